"""The adapters of one scheduler, through SGLang's own loader of adapters from tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_memory_plugins.engines.lora_layers import features
from rl_memory_plugins.errors import InvalidRequestError, WeightUpdateError
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec

if TYPE_CHECKING:
    import torch

_PREFIX = "rl-memory-"
#: SGLang's packed layers, and the parts under which checkpoints hold them.
_PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
#: Fields of PEFT's configuration that SGLang ignores, though they change what an adapter computes.
_IGNORED = ("use_rslora", "rank_pattern", "alpha_pattern", "lora_bias", "modules_to_save", "layer_replication")
_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)\.lora_([AB])\.weight")


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


class _Part(NamedTuple):
    """A layer, or a part of a packed layer."""

    layer: Any
    number: int = 0  # of the part
    siblings: tuple[str, ...] = ()  # the names of all parts

    def features(self, *, incoming: bool) -> int | None:
        return features(self.layer, self.number, max(len(self.siblings), 1), incoming=incoming)


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
        parts = self._parts()
        found: list[Mismatch] = []
        unused: list[str] = []
        halves: dict[tuple[int, str], list[TensorSpec]] = {}
        for spec in specs:
            if _is_embedding(spec.name):
                if not self._embeds(spec.name):
                    unused.append(spec.name)
                continue
            matched = _NAME.fullmatch(spec.name)
            if matched is None:
                found.append(Mismatch("unknown", spec.name, "this is not the name of an adapter's tensor"))
                continue
            place, is_a = (int(matched[1]), matched[2]), matched[3] == "A"
            part = _find(parts, place)
            if part is None:
                unused.append(spec.name)
                continue
            halves.setdefault(place, []).append(spec)
            problem = _shape_problem(spec, part, is_a, config["r"])
            if problem:
                found.append(Mismatch("shape", spec.name, problem))
        lonely = [pair[0].name for pair in halves.values() if len(pair) == 1]
        found += [Mismatch("missing", name, "the other half of the pair is not in the manifest") for name in lonely]
        return found, unused

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
        result = loras.load_lora_adapter_from_tensors(ref, {**own, **self._zeros(own)}, _as_lora(config))
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

    def _parts(self) -> dict[tuple[int, str], _Part]:
        """The layers that take adapters, by the number of their block and their name in it."""
        parts: dict[tuple[int, str], _Part] = {}
        for number, layers in enumerate(self._loras.lora_modules):
            for name, layer in layers.items():
                tail = re.split(rf"(?:^|\.)layers\.{number}\.", name, maxsplit=1)[-1]
                parent, _, last = tail.rpartition(".")
                siblings = tuple(f"{parent}.{part}" for part in _PACKED.get(last, ()))
                parts[number, tail] = _Part(layer)
                for index, sibling in enumerate(siblings):
                    parts[number, sibling] = _Part(layer, index, siblings)
        return parts

    def _embeds(self, name: str) -> bool:
        attribute = "embed_tokens_module" if "embed_tokens" in name else "lm_head_module"
        return getattr(self._loras, attribute, None) is not None

    def _zeros(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Zeros for the parts of packed layers that the adapter leaves out. SGLang would drop the other parts."""
        parts = self._parts()
        made = {}
        for name, tensor in tensors.items():
            matched = _NAME.fullmatch(name)
            part = matched and parts.get((int(matched[1]), matched[2]))
            if not matched or not part:
                continue
            is_a = matched[3] == "A"
            for number, sibling in enumerate(part.siblings):
                other = name.replace(f".{matched[2]}.", f".{sibling}.")
                size = part._replace(number=number).features(incoming=is_a)
                if other in tensors or size is None:
                    continue
                rank = tensor.shape[0] if is_a else tensor.shape[1]
                made[other] = tensor.new_zeros((rank, size) if is_a else (size, rank))
        return made


def requests_of(scheduler: Any) -> Iterator[Any]:
    """The requests that a scheduler holds."""
    seen: set[int] = set()
    batches = [getattr(scheduler, name, None) for name in ("running_batch", "cur_batch", "last_batch")]
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


def _is_embedding(name: str) -> bool:
    return any(part in name for part in ("embed_tokens", "lm_head", "unembed_tokens"))


def _find(parts: Mapping[tuple[int, str], _Part], place: tuple[int, str]) -> _Part | None:
    """The part of this name. All names of experts belong to the layer of the experts, which has no single shape."""
    number, tail = place
    part = parts.get(place)
    experts = re.match(r"(.*\bexperts)(?:\.|$)", tail)
    if part is None and experts is not None:
        layer = parts.get((number, experts[1]))
        return None if layer is None else _Part(None)
    return part


def _shape_problem(spec: TensorSpec, part: _Part, is_a: bool, rank: int) -> str:
    expected = part.features(incoming=is_a)
    if expected is None:
        return ""
    shape = [rank, expected] if is_a else [expected, rank]
    return "" if list(spec.shape) == shape else f"the shape is {list(spec.shape)}; the engine expects {shape}"
