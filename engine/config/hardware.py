"""What "auto" means on this machine. Reads the system's own listings; imports no framework."""

from functools import cache
from pathlib import Path
from typing import Literal

from headrace.engine.config.schema import Config

Dtype = Literal["bfloat16", "float16", "float32"]

# Instructions that multiply bfloat16: x86 (AVX-512 and AMX) and Arm.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def count_gpus() -> int:
    """NVIDIA GPUs of this host, by the driver's own listing."""
    listing = Path("/proc/driver/nvidia/gpus")
    return sum(1 for _ in listing.iterdir()) if listing.is_dir() else 0


@cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of the first processor; empty where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    listed = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(listed, "").split())


def multiplies_bfloat16(num_gpus: int, flags: frozenset[str]) -> bool:
    """Whether bfloat16 is fast: on a GPU, or on a processor with instructions for it. Emulated, it is far slower."""
    return num_gpus > 0 or bool(flags & _BF16_FLAGS)


def model_dtype(config: Config) -> Dtype:
    """`model.dtype`, with "auto" settled: bfloat16 where it is fast, float32 elsewhere."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "bfloat16" if multiplies_bfloat16(count_gpus(), cpu_flags()) else "float32"
