# pyright: basic
# transformers and torch are only partly typed.
"""Where a model comes from: `model.path` to a local folder, and a folder to a causal language model.

torch and transformers are imported inside the functions, so importing this module is cheap.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headrace.engine.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = Any

logger = logging.getLogger(__name__)

_PACKAGE_SCHEME = "package://"
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve_model(path: str, cache_dir: Path | None = None) -> Path:
    """Turn `model.path` into a local folder with `config.json`, safetensors and a tokenizer.

    A folder is used as it is. `package://python_package/file.gguf` is converted once to bfloat16 safetensors and kept
    in the cache; concurrent callers, also of other processes, wait for the first. Anything else is a hub name, which
    is downloaded unless the hub is switched off (`HF_HUB_OFFLINE=1`) or the snapshot is there already.

    Blocks while it converts or downloads; an interrupted conversion leaves nothing behind that counts.

    Args:
        path: The value of `model.path`.
        cache_dir: Where converted models are kept; default `$HEADRACE_CACHE`, else `~/.cache/headrace`, `/models`.

    Raises:
        ConfigError: There is no such model; the message names the remedy.
    """
    if not path:
        raise ConfigError("model.path is empty: give a folder, a hub name or package://python_package/file.gguf")
    if path.startswith(_PACKAGE_SCHEME):
        return _converted_package_file(path, cache_dir or _default_cache())
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path = {path!r} has no config.json: name the folder of a saved model")
        return folder
    if path.startswith(("/", ".", "~")):
        raise ConfigError(f"model.path = {path!r} does not exist: name an existing folder, or a model of the hub")
    return _hub_snapshot(path)


def check_model(path: str) -> None:
    """Look whether `resolve_model` would find the model, without loading, converting or downloading anything.

    Raises:
        ConfigError: There is no such folder, package or file; or, with the hub switched off, no snapshot of that name.
    """
    folder = Path(path).expanduser()
    if path.startswith(_PACKAGE_SCHEME):
        package, _, relative = path.removeprefix(_PACKAGE_SCHEME).partition("/")
        _package_file(path, package, relative)
    elif folder.is_dir() or path.startswith(("/", ".", "~")) or hub_is_off():
        resolve_model(path)


def hub_is_off() -> bool:
    """Whether the environment forbids downloads, read as the hub's own library does."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def load_causal_lm(folder: Path, dtype: str = "float32", attn: str = "sdpa") -> PreTrainedModel:
    """Load a causal language model from a local folder, in evaluation mode, on the CPU.

    Only safetensors are read: other formats would unpickle what they hold. No code of the folder is executed.

    Args:
        folder: What `resolve_model` returned.
        dtype: "float32", "bfloat16" or "float16"; the weights are cast to it.
        attn: An attention implementation of transformers.

    Raises:
        ConfigError: The folder holds no causal language model that can be loaded.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation=attn,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"the model in {folder} cannot be loaded ({error}): set model.path to another one") from error
    model.train(False)
    return cast(PreTrainedModel, model)


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that lies beside a model; reads local files only.

    Raises:
        ConfigError: The folder holds no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file is a plain Exception of the tokenizers' own reader
        raise ConfigError(f"the tokenizer in {folder} cannot be loaded ({error}): save it beside the model") from error


def checkpoint_tensor_names(folder: Path) -> frozenset[str]:
    """The tensor names in a folder's safetensors files; reads their headers only.

    Raises:
        ConfigError: The folder holds no safetensors file.
    """
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return frozenset(json.loads(index.read_text())["weight_map"])
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            names.update(tensors.keys())
    if not names:
        raise ConfigError(f"{folder} holds no safetensors file: save the model in that format")
    return frozenset(names)


def _default_cache() -> Path:
    return Path(os.environ.get("HEADRACE_CACHE") or Path.home() / ".cache" / "headrace") / "models"


def _converted_package_file(path: str, cache_dir: Path) -> Path:
    package, _, relative = path.removeprefix(_PACKAGE_SCHEME).partition("/")
    source = _package_file(path, package, relative)
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    target = cache_dir / f"{source.stem}-{digest}"
    if (target / "config.json").is_file():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _exclusive(cache_dir / f"{target.name}.lock"):
        if (target / "config.json").is_file():  # another process was faster
            return target
        logger.info("converting %s to safetensors in %s; this happens once", source.name, target)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache_dir))
        try:
            _convert_gguf(source, scratch)
            scratch.chmod(0o755)
            os.rename(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _package_file(path: str, package: str, relative: str) -> Path:
    if not package.isidentifier() or not relative.endswith(".gguf"):
        raise ConfigError(f"model.path = {path!r} is not understood: write package://python_package/file.gguf")
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ConfigError(
            f"model.path = {path!r}: the package {package!r} is not installed; install it beside headrace"
        )
    for root in spec.submodule_search_locations or ():
        source = (Path(root) / relative).resolve()
        if source.is_file() and source.is_relative_to(Path(root).resolve()):
            return source
    raise ConfigError(f"model.path = {path!r}: the installed package {package!r} holds no file {relative!r}")


def _convert_gguf(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM  # partly untyped
    loaded = auto.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The weights are dense now, but the loaded object still counts as quantised and refuses to be saved: move them into
    # a plain model of the same configuration.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict({name: tensor.bfloat16() for name, tensor in loaded.state_dict().items()}, assign=True)
    model.tie_weights()
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def _hub_snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except (OSError, ValueError) as error:  # not found, no access, no connection, not a name
        raise ConfigError(
            f"model.path = {name!r} is neither a folder nor a model of the hub that can be reached "
            f"({type(error).__name__}): give a local folder, or connect and unset HF_HUB_OFFLINE"
        ) from error


@contextlib.contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel if this process dies
        yield
