"""Whether the processes of a trainer send their shards, and to which ranks: the same decision on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rl_memory_plugins.weights.buffers.protocols import SENT
from rl_memory_plugins.weights.shards import Layouts
from rl_memory_plugins.weights.slices import Slice


class Need(msgspec.Struct, array_like=True):
    """What a rank of an engine needs.

    Attributes:
        transport: How it receives.
        slices: What it needs of each tensor.
        divisible: Whether it can receive from several processes.
    """

    transport: str
    slices: list[Slice | None]
    divisible: bool


class Share(msgspec.Struct, array_like=True):
    """What a process of the trainer contributes.

    Attributes:
        manifest: A hash of the tensors that it lists.
        layouts: How they lie over the processes; `None` if it cannot tell, or cannot listen.
        needs: Those of the ranks that it serves.
        places: Where it listens.
    """

    manifest: str
    layouts: Layouts | None
    needs: list[Need]
    places: list[str]


class Division(NamedTuple):
    """The decision, as one process sees it.

    Attributes:
        process: This process.
        layouts: How the tensors lie over the processes.
        needs: Those of all ranks.
        first: The number of the first rank that this process serves; the others follow.
        served: How many it serves.
        places: Where each process listens.
    """

    process: int
    layouts: Layouts
    needs: list[Need]
    first: int
    served: int
    places: list[list[str]]


def decide(shares: Sequence[Share], process: int) -> Division | None:
    """What all processes make of their shares; `None` if the source gathers as ever.

    Replicas of a trainer's model may lie over other processes. The first process decides which replica sends.
    """
    layouts = shares[0].layouts
    needs = [need for share in shares for need in share.needs]
    if layouts is None or not layouts.different or not needs:
        return None
    if any(need.transport not in SENT or not need.divisible for need in needs):
        return None
    if any(share.manifest != shares[0].manifest for share in shares):
        return None
    holders = layouts.holders()
    if not holders <= set(range(len(shares))) or any(shares[one].layouts != layouts for one in holders):
        return None
    first = sum(len(share.needs) for share in shares[:process])
    return Division(process, layouts, needs, first, len(shares[process].needs), [share.places for share in shares])
