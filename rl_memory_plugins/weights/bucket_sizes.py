"""How large the buckets of each transport are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rl_memory_plugins.weights.manifest import MIN_STAGED_BUCKET_BYTES, Manifest, align

HOST_BUCKET_BYTES = 128 << 20
"""The largest bucket in host memory. Larger ones cost more: page faults and page-locking take longer than the copy."""

STREAMED_BUCKET_BYTES = 32 << 20
"""The largest bucket that travels over a connection. With smaller ones packing, sending and loading overlap more."""

PEER_BUCKET_BYTES = 256 << 20
"""The largest bucket that is packed from one GPU on another. The next one is packed while the receiver loads it. Of 512
MiB each update would take 10 ms more for 15 GB: the driver takes as long for the first such allocation there."""

PEER_SLOTS = 3
"""The slots for buckets that go from one GPU to another: one is packed, one travels, one is loaded. With two, 15 GB
take 55 ms instead of 51 by CUDA IPC. By NCCL several ranks stay at two: each may need other slices, from own slots."""

NCCL_BUCKET_BYTES = 512 << 20
"""The largest bucket that travels from GPU to GPU. It travels for 1.4 ms at 370 GB/s. In that time the two ends make
the calls for the next one, and the GPUs pack that one and load the former. Smaller ones are over before all that is
done: 15 GB take 79 ms with 256 MiB, 71 with a third slot, and 53 with 512, of 41 for the bytes alone."""

NCCL_PART_BUCKET_BYTES = 128 << 20
"""The same where several processes may send their parts of each bucket: a rank has a slot for each of them."""

DIRECT_BUCKET_BYTES = 1 << 30
"""The bucket size without staging. Such a bucket uses no memory: it is only the unit of announcement."""


def with_buckets(manifest: Manifest, nbytes: int) -> Manifest:
    """The manifest with buckets of at most `nbytes`."""
    return msgspec.structs.replace(manifest, bucket_bytes=min(manifest.bucket_bytes, nbytes))


def with_half_buckets(manifest: Manifest) -> Manifest | None:
    """The manifest with buckets of half the size; `None` if that is too small, or a row needs more."""
    slot_bytes = manifest.slot_bytes()
    smaller = with_buckets(manifest, slot_bytes // 2)
    if smaller.bucket_bytes < MIN_STAGED_BUCKET_BYTES or smaller.slot_bytes() >= slot_bytes:
        return None
    return smaller


def staged_bucket_bytes(sizes: Sequence[int], slots: int) -> int:
    """The bucket size, in bytes, at which the sender fills each slot twice: packing then overlaps loading.

    The size is at least `MIN_STAGED_BUCKET_BYTES`, but all slots together are never larger than all tensors.
    """
    total = sum(map(align, sizes))
    wanted = max(-(-total // (2 * slots)), MIN_STAGED_BUCKET_BYTES)
    return max(align(min(wanted, -(-total // slots))), 1)
