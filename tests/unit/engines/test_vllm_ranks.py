"""The workers of vLLM's executor, as ranks; no vLLM is needed."""

from types import SimpleNamespace

import pytest

from rl_memory_plugins.engines.vllm.capabilities import hosts_of
from rl_memory_plugins.engines.vllm.core_hooks import VllmRanks
from rl_memory_plugins.errors import UnsupportedError


class Executor:
    """One of whose workers lacks the plugin."""

    def __init__(self, message="'Worker' object has no attribute 'rl_memory_rank_call'"):
        self.message = message
        self.calls = 0

    def collective_rpc(self, method, args=()):
        self.calls += 1
        raise RuntimeError(self.message)


def test_the_workers_of_one_host_are_not_asked():
    executor = Executor()
    VllmRanks(executor)
    assert executor.calls == 0


def test_a_host_without_the_plugin_ends_the_start():
    with pytest.raises(UnsupportedError, match="only some hosts"):
        VllmRanks(Executor(), may_lack_plugin=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        VllmRanks(Executor("out of memory"), may_lack_plugin=True)


@pytest.mark.parametrize(
    ("parallel", "hosts"), [({}, 1), ({"nnodes": 2}, 2), ({"nnodes": 2, "nnodes_within_dp": 1}, 1)]
)
def test_the_hosts_of_one_engine(parallel, hosts):
    assert hosts_of(SimpleNamespace(**parallel)) == hosts
