"""The prefix cache of an engine core whose running requests keep their KV cache over an update.

Requests that begin later must not find keys and values of former weights. So the prefix cache forgets all blocks, and
blocks that running requests fill later get hashes that no other request has: keys and values of the new weights in them
depend on those of former weights before them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

from rl_memory_plugins.errors import UnsupportedError


def require_known_cache(core: Any) -> None:
    """
    Raises:
        UnsupportedError: the scheduler, e.g. one of `--scheduler-cls`, keeps its blocks in a structure of its own.
    """
    if _managers(core) is None:
        raise UnsupportedError("mode 'freeze' is refused: the scheduler has another prefix cache than vLLM's own")


def forget_prefixes(core: Any) -> None:
    """Keep new requests from finding the present prefix cache, and the blocks that running requests add to it later."""
    managers = _managers(core) or ()
    for pool in {id(manager.block_pool): manager.block_pool for manager in managers}.values():
        _forget(pool)
    salt = secrets.token_bytes(16)
    for request in core.scheduler.requests.values():
        _separate(request, managers, salt)


def _managers(core: Any) -> Sequence[Any] | None:
    """The managers of the blocks of each kind of layer; `None` if the scheduler has none."""
    coordinator = getattr(getattr(core.scheduler, "kv_cache_manager", None), "coordinator", None)
    return getattr(coordinator, "single_type_managers", None)


def _forget(pool: Any) -> None:
    """Do what `BlockPool.reset_prefix_cache` does, also while requests hold blocks."""
    if not len(pool.cached_block_hash_to_block):  # some trainers call for each tensor
        return
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
    getattr(pool, "cached_block_hashes_by_block", {}).clear()
    for block in pool.blocks:
        block.reset_hash()
    if pool.enable_kv_cache_events:
        from vllm.distributed.kv_events import AllBlocksCleared

        pool.kv_event_queue.append(AllBlocksCleared())


def _separate(request: Any, managers: Sequence[Any], salt: bytes) -> None:
    """Change the hashes of the blocks that a running request has not cached yet. Waiting requests keep theirs.

    vLLM derives the hash of each further block from that of the last. So at least the last hash changes, or the first.
    The hashes of cached blocks stay: the cache has forgotten these blocks, and a request computes them anew if it is
    preempted.
    """
    number, hashes = request.request_id, request.block_hashes
    holders = [manager for manager in managers if number in manager.num_cached_block or number in manager.req_to_blocks]
    if not holders:
        return
    if not hashes:  # it has no whole block yet: the hash of its first one will have the salt, and so all that follow
        request.cache_salt = salt.hex() + (request.cache_salt or "")
        return
    cached = min(
        manager.num_cached_block.get(number, 0) * manager.block_size // manager.block_pool.hash_block_size
        for manager in holders
    )
    start = min(cached, len(hashes) - 1)
    hashes[start:] = [hashlib.sha256(salt + block_hash).digest() for block_hash in hashes[start:]]
