"""Puts the tensors of a source into the buckets of an update, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights.buffers import CudaStaging, NcclStaging
from rl_memory_plugins.weights.manifest import BucketEntry, Manifest, TensorSpec
from rl_memory_plugins.weights.overrides import makes_in_places, tensors_in
from rl_memory_plugins.weights.routes import Packed, Route
from rl_memory_plugins.weights.source import TensorSource, next_tensor

if TYPE_CHECKING:
    import torch


class Packing:
    """The tensors of one update on their way into the buffers of its routes.

    A source that can makes its tensors in the buffer itself, if there is one buffer, which receivers read on a GPU.

    Args:
        exist: All tensors of the source exist before the update.

    Attributes:
        tensors: The iterator of the source.
    """

    def __init__(self, source: TensorSource, manifest: Manifest, routes: list[Route], *, exist: bool = False) -> None:
        self._specs = manifest.tensors
        self._routes = routes
        self._current: Any = None  # the tensor that is packed in parts
        self._places: _BucketPlaces | None = None
        self._staging: CudaStaging | NcclStaging | None = None  # the only buffer, if it gets each tensor as it is
        buffer = routes[0].buffer if len(routes) == 1 else None
        if isinstance(buffer, CudaStaging) and not exist and makes_in_places(source):
            self._places = _BucketPlaces(buffer, manifest.tensors)
        elif isinstance(buffer, (CudaStaging, NcclStaging)) and routes[0].cut is None:
            self._staging = buffer
        self.tensors: Iterator[tuple[str, torch.Tensor]] = (
            source.tensors() if self._places is None else tensors_in(source, self._places)
        )

    def pack(self, slot: int, entries: Sequence[BucketEntry]) -> Packed:
        """Put the tensors of a bucket into all buffers."""
        if self._places is not None:
            self._places.begin(slot, entries)
        placed: dict[Route, list[BucketEntry]] = {route: [] for route in self._routes}
        left = {route: route.left_of(entries) for route in self._routes if route.cut is not None}
        if self._staging is not None and self._current is None:
            placed[self._routes[0]], entries = self._put_whole(self._staging, slot, entries)
        for entry in entries:
            spec, nbytes = self._specs[entry.index], entry.nbytes
            if entry.start == 0:
                self._current = next_tensor(spec, self.tensors)
            part, whole = self._current, spec.nbytes
            if nbytes != whole:
                row = spec.row_nbytes
                part = part.narrow(0, entry.start // row, nbytes // row)
            for route, places in placed.items():
                own = left[route].get(entry.index) if route in left else entry
                if own is not None:
                    places.append(route.buffer.put(slot, own, spec, route.part(entry, part)))
            if entry.start + nbytes == whole:
                self._current = part = None
        return Packed(slot, placed, [copy for route in placed for copy in route.buffer.publish()])

    def _put_whole(
        self, staging: CudaStaging | NcclStaging, slot: int, entries: Sequence[BucketEntry]
    ) -> tuple[list[BucketEntry], Sequence[BucketEntry]]:
        """Put the tensors of which the bucket has all rows.

        Returns: their entries, and the rest: only the last tensor of a bucket may go on in the next one.
        """
        specs = [self._specs[entry.index] for entry in entries]
        count = len(entries) - (bool(entries) and entries[-1].nbytes != specs[-1].nbytes)
        staging.put_whole(slot, entries[:count], specs[:count], self.tensors)
        return list(entries[:count]), entries[count:]

    def finish(self) -> None:
        """
        Raises:
            WeightUpdateError: the source has more tensors.
        """
        for extra, _ in self.tensors:
            raise WeightUpdateError(f"the source yielded {extra}, which its specs do not list", name=extra)
        self.close()

    def close(self) -> None:
        """Let go of the source's tensors. The source gets no more places."""
        self._current = None
        if self._places is not None:
            self._places.begin(0, ())


class _BucketPlaces:
    """See `source.Places`."""

    def __init__(self, buffer: CudaStaging, specs: Sequence[TensorSpec]) -> None:
        self._buffer = buffer
        self._specs = specs
        self._slot = 0
        self._entries: dict[str, BucketEntry] = {}

    def begin(self, slot: int, entries: Sequence[BucketEntry]) -> None:
        """These are the places from now on."""
        self._slot = slot
        named = ((self._specs[entry.index], entry) for entry in entries)
        self._entries = {spec.name: entry for spec, entry in named if entry.nbytes == spec.nbytes}

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        return self._buffer.place(self._slot, entry, self._specs[entry.index])
