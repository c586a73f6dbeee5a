"""The load plan: what each tensor of a manifest does to this rank's memory, found without touching it.

Making the plan is the validation of the manifest; the plan then loads later updates without the model's loader.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.memory.ranges import merge
from rl_memory_plugins.weights.coverage import Coverage
from rl_memory_plugins.weights.manifest import Manifest, Mismatch, TensorSpec, manifest_error
from rl_memory_plugins.weights.pools import inline, intercepted
from rl_memory_plugins.weights.trace import CopyStep, PythonGuard, Step, Tracer

Write = tuple[torch.Tensor, Any]
"""A destination, and the tensor that is copied or the value that is filled there."""

SMALL_BYTES = 4 << 20
"""Up to this size copies on a GPU go many to a kernel: one kernel each costs more than the bytes."""

_ALONE = {getattr(torch, name, None) for name in ("float8_e8m0fnu", "uint16", "uint32", "uint64")}
"""Dtypes of which `torch._foreach_copy_` refuses tensors on a GPU."""

MAX_FAILURES = 64
"""After so many names in a row that a loader cannot take, it is asked for no more: each costs a call of it, and all of
a wrong prefix would cost minutes."""

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""A model's `load_weights`."""


def goes_with_others(source: torch.Tensor, destination: torch.dtype) -> bool:
    """Whether a copy on a GPU may be one of `torch._foreach_copy_`'s.

    No casts: releases of torch take one kernel for all destinations, that of the first one's dtype, and write wrong
    bytes to those of another (pytorch/pytorch#173383).
    """
    return source.nbytes <= SMALL_BYTES and source.dtype == destination and destination not in _ALONE


class LoadPlan:
    """Per name of one manifest, how its bytes get to where this rank wants them.

    Attributes:
        steps: Copies and fills that `apply` replays; a name may have many (experts, fused layers) or none.
        opaque: Names that the engine's loader must load itself, and why.
        unused: Names that this rank's loader ignored, without those it may ignore.
        unproven: Where the trace broke off for some names: the parameters that others do not cover, with their
            addresses. Only the real load shows whether a complete update writes them.
        traced: What the trace saw being written, where some are unproven.
    """

    def __init__(
        self, manifest: Manifest, steps: dict[str, list[Step]], opaque: dict[str, str], unused: list[str]
    ) -> None:
        self.unproven: dict[str, int] = {}
        self.traced = Coverage()
        self.digest = manifest.digest()
        self.partial = manifest.partial
        self.specs = {spec.name: spec for spec in manifest.tensors}
        self.steps = steps
        self.opaque = opaque
        self.unused = unused
        # Otherwise the order of writes matters.
        self._disjoint = _are_disjoint(step for of_name in steps.values() for step in of_name)

    def apply(self, name: str, source: torch.Tensor) -> None:
        """Load one tensor that is not opaque. `source` is contiguous and has the manifest's shape and dtype."""
        self.run(self.writes(name, source, source.storage_offset()))

    def writes(self, name: str, memory: torch.Tensor, start: int) -> list[Write]:
        """What loading one tensor writes, and views of what it copies there.

        Args:
            name: Not opaque.
            memory: Of the tensor's dtype; holds it, contiguous, from element `start` of its storage.
        """
        return [
            (step.destination, memory.as_strided(step.size, step.stride, start + step.offset))
            if isinstance(step, CopyStep)
            else (step.destination, step.value)
            for step in self.steps.get(name, ())
        ]

    def row_writes(self, name: str, memory: torch.Tensor, start: int, first: int, last: int) -> list[Write] | None:
        """What loading the rows `first` to `last` (exclusive) of the first dimension writes.

        Args:
            memory: Holds the rows, contiguous, from element `start` of its storage.

        Returns: None where the name can only be loaded whole: it is opaque, a copy's view mixes rows, or the
        order of its writes matters.
        """
        steps, shape = self.steps.get(name, ()), self.specs[name].shape
        if name in self.opaque or not self._disjoint or not shape:
            return None
        row = math.prod(shape[1:])
        writes: list[Write] = []
        for step in steps:
            if not isinstance(step, CopyStep):
                if first == 0:
                    writes.append((step.destination, step.value))
                continue
            along = _row_dimension(step, row)
            if along is None:
                return None
            dimension, begin, count = along
            low, high = max(first - begin, 0), min(last - begin, count)
            if low >= high:
                continue
            size, destination = list(step.size), step.destination
            if dimension >= 0:
                size[dimension] = high - low
                destination = destination.narrow(dimension, low, high - low)
            offset = start + step.offset + (low - first) * row
            writes.append((destination, memory.as_strided(size, step.stride, offset)))
        return writes

    def run(self, writes: Iterable[Write]) -> Batch:
        """Do writes of any number of tensors. Does not wait for the device."""
        batch = Batch(writes, group=self._disjoint)
        batch.run()
        return batch


class Batch:
    """Writes that can be done any number of times, as long as the memory that they name is there.

    Args:
        group: Small copies on a GPU may be done together, after all others.
    """

    def __init__(self, writes: Iterable[Write], *, group: bool) -> None:
        self._each: list[Write] = []
        self._destinations: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        for destination, value in writes:
            together = group and isinstance(value, torch.Tensor) and value.is_cuda
            if together and goes_with_others(value, destination.dtype):
                self._destinations.append(destination)
                self._sources.append(value)
            else:
                self._each.append((destination, value))

    def run(self) -> None:
        """Does not wait for the device."""
        # Inference tensors may be written in inference mode only, and others may be there too.
        with torch.inference_mode():
            for destination, value in self._each:
                if isinstance(value, torch.Tensor):
                    destination.copy_(value, non_blocking=True)
                else:
                    destination.fill_(value)
            if self._destinations:
                torch._foreach_copy_(self._destinations, self._sources, non_blocking=True)


def _row_dimension(step: CopyStep, row: int) -> tuple[int, int, int] | None:
    """Which dimension of a copy counts rows of `row` elements (-1: it has one only), its first row, and how many.

    None if no dimension alone does.
    """
    begin, inside = divmod(step.offset, row) if row else (0, 0)
    found = -1
    for dimension, (extent, stride) in enumerate(zip(step.size, step.stride, strict=True)):
        if extent > 1 and stride == row and found < 0:
            found = dimension
        else:
            inside += (extent - 1) * stride
    if inside >= max(row, 1) or not row:
        return None
    return found, begin, step.size[found] if found >= 0 else 1


def _are_disjoint(steps: Iterable[Step]) -> bool:
    """Whether no two steps write the same memory, as far as their lowest and highest addresses tell."""
    ranges = sorted((step.destination.data_ptr(), _end(step.destination)) for step in steps if step.destination.numel())
    return all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))


def _end(tensor: torch.Tensor) -> int:
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.data_ptr() + (last + 1) * tensor.element_size())


def trace(
    load_weights: Loader,
    manifest: Manifest,
    *,
    expected: Mapping[str, torch.Tensor] | None = None,
    ignorable: Callable[[str], bool] = lambda name: False,
    owned: Iterable[torch.Tensor] | None = None,
    allow_cast: bool = False,
    whole_layers: str = "",
) -> LoadPlan:
    """Run the loader on meta tensors and record what it would do. Writes no real memory.

    Args:
        load_weights: The model's loader.
        manifest: What the trainer is going to send.
        expected: The parameters that a complete update must cover, by the engine's name.
        ignorable: Whether the loader may ignore a name (tied embeddings, derived buffers).
        owned: All memory whose replacement is noticed: the model's parameters and buffers. A name whose loading
            writes other memory is opaque.
        allow_cast: Take tensors whose dtype is not the engine's; the copy casts.
        whole_layers: Why the engine reloads whole layers, if it does: each layer of `expected` must be covered
            or left out, and every name is opaque.

    Raises:
        ManifestError: `details["mismatches"]` lists everything that is wrong, `details["unused"]` the names
            that the loader ignored.
    """
    problems = manifest.mismatches()
    if problems:
        raise manifest_error(problems)
    tracer = Tracer(manifest.tensors, (expected or {}).values(), allow_cast=allow_cast)
    failures, untried, blind = _run(load_weights, tracer, [spec.name for spec in manifest.tensors])
    blind = blind or tracer.blind
    if owned is not None:
        _leave_to_the_loader(tracer, owned)
    tracer.finish()
    problems = [*failures.values(), *tracer.wrong_dtype.values()]
    if untried:
        problems.append(
            Mismatch("loader", untried[0], f"not tried after so many failures, nor {len(untried) - 1} more")
        )
    used = tracer.steps.keys() | tracer.opaque.keys() | failures.keys() | set(untried)
    unused = [s.name for s in manifest.tensors if s.name not in used and s.numel and not ignorable(s.name)]
    if expected is not None and not manifest.partial and not blind:
        problems += _missing(tracer, expected)
    elif expected is not None and whole_layers:
        problems += _torn(tracer, expected)
    if problems:
        raise manifest_error(problems, unused)
    if tracer.derives:
        whole_layers = whole_layers or f"the loader runs {tracer.derives} on the model's memory"
    if whole_layers:
        return LoadPlan(manifest, {}, {spec.name: whole_layers for spec in manifest.tensors}, unused)
    plan = LoadPlan(manifest, tracer.steps, tracer.opaque, unused)
    if expected is not None and not manifest.partial and blind:
        plan.traced = tracer.written
        plan.unproven = {mismatch.name: expected[mismatch.name].data_ptr() for mismatch in _missing(tracer, expected)}
    return plan


def _leave_to_the_loader(tracer: Tracer, owned: Iterable[torch.Tensor]) -> None:
    """Make those names opaque that write memory which the model may drop without anybody's notice."""
    storages = (tensor.untyped_storage() for tensor in owned)
    ranges = merge(Block(storage.data_ptr(), storage.nbytes()) for storage in storages)

    def is_owned(tensor: torch.Tensor) -> bool:
        at = bisect_right(ranges, tensor.data_ptr(), key=lambda block: block.address) - 1
        return at >= 0 and _end(tensor) <= ranges[at].end

    for name, destinations in tracer.destinations():
        if not all(is_owned(destination) for destination in destinations):
            tracer.mark_opaque([name], "its loader writes memory that is no parameter and no buffer of the model")


def _run(load_weights: Loader, tracer: Tracer, names: Sequence[str]) -> tuple[dict[str, Mismatch], Sequence[str], bool]:
    """Feed all names to the loader, going on after each one that it cannot take.

    Returns: what was wrong by name, the names that were given up (see `MAX_FAILURES`), and whether the loader broke
    off where it needs real values, so that what it would have written is not known.
    """
    failures: dict[str, Mismatch] = {}
    blind = False
    in_a_row = 0

    def load(batch: Sequence[str]) -> Exception | None:
        tracer.current = None
        try:
            with intercepted(inline), PythonGuard(tracer), tracer:
                load_weights(tracer.feed(batch))
        except RLMemoryError:
            raise
        except Exception as error:
            return error
        return None

    def blame(name: str, error: Exception) -> None:
        nonlocal blind, in_a_row
        tracer.forget(name)
        if name in tracer.opaque or _needs_values(error):
            tracer.mark_opaque([name], f"its loader needs values: {error}")
            blind, in_a_row = True, 0
        else:
            in_a_row += 1
            failures[name] = _mismatch(name, error)

    rest = list(names)
    while rest and in_a_row < MAX_FAILURES:
        error = load(rest)
        if error is None:
            return failures, [], blind
        name = tracer.current
        if name is None:  # it failed before it took anything
            raise manifest_error([Mismatch("loader", "", f"{type(error).__name__}: {error}")])
        position = rest.index(name)
        if position > 0:  # was it this one, or one that the loader had put off?
            in_a_row = 0
            tracer.forget(name)
            error = load([name])
        if error is not None:
            blame(name, error)
            rest = rest[position + 1 :]
            continue
        for position, each in enumerate(rest):
            if in_a_row == MAX_FAILURES:
                return failures, rest[position:], blind
            tracer.forget(each)
            alone = load([each])
            if alone is None:
                in_a_row = 0
            else:
                blame(each, alone)
        return failures, [], blind
    return failures, rest, blind


def _needs_values(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "meta tensor" in str(error) or "meta device" in str(error)


def _mismatch(name: str, error: Exception) -> Mismatch:
    """Sort a loader's exception: loaders look names up in dicts and assert shapes."""
    text = f"{type(error).__name__}: {error}"
    says_unknown = any(word in str(error).lower() for word in ("no module", "no parameter", "unexpected", "unknown"))
    if isinstance(error, (KeyError, AttributeError)) or says_unknown:
        return Mismatch("unknown", name, f"the model has no such parameter ({text})")
    if isinstance(error, (RuntimeError, AssertionError, ValueError, IndexError)):
        return Mismatch("shape", name, text)
    return Mismatch("loader", name, text)


def _missing(tracer: Tracer, expected: Mapping[str, torch.Tensor]) -> list[Mismatch]:
    found = []
    for name, parameter in expected.items():
        fraction = tracer.written.fraction(parameter)
        if fraction < 1.0:
            found.append(Mismatch("missing", name, f"the manifest covers {fraction:.1%} of this parameter"))
    return found


def _torn(tracer: Tracer, expected: Mapping[str, torch.Tensor]) -> list[Mismatch]:
    """What is missing of layers that are covered in part."""
    layers: dict[str, dict[str, float]] = {}
    for name, parameter in expected.items():
        layers.setdefault(name.rpartition(".")[0], {})[name] = tracer.written.fraction(parameter)
    return [
        Mismatch("missing", name, f"the manifest covers {fraction:.1%} of it, and the engine reloads whole layers")
        for fractions in layers.values()
        if any(fractions.values())
        for name, fraction in fractions.items()
        if fraction < 1.0
    ]


def warm_up() -> None:
    """Have torch import what the first trace of a process needs: that takes seconds."""
    memory = torch.zeros(2)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            memory.narrow(0, 0, 1).copy_(weight.narrow(0, 0, 1))

    trace(load, Manifest([TensorSpec("warm-up", "float32", (2,))]))


def signature(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """Identifies the memory that a plan writes, of parameters and buffers; a plan is void once it changes."""
    with torch._C.DisableTorchFunctionSubclass():  # engines' parameters are subclasses: each look would run Python
        return tuple(
            (name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in tensors.items()
        )
