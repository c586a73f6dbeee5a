"""Running requests that give up their KV cache: they return to SGLang's queue, and SGLang computes it again later.

SGLang's own step for that, `pause_generation`, misses requests that no batch has, and expects no beam search. Some
requests cannot go on afterwards.
"""

from __future__ import annotations

from typing import Any

from rl_memory_plugins.engines.sglang import frozen
from rl_memory_plugins.engines.sglang.hooks import SCHEDULER, hooks

_REASON = {
    "type": "abort",
    "message": "SGLang cannot compute the KV cache of this request again, and the engine has paused: send it again",
    "status_code": None,
    "err_type": None,
}


def retract(scheduler: Any) -> list[Any]:
    """Move running requests back into the queue. Returns those among them that must end there: see `end`."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    pause = hooks.table[f"{SCHEDULER}.pause_generation"]
    lost = [request for request in _running(scheduler) if _cannot_go_on(request)]
    _end_beams(scheduler, lost)
    pause(scheduler, PauseGenerationReqInput(mode="retract"))
    staged = [one.req for one in getattr(getattr(scheduler, "hisparse_coordinator", None), "ack_staging_queue", ())]
    if staged:  # they are between a prefill and their first step, in no batch; SGLang has emptied the running one
        scheduler.running_batch.reqs = staged
        pause(scheduler, PauseGenerationReqInput(mode="retract"))
    queued = {id(request) for request in scheduler.waiting_queue}
    return [request for request in lost if id(request) in queued]  # the others have ended with the step in flight


def end(scheduler: Any, requests: list[Any]) -> None:
    """End requests of the queue, as an abort does: the answer holds the tokens that the client has."""
    from sglang.srt.managers.io_struct import AbortReq

    ended = {id(request) for request in requests}
    others = [request for request in scheduler.waiting_queue if id(request) not in ended]
    for request in requests:
        scheduler.waiting_queue = [request]  # alone: SGLang aborts all requests whose names begin with this one
        scheduler.abort_request(AbortReq(rid=request.rid, finished_reason=_REASON))
    scheduler.waiting_queue = others


def _running(scheduler: Any) -> list[Any]:
    batches = scheduler.running_batch, scheduler.last_batch
    found = [request for batch in batches if batch is not None for request in batch.reqs] + [scheduler.chunked_req]
    return list({id(request): request for request in found if request is not None}.values())


def _cannot_go_on(request: Any) -> bool:
    """Whether the request would go on wrongly.

    Beams share the KV cache of a prompt. A request of embeddings loses its tokens and begins anew, but SGLang keeps
    their log-probabilities, and how many of them it has sent.
    """
    return getattr(request, "beam_group", None) is not None or getattr(request, "input_embeds", None) is not None


def _end_beams(scheduler: Any, requests: list[Any]) -> None:
    """Give back the memory of all beams but the first, as SGLang does where memory is short."""
    leaders = [request for request in requests if getattr(request, "beam_group", None) is not None]
    if not leaders:
        return
    from sglang.srt.beam_search.batch_tail import strip_beam_tail
    from sglang.srt.beam_search.fork import free_member_rows

    frozen.end_step(scheduler)  # it has the beams
    for batch in (scheduler.running_batch, scheduler.last_batch):
        if batch is not None:
            strip_beam_tail(batch)
    for leader in leaders:
        if not leader.finished():
            free_member_rows(leader.beam_group, scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator)
            scheduler.beam_coordinator.retire_group(leader)
