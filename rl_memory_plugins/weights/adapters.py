"""The adapters of one rank: it receives their tensors by the stream of weight updates, and gives them to the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rl_memory_plugins.errors import RLMemoryError, WeightUpdateError
from rl_memory_plugins.timing import timed
from rl_memory_plugins.weights.addresses import Endpoints
from rl_memory_plugins.weights.manifest import Manifest, Mismatch, TensorSpec, manifest_error
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.plan import LoadPlan

if TYPE_CHECKING:
    import torch

    from rl_memory_plugins.weights.receiver import WeightReceiver


class AdapterSlots(Protocol):
    """The adapters of an engine on one rank. Each version of a name has a number of its own."""

    def check(self, name: str, config: Mapping[str, Any]) -> None:
        """Check the name and PEFT's configuration.

        Raises:
            InvalidRequestError: the engine cannot serve such an adapter.
        """

    def fit(self, config: Mapping[str, Any], specs: Sequence[TensorSpec]) -> tuple[list[Mismatch], list[str]]:
        """Compare the tensors with the model. Returns the mismatches, and the names of layers that this rank lacks."""

    def add(self, number: int, name: str, config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Make a version ready for requests. No request uses it yet. Keeps the tensors, and copies none to a file."""

    def remove(self, number: int) -> None:
        """Forget a version. Does nothing if it is not there."""


class AdapterLoader(ModelLoader):
    """Takes the tensors of an adapter whole, and writes none of the model's weights.

    Attributes:
        tensors: The tensors by name, after an update.
    """

    writes_weights = False

    def __init__(self, slots: AdapterSlots, config: Mapping[str, Any]) -> None:
        super().__init__(lambda weights: None, dict)
        self.tensors: dict[str, torch.Tensor] = {}
        self._slots = slots
        self._config = config

    def plan(
        self, manifest: Manifest, expected: Mapping[str, torch.Tensor], kept: frozenset[str] = frozenset()
    ) -> LoadPlan:
        """Check the manifest.

        Raises:
            ManifestError: the tensors do not fit the model.
        """
        problems = manifest.mismatches()
        unused: list[str] = []
        if not manifest.tensors:
            problems = [Mismatch("missing", "lora_A", "the adapter has no tensors")]
        if not problems:
            problems, unused = self._slots.fit(self._config, manifest.tensors)
        if problems:
            raise manifest_error(problems, unused)
        return LoadPlan(manifest, {}, {spec.name: "adapters arrive whole" for spec in manifest.tensors}, unused)

    def load_with_engine(self, plan: LoadPlan, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.tensors = dict(weights)

    def note_complete(self, plan: LoadPlan) -> None:
        """Nothing: the weights are those of before."""


class RankAdapters:
    """The calls of the controller that concern adapters.

    Args:
        receiver: Gives the receiver of this rank.
        slots: Gives the engine's adapters.
    """

    def __init__(self, receiver: WeightReceiver, slots: Callable[[], AdapterSlots]) -> None:
        self._receiver = receiver
        self._slots = slots
        self.calls: dict[str, Callable[..., Any]] = {
            name: getattr(self, name) for name in ("prepare_adapter", "abort_adapter", "forget_adapters")
        }

    def prepare_adapter(
        self,
        name: str,
        number: int,
        config: dict[str, Any],
        endpoints: Endpoints,
        token: str,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Receive a version and add it to the engine. Returns the report of `WeightReceiver.receive`.

        Raises:
            InvalidRequestError: `config` asks for something that the engine cannot do.
            ManifestError: the tensors do not fit the model. No tensor was sent.
            WeightUpdateError: the trainer stalled, disconnected or gave up; or the engine refused the adapter.
        """
        slots = self._slots()
        slots.check(name, config)
        loader = AdapterLoader(slots, config)
        report = self._receiver.receive(endpoints, token, timeout_s, loader)
        with timed(report["seconds"], "add"):
            try:
                slots.add(number, name, config, loader.tensors)
            except RLMemoryError:
                raise
            except Exception as error:
                raise WeightUpdateError(f"the engine refused the adapter {name}: {error}", name=name) from error
        return report

    def abort_adapter(self, number: int) -> None:
        self._slots().remove(number)

    def forget_adapters(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._slots().remove(number)
