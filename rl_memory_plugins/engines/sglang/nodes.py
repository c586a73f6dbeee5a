"""An engine over several nodes (`--nnodes`): each node is started by itself, and each must have the plugin."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from rl_memory_plugins.errors import unsupported

#: How long the schedulers of one node wait for those of others, which may still capture graphs.
START_S = 600.0


def count(server_args: Any) -> int:
    """The number of nodes of the engine."""
    return int(getattr(server_args, "nnodes", 1) or 1)


def require_all_nodes(server_args: Any) -> None:
    """Check that the schedulers of all nodes have the plugin. Called by each of them, at the same point of its start.

    Without the check the first agreement of the ranks would wait for a node that knows nothing of it.

    Raises:
        UnsupportedError: some have not said so within `START_S`.
    """
    if count(server_args) == 1:
        return
    from torch import distributed
    from torch.distributed.distributed_c10d import _get_default_store

    meet(_get_default_store(), distributed.get_rank(), distributed.get_world_size(), START_S)


def meet(store: Any, rank: int, size: int, timeout_s: float) -> None:
    """Tell all ranks that this rank has the plugin, and wait until all have told it.

    Args:
        store: The store of `torch.distributed` that all ranks share.

    Raises:
        UnsupportedError: see `require_all_nodes`.
    """
    keys = [f"rl_memory/enabled/{number}" for number in range(size)]
    store.set(keys[rank], "yes")
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        silent = [number for number, key in enumerate(keys) if not store.check([key])]
        why = f"start every node with the same --rl-memory; ranks {silent} have not said that they have the plugin"
        raise unsupported("an engine of which only some nodes have the plugin", why) from error
