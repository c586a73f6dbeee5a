"""Ranks of an external launcher (torchrun): each is a process with an engine core, a controller and one worker.

The caller runs the same program on every rank, so all controllers run the same operation. Here they act in step: each
call of a rank's agent waits until every rank has come to it, and every controller sees the replies of all. The ranks
meet in the store of `torch.distributed`, not in a collective: a wait there has an end, the store knows who is absent,
and the next call finds it as it was.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec

from rl_memory_plugins.commands import decode_reply, error_reply
from rl_memory_plugins.errors import StateConflictError
from rl_memory_plugins.rank import RankAgent, encode_call
from rl_memory_plugins.records import Reply

JOIN_TIMEOUT_S = 600.0
"""How long a rank waits for the others to come to the same call; a trainer may work on one rank in between."""

REPLY_TIMEOUT_S = 1800.0
"""How long it waits for their replies, as torch's own collectives do. The slowest call is a weight update."""

_AFTER_A_FAILURE_S = 1.0  # for the rest of an operation to which somebody did not come


class ExternalRanks:
    """The ranks of one engine, for the controller of one of them.

    Args:
        agent: This rank's.
        store: Of `torch.distributed`; all ranks use the same one.
        rank: This rank's number in the launcher's world.
        ranks: The numbers of all ranks of the engine.
    """

    def __init__(self, agent: RankAgent, store: Any, rank: int, ranks: range) -> None:
        from torch.distributed import PrefixStore

        self._agent = agent
        self._store = PrefixStore(f"rl_memory/{ranks.start}", store)
        self._rank = rank
        self._ranks = ranks
        self._calls = 0
        self._failure: StateConflictError | None = None  # of the last call, to which not all ranks came

    def call(self, method: str, **arguments: Any) -> list[Reply[Any]]:
        try:
            self._join(method, arguments)
        except Exception as error:
            if _undoes(method, arguments):  # whoever comes
                self._agent.reply(encode_call(method, arguments))
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
        """Wait until all ranks are at this call.

        Raises:
            StateConflictError: some did not come within the time, or came to another call.
        """
        asked = {key: value for key, value in arguments.items() if key not in ("endpoints", "token")}  # a rank's own
        self._store.set(self._key("join", self._rank), msgspec.json.encode((method, asked)))
        try:
            self._wait("join", method, JOIN_TIMEOUT_S if self._failure is None else _AFTER_A_FAILURE_S)
        except StateConflictError as error:
            self._store.delete_key(self._key("join", self._rank))
            self._failure = self._failure or error  # the first one says for which call the others are missing
            raise self._failure from None
        self._failure = None
        calls = {rank: self._store.get(self._key("join", rank)) for rank in self._ranks}
        self._forget_former_call()
        if len(set(calls.values())) > 1:
            self._calls += 1
            at = {rank: msgspec.json.decode(call)[0] for rank, call in calls.items()}
            raise StateConflictError(f"the ranks of this engine were asked for different operations: {at}", calls=at)

    def _wait(self, phase: str, method: str, timeout_s: float) -> None:
        keys = {rank: self._key(phase, rank) for rank in self._ranks}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=timeout_s))
        except Exception as error:
            absent = [rank for rank, key in keys.items() if not self._store.check([key])]
            if absent:
                raise StateConflictError(
                    f"{method}: the ranks {absent} of this engine did not join within {timeout_s:g} s. An external "
                    "launcher's ranks must all make the same calls in the same order",
                    absent_ranks=absent,
                ) from error

    def _forget_former_call(self) -> None:
        """All ranks have come to this call, so they have read the replies to the one before."""
        if self._calls:
            for phase in ("join", "reply"):
                self._store.delete_key(self._key(phase, self._rank, self._calls - 1))

    def _key(self, phase: str, rank: int, call: int | None = None) -> str:
        return f"{self._calls if call is None else call}/{phase}/{rank}"


def _undoes(method: str, arguments: dict[str, Any]) -> bool:
    """Whether a call ends what a rank has begun, so that the rank must not wait for others with it."""
    return method.startswith("abort_") or (method == "finish_update" and not arguments["complete"])


def ranks_of(core: Any, agent: RankAgent) -> ExternalRanks:
    """The ranks of an engine core whose executor's backend is `external_launcher`.

    An engine is a block of the launcher's world; other blocks, if there are any, are engines of their own.
    """
    from torch import distributed

    rank, size = distributed.get_rank(), core.vllm_config.parallel_config.world_size
    first = rank // size * size
    store = distributed.distributed_c10d._get_default_store()
    return ExternalRanks(agent, store, rank, range(first, first + size))
