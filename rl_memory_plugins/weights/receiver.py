"""The receiving side of weight updates, on one rank."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rl_memory_plugins.capabilities import Capabilities, fixed_by
from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError, UnsupportedError
from rl_memory_plugins.full_collections import postponed
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.timing import timed
from rl_memory_plugins.weights import checksums, wire
from rl_memory_plugins.weights.addresses import Endpoints, places_of
from rl_memory_plugins.weights.communicators.kept import MAX_NAMES, KeptCommunicators
from rl_memory_plugins.weights.dial import dial
from rl_memory_plugins.weights.filled import Filled
from rl_memory_plugins.weights.identity import identity
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.open_allocations import Mappings
from rl_memory_plugins.weights.plan import warm_up
from rl_memory_plugins.weights.session import Session
from rl_memory_plugins.weights.update_hosts import UpdateHosts

logger = logging.getLogger(__name__)


class WeightReceiver:
    """Loads updates from a trainer into this rank's memory.

    Args:
        manager: The manager of the rank. The receiver calls its `begin_writing` before the first byte is written.
        model: How the model loads tensors.
        check_finite: Refuse tensors that contain a NaN or an infinity.
        hosts: Where the receiver may connect to over TCP; this host alone by default.

    Attributes:
        before_writing: Called in an update of weights once the offer has been accepted, before anything is received
            or written: an engine may have left its last step running until then. Called too when an update fails
            before that: the other ranks may have come further.
    """

    def __init__(
        self,
        manager: MemoryManager,
        model: ModelLoader,
        *,
        check_finite: bool = False,
        hosts: UpdateHosts | None = None,
    ) -> None:
        self._manager = manager
        self._model = model
        self._check_finite = check_finite
        self._hosts = hosts or UpdateHosts()
        self.before_writing: Callable[[], None] | None = None
        self._mappings = Mappings()
        self._communicators = KeptCommunicators(MAX_NAMES)

    @postponed()
    def receive(
        self, endpoints: Endpoints, token: str, timeout_s: float, loader: ModelLoader | None = None
    ) -> dict[str, Any]:
        """Receive one update from the trainer.

        Before the first bucket an error changes nothing. From the first bucket on the content of the weights is
        `updating` until the controller's `finish_update`.

        Args:
            endpoints: The trainer's sockets for each device; `"*"` stands for all devices.
            token: The token of the update.
            timeout_s: The longest wait for the trainer at any point, in seconds.
            loader: Takes the tensors; the model by default.

        Returns: bytes, tensors (replayed and opaque), transport (`buffers.TRANSPORTS`), and seconds by step.

        Raises:
            InvalidRequestError: `endpoints` has no socket for this device.
            PermissionDeniedError: the option `update_hosts` does not allow the trainer's address.
            ManifestError: the tensors do not fit the model; the details list every mismatch.
            StateConflictError: the weights are asleep, or the update is partial and the weights are not valid.
            WeightUpdateError: the trainer stalled, disconnected or gave up; or the engine's loader failed.
        """
        end_step = None if self.before_writing is None or loader is not None else _once(self.before_writing)
        try:
            return self._receive(endpoints, token, timeout_s, loader, end_step)
        except BaseException:
            if end_step is not None:
                with suppress(Exception):
                    end_step()
            raise

    def _receive(
        self,
        endpoints: Endpoints,
        token: str,
        timeout_s: float,
        loader: ModelLoader | None,
        before_writing: Callable[[], None] | None,
    ) -> dict[str, Any]:
        self._manager.require_writable()
        session = Session(
            self._manager,
            loader or self._model,
            self._mappings,
            self._communicators,
            timeout_s,
            self._check_finite,
            lambda places, local: self._dial(places, timeout_s, local=local),
            before_writing,
        )
        with timed(session.seconds, "connect"):
            connection = self._connect(endpoints, timeout_s)
        try:
            return session.run(connection, token)
        except Exception as error:
            known = wire.as_update_error(error, rank=self._manager.rank)
            for one in (connection, *session.others()):
                one.fail(known)
            # The frames of the traceback must not keep the trainer's memory alive as long as the error.
            traceback.clear_frames(error.__traceback__)
            if known is error:
                raise
            raise known from error
        finally:
            session.close()
            if not session.is_held:
                for one in (connection, *session.others()):
                    one.close()

    def capabilities(self) -> Capabilities:
        """Whether this model's weights can be updated."""
        try:
            self._model.reload()
        except UnsupportedError as error:
            return fixed_by(error)
        return Capabilities()

    def padding(self) -> Filled:
        """See `ModelLoader.padding`. Nothing if the model cannot tell."""
        try:
            return self._model.padding()
        except Exception as error:  # a load by the engine's own calls must not fail for that
            logger.warning("cannot tell which elements of the parameters are padding: %s", error)
            return {}

    def warm_up(self) -> None:
        """Import in the background what the first update needs."""
        with suppress(RuntimeError):  # this process cannot start more threads: the first update imports it
            threading.Thread(target=warm_up, name="rl-memory-warm-up", daemon=True).start()

    def close(self) -> None:
        """Close all memory of a trainer that is still open, and all communicators."""
        self._mappings.close()
        self._communicators.close()

    def _connect(self, endpoints: Endpoints, timeout_s: float) -> wire.Connection:
        device = self._manager.device.name
        places = endpoints.get(device, endpoints.get("*"))
        if not places:
            raise InvalidRequestError(
                f"endpoints has no socket for device {device}", field="endpoints", device=device, got=sorted(endpoints)
            )
        return self._dial(places_of(places), timeout_s)

    def _dial(self, places: Sequence[str], timeout_s: float, *, local: bool = True) -> wire.Connection:
        try:
            sock = dial(places, self._hosts, timeout_s, local=local)
        except RLMemoryError as error:
            error.details["rank"] = self._manager.rank
            raise
        return wire.Connection(sock, "the trainer", rank=self._manager.rank)

    def checksums(self, *, by_engine_names: bool = False) -> dict[str, Any]:
        """Checksums of the current weights. Merge those of all ranks with `checksums.merge_checksums`.

        After a complete update of which a plan replayed tensors they have the checkpoint's names, else the engine's.

        Args:
            by_engine_names: In any case the engine's names.
        """
        expected = self._model.drop_outdated()
        self._manager.device.synchronize()
        if self._model.complete is not None and not by_engine_names:
            return checksums.plan_checksums(self._model.complete)
        return {
            "layout": "engine",
            "parameters": {name: checksums.tensor_checksum(tensor) for name, tensor in expected.items()},
        }

    def identity(self) -> str:
        """See `identity.identity`."""
        parameters = self._model.parameters().values()
        self._manager.device.synchronize()
        return identity(parameters, self._manager.device)


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """A call that is made once, also if it fails."""
    calls = [call]
    return lambda: calls.pop()() if calls else None
