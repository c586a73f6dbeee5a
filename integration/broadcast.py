"""The limit of an update between two GPUs: one process broadcasts a checkpoint's bytes to another, with torch alone."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from integration.models import SHAPES, checkpoint_shapes
from integration.native_updates import BUCKET_BYTES, HOST, cut
from rl_memory_plugins.weights.checksums import tensor_checksum

SENDER, RECEIVER = 0, 1
JOIN_S = 40
SEED = 1

Record = Callable[[str, list[float], str], None]


def measure(model: str, device: str, repeats: int, port: int, record: Record) -> int:
    """Record the first broadcast and `repeats` more. This process is the sender, and starts the receiver.

    Args:
        port: A free port of this host, where the two meet.
        record: Takes a metric, its values and their unit.

    Returns: the bytes of the checkpoint.

    Raises:
        RuntimeError: other bytes arrived.
    """
    context = mp.get_context("spawn")
    pipe, inside = context.Pipe()
    receiver = context.Process(target=receive, args=(inside, model, device, repeats, port), daemon=True)
    receiver.start()
    inside.close()
    buckets = _buckets(model, device, SENDER)
    nbytes = sum(bucket.nbytes for bucket in buckets)
    pipe.recv()
    before = _used(device)
    times = _broadcasts(buckets, device, SENDER, repeats, port)
    for side, start, used in zip(("trainer", "engine"), before, _used(device), strict=False):
        record(f"peak_extra_mib_{side}", [(used - start) / (1 << 20)], "MiB")
    record("update_first_s", times[:1], "s")
    record("update_s", times[1:], "s")
    record("gb_per_s", [nbytes / 1e9 / seconds for seconds in times[1:]], "GB/s")
    if pipe.recv() != [tensor_checksum(bucket) for bucket in buckets]:
        raise RuntimeError("other bytes arrived")
    receiver.join(JOIN_S)
    return nbytes


def receive(pipe: Connection, model: str, device: str, repeats: int, port: int) -> None:
    """The program of the receiver."""
    buckets = _buckets(model, device, RECEIVER)
    pipe.send("ready")
    _broadcasts(buckets, device, RECEIVER, repeats, port)
    pipe.send([tensor_checksum(bucket) for bucket in buckets])


def _buckets(model: str, device: str, rank: int) -> list[torch.Tensor]:
    """Memory for a checkpoint, one tensor for each bucket: random numbers at the sender, zeros at the receiver."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = checkpoint_shapes(SHAPES[model])
    named = [(name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape in shapes.items()]
    place = torch.device(device, rank if device == "cuda" else None)
    sizes = [sum(tensor.numel() for _, tensor in bucket) for bucket in cut(named, BUCKET_BYTES)]
    buckets = [torch.zeros(size, dtype=dtype, device=place) for size in sizes]
    if rank == SENDER:
        generator = torch.Generator(place).manual_seed(SEED)
        for bucket in buckets:
            bucket.normal_(generator=generator)
    return buckets


def _broadcasts(buckets: list[torch.Tensor], device: str, rank: int, repeats: int, port: int) -> list[float]:
    """Seconds of each broadcast of all buckets: those of the process that took longer."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    place = buckets[0].device
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://{HOST}:{port}",
        world_size=2,
        rank=rank,
        timeout=timedelta(seconds=JOIN_S),
        device_id=place if device == "cuda" else None,
    )
    times = []
    for _ in range(1 + repeats):
        dist.barrier()
        _wait(device)
        start = time.perf_counter()
        for bucket in buckets:
            dist.broadcast(bucket, SENDER)
        _wait(device)
        took = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=place)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(float(took))
    return times  # the group ends with the process


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _used(device: str) -> list[int]:
    """The bytes in use on each GPU; nothing on the CPU."""
    if device != "cuda":
        return []
    return [torch.cuda.device_memory_used(gpu) for gpu in (SENDER, RECEIVER)]
