"""A weight transfer backend as a user may register it. It writes parameters in place, where no operator of torch runs.

vLLM's own backends of this kind need GPUs or Ray: `nccl_m2n` writes by NCCL, `sharded_rdt` in threads of its own.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "past_the_loader"
WRITE_S = 0.05  # of a deferred write


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """`bakes`: run the loader on layers without memory, as `sharded_rdt` does."""

    bakes: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What to write, and how.

    Attributes:
        how: "memmove", "thread" (ended before the call returns) or "deferred" (written after the call has returned).
        count: How many parameters to write; all of them if negative.
        fail: Raise after that.
        breaks: Raise where the deferred writes are waited for.
    """

    how: str = "memmove"
    count: int = -1
    fail: bool = False
    breaks: bool = False


class PastTheLoader(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Writes the weights that `remember` has copied."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    defers_processing = True

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._jobs: queue.Queue[tuple[torch.Tensor, torch.Tensor]] = queue.Queue()
        threading.Thread(target=self._write_deferred, daemon=True).start()
        if init_info.bakes:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(()))
            finalize_layerwise_reload(self.model, self.model_config)

    def remember(self) -> None:
        """Copy the weights as they are."""
        self._remembered = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo, *args: Any) -> None:
        pairs = list(self._pairs())[: None if update_info.count < 0 else update_info.count]
        if update_info.how == "deferred":
            for pair in pairs:
                self._jobs.put(pair)
        elif update_info.how == "thread":
            thread = threading.Thread(target=lambda: [_write(*pair) for pair in pairs])
            thread.start()
            thread.join()
        else:
            for pair in pairs:
                _write(*pair)
        self._breaks = update_info.breaks
        if update_info.fail:
            raise ConnectionError("the trainer is gone")

    def finish_weight_update(self) -> None:
        self.drain_pending()

    def drain_pending(self) -> None:
        self._jobs.join()
        if getattr(self, "_breaks", False):
            self._breaks = False
            raise ConnectionError("a deferred write has failed")

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Older releases of vLLM require it."""

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield parameter, self._remembered[name]

    def _write_deferred(self) -> None:
        while True:
            pair = self._jobs.get()
            time.sleep(WRITE_S)
            _write(*pair)
            self._jobs.task_done()


def _write(destination: torch.Tensor, source: torch.Tensor) -> None:
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)


class RememberExtension:
    """A worker extension; vLLM imports this module with it, in each worker."""

    def remember(self) -> None:
        self.weight_transfer_engine.remember()


WeightTransferEngineFactory.register_engine(BACKEND, __name__, "PastTheLoader")
