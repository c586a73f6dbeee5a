"""A target model and its draft model (speculative decoding), loaded by one manifest.

A trainer names tensors of the draft in one of two ways: with the prefix `draft.` before the names of the draft's own
checkpoint; or, if the engine loads both models from one checkpoint (layers for multi-token prediction), by the
checkpoint's names, of which the draft's loader takes those that the target's loader ignores.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rl_memory_plugins.errors import ManifestError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.tags import DraftShare
from rl_memory_plugins.weights.checksums import tensor_checksum
from rl_memory_plugins.weights.filled import Filled
from rl_memory_plugins.weights.manifest import Manifest, Mismatch, manifest_error
from rl_memory_plugins.weights.model_loader import MAX_PLANS, ModelLoader
from rl_memory_plugins.weights.names import DRAFT
from rl_memory_plugins.weights.plan import LoadPlan

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Arrivals = Iterable[tuple[str, "torch.Tensor"]]


class DraftedPlan(LoadPlan):
    """The plans of both models as one.

    Attributes:
        target, draft: The plans of the two models.
        names: By the name in the manifest, the name for the draft's loader, for each tensor that the draft takes.
        unneeded: The names of the draft's checkpoint that only write memory which the draft shares with the target.
    """

    def __init__(self, manifest: Manifest, target: LoadPlan, draft: LoadPlan, split: Split, share: DraftShare) -> None:
        sent = {own: name for name, own in split.names.items()}
        steps = dict(target.steps)
        for own, more in draft.steps.items():
            steps[sent[own]] = [*steps.get(sent[own], ()), *more]
        opaque = {**{sent[own]: why for own, why in draft.opaque.items()}, **target.opaque}
        steps = {name: found for name, found in steps.items() if name not in opaque}
        unused = [*target.unused, *(sent[own] for own in draft.unused)]
        super().__init__(manifest, steps, opaque, unused)
        self.skipped = [*target.skipped, *(sent[own] for own in draft.skipped)]
        self.nearest = {**target.nearest, **{sent[own]: DRAFT + near for own, near in draft.nearest.items()}}
        self.casts = [*target.casts, *draft.casts]
        self.padded = [*target.padded, *draft.padded]
        self.target, self.draft, self.names = target, draft, split.names
        self.omitted = target.omitted
        self.draft_share = share
        self.draft_tensors = len(split.names) - len(draft.unused) - len(draft.skipped)


class Split(NamedTuple):
    """Which model takes which tensors of a manifest."""

    target: frozenset[str]
    names: dict[str, str]  # see `DraftedPlan`


class DraftedLoader(ModelLoader):
    """Loads a target model, and its draft model too if a manifest names it.

    Args:
        target: The loader of the target.
        draft: The loader of the draft. It is used only while `exists`.
        exists: Whether the engine has a draft model.
        one_checkpoint: Whether the engine loads both models from one checkpoint.
        torn: Whether a load that broke off may have written the draft.
    """

    def __init__(
        self,
        target: ModelLoader,
        draft: ModelLoader,
        exists: Callable[[], bool],
        one_checkpoint: Callable[[], bool],
        torn: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(target.load_weights, target.parameters, reload=target.reload)
        self._target = target
        self._draft = draft
        self._exists = exists
        self._one_checkpoint = one_checkpoint
        self._torn = torn
        self._unfilled: frozenset[str] | None = None  # what no load of the draft's checkpoint fills
        self._whole: dict[str, str] = {}  # the checksums of these parameters, while the draft was not torn
        self._splits: dict[str, Split | None] = {}
        self._of_both: dict[str, DraftedPlan] = {}
        self._leave_out: set[str] = set()  # manifests that leave out what no load of the draft's checkpoint fills

    def padding(self) -> Filled:
        """See `ModelLoader`. The engine's own loads of the draft are not watched."""
        return self._target.padding()

    @property
    def has_random_padding(self) -> bool:
        """See `ModelLoader`."""
        return self._target.has_random_padding

    def drop_outdated(self) -> Mapping[str, torch.Tensor]:
        """See `ModelLoader`. The names of the draft's parameters have the prefix `draft.`."""
        expected = self._target.drop_outdated()
        own = self._draft.drop_outdated() if self._exists() else {}
        current = (self._target.signature, self._draft.signature if own else ())
        if current != self._signature:
            self._signature = current
            self._splits.clear()
            self._of_both.clear()
            self._leave_out.clear()
            self.replays.clear()
            self.complete = None
        shared = self._shared()
        return {**expected, **{DRAFT + name: tensor for name, tensor in own.items() if name not in shared}}

    def plan(
        self, manifest: Manifest, expected: Mapping[str, torch.Tensor], kept: frozenset[str] = frozenset()
    ) -> LoadPlan:
        """See `ModelLoader`. A manifest that names no tensor of the draft leaves the draft as it is."""
        of_target = self._target.parameters() if self._exists() else expected
        ours = {name: tensor for name, tensor in expected.items() if name in of_target}
        split = self._split(manifest)
        if split is None:
            return self._target.plan(manifest, ours, kept)
        specs = [spec for spec in manifest.tensors if spec.name in split.target]
        target = self._target.plan(msgspec.structs.replace(manifest, tensors=specs), ours, kept)
        known = self._of_both.get(manifest.digest())
        if known is not None and known.target is target and not self._exists():
            return known
        draft, share = self._draft_plan(manifest, split)
        if known is None or known.target is not target or known.draft is not draft:
            while len(self._of_both) >= MAX_PLANS:
                del self._of_both[next(iter(self._of_both))]
            known = self._of_both[manifest.digest()] = DraftedPlan(manifest, target, draft, split, share)
        return known

    def _draft_plan(self, manifest: Manifest, split: Split) -> tuple[LoadPlan, DraftShare]:
        if not self._exists():
            return LoadPlan(
                msgspec.structs.replace(manifest, tensors=[]), {}, {}, [*split.names.values()]
            ), DraftShare.NONE
        specs = [
            msgspec.structs.replace(spec, name=split.names[spec.name])
            for spec in manifest.tensors
            if spec.name in split.names
        ]
        expected, shared, holding = self._draft.parameters(), self._shared(), self._holding()
        whole = msgspec.structs.replace(manifest, tensors=specs, partial=False)
        try:
            return self._whole_draft_plan(whole, expected, shared, holding), DraftShare.WHOLE
        except ManifestError as error:
            if not manifest.partial:
                raise _named(error) from None
        try:
            return self._draft.plan(msgspec.structs.replace(whole, partial=True), expected, shared), DraftShare.PART
        except ManifestError as error:
            raise _named(error) from None

    def _whole_draft_plan(
        self, manifest: Manifest, expected: Mapping[str, torch.Tensor], shared: frozenset[str], holding: frozenset[str]
    ) -> LoadPlan:
        """The plan of an update of the whole draft, which may leave out what no load of its checkpoint fills."""
        digest = manifest.digest()
        if digest not in self._leave_out:  # to find that out takes a trace
            try:
                return self._draft.plan(manifest, expected, shared)
            except ManifestError:
                if not holding:
                    raise
        plan = self._draft.plan(manifest, expected, shared | holding)
        if len(self._leave_out) >= MAX_PLANS:
            self._leave_out.clear()
        self._leave_out.add(digest)
        return plan

    def _holding(self) -> frozenset[str]:
        """The parameters of the draft that no load of its checkpoint fills and that hold their values.

        Every sleep preserves them. After a load that broke off they count only if none of their bytes has changed.
        """
        if self._unfilled is None:
            try:
                self._unfilled = self._draft.unfilled()
            except Exception as error:  # without the knowledge every parameter must be sent
                logger.warning("cannot tell which parameters the draft's checkpoint does not fill: %s", error)
                self._unfilled = frozenset()
        parameters = self._draft.parameters()
        now = {name: tensor_checksum(parameters[name]) for name in self._unfilled if name in parameters}
        if not self._torn():
            self._whole = now
        return self._unfilled if now == self._whole else frozenset()

    def _shared(self) -> frozenset[str]:
        """The names of the draft's parameters whose memory is the target's."""
        if not self._exists():
            return frozenset()
        of_target = {tensor.data_ptr() for tensor in self._target.parameters().values() if tensor.numel()}
        return frozenset(
            name
            for name, tensor in self._draft.parameters().items()
            if tensor.numel() and tensor.data_ptr() in of_target
        )

    def _split(self, manifest: Manifest) -> Split | None:
        """Which tensors the draft takes; `None` if it takes none.

        Without a draft those with its prefix are unused here: the last pipeline stage may have the draft.
        """
        if not self._exists() and not any(spec.name.startswith(DRAFT) for spec in manifest.tensors):
            return None
        digest = manifest.digest()
        if digest not in self._splits:
            while len(self._splits) >= MAX_PLANS:
                del self._splits[next(iter(self._splits))]
            self._splits[digest] = self._new_split(manifest)
        return self._splits[digest]

    def _new_split(self, manifest: Manifest) -> Split | None:
        named = {spec.name: spec.name.removeprefix(DRAFT) for spec in manifest.tensors if spec.name.startswith(DRAFT)}
        if named and not self._exists():
            return Split(frozenset(spec.name for spec in manifest.tensors) - named.keys(), named)
        if named:
            specs = [
                msgspec.structs.replace(spec, name=named[spec.name]) for spec in manifest.tensors if spec.name in named
            ]
            shared = self._shared()
            unneeded = self._draft.written(specs, shared).only_in if shared else frozenset()
            names = {name: own for name, own in named.items() if own not in unneeded}
            return Split(frozenset(spec.name for spec in manifest.tensors) - named.keys(), names)
        if not self._one_checkpoint():
            return None
        try:
            taken = self._draft.written(manifest.tensors, self._shared())
        except UnsupportedError:  # the target alone can be updated
            return None
        own = taken.names - self._target.written(manifest.tensors).names
        if not own:
            return None
        names = {name: name for name in taken.names - taken.only_in}
        return Split(frozenset(spec.name for spec in manifest.tensors) - own, names)

    def load_with_engine(self, plan: LoadPlan, weights: Arrivals) -> None:
        """See `ModelLoader`. The target's loader runs first."""
        if not isinstance(plan, DraftedPlan):
            self._target.load_with_engine(plan, weights)
            return
        shares = _Shares(plan, weights)
        self._target.load_with_engine(plan.target, shares.of_target())
        self._draft.load_with_engine(plan.draft, shares.of_draft())
        for name, _ in shares.of_draft():  # if the draft's plan replays everything, no loader has read the rest
            raise WeightUpdateError(f"the draft's loader did not read {name}", name=name)

    def finish(self, plan: LoadPlan) -> None:
        """See `ModelLoader`."""
        if isinstance(plan, DraftedPlan):
            self._target.finish(plan.target)
            self._draft.finish(plan.draft)
        else:
            self._target.finish(plan)

    def note_complete(self, plan: LoadPlan) -> None:
        """See `ModelLoader`."""
        if isinstance(plan, DraftedPlan):
            self._target.note_complete(plan.target)
            self._draft.note_complete(plan.draft)
            self.complete = plan if self._target.complete and plan.steps else None
        else:
            self._target.note_complete(plan)
            self.complete = self._target.complete


class _Shares:
    """The tensors of one update for the loaders of both models.

    Tensors of the draft that arrive before the target's loader is done wait in memory.
    """

    def __init__(self, plan: DraftedPlan, arrivals: Arrivals) -> None:
        self._plan = plan
        self._arrivals = iter(arrivals)
        self._waiting: deque[tuple[str, torch.Tensor]] = deque()

    def of_target(self) -> Arrivals:
        for name, tensor in self._arrivals:
            if self._is_for_target(name, tensor):
                yield name, tensor

    def of_draft(self) -> Arrivals:
        yield from self._waited()
        for name, tensor in self._arrivals:
            if self._is_for_target(name, tensor):
                raise WeightUpdateError(f"the target's loader did not read {name}", name=name)
            yield from self._waited()

    def _is_for_target(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the target's loader has to take the tensor. What its plan replays is loaded here."""
        plan = self._plan
        if name in plan.names:
            self._waiting.append((plan.names[name], tensor))
        if name in plan.target.opaque:
            return True
        if name in plan.target.specs:
            plan.target.apply(name, tensor)
        return False

    def _waited(self) -> Arrivals:
        while self._waiting:
            own, tensor = self._waiting.popleft()
            if own in self._plan.draft.opaque:
                yield own, tensor
            else:
                self._plan.draft.apply(own, tensor)


def _named(error: ManifestError) -> ManifestError:
    """The error with the names of the manifest."""
    mismatches = [msgspec.convert(mismatch, Mismatch) for mismatch in error.details["mismatches"]]
    named = [msgspec.structs.replace(mismatch, name=DRAFT + mismatch.name) for mismatch in mismatches]
    return manifest_error(named, [DRAFT + name for name in error.details.get("unused", ())])
