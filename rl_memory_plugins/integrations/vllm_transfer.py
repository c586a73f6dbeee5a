"""The trainer's half of the backend `rl_memory` of vLLM's own weight transfer.

The engine runs with the plugin and `--weight-transfer-config '{"backend": "rl_memory"}'`. The trainer:

    from rl_memory_plugins.integrations.vllm_transfer import RLMemoryTrainerInitInfo

    engine = WeightTransferTrainerFactory.trainer_init(
        RLMemoryTrainerInitInfo(rank=0), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
    )
    engine.send_weights()

To import this module registers the backend in the trainer's process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer.once import Once
from rl_memory_plugins.trainer.push import push_weights
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.source import name_of

if TYPE_CHECKING:
    import torch
    from vllm.distributed.weight_transfer.base import ParamMeta

__all__ = ["RLMemoryTrainerInitInfo"]


@dataclass
class RLMemoryTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """What the trainer knows.

    Attributes:
        receivers: The devices of all engine ranks, or their number; see `push_weights`.
        timeout_s: The longest silence of either side, in seconds.
        options: Options of `WeightSender`, for example `bucket_bytes`.
    """

    backend: ClassVar[str] = "rl_memory"
    receivers: int | Sequence[str] = 1
    timeout_s: float = 300.0
    options: dict[str, Any] = field(default_factory=dict)


class _Source:
    """A `WeightSource` of vLLM's as a `TensorSource`."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(meta.name, name_of(meta.dtype), tuple(meta.shape)) for meta in _metadata(self._source)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in _whole_tensors(self._source):
            yield name, tensor.detach()


def _metadata(source: WeightSource) -> list[ParamMeta]:
    found: list[ParamMeta] | Callable[[], list[ParamMeta]] = source.metadata
    return found() if callable(found) else found  # a property since vLLM 0.33


def _whole_tensors(source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(source.iter_full() if hasattr(source, "iter_full") else source)  # vLLM < 0.33 iterates the source


def _gather(source: WeightSource) -> None:
    for _ in _whole_tensors(source):
        pass


class RLMemoryTrainerTransferEngine(TrainerWeightTransferEngine[RLMemoryTrainerInitInfo]):  # type: ignore[misc]
    """Sends all weights in one update. Every rank of the trainer calls `send_weights`; rank 0 sends."""

    init_info_cls = RLMemoryTrainerInitInfo

    def __init__(self, init_info: RLMemoryTrainerInitInfo, **kwargs: Any) -> None:
        super().__init__(is_sender=init_info.is_sender, **kwargs)
        self._init_info = init_info

    @classmethod
    def trainer_init(
        cls, init_info: RLMemoryTrainerInitInfo, *, client: Any, source: WeightSource | None = None
    ) -> RLMemoryTrainerTransferEngine:
        """Make the engine, and tell the inference side.

        Raises:
            InvalidRequestError: no source is given, it does not give whole tensors, or rank 0 does not own all of them.
        """
        if source is None:
            raise InvalidRequestError("the backend rl_memory sends whole models: pass a WeightSource as source=")
        if not getattr(source, "implements_iter_full", lambda: True)():
            raise InvalidRequestError(
                f"the backend rl_memory sends whole tensors, and {type(source).__name__} has no iter_full",
                field="source",
                got=type(source).__name__,
            )
        elsewhere = [meta.name for meta in _metadata(source) if 0 not in (getattr(meta, "owners", None) or (0,))]
        if elsewhere:
            raise InvalidRequestError(
                f"the backend rl_memory sends from the trainer's rank 0, which does not own {len(elsewhere)} tensors, "
                f"such as {elsewhere[0]}",
                field="source",
                got=elsewhere[:20],
            )
        if init_info.is_sender:
            client.init_weight_transfer_engine({})
        return cls(init_info, client=client, source=source)

    def send_weights(self, weight_version: str | None = None) -> None:
        """Update the weights of the inference engine.

        Args:
            weight_version: The version after the update; `None` leaves it.

        Raises:
            RLMemoryError: the update failed.
        """
        if not self.is_sender:
            _gather(self.source)
            return
        source = Once(_Source(self.source))
        try:
            self.client.start_weight_update()
            push_weights(
                self._post,
                source,
                receivers=self._init_info.receivers,
                timeout_s=self._init_info.timeout_s,
                **self._init_info.options,
            )
        except Exception:
            with contextlib.suppress(Exception):
                source.drain()  # the other ranks gather all tensors whatever happens here
            raise
        self.client.finish_weight_update(*([] if weight_version is None else [weight_version]))

    def _post(self, body: dict[str, Any]) -> None:
        self.client.update_weights({name: body[name] for name in ("endpoints", "token", "timeout_s")})


if RLMemoryTrainerInitInfo.backend not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(RLMemoryTrainerInitInfo.backend, RLMemoryTrainerTransferEngine)
