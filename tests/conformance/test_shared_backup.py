"""Host memory of data-parallel replicas: their equal weights take one copy, which the kernel counts too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integration.engines.base import Server
from tests.conformance.conftest import PROMPT, Weights
from tests.conformance.trainers import push


def ranks(server: Server) -> list[dict[str, Any]]:
    return [rank for engine in server.control.memory()["engines"] for rank in engine["ranks"]]


def shared(server: Server) -> dict[str, int]:
    """The bytes of each shared copy, by its name."""
    return {name: nbytes for rank in ranks(server) for name, nbytes in rank["host_shared"].items()}


def resident_copies(server: Server) -> int:
    """The proportional share of the server's processes in the memory of shared copies, in bytes (`Pss` of smaps)."""
    total, inside = 0, False
    for process in server.processes():
        for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
            if "-" in line.split(maxsplit=1)[0]:
                inside = "rl-memory-copy" in line
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
    return total


def assert_one_copy(server: Server) -> None:
    """The replicas hold at most 0.55 times the host memory that they would hold each for itself."""
    copies, all_ranks = shared(server), ranks(server)
    if server.launch.dp == 1:
        assert copies == {}
        return
    assert len(copies) == server.launch.ranks_of_engine
    alone = sum(rank["host_arena_bytes"] + sum(rank["host_shared"].values()) for rank in all_ranks)
    held = sum(rank["host_arena_bytes"] for rank in all_ranks) + sum(copies.values())
    assert held <= (0.1 + 0.9 / server.launch.dp) * alone
    assert resident_copies(server) <= 1.01 * sum(copies.values())


def test_replicas_keep_one_copy_of_their_weights(server: Server, first_tokens: list[int]) -> None:
    for _ in range(2):
        server.control.sleep(1)
        assert_one_copy(server)
        server.control.wake_up()
        assert server.generate(PROMPT) == first_tokens


def test_replicas_keep_one_copy_of_new_weights(server: Server, weights: Weights, first_tokens: list[int]) -> None:
    server.control.sleep(1)
    before = shared(server)
    server.control.wake_up()
    push(server, weights.other)
    server.control.sleep(1)
    assert_one_copy(server)
    assert len(shared(server)) == len(before)
    server.control.wake_up()
    assert server.generate(PROMPT) != first_tokens
