"""How one model takes tensors: plans by manifest, and the engine's own loader for what they cannot replay."""

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
"""Plans kept, one for each manifest that a trainer alternates between (complete, LoRA, …)."""


class Reload(Protocol):
    """An engine's own way to load weights that it transforms after loading (quantised, packed, absorbed ones).

    Attributes:
        why: Why replaying copies would be wrong, for a person.
    """

    why: str

    def checkpoint_layout(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Give the model's parameters the shapes and loaders that they had before the transformation.

        There is no memory behind them. Names them as `"layer.parameter"`; at the end the model is as it was.
        """

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], *, partial: bool) -> None:
        """Load and transform; it may keep the tensors until it returns. Every address stays.

        Raises:
            WeightUpdateError: what the engine did is not what it did at its first load.
        """


class ModelLoader:
    """Plans of one model, kept as long as they hold. Arguments are those of `WeightReceiver`.

    Attributes:
        complete: The plan of the latest complete update, if it replayed anything and the model is still as it was.
        replays: What the latest update did, bucket by bucket.
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
        """The plan for a manifest: from the cache, or traced now. Touches no weights.

        Args:
            expected: What `drop_outdated` returned in this session.

        Raises:
            ManifestError: the tensors do not fit.
            UnsupportedError: the engine has transformed weights and cannot do it again.
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
        self.drop_outdated()  # the loader may have made new tensors, traced or not
        return plan

    def refusal(self) -> UnsupportedError | None:
        """Why no update can ever reach the model's weights, or `None` if updates can."""
        try:
            self._reload()
        except UnsupportedError as error:
            return error
        return None

    def load_opaque(self, plan: LoadPlan, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give the tensors to the engine's own loader, if the plan has any that only it can load.

        Raises:
            WeightUpdateError: the tensors do not make up a complete update; only now could that be seen.
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
        """Forget plans that write memory which is no longer the model's; they would keep it alive.

        Plans that were made before the engine was seen to transform something go too.

        Returns: the parameters as they are now.
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
        """A complete update by this plan has arrived. What is opaque has no checksum by the checkpoint's names."""
        if plan.digest in self._plans:
            self.complete = plan if plan.steps else None


def _lies_at(parameter: torch.Tensor | None, address: int) -> bool:
    """Whether it is where it was; a loader that gives a parameter other memory has made that anew."""
    return parameter is not None and parameter.data_ptr() == address
