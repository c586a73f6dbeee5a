"""What a plan is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.plan.gpus import GIB, Gpu, find_gpu

CHOICES = {
    "engine": ("vllm", "sglang"),
    "trainer": ("fsdp2", "fsdp1", "ddp", "megatron", "plain", "none"),
    "optimizer": ("adamw", "adamw8bit", "adafactor", "momentum", "sgd"),
    "precision": ("mixed", "bf16", "fp32"),
    "offload": ("all", "optimizer", "none"),
    "dtype": ("bfloat16", "float16", "float32"),
    "kv_dtype": ("auto", "fp8"),
}
DEFAULT_FRACTION = {"vllm": 0.92, "sglang": 0.85}
MOST_RANKS = 1024


@dataclass(frozen=True)
class Options:
    """How engine and trainer share GPUs. All bytes are those of one GPU, unless they are of the host.

    Attributes:
        gpu: A name of `gpus.GPUS`, or GiB.
        engine: `vllm` or `sglang`.
        tp: Tensor-parallel ranks of an engine.
        gpus: GPUs of the host, each with one rank of an engine and one process of the trainer; 0 stands for `tp`. With
            more than `tp` there are several engines.
        fraction: vLLM's `gpu_memory_utilization` or SGLang's `mem_fraction_static`; `None` for the engine's default.
        kv_gib: GiB of KV cache on each GPU in place of a fraction (`kv_cache_memory_bytes`); 0 for the fraction's.
        max_running: Requests that the engine runs at once.
        dtype: The dtype that the engine computes in.
        kv_dtype: `fp8` stores the KV cache in one byte for each element; `auto` in `dtype`.
        level: The level of the engine's sleeps, 1 or 2.
        from_host: The weights are sent from host memory.
        share_host_backups: Engines on one host share equal copies.
        trainer: How the trainer's processes share its state. `none`: only the engine is planned.
        optimizer: The optimiser.
        precision: `mixed` has parameters and states in float32 and computes in bfloat16; `bf16` and `fp32` have one
            dtype for all.
        micro_tokens: Tokens that one process computes at once: of a micro-batch, with padding.
        checkpointing: Only each layer's input is kept for the backward pass.
        offload: What leaves the GPU during a rollout: all, only the optimiser's state, or nothing.
        bucket_mib: The largest bucket of an update, MiB.
        host_gib: The host's memory in GiB; 0 if it is not to be checked.

    Raises:
        InvalidRequestError: a value is not allowed; the details have `field`, `got` and `allowed`.
    """

    gpu: str = "h100-80"
    engine: str = "vllm"
    tp: int = 1
    gpus: int = 0
    fraction: float | None = None
    kv_gib: float = 0.0
    max_running: int = 256
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    level: int = 2
    from_host: bool = False
    share_host_backups: bool = False
    trainer: str = "fsdp2"
    optimizer: str = "adamw"
    precision: str = "mixed"
    micro_tokens: int = 4096
    checkpointing: bool = True
    offload: str = "all"
    bucket_mib: int = 1024
    host_gib: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            _require(name, getattr(self, name), getattr(self, name) in allowed, list(allowed))
        for name in ("tp", "max_running", "micro_tokens", "bucket_mib"):
            value = getattr(self, name)
            _require(name, value, isinstance(value, int) and value >= 1, "a whole number above 0")
        _require("tp", self.tp, self.tp <= MOST_RANKS, f"at most {MOST_RANKS}")
        _require("level", self.level, self.level in (1, 2), [1, 2])
        ranks = isinstance(self.gpus, int) and 0 <= self.gpus <= MOST_RANKS and self.gpus % self.tp == 0
        _require("gpus", self.gpus, ranks, f"a multiple of tp ({self.tp}), at most {MOST_RANKS}")
        within = self.fraction is None or 0 < self.fraction <= 1
        _require("fraction", self.fraction, within, "above 0 and at most 1")
        for name in ("kv_gib", "host_gib"):
            value = getattr(self, name)
            _require(name, value, math.isfinite(value) and value >= 0, "GiB, at least 0")
        alone = self.trainer != "plain" or self.ranks == 1
        _require("trainer", self.trainer, alone, "for several GPUs: fsdp2, fsdp1, ddp, megatron")
        find_gpu(self.gpu)

    @property
    def card(self) -> Gpu:
        return find_gpu(self.gpu)

    @property
    def ranks(self) -> int:
        """GPUs of the host that engine and trainer share."""
        return self.gpus or self.tp

    @property
    def engines(self) -> int:
        return self.ranks // self.tp

    @property
    def share(self) -> float:
        """The engine's fraction."""
        return DEFAULT_FRACTION[self.engine] if self.fraction is None else self.fraction

    @property
    def kv_bytes(self) -> int:
        return int(self.kv_gib * GIB)


def _require(name: str, got: object, passed: bool, allowed: object) -> None:
    if not passed:
        words = ", ".join(map(str, allowed)) if isinstance(allowed, list) else allowed
        raise InvalidRequestError(f"{name} is {got!r}, and must be {words}", field=name, got=got, allowed=allowed)


NAMES = tuple(field.name for field in fields(Options))
