"""vLLM's `--enable-nccl-comm-suspend`: a sleep also releases the memory of NCCL communicators.

The calls are collective, so they are phases of their own: a rank may suspend or resume only after every rank has
succeeded in the phase before.
"""

from __future__ import annotations

from typing import Any

from rl_memory_plugins.coordination import RankGroup
from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.records import Reply


class SuspendingRanks:
    """The ranks of an engine that suspends its communicators.

    They suspend after all ranks have released the memory of a sleep. They resume after all ranks have reserved the
    memory of a wake, and before any rank maps it. A wake that fails to resume leaves the tags asleep, and the next wake
    tries again.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def call(self, method: str, **arguments: Any) -> list[Reply[Any]]:
        replies = self._ranks.call(method, **arguments)
        if any(reply.error is not None for reply in replies):
            return replies
        after: list[Reply[Any]] = []
        if method == "commit_sleep" and any(reply.result["changes"] for reply in replies):
            after = self._ranks.call("suspend_communicators")
        elif method == "prepare_wake":
            after = self._ranks.call("resume_communicators")
        return after if any(reply.error is not None for reply in after) else replies


def _suspend() -> None:
    from vllm.distributed import parallel_state

    try:
        parallel_state.suspend_device_comms()
    except Exception as error:
        raise EngineFaultError(f"the memory is released, but the communicators are not suspended: {error}") from error


def _resume() -> None:
    from vllm.distributed import parallel_state

    try:
        parallel_state.resume_device_comms()
    except Exception as error:
        raise EngineFaultError(f"the communicators cannot be resumed, and nothing was mapped: {error}") from error


#: The calls of a rank, by name.
CALLS = {"suspend_communicators": _suspend, "resume_communicators": _resume}
