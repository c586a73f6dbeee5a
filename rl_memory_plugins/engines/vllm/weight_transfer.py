"""This package's weight stream as a backend of vLLM's own weight transfer: `{"backend": "rl_memory"}`.

vLLM's protocol has four calls. Init and start do nothing here. The update receives a whole manifest, as
`update_weights_from_ipc` does: nothing is written before every rank has accepted it. The content is `updating` from the
first write on. The finish makes it `valid`, once every rank has everything; else it is `failed`.

The trainer's half is `integrations/vllm_transfer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from rl_memory_plugins.errors import UnsupportedError

if TYPE_CHECKING:
    from rl_memory_plugins.rank import RankAgent


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Needs nothing: each update names its sender."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the trainer serves one update.

    Attributes:
        endpoints: The address of the sender for each rank's device; see `WeightSender.endpoints`.
        token: What the sender asks for.
        timeout_s: The longest silence, in seconds.
    """

    endpoints: dict[str, str | list[str]] = field(default_factory=dict)
    token: str = ""
    timeout_s: float = 300.0


class RLMemoryTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """The engine's half, in each worker.

    Attributes:
        agent: The agent of this rank; `UpdateSession` sets it.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    agent: RankAgent

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo, *args: Any) -> None:
        """Receive all weights. Older releases of vLLM pass a loader, which is not needed.

        Raises:
            RLMemoryError: the update failed. The content is `failed` if anything was written.
        """
        try:
            self.agent.receive_weights(update_info.endpoints, update_info.token, update_info.timeout_s)
        except BaseException:
            self.agent.finish_update(complete=False)
            raise

    def finish_weight_update(self) -> None:
        self.agent.finish_update(complete=True)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """The trainer's half in releases before 0.27.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("this release of vLLM has no trainer's half for other backends: use push_weights")
