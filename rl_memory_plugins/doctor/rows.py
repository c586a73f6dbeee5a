"""Which check finds each row of docs/troubleshooting.md, or why none does."""

from __future__ import annotations

from typing import NamedTuple


class FoundBy(NamedTuple):
    """The check that finds the cause, if it is there when the doctor runs."""

    check: str


class NotFound(NamedTuple):
    """Why no check can find it."""

    reason: str


_PAST = "the call has ended, and its error has said it"
_CALLER = "it is in the caller's program"
_TRAINER = "it is in the trainer's program"

#: By the text of the row's first cell.
ROWS: dict[str, FoundBy | NotFound] = {
    # Starting
    "`unrecognized arguments: --rl-memory`": FoundBy("plugin"),
    "`bad rl_memory options: 'MODEL' is not key=value`": NotFound(
        "the command line of an engine that did not start is gone; `options` checks the environment's options"
    ),
    "`rl_memory needs module:Class.name, which this engine (…) does not have`": FoundBy("hooks"),
    "`rl_memory does not work with …`": NotFound("it depends on the options of the engine that did not start"),
    "`vllm serve` does not start with vLLM's CPU build": FoundBy("vllm-command"),
    "`torch … does not allocate through custom pools here`": FoundBy("gpu-allocator"),
    "`allocator=tms does not work with torch's expandable_segments`": FoundBy("expandable-segments"),
    "a warning that free memory differs between tensor-parallel ranks (SGLang)": NotFound(
        "it shows only while the engine loads; its log names the memory of each rank"
    ),
    "`tms_hook_mode=preload needs torch_memory_saver's library to be preloaded`": FoundBy("preload"),
    "404 on `/v1/rl_memory/…`": FoundBy("url"),
    # Requests
    "503, reason `asleep`": FoundBy("admission"),
    "503, reason `stale`, although every tag is awake": FoundBy("admission"),
    "503, reason `failed`": FoundBy("admission"),
    "503, reason `paused`": FoundBy("admission"),
    "503, reason `updating`, for a long time": FoundBy("admission"),
    "503, reason `starting`": FoundBy("url"),
    "401 or 403 on control routes": FoundBy("auth"),
    "answers end early when the engine goes to sleep": NotFound(_CALLER + ": the mode of its sleep"),
    # Health
    "a monitor restarts an engine that sleeps or is updated": NotFound("it is in the monitor's configuration"),
    "`/health` is 200 and requests get 503": FoundBy("admission"),
    "`NoAnswerError` from the client": FoundBy("url"),
    # Memory
    "507 at `wake_up`": FoundBy("next-wake"),
    "507 at `sleep`": FoundBy("next-sleep"),
    "device memory stays in use during a sleep": FoundBy("kept-memory"),
    "host memory stays in use after a wake": FoundBy("kept-memory"),
    "the engine ends with exit code 1 at a wake, with `allocator=tms`": FoundBy("rank-allocators"),
    "NCCL hangs after a wake": FoundBy("nccl"),
    # Updates
    "422 `ManifestError`": NotFound("it depends on the trainer's tensors"),
    "422 `UnsupportedError` that names layers": FoundBy("updates"),
    "409, the weights are asleep": FoundBy("updates"),
    "409, a partial update needs valid weights": FoundBy("updates"),
    "409, a weight update is running": FoundBy("updates"),
    "502, reason `unreachable`": FoundBy("same-place"),
    "`can't start new thread`": NotFound("the limit that counts may be that of a control group, a user or a host"),
    "403 with `update_hosts` in the details": NotFound("the engine learns the trainer's address from the update"),
    "502, reason `protocol`": FoundBy("versions"),
    "502, reason `stalled` or `lost`": NotFound("the update has ended; `admission` shows the content that it left"),
    "422, cannot create a socket in the temporary directory": FoundBy("sockets"),
    "the trainer's memory is not freed after an update with `keep_mapped=True`": NotFound(_CALLER),
    "an update is slower than expected": NotFound("the report of each update names its transport and the reasons"),
    "answers look like the old weights": NotFound("it takes the trainer's weights to compare the checksums"),
    # Trainers
    "the trainer runs out of device memory in the step `load` or in training": FoundBy("kept-memory"),
    "the trainer still holds device memory after a handoff": NotFound(_TRAINER),
    "an error of the step `offload` when the next step begins": NotFound(_PAST),
    "`a CUDA graph is captured while a sleep or wake is unfinished: call wait() before`": NotFound(_TRAINER),
    "`Trying to resize storage that is not resizable` from `torch.load`": NotFound("it is in the checkpoint's file"),
    "`the trainer's processes are at different steps`": NotFound(_TRAINER),
    "the trainer's processes hang in an update": NotFound(_TRAINER),
    # Calls
    "422 for `tags=[]`": NotFound(_CALLER),
    "409 from `wake_up` while a sleep waits": FoundBy("admission"),
    "504": NotFound(_PAST),
    "a client timed out": NotFound(_PAST + "; `admission` shows a transition that is still under way"),
    "`worker.sleep() cannot manage the memory of one worker while rl_memory is enabled`": NotFound(_CALLER),
    "409 with `absent_ranks`": NotFound(_CALLER + ": the order of the calls on all ranks"),
}
