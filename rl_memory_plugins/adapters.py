"""The adapters of one engine: how its controller adds, replaces and removes them beside running requests.

Each update of a name makes a new version with a number of its own. New requests use the new version. A request that
runs already finishes with the version that it began with, so no answer mixes two versions. The ranks forget a former
version at a later change, once no request uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from rl_memory_plugins import commands
from rl_memory_plugins.admission import require_version, require_weights
from rl_memory_plugins.coordination import RankGroup, call_or_undo, raise_failures
from rl_memory_plugins.engine_hooks import EngineHooks
from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError
from rl_memory_plugins.published_state import PublishedState
from rl_memory_plugins.records import AdapterStatus, Report
from rl_memory_plugins.transition import PendingTransition

logger = logging.getLogger(__name__)

MOST_ADAPTERS = 256
"""The most adapters of one engine. Every status lists them, and the status board is limited."""

_FIRST_NUMBER = 1 << 30  # engines count their own adapters from 1; numbers must fit 31 bits

Finish = Callable[[bool], Any]


class Adapters:
    """Changes the adapters of one engine.

    Args:
        ranks: The ranks of the engine.
        engine: The scheduler of the engine, which knows the versions that requests use.
        state: The state of the engine, which lists its adapters.
        decide: Runs the second phase of a change, now or after the decision of all data-parallel engines.
        update_timeout_s: The longest silence of a trainer, for updates whose command has no `timeout_s`.

    Attributes:
        current: The version of each name that new requests use.
    """

    def __init__(
        self,
        ranks: RankGroup,
        engine: EngineHooks,
        state: PublishedState,
        decide: Callable[[PendingTransition, Finish], Any],
        update_timeout_s: float,
    ) -> None:
        self.current: dict[str, AdapterStatus] = {}
        self._ranks = ranks
        self._engine = engine
        self._state = state
        self._decide = decide
        self._update_timeout_s = update_timeout_s
        self._former: set[int] = set()  # numbers that running requests may use
        self._updates: dict[str, int] = {}  # by name

    def change(self, command: commands.UpdateAdapter | commands.RemoveAdapter, operation: PendingTransition) -> Any:
        """Run the first phase of a change on all ranks, and let `decide` run the second. Returns its result.

        Raises:
            InvalidRequestError: there is no adapter of this name to remove, or there are too many; or `config` asks for
                something that the engine cannot do; or the token is not new.
            ManifestError: the tensors do not fit the model.
            StateConflictError: the weights are asleep, with the memory of the adapters, or have another version than
                the command needs.
        """
        if isinstance(command, commands.RemoveAdapter):
            return self._decide(operation, self._remove(command, operation))
        require_weights(self._state.status, "an update of an adapter")
        require_version(self._state.status, command.base_version)
        return self._decide(operation, self._update(command, operation))

    def knows(self, number: int) -> bool:
        """Whether the ranks have the version of this number."""
        return number in self._former or any(adapter.number == number for adapter in self.current.values())

    def _update(self, command: commands.UpdateAdapter, operation: PendingTransition) -> Finish:
        name = command.adapter
        if name not in self.current and len(self.current) >= MOST_ADAPTERS:
            raise InvalidRequestError(
                f"the engine has {MOST_ADAPTERS} adapters already: remove one", field="name", got=name
            )
        number = number_of(command.token)
        if self.knows(number):
            raise InvalidRequestError("the token of this update has made another version already", field="token")
        received = call_or_undo(
            self._ranks,
            "prepare_adapter",
            lambda: self._ranks.call("abort_adapter", number=number),
            name=name,
            number=number,
            config=command.config,
            endpoints=command.endpoints,
            token=command.token,
            timeout_s=self._update_timeout_s if command.timeout_s is None else command.timeout_s,
        )

        def finish(agreed: bool) -> Any:
            if not agreed:
                self._ranks.call("abort_adapter", number=number)
                return None
            self._forget_unused()
            former = self.current.get(name)
            if former is not None:
                self._former.add(former.number)
            self._updates[name] = self._updates.get(name, 0) + 1
            version = command.adapter_version or str(self._updates[name])
            reports = [reply.result for reply in received]
            self.current[name] = AdapterStatus(name, version, number, reports[0]["bytes"])
            self._state.note(adapters=tuple(self.current.values()))
            return operation.report(received, adapter=name, adapter_version=version, ranks=reports)

        return finish

    def _remove(self, command: commands.RemoveAdapter, operation: PendingTransition) -> Finish:
        removed = self.current.get(command.adapter)
        if removed is None:
            raise InvalidRequestError(
                f"there is no adapter {command.adapter!r} that update_adapter has added",
                field="name",
                got=command.adapter,
                allowed=list(self.current),
            )

        def finish(agreed: bool) -> Any:
            if not agreed:
                return None
            del self.current[removed.name]
            self._state.note(adapters=tuple(self.current.values()))
            self._former.add(removed.number)
            self._forget_unused()
            return operation.report([], adapter=removed.name, adapter_version=removed.version)

        return finish

    def _forget_unused(self) -> None:
        """Have the ranks forget the former versions that no request uses."""
        unused = self._former - self._engine.adapters_in_use() if self._former else set()
        if not unused:
            return
        try:
            raise_failures(self._ranks.call("forget_adapters", numbers=sorted(unused)))
            self._former -= unused
        except RLMemoryError:  # their memory stays until the next change
            logger.exception("former versions of adapters were not removed")


def version_in(report: Report) -> str:
    """The version of the adapter in the report of a change. All data-parallel engines give the same."""
    engines = report.details.get("engines", [report.details])
    return str(engines[0]["adapter_version"])


def number_of(token: str) -> int:
    """The number of the version that an update with this token makes; the same on all data-parallel engines."""
    return _FIRST_NUMBER + int.from_bytes(sha256(token.encode()).digest()[:4], "big") % _FIRST_NUMBER
