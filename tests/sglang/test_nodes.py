"""Engines over several nodes: what one node knows of the others at the start."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from rl_memory_plugins.engines.sglang.nodes import meet, require_all_nodes
from rl_memory_plugins.errors import UnsupportedError


def test_nodes_that_all_have_the_plugin_start() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        for rank in pool.map(lambda rank: meet(store, rank, 2, 60), range(2)):
            assert rank is None


def test_a_node_without_the_plugin_is_named() -> None:
    """Without the check the first agreement of the ranks waits for ever."""
    with pytest.raises(UnsupportedError, match=r"ranks \[1\] have not said .*") as caught:
        meet(HashStore(), 0, 2, 0.1)
    assert "some nodes" in caught.value.details["mode"]


def test_one_node_asks_nobody() -> None:
    require_all_nodes(SimpleNamespace(nnodes=1))
    require_all_nodes(SimpleNamespace())
