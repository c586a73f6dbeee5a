"""The load plan: the copies and fills that load each tensor of a manifest into this rank's memory.

`trace` makes the plan and validates the manifest, and writes no memory. Later updates replay the plan without the
model's loader.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
import torch

from rl_memory_plugins.tags import DraftShare
from rl_memory_plugins.weights.casts import CastRule, summary
from rl_memory_plugins.weights.coverage import Coverage
from rl_memory_plugins.weights.filled import Filled
from rl_memory_plugins.weights.known_names import hint, nearest, skipped_twins
from rl_memory_plugins.weights.loader_run import MAX_FAILURES, Loader, insists_on_others, run_traced
from rl_memory_plugins.weights.manifest import Manifest, Mismatch, TensorSpec, manifest_error
from rl_memory_plugins.weights.slices import Slice, cut_specs, cut_step, slice_of
from rl_memory_plugins.weights.trace import CopyStep, Step, Tracer

Write = tuple[torch.Tensor, Any]
"""A destination, and the tensor to copy or the value to fill."""

_SOURCE = object()  # in place of a value: the next source is copied

SMALL_BYTES = 4 << 20
"""Up to this size, many copies on a GPU share one kernel: a launch for each copy takes longer than the copy."""

_NOT_GROUPED = {getattr(torch, name, None) for name in ("float8_e8m0fnu", "uint16", "uint32", "uint64")}
"""Dtypes that `torch._foreach_copy_` refuses on a GPU."""


def can_group_copy(source: torch.Tensor, destination: torch.dtype) -> bool:
    """Whether `torch._foreach_copy_` may do this copy on a GPU.

    It must not cast: some torch releases use the kernel for the first destination's dtype for all destinations, and
    write wrong bytes to those of another dtype (pytorch/pytorch#173383).
    """
    return source.nbytes <= SMALL_BYTES and source.dtype == destination and destination not in _NOT_GROUPED


class LoadPlan:
    """How this rank loads each tensor of one manifest.

    Attributes:
        steps: The copies and fills that `apply` replays, by name. A name may have many (experts, fused layers) or none.
        opaque: Names that only the engine's loader can load, with the reason.
        unused: Names that this rank's loader ignored and may not ignore.
        skipped: Names that it skips by itself.
        nearest: For unused names, similar names that it knows.
        unproven: Parameters that the trace has not seen covered because it could not follow the loader, with their
            addresses. Only the real load shows whether a complete update writes them.
        traced: If parameters are unproven, the memory that the trace has seen written.
        omitted: The kept parameters that a complete update leaves out. The plan is complete only while these are kept.
        casts: The casts of its copies, see `casts.summary`.
        padded: For a complete update, parameters with padding that it does not write and no reload makes anew.
        padding: For parameters with padding, by name before a reload, the regions that are no padding.
        rebuilt: For each opaque name that is copied into temporary parameters of a `Reload`, these copies and fills.
        derived_from: The parameters, by the engine's name, from which the loader itself computes other tensors.
        read_unwritten: Those of them that the update does not write, or not all but their padding.
        draft_share: How much of the draft model it writes.
        draft_tensors: The number of tensors that the draft model takes.
    """

    def __init__(
        self, manifest: Manifest, steps: dict[str, list[Step]], opaque: dict[str, str], unused: list[str]
    ) -> None:
        self.unproven: dict[str, int] = {}
        self.traced = Coverage()
        self.omitted: frozenset[str] = frozenset()
        self.casts: list[dict[str, Any]] = []
        self.padded: list[torch.Tensor] = []
        self.padding: Filled = {}
        self.skipped: list[str] = []
        self.nearest: dict[str, str] = {}
        self.rebuilt: dict[str, list[Step]] = {}
        self.derived_from: frozenset[str] = frozenset()
        self.read_unwritten: frozenset[str] = frozenset()
        self.draft_share = DraftShare.NONE
        self.draft_tensors = 0
        self.digest = manifest.digest()
        self.partial = manifest.partial
        self.specs = {spec.name: spec for spec in manifest.tensors}
        self.steps = steps
        self.opaque = opaque
        self.unused = unused
        # If steps overlap, the order of writes matters.
        self._disjoint = _are_disjoint(step for of_name in steps.values() for step in of_name)

    @functools.cached_property
    def is_orderless(self) -> bool:
        """Whether no two writes of `steps` and `rebuilt` overlap."""
        return _are_disjoint(step for of_name in [*self.steps.values(), *self.rebuilt.values()] for step in of_name)

    @functools.cached_property
    def slices(self) -> list[Slice | None]:
        """For each tensor of the manifest what this rank needs of it; `None` for a whole tensor."""
        return [
            None
            if spec.name in self.opaque
            else slice_of(spec.shape, [one for one in self.steps.get(spec.name, ()) if isinstance(one, CopyStep)])
            for spec in self.specs.values()
        ]

    @functools.cached_property
    def cut(self) -> LoadPlan:
        """The same plan for tensors of which only `slices` travel."""
        found = copy.copy(self)
        specs = list(self.specs.values())
        found.specs = {spec.name: spec for spec in cut_specs(specs, self.slices)}
        parts = {spec.name: (spec.shape, part) for spec, part in zip(specs, self.slices, strict=True) if part}
        found.steps = {
            name: [
                cut_step(step, *parts[name]) if name in parts and isinstance(step, CopyStep) else step for step in steps
            ]
            for name, steps in self.steps.items()
        }
        return found

    def apply(self, name: str, source: torch.Tensor) -> None:
        """Load a tensor that is not opaque. `source` is contiguous and has the manifest's shape and dtype."""
        self.run(self.writes(name, source, source.storage_offset()))

    def writes(self, name: str, memory: torch.Tensor, start: int) -> list[Write]:
        """The writes that load one tensor.

        Args:
            name: A name that is not opaque.
            memory: Has the tensor's dtype. Its storage holds the tensor, contiguous, from element `start` on.
        """
        return [
            (step.destination, memory.as_strided(step.size, step.stride, start + step.offset))
            if isinstance(step, CopyStep)
            else (step.destination, step.value)
            for step in self.steps.get(name, ())
        ]

    def row_writes(self, name: str, memory: torch.Tensor, start: int, first: int, last: int) -> list[Write] | None:
        """The writes that load rows `first` to `last` (exclusive) of a tensor's first dimension.

        Args:
            memory: Has the tensor's dtype. Its storage holds the rows, contiguous, from element `start` on.

        Returns: `None` if the tensor can only be loaded whole: it is opaque, a copy mixes rows, or the order of writes
        matters.
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

    def clear_padding(self) -> None:
        """Fill the parameters with padding with zeros, as engines do when they allocate them."""
        with torch.inference_mode():
            for parameter in self.padded:
                parameter.zero_()

    def run(self, writes: Iterable[Write]) -> Batch:
        """Run the writes of any number of tensors. Does not wait for the device."""
        batch = Batch(writes, group=self._disjoint)
        batch.run()
        return batch


class Batch:
    """Writes that can be repeated as long as their sources and destinations are allocated.

    Args:
        group: Run small copies on a GPU together, after all other writes.

    Attributes:
        sources: What is copied. Others of the same dtypes, shapes and devices may take their place.
    """

    def __init__(self, writes: Iterable[Write], *, group: bool) -> None:
        self._each: list[Write] = []  # without the sources
        self._together: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []
        last: list[torch.Tensor] = []
        for destination, value in writes:
            if not isinstance(value, torch.Tensor):
                self._each.append((destination, value))
            elif group and value.is_cuda and can_group_copy(value, destination.dtype):
                self._together.append(destination)
                last.append(value)
            else:
                self._each.append((destination, _SOURCE))
                self.sources.append(value)
        self.sources += last

    def run(self) -> None:
        """Run the writes. Does not wait for the device."""
        sources = iter(self.sources)
        # Inference mode can write inference tensors and all others.
        with torch.inference_mode():
            for destination, value in self._each:
                if value is _SOURCE:
                    destination.copy_(next(sources), non_blocking=True)
                else:
                    destination.fill_(value)
            if self._together:
                torch._foreach_copy_(self._together, list(sources), non_blocking=True)


def _row_dimension(step: CopyStep, row: int) -> tuple[int, int, int] | None:
    """The dimension of a copy that counts rows of `row` elements (-1: only one row), the first row, and their number.

    `None` if no single dimension counts rows.
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
    """Whether the address ranges of all steps are disjoint, each from the lowest to the highest address."""
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
    kept: frozenset[str] = frozenset(),
    ignorable: Callable[[str], bool] = lambda name: False,
    checkpoint: Callable[[], Mapping[str, TensorSpec]] = dict,
    filled: Callable[[], Filled] = dict,
    owned: Iterable[torch.Tensor] | None = None,
    casts: CastRule | None = None,
    whole_layers: str = "",
    is_temporary: Callable[[torch.Tensor], bool] | None = None,
    optional: Mapping[str, torch.Tensor] | None = None,
) -> LoadPlan:
    """Run the loader on meta tensors and record its copies and fills. Writes no real memory.

    Args:
        load_weights: The model's loader.
        manifest: The manifest of the update.
        expected: The parameters that a complete update must cover, by the engine's name.
        kept: Those that a complete update may leave out, each as a whole.
        ignorable: Whether the loader may ignore a name (tied embeddings, derived buffers).
        checkpoint: Gives the tensors of the engine's checkpoint. The loader may ignore their names too.
        filled: Gives what the load of that checkpoint fills. The rest of a parameter is padding.
        owned: The model's parameters and buffers. The caller drops the plan if their memory is replaced. A name whose
            loading writes other memory is opaque.
        casts: Which tensors may have another dtype than the engine's memory; the copy casts.
        whole_layers: If the engine reloads whole layers, the reason; else empty. An update must then cover each
            reloaded layer of `expected` completely or not at all, and every name that is loaded into one is opaque.
        is_temporary: Whether a tensor has memory of a parameter of a reloaded layer. Default: all layers are reloaded.
        optional: Parameters of reloaded layers that are not in `expected`. Whoever brings one brings its whole layer.

    Raises:
        ManifestError: the manifest does not fit. `details["mismatches"]` lists every mismatch, `details["unused"]` the
            names that the loader ignored, `details["nearest"]` similar names that it knows.
    """
    problems = manifest.mismatches()
    if problems:
        raise manifest_error(problems)
    expected = expected or {}
    owned = None if owned is None else list(owned)
    tracer = Tracer(manifest.tensors, expected.values(), buffers=owned or (), casts=casts)
    failures, untried = run_traced(load_weights, tracer, [spec.name for spec in manifest.tensors])
    addresses = None if owned is None else {tensor.untyped_storage().data_ptr() for tensor in owned}

    def is_owned(tensor: torch.Tensor) -> bool:
        known = addresses is None or tensor.untyped_storage().data_ptr() in addresses
        return known or (is_temporary is not None and is_temporary(tensor))

    tracer.finish(is_owned)
    problems = [*failures.values(), *tracer.wrong_dtype.values()]
    if untried:
        reason = f"not tried after {MAX_FAILURES} failures in a row, nor {len(untried) - 1} more names"
        problems.append(Mismatch("loader", untried[0], reason))
    used = tracer.steps.keys() | tracer.opaque.keys() | failures.keys() | set(untried)
    ignored = [s.name for s in manifest.tensors if s.name not in used and s.numel]
    skipped = [name for name in ignored if ignorable(name)]
    if len(skipped) < len(ignored):
        skipped += _skipped(load_weights, manifest, set(ignored).difference(skipped), checkpoint())
    unused = [name for name in ignored if name not in set(skipped)] if skipped else ignored
    near: dict[str, str] = {}
    if unused or any(problem.kind == "unknown" for problem in problems):
        unknown = [*unused, *(problem.name for problem in problems if problem.kind == "unknown")]
        near = nearest(unknown, dict.fromkeys([*tracer.steps, *expected, *checkpoint()]))
        problems = [_with_hint(problem, near) for problem in problems]
    temporary = is_temporary or (lambda tensor: bool(whole_layers))
    reloaded = {name for name, parameter in expected.items() if temporary(parameter)}
    counted = expected if not manifest.partial else {name: expected[name] for name in expected if name in reloaded}
    written = {name: tracer.written.fraction(parameter) for name, parameter in counted.items()}
    unsure = frozenset(name for name, parameter in counted.items() if tracer.may_have_written(parameter))
    may_lack = frozenset(written) if manifest.partial else kept | unsure if whole_layers else kept
    brought = {layer_of(name) for name, parameter in (optional or {}).items() if tracer.written.fraction(parameter)}
    missing = _missing(written, may_lack, reloaded, brought)
    lacking = {mismatch.name: counted[mismatch.name] for mismatch in missing}
    padded = _padded(filled(), tracer.written, lacking) if lacking else {}
    missing = [mismatch for mismatch in missing if mismatch.name not in padded]
    runs = bool(tracer.opaque or tracer.derives)  # the loader itself, whose writes can be looked at
    problems += [mismatch for mismatch in missing if whole_layers or not runs or mismatch.name not in unsure]
    if problems:
        error = manifest_error(problems, unused)
        error.details["nearest"] = near
        raise error
    opaque, rebuilt = tracer.opaque, {}
    if is_temporary is not None:
        rebuilt = {
            name: steps for name, steps in tracer.steps.items() if any(is_temporary(s.destination) for s in steps)
        }
        opaque = {**opaque, **dict.fromkeys(rebuilt, whole_layers)}
    if tracer.derives or (whole_layers and is_temporary is None):
        why = whole_layers or f"the loader runs {tracer.derives} on the model's memory"
        opaque = {spec.name: why for spec in manifest.tensors}
    left = [spec for spec in manifest.tensors if spec.name in opaque]
    if left and tracer.steps.keys() - opaque.keys() and insists_on_others(load_weights, left):
        opaque = {spec.name: "the loader fails without the other tensors" for spec in manifest.tensors} | opaque
    steps = {name: steps for name, steps in tracer.steps.items() if name not in opaque}
    plan = LoadPlan(manifest, steps, opaque, unused)
    plan.casts, plan.skipped, plan.nearest = summary(tracer.casts), skipped, near
    plan.rebuilt = rebuilt
    plan.derived_from = frozenset(name for name, parameter in expected.items() if tracer.derives_from(parameter))
    plan.read_unwritten = frozenset(
        name for name in plan.derived_from - padded.keys() if tracer.written.fraction(expected[name]) < 1
    )
    if not manifest.partial:
        excused = unsure - kept if whole_layers else {mismatch.name for mismatch in missing}
        plain = (name for name in excused if written[name] < 1 and not temporary(expected[name]))
        plan.traced = tracer.written
        plan.unproven = {name: expected[name].data_ptr() for name in plain}
    plan.padded = [one for one in padded.values() if not (temporary(one) or manifest.partial)]
    plan.padding = {name: filled()[name] for name in padded}
    if not manifest.partial:
        plan.omitted = frozenset(name for name in kept & written.keys() if not written[name])
    return plan


def _padded(filled: Filled, written: Coverage, lacking: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of the lacking parameters of which the engine's own checkpoint fills nothing more, but something."""
    return {
        name: parameter
        for name, parameter in lacking.items()
        if filled.get(name) and all(written.fraction(region.of(parameter)) == 1 for region in filled[name])
    }


def _skipped(
    load_weights: Loader, manifest: Manifest, ignored: Collection[str], names: Mapping[str, TensorSpec]
) -> list[str]:
    """The ignored names that the engine's checkpoint has too, or has under another name that the loader ignores."""
    shapes = {spec.name: spec for spec in manifest.tensors if spec.name in ignored}

    def ignores(twins: list[str]) -> set[str]:
        tracer = Tracer([names[twin] for twin in twins], casts=CastRule(any=True))
        failures, untried = run_traced(load_weights, tracer, twins)
        return {*twins}.difference(tracer.steps, tracer.opaque, failures, untried)

    others = [name for name in shapes if name not in names]
    return [name for name in shapes if name in names] + skipped_twins(others, names, ignores)


def _with_hint(problem: Mismatch, near: Mapping[str, str]) -> Mismatch:
    if problem.name not in near:
        return problem
    return msgspec.structs.replace(problem, message=problem.message + hint(near[problem.name]))


def _missing(
    written: Mapping[str, float], may_omit: frozenset[str], reloaded: set[str], brought: set[str]
) -> list[Mismatch]:
    """The parameters that the manifest does not cover.

    Args:
        written: The fraction of each parameter that the manifest covers.
        may_omit: Parameters that the manifest may leave out.
        reloaded: The parameters of layers that the manifest must cover completely or not at all.
        brought: Layers of which it has other parameters.
    """
    touched = brought | {layer_of(name) for name, fraction in written.items() if fraction}
    missing = []
    for name, fraction in written.items():
        whole = name in reloaded
        if fraction >= 1 or (name in may_omit and not (layer_of(name) in touched if whole else fraction)):
            continue
        reason = ", but the engine reloads whole layers" if whole and name in may_omit else ""
        missing.append(Mismatch("missing", name, f"the manifest covers {fraction:.1%} of this parameter{reason}"))
    return missing


def layer_of(name: str) -> str:
    """The name of the layer that has this parameter."""
    return name.rpartition(".")[0]


def warm_up() -> None:
    """Run a small trace: the first trace of a process makes torch import modules, which takes seconds."""
    memory = torch.zeros(2)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            memory.narrow(0, 0, 1).copy_(weight.narrow(0, 0, 1))

    trace(load, Manifest([TensorSpec("warm-up", "float32", (2,))]))


def signature(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """Identifies the memory of parameters and buffers. A plan is invalid once the signature changes."""
    with torch._C.DisableTorchFunctionSubclass():  # engines use subclasses: each attribute would run Python
        return tuple(
            (name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in tensors.items()
        )
