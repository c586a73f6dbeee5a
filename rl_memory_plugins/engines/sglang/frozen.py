"""Requests that keep their KV cache over an update, and the prefixes that requests which begin later must not find.

SGLang's prefix trees match only requests with the same `extra_key`. Requests that begin after an update get a key of
their own, and frozen requests keep the former key for all that they still add to the tree. The tree evicts the former
entries as any others.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from rl_memory_plugins.engines.sglang.hooks import SCHEDULER, hooks

_DONE = SimpleNamespace(grammar_advanced=True)
"""In place of a result that has been processed: SGLang's loop takes each result out of its queue later. Grammars have
accepted its tokens."""

_NOBODY = SimpleNamespace(reqs=[])
"""In place of its batch. Of a request whose last token waits in the queue SGLang computes no other token."""


def why_not(server_args: Any) -> str:
    """The reason why this engine cannot freeze requests; empty if it can."""
    from sglang.srt.environ import envs

    if getattr(server_args, "enable_streaming_session", False):
        return "with --enable-streaming-session a later request goes on with the KV cache of the request before it"
    if getattr(server_args, "radix_cache_backend", None):
        return "--radix-cache-backend names a prefix cache that may not tell requests apart by their extra_key"
    cpp = getattr(envs, "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", None)
    if cpp is not None and cpp.get():
        return "the tree of SGLANG_EXPERIMENTAL_CPP_RADIX_TREE does not tell requests apart by their extra_key"
    return ""


class Namespace:
    """The part of the prefix cache for requests that begin now. The name is secret, because clients choose keys too."""

    def __init__(self) -> None:
        self._name = ""

    def renew(self, waiting: Iterable[Any]) -> None:
        """Give requests that begin from now on a new part.

        Args:
            waiting: The requests that have not begun, or hold no KV cache any more.
        """
        self._name = f"rl_memory:{uuid.uuid4().hex}|"
        for request in waiting:
            self.enter(request)

    def enter(self, request: Any) -> None:
        """Move a request that holds no KV cache into the present part."""
        former = getattr(request, "rl_memory_namespace", "")
        if former != self._name:
            # In front: SGLang finds the id of a LoRA adapter at the end of the key.
            request.extra_key = self._name + (request.extra_key or "").removeprefix(former)
            request.rl_memory_namespace = self._name


def pause_in_place(scheduler: Any) -> None:
    """Stop running requests where they are. The step in flight runs on; see `end_step`."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    if not scheduler._engine_paused:
        hooks.table[f"{SCHEDULER}.pause_generation"](scheduler, PauseGenerationReqInput(mode="in_place"))
    hide_batch(scheduler)
    if not hasattr(scheduler, "cur_batch_for_debug"):
        scheduler.cur_batch = None


def hide_batch(scheduler: Any) -> None:
    """Keep SGLang's watchdog from taking a batch that waits for a hang. The loop names its next batch itself.

    Releases before 0.5.16 have the batch in `cur_batch` alone, which aborts read too.
    """
    if hasattr(scheduler, "cur_batch_for_debug"):
        scheduler.cur_batch_for_debug = None


def end_step(scheduler: Any) -> None:
    """Wait for the step in flight, and hand out its tokens.

    SGLang records the version of each token by the number of tokens that it has handed out when the version changes.
    """
    results: Any = getattr(scheduler, "result_queue", ())
    for number, (batch, result) in enumerate(results):
        if result is not _DONE:
            scheduler.process_batch_result(batch, result)
            results[number] = (_NOBODY, _DONE)


def is_done(result: Any) -> bool:
    """Whether a result of the queue has been processed already."""
    return result is _DONE
