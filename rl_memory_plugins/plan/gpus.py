"""GPUs by name, and the bytes that processes can use on them."""

from __future__ import annotations

import math
from typing import NamedTuple

from rl_memory_plugins.errors import InvalidRequestError

GIB = 1 << 30


class Gpu(NamedTuple):
    """A kind of GPU.

    Attributes:
        total: Bytes that CUDA reports as the GPU's memory (`torch.cuda.mem_get_info()[1]`), which is less than the name
            says. Engines take their fraction of these.
        prefill_tokens: The most tokens that an engine's server computes at once by default on such a GPU.
    """

    name: str
    total: int
    prefill_tokens: int


def _gpu(name: str, gib: float, prefill_tokens: int) -> Gpu:
    return Gpu(name, int(gib * GIB), prefill_tokens)


#: GiB as CUDA reports them: torch prints them as "total capacity" when memory runs out.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100-80", 79.11, 8192),
        _gpu("h200-141", 139.8, 8192),
        _gpu("a100-40", 39.39, 2048),
        _gpu("a100-80", 79.14, 2048),
        _gpu("b200-180", 178.35, 16384),
        _gpu("l40s-48", 44.40, 2048),
        _gpu("rtx4090-24", 23.52, 2048),
    )
}
MOST_GIB = 1 << 14


def find_gpu(given: str | float) -> Gpu:
    """A GPU by its name, or one with this many GiB.

    Raises:
        InvalidRequestError: neither a known name nor a number of GiB.
    """
    name = str(given).strip().lower()
    if name in GPUS:
        return GPUS[name]
    try:
        gib = float(name.removesuffix("gib"))
    except ValueError:
        gib = math.nan
    if not 0 < gib <= MOST_GIB:
        raise InvalidRequestError(
            f"unknown GPU {given!r}: name one of {', '.join(GPUS)}, or its memory in GiB",
            field="gpu",
            got=str(given),
            allowed=list(GPUS),
        )
    return _gpu(f"{gib:g} GiB", gib, 16384 if gib >= 160 else 8192 if gib >= 70 else 2048)
