"""The prefix cache under frozen requests, on vLLM's own block manager without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from rl_memory_plugins.engines.vllm.core_hooks import VllmEngine, _finish_steps
from rl_memory_plugins.engines.vllm.frozen import forget_prefixes
from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.tags import PauseMode

BLOCK = 16
PROMPT = list(range(100, 100 + 4 * BLOCK))


class Cache:
    """A block manager, and the part of an engine core that holds it."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, 1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK)
        self.requests: dict[str, Request] = {}
        self.core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=self.manager, requests=self.requests))

    def request(self, name: str, prompt: list[int] = PROMPT) -> Request:
        sampling = SamplingParams(max_tokens=100)
        hasher = get_request_block_hasher(BLOCK, sha256)
        self.requests[name] = Request(name, prompt, sampling, None, block_hasher=hasher)
        return self.requests[name]

    def compute(self, request: Request, tokens: int) -> int:
        """Compute the next tokens of a request. Returns how many the prefix cache had at its begin."""
        hits = 0
        computed: Any = None
        if request.num_computed_tokens == 0:
            computed, hits, *_ = self.manager.get_computed_blocks(request)
            request.num_computed_tokens = hits
        assert self.manager.allocate_slots(request, tokens, hits, computed) is not None
        request.num_computed_tokens += tokens
        return hits

    def generate(self, request: Request, tokens: int) -> None:
        for token in range(tokens):
            request.append_output_token_ids(token)
            self.compute(request, 1)


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_nobody_finds_what_a_frozen_request_has_or_adds(cache: Cache) -> None:
    running = cache.request("running")
    cache.compute(running, len(PROMPT))
    assert cache.compute(cache.request("before"), BLOCK) > 0, "the prefix cache works"
    blocks = cache.manager.get_block_ids("running")
    forget_prefixes(cache.core)
    assert cache.manager.get_block_ids("running") == blocks
    new = cache.request("new")
    assert cache.compute(new, len(PROMPT)) == 0
    cache.generate(running, 3 * BLOCK)
    later = cache.request("later", PROMPT + list(range(3 * BLOCK)))
    assert cache.compute(later, BLOCK) == len(PROMPT), "only the blocks of the new request"


@pytest.mark.parametrize("done", [BLOCK, 2 * BLOCK + 3])
def test_the_rest_of_a_half_computed_prompt_is_not_found_either(cache: Cache, done: int) -> None:
    running = cache.request("running")
    cache.compute(running, done)
    waiting = cache.request("waiting")
    forget_prefixes(cache.core)
    cache.compute(running, len(PROMPT) - done)
    assert cache.compute(waiting, len(PROMPT)) == 0
    assert cache.compute(cache.request("new"), BLOCK) == len(PROMPT) - BLOCK, "what the waiting one computed"


@pytest.mark.parametrize("freezes", [1, 2])
@pytest.mark.parametrize("tokens", [1, 5, BLOCK - 1])
def test_a_request_without_a_whole_block_is_not_found_either(cache: Cache, tokens: int, freezes: int) -> None:
    running = cache.request("running", PROMPT[:tokens])
    cache.compute(running, tokens)
    for _ in range(freezes):
        forget_prefixes(cache.core)
    cache.generate(running, 3 * BLOCK)
    later = cache.request("later", PROMPT[:tokens] + list(range(3 * BLOCK)))
    assert cache.compute(later, BLOCK) == 0


def test_requests_of_two_tenants_stay_apart(cache: Cache) -> None:
    running = [cache.request(name, PROMPT[:5]) for name in ("a", "b")]
    for request in running:
        request.cache_salt = request.request_id
        cache.compute(request, 5)
    forget_prefixes(cache.core)
    for request in running:
        cache.generate(request, BLOCK)
    assert running[0].block_hashes != running[1].block_hashes


def test_a_preempted_request_is_computed_by_the_new_weights_alone(cache: Cache) -> None:
    running = cache.request("running")
    cache.compute(running, len(PROMPT))
    forget_prefixes(cache.core)
    cache.generate(running, 2 * BLOCK)
    cache.manager.free(running)
    running.num_computed_tokens = 0
    _, hits, *_ = cache.manager.get_computed_blocks(running)
    assert hits == 0


def test_a_second_freeze_forgets_what_the_first_left_to_new_requests(cache: Cache) -> None:
    running = cache.request("running")
    cache.compute(running, len(PROMPT))
    forget_prefixes(cache.core)
    cache.compute(cache.request("new"), len(PROMPT))
    forget_prefixes(cache.core)
    assert cache.compute(cache.request("newer"), len(PROMPT)) == 0


def test_a_scheduler_with_another_cache_is_refused_before_it_stops() -> None:
    core = SimpleNamespace(scheduler=SimpleNamespace(requests={}), pause_scheduler=pytest.fail)
    with pytest.raises(UnsupportedError, match="another prefix cache"):
        VllmEngine(core).drain(PauseMode.FREEZE)


def test_steps_in_flight_end_before_a_core_in_the_callers_process_is_updated() -> None:
    """Else the tokens of these steps would count as those of the new weights."""
    core = SimpleNamespace(batch_queue=["first", "second"])

    def step() -> tuple[Any, bool]:
        return ({0: core.batch_queue.pop(0)}, False) if core.batch_queue else ({0: "later"}, True)

    core.step_fn = step
    _finish_steps(core)
    assert core.batch_queue == []
    assert [core.step_fn() for _ in range(3)] == [({0: "first"}, False), ({0: "second"}, False), ({0: "later"}, True)]
