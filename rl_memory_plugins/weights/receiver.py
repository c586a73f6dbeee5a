"""One rank's end of weight updates."""

from __future__ import annotations

import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.capabilities import Capabilities, fixed_by
from rl_memory_plugins.errors import InvalidRequestError, WeightUpdateError
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.weights import checksums, wire
from rl_memory_plugins.weights.cuda_ipc import Mappings
from rl_memory_plugins.weights.model_loader import ModelLoader, Reload
from rl_memory_plugins.weights.plan import Loader, warm_up
from rl_memory_plugins.weights.session import Session

if TYPE_CHECKING:
    import torch


def is_ignorable(name: str, *, tied: bool = False) -> bool:
    """Whether engines' loaders skip a checkpoint's name on purpose: what they compute themselves, or have already.

    Args:
        tied: The output layer is the embedding.
    """
    computed = name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))
    return computed or (tied and name.startswith("lm_head."))


class WeightReceiver:
    """Takes updates from a trainer into this rank's memory.

    Args:
        manager: The rank's state machine; told when the first byte is about to be written.
        load_weights: The model's loader. Planning runs it on meta tensors.
        parameters: The parameters that a complete update must cover, by the engine's name.
        buffers: What else the loader writes and may be replaced, by the engine's name: the model's buffers. What it
            writes beside these and the parameters is left to the loader in each update.
        load_opaque: Loads, for real, tensors that the plan cannot replay. Called once for each update that has
            any, with an iterator over them; it may keep the tensors. The model's loader where it is not given.
        reload: Gives what loads all tensors in place of both, if the engine has transformed any weights. Asked
            for each plan, and whenever one has opaque tensors; raises `UnsupportedError` if the engine has and
            cannot do it again.
        transformed: How many of the engine's post-load steps were seen to transform weights. Plans are void once
            that changes.
        ignorable: Whether the model's loader may ignore a name of the manifest.
        allow_cast: Take tensors of another dtype than the engine's.
        check_finite: Refuse tensors that hold a NaN or an infinity.
    """

    def __init__(
        self,
        manager: MemoryManager,
        load_weights: Loader,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        *,
        buffers: Callable[[], Mapping[str, torch.Tensor]] = dict,
        load_opaque: Loader | None = None,
        reload: Callable[[], Reload | None] = lambda: None,
        transformed: Callable[[], int] = lambda: 0,
        ignorable: Callable[[str], bool] = is_ignorable,
        allow_cast: bool = False,
        check_finite: bool = False,
    ) -> None:
        self._manager = manager
        self._check_finite = check_finite
        self._mappings = Mappings()
        self._model = ModelLoader(
            load_weights,
            parameters,
            buffers=buffers,
            load_opaque=load_opaque or load_weights,
            reload=reload,
            transformed=transformed,
            ignorable=ignorable,
            allow_cast=allow_cast,
        )

    def receive(self, endpoints: dict[str, str], token: str, timeout_s: float) -> dict[str, Any]:
        """Take one update from the trainer.

        No wait for the trainer is longer than `timeout_s`. On any error before the first bucket nothing has
        changed; after it the weights' content is `updating` until the controller's `finish_update`.

        Returns: bytes, tensors (replayed and opaque), transport (`buffers.TRANSPORTS`), and seconds by step.

        Raises:
            ManifestError: the tensors do not fit; lists every mismatch.
            StateConflictError: a partial update of weights that are not valid, or the weights are asleep.
            WeightUpdateError: the trainer stalled, is gone, or gave up; or the engine's loader failed.
        """
        self._manager.require_writable()
        session = Session(self._manager, self._model, self._mappings, timeout_s, check_finite=self._check_finite)
        with session.timed("connect"):
            connection = self._connect(endpoints, timeout_s)
        try:
            return session.run(connection, token)
        except Exception as error:
            known = wire.as_update_error(error, rank=self._manager.rank)
            connection.fail(known)
            # Whoever keeps the error must not keep the trainer's memory through the frames of its traceback.
            traceback.clear_frames(error.__traceback__)
            if known is error:
                raise
            raise known from error
        finally:
            if session.lease is None:
                connection.close()
            else:
                self._mappings.keep(session.lease)

    def capabilities(self) -> Capabilities:
        """Whether an update can ever reach the weights."""
        refusal = self._model.refusal()
        return Capabilities() if refusal is None else fixed_by(refusal)

    def warm_up(self) -> None:
        """Prepare the first update in the background."""
        threading.Thread(target=warm_up, name="rl-memory-warm-up", daemon=True).start()

    def close(self) -> None:
        """Close what is still open of a trainer's memory."""
        self._mappings.close()

    def _connect(self, endpoints: dict[str, str], timeout_s: float) -> wire.Connection:
        device = self._manager.device.name
        path = endpoints.get(device, endpoints.get("*"))
        if path is None:
            raise InvalidRequestError(
                f"no endpoint for device {device}", field="endpoints", device=device, got=sorted(endpoints)
            )
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise WeightUpdateError(
                f"the trainer's socket {path} cannot be reached: {error}",
                reason="unreachable",
                endpoint=path,
                rank=self._manager.rank,
            ) from None
        return wire.Connection(sock, "the trainer", rank=self._manager.rank)

    def checksums(self) -> dict[str, Any]:
        """Of the weights as they are: by the checkpoint's names after a complete update, else by the engine's.

        Merge the ranks' with `checksums.merge_checksums`.
        """
        expected = self._model.drop_outdated()
        self._manager.device.synchronize()
        if self._model.complete is not None:
            return checksums.plan_checksums(self._model.complete)
        return {
            "layout": "engine",
            "parameters": {name: checksums.tensor_checksum(tensor) for name, tensor in expected.items()},
        }
