"""How one model loads tensors: by a plan for each manifest, and by the engine's own loader for opaque tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rl_memory_plugins.errors import WeightUpdateError
from rl_memory_plugins.weights.casts import CastRule
from rl_memory_plugins.weights.coverage import Coverage
from rl_memory_plugins.weights.filled import Filled, filled_by
from rl_memory_plugins.weights.loader_run import Loader
from rl_memory_plugins.weights.manifest import Manifest, TensorSpec
from rl_memory_plugins.weights.plan import LoadPlan, layer_of, signature, trace
from rl_memory_plugins.weights.replay import Replays
from rl_memory_plugins.weights.write_recorder import recording
from rl_memory_plugins.weights.written import Written, written_names

if TYPE_CHECKING:
    import torch

MAX_PLANS = 4
"""The number of plans to keep. A trainer may alternate between manifests (complete, LoRA, …)."""


def is_ignorable(name: str, *, tied: bool = False) -> bool:
    """Whether engines' loaders skip a name of the checkpoint on purpose: they compute that tensor, or have it already.

    Args:
        tied: The output layer shares the weights of the embedding.
    """
    computed = name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))
    return computed or (tied and name.startswith("lm_head."))


def _of_kept_layers(names: Iterable[str], expected: Iterable[str], kept: frozenset[str]) -> frozenset[str]:
    """The names in layers of which every expected parameter is kept. A reload writes whole layers."""
    layers = {layer_of(name) for name in kept} - {layer_of(name) for name in expected if name not in kept}
    return frozenset(name for name in names if layer_of(name) in layers)


def _kept_in(
    layout: Mapping[str, torch.Tensor], expected: Iterable[str], kept: frozenset[str], reload: Reload
) -> frozenset[str]:
    """The names of the checkpoint's layout that an update may leave out before this reload."""
    of_layers = _of_kept_layers(layout, expected, kept)
    if reload.is_temporary is None:
        return of_layers
    return of_layers | {name for name in kept & layout.keys() if not reload.is_temporary(layout[name])}


class Reload(Protocol):
    """Loads weights through the engine's own reload, which transforms them after loading (quantises, packs, absorbs).

    Attributes:
        why: Why a plan cannot replay copies, as text for a person.
    """

    why: str

    @property
    def is_temporary(self) -> Callable[[torch.Tensor], bool] | None:
        """Tells whether a tensor has memory of `checkpoint_layout` that is no memory of the model. Only tensors that
        are loaded into such memory need the reload. `None`: all tensors need it."""

    @property
    def optional(self) -> Mapping[str, torch.Tensor]:
        """Parameters of `checkpoint_layout` that an update need not have, and which the layout does not yield."""

    def checkpoint_layout(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Give the model's parameters the shapes and loaders that they had before the transformation, without memory.

        The context yields the parameters as `"layer.parameter"`. At its exit the model is unchanged.
        """

    def suits(self, plan: LoadPlan) -> bool:
        """Whether this reload is to load a plan. If not, the next reload that the loader asks for is to plan anew."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], plan: LoadPlan) -> None:
        """Load and transform the opaque tensors of a plan at the same addresses. It may keep them until it returns.

        Raises:
            WeightUpdateError: the engine did not repeat the steps of its first load.
        """


@dataclass(eq=False)
class ModelLoader:
    """Keeps the valid plans of one model.

    Attributes:
        writes_weights: Whether an update changes the content of the model's weights.
        load_weights: The model's loader. Planning runs it on meta tensors.
        parameters: The parameters that a complete update must cover, by the engine's name.
        buffers: The model's buffers, by the engine's name. Plans replay only writes into parameters and buffers; the
            loader does all other writes in each update.
        load_opaque: Loads the tensors that the plan cannot replay. It is called once for each update that has such
            tensors, with an iterator over them; it may keep the tensors. Default: `load_weights`.
        reload: Returns the `Reload` that loads all tensors if the engine has transformed weights, else `None`. It is
            called for each new plan and for each update with opaque tensors. Raises `UnsupportedError` if the engine
            has transformed weights and cannot repeat that.
        transformed: The number of the engine's post-load steps that have transformed weights. A change makes all plans
            invalid.
        ignorable: Whether the loader may ignore a name of the manifest.
        checkpoint: Gives the tensors of the engine's checkpoint. The loader may ignore their names too, and what it
            does not write for them is padding.
        dummy: Whether the engine was started with dummy weights, which also lie where a load of its checkpoint leaves
            the engine's own values. A complete update must then bring every parameter.
        unchanged: The model has its layers again at the exit of this context.
        in_place: What the loader computes anew in this context lies at its exit where it was before.
        derive: Derives again what the engine keeps of weights elsewhere, after an update with the plan has loaded all.
        casts: Which tensors may have another dtype than the engine's memory.
        complete: The plan of the latest complete update; `None` if it replayed nothing or has become invalid.
        replays: The buckets of the latest update.
    """

    writes_weights: ClassVar[bool] = True

    load_weights: Loader
    parameters: Callable[[], Mapping[str, torch.Tensor]]
    buffers: Callable[[], Mapping[str, torch.Tensor]] = dict
    load_opaque: Loader | None = None
    reload: Callable[[], Reload | None] = lambda: None
    transformed: Callable[[], int] = lambda: 0
    ignorable: Callable[[str], bool] = is_ignorable
    checkpoint: Callable[[], Mapping[str, TensorSpec]] = dict
    dummy: Callable[[], bool] = lambda: False
    unchanged: Callable[[], AbstractContextManager[None]] = nullcontext
    in_place: Callable[[], AbstractContextManager[None]] = nullcontext
    derive: Callable[[LoadPlan], None] = lambda plan: None
    casts: CastRule = field(default_factory=CastRule)
    complete: LoadPlan | None = field(default=None, init=False)
    replays: Replays = field(default_factory=Replays, init=False)
    _plans: dict[str, LoadPlan] = field(default_factory=dict, init=False)
    _signature: tuple[Any, ...] = field(default=(), init=False)
    _was_complete: bool = field(default=False, init=False)
    # Whether an update has reloaded layers that may not have the engine's own values again.
    _has_reloaded: bool = field(default=False, init=False)
    _filled: Filled | None = field(default=None, init=False)

    def plan(
        self, manifest: Manifest, expected: Mapping[str, torch.Tensor], kept: frozenset[str] = frozenset()
    ) -> LoadPlan:
        """The plan for a manifest, from the cache or from a new trace. Writes no weights.

        Args:
            expected: The result of `drop_outdated` in this session.
            kept: The parameters that a complete update may leave out, by the engine's name.

        Raises:
            ManifestError: the tensors do not fit the model.
            UnsupportedError: the engine has transformed weights and cannot repeat that.
        """
        digest = manifest.digest()
        known = self._plans.get(digest)
        if known is not None and known.omitted <= kept:
            return known
        reload = self.reload()
        replays = reload is None or reload.is_temporary is not None
        # A loader may assign attributes and make new tensors even in a trace.
        with self.unchanged(), nullcontext(expected) if reload is None else reload.checkpoint_layout() as layout:
            plan = trace(
                self.load_weights,
                manifest,
                expected=layout,
                kept=kept if reload is None else _kept_in(layout, expected, kept, reload),
                ignorable=self.ignorable,
                checkpoint=self.checkpoint,
                filled=functools.partial(self._filled_in, layout),
                # Where nothing is replayed, an opaque name would escape the rule for casts.
                owned=[*expected.values(), *self.buffers().values()] if replays else None,
                casts=self.casts,
                whole_layers="" if reload is None else reload.why,
                is_temporary=None if reload is None else reload.is_temporary,
                optional={} if reload is None else reload.optional,
            )
        if reload is not None and not reload.suits(plan):
            # What is known fits this reload's layout only.
            self._filled, self._signature = None, ()
            return self.plan(manifest, self.drop_outdated(), kept)
        if reload is not None and plan.omitted:
            after = _of_kept_layers(expected, expected, kept)  # their names after the transformation
            plan.omitted = after | (plan.omitted & kept)
        while len(self._plans) >= MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[digest] = plan
        self.drop_outdated()  # if `unchanged` does not restore what the trace has changed
        return plan

    def _filled_in(self, layout: Mapping[str, torch.Tensor]) -> Filled:
        """What the load of the engine's own checkpoint fills of parameters. The first call finds it out."""
        if self._filled is None:
            self._filled = filled_by(self.load_weights, self.checkpoint(), layout, self.unchanged)
        return self._filled

    def unfilled(self) -> frozenset[str]:
        """The parameters, by the engine's name, that the load of the engine's own checkpoint does not fill at all.

        The first call runs the loader on meta tensors of the whole checkpoint. Later calls take no time.

        Raises:
            UnsupportedError: the engine has transformed weights and cannot repeat that.
        """
        lacking = self._lacking()
        return frozenset(() if self.dummy() else (name for name, regions in lacking.items() if not regions))

    def _lacking(self) -> Filled:
        if self._filled is None:
            reload = self.reload()
            with nullcontext(self.parameters()) if reload is None else reload.checkpoint_layout() as layout:
                return self._filled_in(layout)
        return self._filled

    def padding(self) -> Filled:
        """For parameters with padding that `load_weights` writes in place, the regions that it fills.

        Raises:
            UnsupportedError: see `unfilled`.
        """
        filled = {name: regions for name, regions in self._lacking().items() if regions}
        reload = self.reload()
        if reload is None or not filled:
            return filled
        if reload.is_temporary is None:
            return {}
        with reload.checkpoint_layout() as layout:
            return {name: regions for name, regions in filled.items() if not reload.is_temporary(layout[name])}

    @property
    def has_random_padding(self) -> bool:
        """Whether dummy weights lie in the padding: no complete update has cleared it."""
        return not self._was_complete and self.dummy()

    def written(self, specs: Sequence[TensorSpec], among: frozenset[str] = frozenset()) -> Written:
        """Which tensors the loader writes anywhere. Writes no memory, and finds no fault with the tensors.

        Args:
            among: Parameters, by the engine's name.

        Raises:
            UnsupportedError: the engine has transformed weights and cannot repeat that.
        """
        reload = self.reload()
        with self.unchanged(), nullcontext() if reload is None else reload.checkpoint_layout():
            memory = [tensor for name, tensor in self.parameters().items() if name in among]
            return written_names(self.load_weights, specs, memory)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Identifies the memory of the model at the last `drop_outdated`."""
        return self._signature

    def load_with_engine(self, plan: LoadPlan, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the opaque tensors of the plan through the engine's own loader. Does nothing if there are none.

        But a complete update gives layers that an earlier update has reloaded the engine's own values again, if it has
        nothing for them and they are not kept.

        Raises:
            WeightUpdateError: the update is not complete, which the trace could not see; or the reload failed.
        """
        if not plan.opaque and (plan.partial or not self._has_reloaded):
            return
        reload = self.reload()
        own = self.load_opaque or self.load_weights
        if reload is not None:
            own = functools.partial(reload.load, plan=plan)
        elif not plan.opaque:
            return
        load = functools.partial(self._load_in_place, own) if plan.derived_from else own
        self._has_reloaded |= reload is not None
        if not plan.opaque:
            load(weights)
            # Kept layers still have what that update brought.
            self._has_reloaded = bool(plan.omitted) and not plan.omitted <= self.unfilled()
            return
        if not plan.unproven:
            load(weights)
            return
        overwritten = Coverage()
        with recording(overwritten):
            load(weights)
        overwritten.extend(plan.traced)
        missing = [
            name
            for name, parameter in self.parameters().items()
            # a parameter with new memory counts as written
            if parameter.data_ptr() == plan.unproven.get(name) and overwritten.fraction(parameter) < 1
        ]
        if missing:
            raise WeightUpdateError(
                f"the update did not cover {len(missing)} parameters, the first being {missing[0]}",
                reason="incomplete",
                missing=missing,
            )

    def _load_in_place(self, load: Loader, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with self.in_place():
            load(weights)

    def finish(self, plan: LoadPlan) -> None:
        """End an update that has loaded all tensors: see `derive`.

        Raises:
            WeightUpdateError: what the engine keeps of the weights cannot follow them.
        """
        self.derive(plan)

    def drop_outdated(self) -> Mapping[str, torch.Tensor]:
        """Drop all plans if the engine has replaced tensors or transformed more weights since.

        Plans would keep replaced memory alive. Returns the current parameters.
        """
        expected = self.parameters()
        current = (self.transformed(), signature(expected), signature(self.buffers()))
        if current != self._signature:
            self._plans.clear()
            self.replays.clear()
            self.complete = None
            self._signature = current
        return expected

    def note_complete(self, plan: LoadPlan) -> None:
        """Note a complete update with this plan. Without the copies of all layers it gives no checkpoint checksums."""
        self._was_complete = True
        if plan.digest in self._plans:
            self.complete = plan if plan.steps and not plan.rebuilt else None
