"""How one model loads tensors: by a plan for each manifest, and by the engine's own loader for opaque tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights.coverage import Coverage
from rl_memory_plugins.weights.manifest import Manifest
from rl_memory_plugins.weights.plan import Loader, LoadPlan, signature, trace
from rl_memory_plugins.weights.replay import Replays
from rl_memory_plugins.weights.write_recorder import Written, recording

if TYPE_CHECKING:
    import torch

MAX_PLANS = 4
"""The number of plans to keep. A trainer may alternate between manifests (complete, LoRA, …)."""


class Reload(Protocol):
    """Loads weights through the engine's own reload, which transforms them after loading (quantises, packs, absorbs).

    Attributes:
        why: Why a plan cannot replay copies, as text for a person.
    """

    why: str

    def checkpoint_layout(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Give the model's parameters the shapes and loaders that they had before the transformation, without memory.

        The context yields the parameters as `"layer.parameter"`. At its exit the model is unchanged.
        """

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        """Load and transform the weights at the same addresses. It may keep the tensors until it returns.

        Raises:
            WeightUpdateError: the engine did not repeat the steps of its first load.
        """


class ModelLoader:
    """Keeps the valid plans of one model. The arguments are those of `WeightReceiver`.

    Attributes:
        complete: The plan of the latest complete update; `None` if it replayed nothing or has become invalid.
        replays: The buckets of the latest update.
    """

    def __init__(
        self,
        load_weights: Loader,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        *,
        buffers: Callable[[], Mapping[str, torch.Tensor]],
        load_opaque: Loader,
        reload: Callable[[], Reload | None],
        transformed: Callable[[], int],
        ignorable: Callable[[str], bool],
        allow_cast: bool,
    ) -> None:
        self._load_weights = load_weights
        self._parameters = parameters
        self._buffers = buffers
        self._load_opaque = load_opaque
        self._reload = reload
        self._transformed = transformed
        self._ignorable = ignorable
        self._allow_cast = allow_cast
        self._plans: dict[str, LoadPlan] = {}
        self._signature: tuple[Any, ...] = ()
        self.complete: LoadPlan | None = None
        self.replays = Replays()

    def plan(self, manifest: Manifest, expected: Mapping[str, torch.Tensor]) -> LoadPlan:
        """The plan for a manifest, from the cache or from a new trace. Writes no weights.

        Args:
            expected: The result of `drop_outdated` in this session.

        Raises:
            ManifestError: the tensors do not fit the model.
            UnsupportedError: the engine has transformed weights and cannot repeat that.
        """
        digest = manifest.digest()
        if digest in self._plans:
            return self._plans[digest]
        reload = self._reload()
        with nullcontext(expected) if reload is None else reload.checkpoint_layout() as layout:
            plan = trace(
                self._load_weights,
                manifest,
                expected=layout,
                ignorable=self._ignorable,
                owned=[*expected.values(), *self._buffers().values()],
                allow_cast=self._allow_cast,
                whole_layers="" if reload is None else reload.why,
            )
        while len(self._plans) >= MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[digest] = plan
        self.drop_outdated()  # the loader may have made new tensors even in a trace
        return plan

    def refusal(self) -> UnsupportedError | None:
        """Why the model's weights can never be updated; `None` if they can."""
        try:
            self._reload()
        except UnsupportedError as error:
            return error
        return None

    def load_opaque(self, plan: LoadPlan, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the opaque tensors of the plan through the engine's own loader. Does nothing if there are none.

        Raises:
            WeightUpdateError: the update is not complete, which the trace could not see; or the reload failed.
        """
        if not plan.opaque:
            return
        reload = self._reload()
        if reload is not None:
            reload.load(weights, partial=plan.partial)
        elif not plan.unproven:
            self._load_opaque(weights)
        else:
            written = Written()
            with recording(written):
                self._load_opaque(weights)
            written.anew.extend(plan.traced)
            self._require_written(plan, written.anew)

    def _require_written(self, plan: LoadPlan, written: Coverage) -> None:
        now = self._parameters()
        same = {name: now[name] for name, address in plan.unproven.items() if _lies_at(now.get(name), address)}
        missing = [name for name, parameter in same.items() if written.fraction(parameter) < 1]
        if missing:
            raise WeightUpdateError(
                f"the update did not cover {len(missing)} parameters, the first being {missing[0]}",
                reason="incomplete",
                missing=missing,
            )

    def drop_outdated(self) -> Mapping[str, torch.Tensor]:
        """Drop all plans if the model's tensors have been replaced: the plans would keep the old memory alive.

        Also drops them if the engine has transformed more weights since they were made.

        Returns: the current parameters.
        """
        expected = self._parameters()
        current = (self._transformed(), signature(expected), signature(self._buffers()))
        if current != self._signature:
            self._plans.clear()
            self.replays.clear()
            self.complete = None
            self._signature = current
        return expected

    def note_complete(self, plan: LoadPlan) -> None:
        """A complete update with this plan has arrived. A plan that replays nothing gives no checkpoint checksums."""
        if plan.digest in self._plans:
            self.complete = plan if plan.steps else None


def _lies_at(parameter: torch.Tensor | None, address: int) -> bool:
    """Whether the parameter has kept its memory. New memory counts as written."""
    return parameter is not None and parameter.data_ptr() == address
