"""Findings from the answers of a running engine to `GET /memory` and `GET /installation`.

Each function takes both answers. The second is `None` if the engine's version of the package has no such route.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

import rl_memory_plugins
from rl_memory_plugins.byte_size import size
from rl_memory_plugins.doctor.finding import Finding, failure, not_applicable, ok, warning
from rl_memory_plugins.memory.host_memory import free_host_bytes
from rl_memory_plugins.records import EngineStatus, RankStatus
from rl_memory_plugins.tags import Tag, TagState
from rl_memory_plugins.weights.wire import PROTOCOL

Json = dict[str, Any]

_OLD = "the engine's version of the package does not tell (before `GET /installation`)"

#: What to do for each reason of a refusal.
REMEDIES = {
    "asleep": "call wake_up(), or wait for the end of the transition that is under way",
    "stale": "send a complete update, or `rl-memory load PATH`: the last sleep discarded the weights, or the "
    "engine was started with start_stale",
    "failed": "send a complete update, or `rl-memory load PATH`: the last one broke off, or a call wrote the weights",
    "paused": "call wake_up()",
    "updating": "wait for the trainer; after timeout_s of silence the update fails. An engine's own update in several "
    "calls may lack its last one",
    "starting": "wait until the engine has started",
}


def versions(memory: Json, installation: Json | None) -> Finding:
    own = rl_memory_plugins.__version__
    if installation is None:
        return warning(_OLD, f"install {own} on both sides", here=own)
    there, protocol = installation["version"], installation["protocol"]
    engine = ", ".join(f"{name} {version}" for name, version in installation["versions"].items())
    seen = f"the engine has {there} (Python {installation['python']}, {engine}), this side has {own}"
    details = {"here": own, "there": there, "protocol_here": PROTOCOL, "protocol_there": protocol}
    if protocol != PROTOCOL:
        return failure(
            f"{seen}; the weight streams have the versions {protocol} and {PROTOCOL}: every update fails",
            "install the same version of rl_memory_plugins on both sides",
            **details,
        )
    if there != own:
        return warning(
            f"{seen}; their weight streams are the same", "install the same version on both sides", **details
        )
    return ok(seen, **details)


def active_hooks(memory: Json, installation: Json | None) -> Finding:
    """The hooks of the server's process. Those of the workers' processes are not asked for."""
    if installation is None:
        return not_applicable(_OLD)
    hooks: dict[str, list[str]] = installation["hooks"]
    if not hooks:
        return warning(
            "no symbol of an engine is replaced in the server's process",
            "start the engine with --rl-memory; a server of this package's routes alone controls no engine",
        )
    counts = ", ".join(f"{len(names)} of {engine}" for engine, names in hooks.items())
    ranks = sum(len(engine["ranks"]) for engine in memory["engines"])
    return ok(f"replaced symbols in the server's process: {counts}; {ranks} ranks have reported a state", hooks=hooks)


def engine_boards(memory: Json, installation: Json | None) -> Finding:
    if installation is None:
        return not_applicable(_OLD)
    boards: list[Json] = installation["boards"]
    if not boards:
        return not_applicable("the server reads no status board: its engines are on other hosts")
    dead = [board["path"] for board in boards if not board["writer_lives"]]
    if dead:
        return failure(
            f"the processes that wrote {', '.join(dead)} have ended: the engine is dead and its server is not",
            "read the engine's log, and start it again",
            boards=boards,
        )
    return ok(f"{len(boards)} status boards, whose writers live", boards=boards)


def same_place(memory: Json, installation: Json | None) -> Finding:
    """Whether the engine can open a trainer's Unix socket of this process: both see the same directories."""
    if installation is None:
        return not_applicable(_OLD)
    paths = [board["path"] for board in installation["boards"]]
    if not paths:
        return not_applicable("the server names no file by which the two sides could be compared")
    if all(map(_is_file, paths)):
        return ok(f"the engine's files ({paths[0]}) are here too: a trainer here can use a Unix socket", paths=paths)
    return warning(
        f"the engine's files ({', '.join(paths)}, host {installation['host']}) are not here: it runs on another host, "
        "in a container, as another user or with another TMPDIR, and cannot open a socket in the temporary directory "
        "of a trainer here (`unreachable`)",
        "on one host give both the same short path with directory=; between hosts use advertise=",
        paths=paths,
    )


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # a directory of another user
        return False


def admission(memory: Json, installation: Json | None) -> Finding:
    seen = f"weights {memory['content']}, version {memory['weight_version']}"
    tags = "; ".join(
        f"engine {engine.engine_rank} rank {rank.rank}: "
        + ", ".join(f"{tag} {found.state.value}" for tag, found in rank.tags.items())
        for engine in _engines(memory)
        for rank in engine.ranks
    )
    way = "; ".join(engine.under_way for engine in _engines(memory) if engine.under_way)
    seen = f"{seen}; {tags}" + (f"; {way}" if way else "")
    if memory["admitting"]:
        return ok(f"admits requests; {seen}", reason=None)
    reason = str(memory["reason"])
    make = failure if reason == "failed" else warning
    return make(
        f"admits no requests ({reason}); {seen}", REMEDIES.get(reason, "docs/contract.md#admission"), reason=reason
    )


def updates(memory: Json, installation: Json | None) -> Finding:
    """Whether a weight update would be accepted now."""
    for engine in _engines(memory):
        can = engine.capabilities
        if can.fixed_weights:
            layers = f" ({', '.join(can.fixed_layers)})" if can.fixed_layers else ""
            return warning(
                f"no update can reach the weights: {can.fixed_weights}{layers}",
                "docs/compatibility.md says which models can be updated",
            )
        if engine.busy:
            return warning(f"an update would wait or be refused: {engine.under_way}", "repeat it after the end of that")
        if Tag.WEIGHTS.value in engine.asleep_tags():
            return warning("an update would be a 409: the weights are asleep", "call wake_up(['weights']) first")
    if memory["content"] in ("stale", "failed"):
        return warning(
            f"only a complete update would be accepted: the weights are {memory['content']}", "send all weights"
        )
    return ok("complete and partial updates would be accepted")


def next_sleep(memory: Json, installation: Json | None) -> Finding:
    """Whether host memory suffices for the copies of a level-1 sleep, if the engine is on this machine."""
    paths = [] if installation is None else [board["path"] for board in installation["boards"]]
    if not paths or not all(map(_is_file, paths)):
        return not_applicable("the engine's files are not here, so this side's free host memory says nothing")
    tag, free = Tag.WEIGHTS.value, free_host_bytes()
    ranks = [rank for rank in _ranks(memory) if tag in rank.tags and rank.tags[tag].state is TagState.RESIDENT]
    needed = sum(max(rank.tags[tag].bytes - rank.host_arena_bytes, 0) for rank in ranks)
    seen = f"a level-1 sleep needs about {size(needed)} more of host memory, and {size(free)} are free for this process"
    if needed > free:
        return warning(seen, "use level=2 if an update follows, or raise the memory limit of the container")
    return ok(seen, needed_bytes=needed, free_bytes=free)


def next_wake(memory: Json, installation: Json | None) -> Finding:
    """Whether a wake would find device memory, by the ranks' last reports."""
    asleep = {
        rank.device: sum(tag.bytes for tag in rank.tags.values() if tag.state is not TagState.RESIDENT)
        for rank in _ranks(memory)
    }
    if not any(asleep.values()):
        return not_applicable("nothing sleeps")
    short = [rank for rank in _ranks(memory) if asleep[rank.device] > rank.device_free_bytes]
    if short:
        told = ", ".join(
            f"{rank.device} needs {size(asleep[rank.device])} and had {size(rank.device_free_bytes)}" for rank in short
        )
        return warning(
            f"a wake of all tags would be a 507, by the free memory that the ranks last reported: {told}",
            "offload the trainer, call gc.collect() and torch.cuda.empty_cache(); wake the weights first",
        )
    return ok(f"a wake needs {size(sum(asleep.values()))}, and that was free at the ranks' last report", asleep=asleep)


def kept_memory(memory: Json, installation: Json | None) -> Finding:
    """The memory that stays: on the devices while asleep, and in host memory afterwards."""
    told, left = [], {}
    for rank in _ranks(memory):
        parts = [f"{size(nbytes)} {cause}" for cause, nbytes in rank.left.items()]
        parts += [f"{size(rank.host_arena_bytes)} of host memory for sleeps"] if rank.host_arena_bytes else []
        parts += list(rank.notes)
        if parts:
            told.append(f"rank {rank.rank}: {', '.join(parts)}")
        left[rank.device] = {"left": rank.left, "host_arena_bytes": rank.host_arena_bytes, "notes": list(rank.notes)}
    return ok("what stays: " + ("; ".join(told) or "nothing that the ranks report"), ranks=left)


def rank_allocators(memory: Json, installation: Json | None) -> Finding:
    names = sorted({rank.allocator for rank in _ranks(memory)})
    if "tms" in names:
        return warning(
            "allocator tms: torch_memory_saver ends the engine with exit code 1 if another process takes the memory "
            "between its check and the wake",
            "on CUDA use allocator=vmm, which has no such race",
        )
    return ok(f"allocators of the ranks: {', '.join(names) or 'none'}")


def _engines(memory: Json) -> list[EngineStatus]:
    return msgspec.convert(memory["engines"], list[EngineStatus])


def _ranks(memory: Json) -> list[RankStatus]:
    return [rank for engine in _engines(memory) for rank in engine.ranks]
