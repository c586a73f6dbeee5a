"""The ranks of an external launcher (torchrun). Each is a process with an engine core, a controller and one worker.

The caller runs the same program on every rank, so all controllers run the same transition. This module keeps them in
step: a call of the rank's agent waits until every rank has reached the call, and every controller sees all replies. The
ranks meet in the store of `torch.distributed`, not in a collective. A wait in the store has a deadline, the store knows
which ranks are absent, and a call that failed leaves the store usable.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import msgspec

from rl_memory_plugins.commands import decode_reply, error_reply
from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.rank import RankAgent, encode_call
from rl_memory_plugins.records import Reply

JOIN_TIMEOUT_S = 600.0
"""How long a rank waits for the others to reach the same call. A trainer may work on a single rank meanwhile."""

REPLY_TIMEOUT_S = 1800.0
"""How long a rank waits for the replies of the others, as torch's collectives do. An update is the slowest call."""

_AFTER_A_FAILURE_S = 1.0
"""For the remaining calls of a transition that a rank has missed. They follow at once; a later call is a new one."""


class ExternalRanks:
    """The ranks of one engine, for the controller of one of them.

    Args:
        agent: The agent of this rank.
        store: The store of `torch.distributed` that all ranks share.
        rank: The number of this rank in the launcher's world.
        ranks: The numbers of all ranks of the engine.
    """

    def __init__(self, agent: RankAgent, store: Any, rank: int, ranks: range) -> None:
        from torch.distributed import PrefixStore

        self._agent = agent
        self._store = PrefixStore(f"rl_memory/{ranks.start}", store)
        self._rank = rank
        self._ranks = ranks
        self._calls = 0
        self._failure: StateConflictError | None = None  # the error of the last call that a rank has missed
        self._failed_at = 0.0

    def call(self, method: str, **arguments: Any) -> list[Reply[Any]]:
        try:
            self._join(method, arguments)
        except Exception as error:
            # A call that undoes the work of this rank does not wait for absent ranks.
            if method.startswith("abort_") or (method == "finish_update" and not arguments["complete"]):
                self._agent.reply(encode_call(method, arguments))
                self._failed_at = time.monotonic()  # that may take a while
            return [error_reply(self._rank, error)]
        try:
            mine = self._agent.handle(encode_call(method, arguments))
            self._store.set(self._key("reply", self._rank), mine)
            self._wait("reply", method, REPLY_TIMEOUT_S)
            return [decode_reply(self._store.get(self._key("reply", rank))) for rank in self._ranks]
        except Exception as error:
            return [error_reply(self._rank, error)]
        finally:
            self._calls += 1

    def _join(self, method: str, arguments: dict[str, Any]) -> None:
        """Wait until all ranks have reached this call.

        Raises:
            StateConflictError: a rank did not reach the call in time, or reached another call.
        """
        differing = ("endpoints", "token", "number", "numbers")  # each rank has its own
        common = {name: value for name, value in arguments.items() if name not in differing}
        self._store.set(self._key("join", self._rank), msgspec.json.encode((method, common)))
        if time.monotonic() - self._failed_at > _AFTER_A_FAILURE_S:
            self._failure = None
        try:
            self._wait("join", method, JOIN_TIMEOUT_S if self._failure is None else _AFTER_A_FAILURE_S)
        except StateConflictError as error:
            self._store.delete_key(self._key("join", self._rank))
            self._failure = self._failure or error  # the first error names the call that the ranks missed
            self._failed_at = time.monotonic()
            raise self._failure from None
        self._failure = None
        calls = {rank: self._store.get(self._key("join", rank)) for rank in self._ranks}
        if self._calls:  # all ranks have reached this call, and have therefore read the replies of the last call
            for phase in ("join", "reply"):
                self._store.delete_key(f"{self._calls - 1}/{phase}/{self._rank}")
        if len(set(calls.values())) > 1:
            self._calls += 1
            at = {rank: msgspec.json.decode(call)[0] for rank, call in calls.items()}
            raise StateConflictError(f"the ranks of this engine were called for different operations: {at}", calls=at)

    def _wait(self, phase: str, method: str, timeout_s: float) -> None:
        keys = {rank: self._key(phase, rank) for rank in self._ranks}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=timeout_s))
        except Exception as error:
            absent = [rank for rank, key in keys.items() if not self._store.check([key])]
            if absent:
                raise StateConflictError(
                    f"{method}: the ranks {absent} of this engine did not join within {timeout_s:g} s. All ranks of an "
                    "external launcher must make the same calls in the same order",
                    absent_ranks=absent,
                ) from error

    def _key(self, phase: str, rank: int) -> str:
        return f"{self._calls}/{phase}/{rank}"


def ranks_of(core: Any, agent: RankAgent) -> ExternalRanks:
    """The ranks of an engine core with the executor backend `external_launcher`.

    The engine is a block of the launcher's world. Other blocks are engines of their own.
    """
    from torch import distributed

    rank, size = distributed.get_rank(), core.vllm_config.parallel_config.world_size
    first = rank // size * size
    store = distributed.distributed_c10d._get_default_store()
    return ExternalRanks(agent, store, rank, range(first, first + size))
