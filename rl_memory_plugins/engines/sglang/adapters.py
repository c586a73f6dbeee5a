"""The adapters of one scheduler, through SGLang's own loader of adapters from tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.engines.sglang.adapter_layers import AdapterLayers
from rl_memory_plugins.errors import InvalidRequestError, WeightUpdateError
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec

if TYPE_CHECKING:
    import torch

_PREFIX = "rl-memory-"
#: Fields of PEFT's configuration that SGLang ignores, though they change what an adapter computes.
_IGNORED = ("use_rslora", "rank_pattern", "alpha_pattern", "lora_bias", "modules_to_save", "layer_replication")


def id_of(number: int) -> str:
    """SGLang's id of a version. The radix cache is keyed by it."""
    return f"{_PREFIX}{number}"


def number_in(lora_id: Any) -> int | None:
    """The number of the version with this id; `None` if the adapter is not of this package."""
    return int(lora_id.removeprefix(_PREFIX)) if isinstance(lora_id, str) and lora_id.startswith(_PREFIX) else None


def why_none(server_args: Any) -> str:
    """Why the engine takes no adapters; empty if it takes them."""
    if not getattr(server_args, "enable_lora", False):
        return "SGLang was started without --enable-lora"
    from sglang.srt.lora.lora_manager import LoRAManager

    if not hasattr(LoRAManager, "load_lora_adapter_from_tensors"):
        return "this release of SGLang loads adapters from files only"
    return ""


class SglangAdapters:
    """See `weights.adapters.AdapterSlots`.

    Args:
        runner: SGLang's model runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    @property
    def _loras(self) -> Any:
        return self._runner.lora_manager

    def check(self, name: str, config: Mapping[str, Any]) -> None:
        from sglang.srt.lora.lora_config import LoRAConfig

        ignored = [field for field in _IGNORED if config.get(field)]
        if config.get("use_dora"):
            ignored.append("use_dora")
        if config.get("bias", "none") != "none":
            ignored.append("bias")
        if ignored:
            raise InvalidRequestError(f"SGLang cannot serve an adapter with {', '.join(ignored)}", field="config")
        try:
            fits = self._loras.memory_pool.can_support(LoRAConfig.from_dict(_as_lora(config)))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise InvalidRequestError(
                f"the adapter {name} has a bad configuration: {error!r}", field="config"
            ) from None
        if not fits:
            pool = self._loras.memory_pool
            raise InvalidRequestError(
                f"the adapter {name} does not fit this engine: it has rank {config['r']} and the layers "
                f"{config['target_modules']}; the engine takes ranks up to {pool.max_lora_rank} and the layers "
                f"{sorted(pool.target_modules)}",
                field="config",
                max_lora_rank=pool.max_lora_rank,
                allowed=sorted(pool.target_modules),
            )

    def fit(self, config: Mapping[str, Any], specs: Sequence[TensorSpec]) -> tuple[list[Mismatch], list[str]]:
        layers = AdapterLayers(self._loras, config["r"])
        found: list[Mismatch] = []
        unused = []
        for spec in specs:
            try:
                if not layers.take(spec):
                    unused.append(spec.name)
            except ValueError as error:
                found.append(Mismatch("shape" if "shape" in str(error) else "unknown", spec.name, str(error)))
        return [*found, *layers.incomplete()], unused

    def add(self, number: int, name: str, config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        from sglang.srt.lora.lora_registry import LoRARef

        loras = self._loras
        ref = LoRARef(
            lora_id=id_of(number),
            lora_name=f"{name} ({id_of(number)})",  # SGLang refuses a second adapter of a name
            lora_path="__tensor__",
            pinned=bool(getattr(loras, "attn_dp_enabled", False)),
        )
        own = {key: tensor.to("cpu") for key, tensor in tensors.items()}
        result = loras.load_lora_adapter_from_tensors(
            ref, {**own, **AdapterLayers(loras, config["r"]).zeros(own)}, _as_lora(config)
        )
        if not result.success:
            raise WeightUpdateError(f"SGLang refused the adapter {name}: {result.error_message}", name=name)

    def remove(self, number: int) -> None:
        from sglang.srt.lora.lora_registry import LoRARef

        loras = self._loras
        if id_of(number) in loras.lora_refs:
            result = loras.unload_lora_adapter(LoRARef(lora_id=id_of(number), lora_name=id_of(number)))
            if not result.success:
                raise WeightUpdateError(f"SGLang did not remove an adapter: {result.error_message}")
        loras.configs.pop(id_of(number), None)  # of a load that failed
        loras.loras.pop(id_of(number), None)


def requests_of(scheduler: Any) -> Iterator[Any]:
    """The requests that a scheduler holds."""
    seen: set[int] = set()
    batches = [getattr(scheduler, name, None) for name in ("running_batch", "cur_batch", "last_batch")]
    for name in ("running_mbs", "mbs", "last_mbs"):  # a pipeline has several of each
        batches += getattr(scheduler, name, ())
    groups: list[Iterable[Any]] = [batch.reqs for batch in batches if batch is not None]
    groups.append(scheduler.waiting_queue)
    groups.append([getattr(scheduler, "chunked_req", None)])
    grammars = getattr(getattr(scheduler, "grammar_manager", None), "grammar_queue", ())
    for request in (request for group in (*groups, grammars) for request in group):
        if request is not None and id(request) not in seen:
            seen.add(id(request))
            yield request


def _as_lora(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the field that SGLang reads and PEFT's defaults leave out."""
    return {"peft_type": "LORA", **config}
