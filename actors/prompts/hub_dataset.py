"""Rows of a Hugging Face data set. Needs the package datasets."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from headrace.engine.errors import ConfigError


class HubDatasetRows:
    """One split of a data set, memory-mapped by the library."""

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        """Load the data set; may download it, and blocks meanwhile.

        Args:
            path: Name or folder.
            options: Passed to `load_dataset`; `split` is "train" unless given.

        Raises:
            ConfigError: The package is not installed, or the data set cannot be loaded or has no rows.
        """
        try:
            datasets = import_module("datasets")
        except ImportError as error:
            raise ConfigError('data.source = "hf" needs the package datasets; pip install datasets adds it') from error
        chosen = {"split": "train", **options}
        try:
            self._dataset: Any = datasets.load_dataset(path, **chosen)
        except Exception as error:  # whatever the library raises, the user gave a name that does not load
            text = " ".join(str(error).split())
            raise ConfigError(
                f"the data set {path!r} with {chosen} cannot be loaded ({type(error).__name__}: {text})"
            ) from error
        self._name = f"{path} {chosen['split']}"
        if len(self._dataset) == 0:
            raise ConfigError(f"the data set {self._name!r} has no rows; choose another split")

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> dict[str, Any]:
        return dict(self._dataset[index])

    def where(self, index: int) -> str:
        return f"{self._name} row {index}"
