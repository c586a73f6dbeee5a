"""A scheduler and its tensor-parallel ranks, as the controller sees them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rl_memory_plugins.commands import decode_reply, encode_reply, error_reply
from rl_memory_plugins.engines.sglang import adapters, metrics, retraction
from rl_memory_plugins.engines.sglang import frozen as frozen_requests
from rl_memory_plugins.engines.sglang.hooks import SCHEDULER, hooks
from rl_memory_plugins.errors import EngineFaultError, StateConflictError
from rl_memory_plugins.rank import RankAgent, encode_call
from rl_memory_plugins.records import Reply
from rl_memory_plugins.tags import PauseMode, Tag

#: The modules that hold SGLang's cache of image embeddings, by release.
EMBEDDINGS = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")


def forget_embeddings() -> None:
    """Drop cached image embeddings. SGLang looks them up by the image alone and never flushes them itself."""
    for name in EMBEDDINGS:
        cache = getattr(sys.modules.get(name), "embedding_cache", None)
        if cache is not None:
            cache.clear()


def handle_natively(scheduler: Any, requests: list[Any]) -> None:
    """Have SGLang handle requests, without the hook on that."""
    hooks.table[f"{SCHEDULER}.process_input_requests"](scheduler, requests)


class RankedGroup:
    """The ranks that run this controller in step. They exchange replies over their process group for CPU tensors.

    Args:
        agent: The agent of this rank.
        group: The `torch.distributed` group of all ranks that receive each request.
        stage: The group of the tensor-parallel ranks, which SGLang's own handlers use; all ranks if there is one
            pipeline stage.
    """

    def __init__(self, agent: RankAgent, group: Any, stage: Any = None) -> None:
        from torch import distributed

        self._distributed = distributed
        self._agent = agent
        self._group = group
        self._stage = group if stage is None else stage
        self.rank: int = distributed.get_rank(group)
        self.size: int = distributed.get_world_size(group)

    def call(self, method: str, **arguments: Any) -> list[Reply[Any]]:
        mine = encode_reply(self._agent.reply(encode_call(method, arguments)))
        try:
            return [decode_reply(reply) for reply in self.gather(mine)]
        except Exception as error:  # a rank is gone
            return [error_reply(self.rank, EngineFaultError(f"the ranks cannot agree: {error}", method=method))]

    def gather(self, mine: Any) -> list[Any]:
        """The value of every rank, in the order of ranks."""
        if self.size == 1:
            return [mine]
        everybody: list[Any] = [None] * self.size
        self._distributed.all_gather_object(everybody, mine, group=self._group)
        return everybody

    def all(self, mine: bool) -> bool:
        return all(self.gather(mine))

    def barrier(self) -> None:
        """Join a barrier at the end of one of SGLang's own handlers."""
        if self.size > 1:
            self._distributed.barrier(group=self._stage)


class SglangEngine:
    """The controller's view of a scheduler. With attention-DP each rank has requests of its own, so all must agree.

    Args:
        all_batches: In its body, SGLang's own code finds all running requests in `running_batch`.
    """

    def __init__(
        self,
        scheduler: Any,
        ranks: RankedGroup,
        all_batches: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._scheduler = scheduler
        self._ranks = ranks
        self._all_batches = all_batches
        self._drains: list[tuple[PauseMode, bool, Future[None]]] = []  # mode, and whether it is for an update
        self._after_reply: list[Callable[[], None]] = []
        self._paused_here = False
        self._retracted = False  # running requests have no KV cache; else they are frozen, if the engine is paused
        self.namespace = frozen_requests.Namespace()
        self.paused_natively = False
        self._shown_version: str | None = None
        self._since = time.monotonic()  # the latest request, or resume

    def note_request(self) -> None:
        self._since = time.monotonic()

    def is_idle(self, seconds: float) -> bool:
        waited = time.monotonic() - self._since >= seconds
        busy = self._scheduler._engine_paused or not self._scheduler.is_fully_idle()
        return self._ranks.all(bool(waited and not busy))

    def drain(self, mode: PauseMode, *, for_update: bool = False) -> Future[None]:
        never_ends = mode is PauseMode.WAIT and self._scheduler._engine_paused
        if never_ends and not self._ranks.all(self._is_idle(mode)):
            raise StateConflictError(
                "the engine is paused, so its requests never finish: "
                "call continue_generation(), or use mode='abort' or mode='keep'"
            )
        if mode is PauseMode.ABORT:
            if self._scheduler._engine_paused:  # a paused request would never notice the abort; a queued one does
                self._retract()
            self._abort_all()
        drained: Future[None] = Future()
        self._drains.append((mode, for_update, drained))
        return drained

    def adapters_in_use(self) -> set[int]:
        mine = {adapters.number_in(getattr(one, "lora_id", None)) for one in adapters.requests_of(self._scheduler)}
        return {number for used in self._ranks.gather(mine) for number in used if number is not None}

    def call_after_reply(self, act: Callable[[], None]) -> None:
        self._after_reply.append(act)

    def poll(self) -> None:
        """Complete the drains that have ended, oldest first. All ranks call this at the same point."""
        while self._after_reply:
            self._after_reply.pop()()
        if self._drains and self._scheduler._engine_paused:
            self._settle_while_paused()
        while self._drains:
            mode, for_update, drained = self._drains[0]
            if mode is PauseMode.FREEZE:
                self._paused_here = True
                frozen_requests.pause_in_place(self._scheduler)
                if not for_update:
                    self.end_frozen_step()
            elif mode is PauseMode.KEEP and not self._retracted:
                # While SGLang compiles the grammar of a request, the request is in no queue that survives a flush.
                if not self._ranks.all(not self._scheduler.grammar_manager.grammar_queue):
                    return
                retraction.end(self._scheduler, self._retract())
            if not self._ranks.all(self._is_idle(mode)):
                return
            del self._drains[0]
            drained.set_result(None)

    def end_frozen_step(self) -> None:
        """Wait for the step in which a pause has found the requests. Does nothing without one, or while steps run."""
        if self._scheduler._engine_paused:
            frozen_requests.end_step(self._scheduler)

    @property
    def draining(self) -> bool:
        return bool(self._drains)

    @property
    def stops_steps(self) -> bool:
        """Whether no step may begin, so that requests stop where they are. Only the loop of a pipeline asks."""
        if self._scheduler._engine_paused:
            return True
        mode = self._drains[0][0] if self._drains else None
        if mode is PauseMode.KEEP:  # a step also lets requests out of the queue for grammars
            return not self._scheduler.grammar_manager.grammar_queue
        return mode is PauseMode.FREEZE

    def _retract(self) -> list[Any]:
        """Move running requests back into the queue. Returns those that must end there."""
        self._paused_here = self._retracted = True
        with self._unlimited_queue(), self._all_batches():
            return retraction.retract(self._scheduler)

    @contextmanager
    def _unlimited_queue(self) -> Iterator[None]:
        """Lift `--max-queued-requests`, which is for new requests: it would abort requests that return to the queue."""
        limit, self._scheduler.max_queued_requests = self._scheduler.max_queued_requests, None
        try:
            yield
        finally:
            self._scheduler.max_queued_requests = limit

    def _settle_while_paused(self) -> None:
        """Do the work that a paused event loop skips and a drain waits for. All ranks call this at the same point."""
        scheduler = self._scheduler
        if scheduler.enable_hierarchical_cache:  # copies to host memory may have ended unnoticed
            scheduler.tree_cache.check_hicache_events()
        if not scheduler.grammar_manager.grammar_queue:
            return
        with self._unlimited_queue():
            for request in scheduler.grammar_manager.get_ready_grammar_requests():
                scheduler._add_request_to_queue(request)
        if any(mode is PauseMode.ABORT for mode, *_ in self._drains):
            self._abort_all()  # an abort reaches such a request only once it is in the queue

    def _abort_all(self) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self._scheduler.abort_request(AbortReq(abort_all=True))

    def resume(self, *, lift_pause: bool) -> None:
        self._since = time.monotonic()
        # SGLang's own resume does not lift a pause by pause_generation, so `lift_pause` has no effect.
        self._drains.clear()
        paused_here, self._paused_here = self._paused_here, False
        self._retracted = False
        if paused_here and not self.paused_natively:
            # Now: one of the ranks may have failed before it came to that, and all must go on from the same tokens.
            self.end_frozen_step()
            from sglang.srt.managers.io_struct import ContinueGenerationReqInput

            hooks.table[f"{SCHEDULER}.continue_generation"](self._scheduler, ContinueGenerationReqInput())

    def continue_later(self) -> None:
        """Lift the pause of a closed engine: generation continues when the engine opens."""
        self._paused_here = self._paused_here or self._scheduler._engine_paused

    @property
    def kv_cache_sleeps(self) -> bool:
        return Tag.KV_CACHE.value in self._scheduler.weight_updater.offload_tags

    def has_requests(self) -> bool:
        return not self._ranks.all(self._is_idle(PauseMode.KEEP))

    def reset_caches(self, *, frozen: bool = False, released: bool = False) -> None:
        forget_embeddings()
        if self.kv_cache_sleeps:
            return  # the sleep has flushed the KV cache and released its memory
        if frozen and self.has_requests():
            self.namespace.renew(self._scheduler.waiting_queue)
            return
        # Emptying torch's cache takes longer than a weight update. A sleep empties it where that frees enough.
        if not self._ranks.all(self._without_queue(lambda: self._scheduler.flush_cache(empty_cache=False))):
            raise EngineFaultError("SGLang refused to flush its caches although no request is running")

    def _is_idle(self, mode: PauseMode) -> bool:
        if mode is PauseMode.FREEZE:
            return True
        if mode is PauseMode.KEEP:
            return self._without_queue(self._scheduler.is_fully_idle)
        return bool(self._scheduler.is_fully_idle())

    def _without_queue(self, call: Callable[[], Any]) -> bool:
        """Call with an empty queue: retracted requests hold no memory, but SGLang counts queued requests as busy."""
        if not self._paused_here:
            return bool(call())
        queue, self._scheduler.waiting_queue = self._scheduler.waiting_queue, []
        try:
            return bool(call())
        finally:
            self._scheduler.waiting_queue = queue

    def show(self, asleep_tags: list[str], weight_version: str) -> None:
        # SGLang's data-parallel attention keeps a reference to this set, so change it in place.
        offloaded = self._scheduler.weight_updater.offload_tags
        if offloaded != set(asleep_tags):  # not in an update of an engine that is awake
            offloaded.clear()
            offloaded.update(asleep_tags)
            metrics.show_usage(self._scheduler, asleep_tags)
        record = getattr(self._scheduler, "record_weight_version_change", None)
        if record is not None and self._shown_version != weight_version:
            record(new_version=weight_version)
        self._shown_version = weight_version
