"""A source that quantises a trainer's weights as the engine's checkpoint is quantised."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer.sources.formats import Target, format_of
from rl_memory_plugins.trainer.sources.model import Tensors, as_source, only_reads
from rl_memory_plugins.weights.checkpoint_files import dtypes_in
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec
from rl_memory_plugins.weights.overrides import is_stable, resident_of, silent_s
from rl_memory_plugins.weights.source import NegotiableSource, Places, TensorSource, name_of

ALIGNED_SHAPE = (16, 16)
"""Of a weight as nearly all are: the kernel is compiled once more for rows that are not multiples of 16 long."""

GROUP_VALUES = 256 << 20
"""Weights are rounded together until they have this many values."""


class QuantisedSource:
    """The tensors of a trainer in 16 or 32 bits, for an engine with a quantised checkpoint.

    Each weight that the checkpoint stores quantised is rounded to the nearest value on its own device, just before it
    is sent. Only one weight is held twice, or, where a GPU rounds several weights at a time (FP8 in blocks), as many as
    have 256 Mi values; an engine on that GPU gets those from where they are made, and none that lies whole in a
    bucket is held twice. All other tensors stay as they are. An engine that quantises by itself (`--quantization fp8`
    with a checkpoint in 16 bits) needs no such source.

    Make it before the first update, and after the model is on its GPU: for FP8 in blocks that compiles a kernel.

    Args:
        source: A source, a module or a mapping, under the names of the checkpoint before quantisation (`….weight`).
        config: The `quantization_config` of the checkpoint's `config.json`.
        names: The names of the checkpoint's tensors. They decide which weights are quantised.

    Raises:
        InvalidRequestError: weights alone do not give the checkpoint's tensors (fixed scales of activations), or the
            format is not known; or the checkpoint has no quantised weight.
    """

    def __init__(self, source: Tensors, config: Mapping[str, Any], names: Collection[str]) -> None:
        self._source: TensorSource = as_source(source)
        self._format = format_of(config)
        self._parts = {"weight"}  # the last parts of the names of what is made, as far as listed
        self._is_stable: bool | None = None  # from `specs` to `tensors`: to find it out looks at every tensor
        end = f".{self._format.marker}"
        self._weights = {f"{name.removesuffix(end)}.weight" for name in names if name.endswith(end)}
        if not self._weights:
            raise InvalidRequestError(
                f"the checkpoint has no tensor whose name ends with {end}", field="names", expected=end
            )
        if self._format.quantise_many is not None and torch.cuda.is_initialized():
            self._compile()

    def _compile(self) -> None:
        """Round some zeros of each dtype on each GPU of the source, which compiles a kernel. In the first update an
        engine would be closed meanwhile, for seconds where no former process has left the kernel in Triton's cache.

        A source that gathers its tensors has none yet: they will be on the current GPU, in 16 or 32 bits.
        """
        tensors = resident_of(self._source)
        if tensors is None:
            here = torch.device("cuda", torch.cuda.current_device())
            alike = {(here, dtype) for dtype in (torch.bfloat16, torch.float32)}
        else:
            alike = {(one.device, one.dtype) for one in tensors if one.is_cuda and one.is_floating_point()}
        with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
            for device, dtype in alike:
                self._format.quantise(torch.zeros(ALIGNED_SHAPE, dtype=dtype, device=device))

    @classmethod
    def for_checkpoint(cls, source: Tensors, folder: str | os.PathLike[str]) -> QuantisedSource:
        """The source for an engine that was started with the checkpoint in `folder`.

        Raises:
            InvalidRequestError: the checkpoint is not quantised; see also the class.
        """
        config = json.loads((Path(folder) / "config.json").read_text())
        quantised = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
        if quantised is None:
            raise InvalidRequestError(f"the checkpoint in {folder} is not quantised", field="folder", got=str(folder))
        return cls(source, quantised, dtypes_in(Path(folder)))

    @property
    def only_reads(self) -> bool:
        """See `weights.source.ReadingSource`."""
        return only_reads(self._source)

    def specs(self) -> list[TensorSpec]:
        """See `TensorSource`."""
        found: list[TensorSpec] = []
        made: dict[tuple[Any, str], list[tuple[str, str, tuple[int, ...]]]] = {}  # thousands of weights have few shapes
        for spec in self._source.specs():
            if spec.name not in self._weights:
                found.append(spec)
                continue
            alike = (spec.shape, spec.dtype)
            if alike not in made:
                made[alike] = self._made_of(spec)
            base = spec.name.removesuffix("weight")
            found += [TensorSpec(base + part, dtype, shape) for part, dtype, shape in made[alike]]
        self._is_stable = is_stable(self._source)  # now the source has listed its tensors
        return found

    def _made_of(self, spec: TensorSpec) -> list[tuple[str, str, tuple[int, ...]]]:
        """The last part of the name, dtype and shape of each tensor that is made of such a weight."""
        try:
            layout = self._format.layout(spec.shape, getattr(torch, spec.dtype))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{spec.name} cannot be quantised: {error}", name=spec.name) from error
        self._parts |= layout.keys()
        return [(part, name_of(dtype), shape) for part, (dtype, shape) in layout.items()]

    @property
    def stable(self) -> bool:
        """See `weights.source.StableSource`: each tensor is the trainer's own, or made for this update."""
        return is_stable(self._source) if self._is_stable is None else self._is_stable

    @property
    def negotiable(self) -> bool:
        """See `weights.source.NegotiableSource`."""
        return isinstance(self._source, NegotiableSource) and self._source.negotiable

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        """See `weights.source.NegotiableSource`. What is quantised has the form of the checkpoint, and no other."""
        left = [one for one in mismatches if not self._is_made(one.name)]
        return bool(left) and isinstance(self._source, NegotiableSource) and self._source.revise(left)

    def _is_made(self, name: str) -> bool:
        """Whether a tensor is made of a quantised weight. One beside it, such as a bias, is the source's own."""
        base, _, part = name.rpartition(".")
        return f"{base}.weight" in self._weights and part in self._parts

    @property
    def silent_s(self) -> float:
        """See `weights.source.ArrivingSource`."""
        return silent_s(self._source)

    @property
    def group_bytes(self) -> int:
        """See `weights.source.GroupingSource`. A value of FP8 is a byte, and scales are few."""
        return self._group_values

    @property
    def _group_values(self) -> int:
        return GROUP_VALUES if self._format.quantise_many is not None and self.stable else 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._all(None)

    def tensors_in(self, places: Places) -> Iterator[tuple[str, torch.Tensor]]:
        """See `weights.source.PlacingSource`."""
        return self._all(None if self._format.quantise_many is None else places)

    def _all(self, places: Places | None) -> Iterator[tuple[str, torch.Tensor]]:
        for group in self._groups(places):
            yield from self._quantised(group, places)

    def _groups(self, places: Places | None = None) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """All tensors in their order, with those together whose weights are rounded together.

        A source that is not stable may write to a tensor's memory as soon as the next one is asked for. A weight
        without a place in this bucket begins another group: it may have one in the next bucket.
        """
        most, self._is_stable = self._group_values, None
        group: list[tuple[str, torch.Tensor]] = []
        values = 0
        for name, tensor in self._source.tensors():
            is_weight = name in self._weights
            is_elsewhere = is_weight and places is not None and name not in places
            if is_elsewhere and group:
                yield group
                group, values = [], 0
            group.append((name, tensor))
            values += tensor.numel() if is_weight else 0
            if values >= most:
                yield group
                group, values = [], 0
        yield group

    def _quantised(
        self, group: list[tuple[str, torch.Tensor]], places: Places | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        alike: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
        for name, tensor in group:
            if name in self._weights:
                # A lazy negation is not in the bytes, which a kernel reads.
                read = tensor.detach().resolve_neg() if tensor.is_neg() else tensor
                alike.setdefault((tensor.device, tensor.dtype), {})[name] = read
        made: dict[str, dict[str, torch.Tensor]] = {}
        many = self._format.quantise_many
        with torch.no_grad():
            for (device, _), weights in alike.items():
                each = list(weights.values())
                if many is None:
                    made.update(zip(weights, map(self._format.quantise, each), strict=True))
                else:
                    into = [self._target(name, places, device) for name in weights]
                    made.update(zip(weights, many(each, into), strict=True))
        for name, tensor in group:
            if name in made:
                base = name.removesuffix("weight")
                yield from ((f"{base}{part}", value) for part, value in made.pop(name).items())
            else:
                yield name, tensor

    def _target(self, name: str, places: Places | None, device: torch.device) -> Target:
        """Where the tensors of a weight are made; `None` if not all of them have a place on its device."""
        base = name.removesuffix("weight")
        values, scales = f"{base}weight", base + self._format.marker
        if places is None or values not in places or scales not in places:
            return None
        target = places[values], places[scales]
        return target if target[0].device == device else None
