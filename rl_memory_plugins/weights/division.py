"""Whether the processes of a trainer send their shards, and to which ranks: the same decision on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.own_host import is_loopback
from rl_memory_plugins.weights.addresses import parse
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
        host: See `own_host.host_id`.
        bucket_bytes, slots: See `Manifest`.
    """

    manifest: str
    layouts: Layouts | None
    needs: list[Need]
    places: list[str]
    host: str = ""
    bucket_bytes: int = 0
    slots: int = 0


class Division(NamedTuple):
    """The decision, as one process sees it.

    Attributes:
        process: This process.
        layouts: How the tensors lie over the processes.
        needs: Those of all ranks.
        first: The number of the first rank that this process serves; the others follow.
        served: How many it serves.
        places: Where each process listens, for ranks that any other process serves.
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

    Raises:
        InvalidRequestError: all is well, but they cut buckets differently. The same on all processes.
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
    places = [share.places for share in shares]
    if len({share.host for one, share in enumerate(shares) if one in holders or share.needs}) > 1:
        # A rank would look for the socket of another host on its own, and show the token to whoever listens there.
        places = [[place for place in own if _is_for_other_hosts(place)] for own in places]
        if not all(places[one] for one in holders):
            return None
    for field in ("bucket_bytes", "slots"):
        given = [getattr(share, field) for share in shares]
        if len(set(given)) > 1:
            raise InvalidRequestError(
                f"processes that send their shards need the same {field}, but the trainer's have {given}",
                field=field,
                got=given,
            )
    first = sum(len(share.needs) for share in shares[:process])
    return Division(process, layouts, needs, first, len(shares[process].needs), places)


def _is_for_other_hosts(place: str) -> bool:
    address = parse(place)
    return address is not None and not is_loopback(address.host)
