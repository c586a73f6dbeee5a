"""The engines' own weight updates, with their own trainer's halves: by IPC on one GPU, and by NCCL to another."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

Sent = Callable[[], Iterator[tuple[str, torch.Tensor]]]
BUCKET_BYTES = 1 << 30
HOST = "127.0.0.1"
GROUP = "weights"
"""The name of SGLang's group of the trainer and the engine's ranks."""


def vllm(client: Any, sent: Sent, *, packed: bool, rank: int = 0) -> Callable[[], Any]:
    """vLLM's weight transfer by IPC. Calling the result is one update; all ranks of the trainer call it together.

    Args:
        client: vLLM's `VLLMWeightSyncClient`, or an object with its four methods.
        sent: Gives the tensors by their names in the checkpoint.
        packed: In buckets of 1 GiB; else with a handle for each tensor.
        rank: The trainer's rank; rank 0 tells the engine of the handles of all ranks.
    """
    from vllm.distributed.weight_transfer import ipc_engine

    largest = max(tensor.nbytes for _, tensor in sent())
    buffer = {"packed": packed, "packed_buffer_size_bytes": max(largest, BUCKET_BYTES)}
    if not hasattr(ipc_engine, "IPCTrainerWeightTransferEngine"):  # older vLLM: the trainer's side is a function

        def send() -> None:
            def ship(info: Any) -> None:
                client.update_weights({key: value for key, value in vars(info).items() if value is not None})

            client.start_weight_update()
            ipc_engine.IPCWeightTransferEngine.trainer_send_weights(sent(), {"send_mode": ship, **buffer})
            client.finish_weight_update()

        client.init_weight_transfer_engine({})
        return send

    sender = ipc_engine.IPCTrainerWeightTransferEngine.trainer_init(
        ipc_engine.IPCTrainerInitInfo(rank=rank, **buffer), client=client, source=_vllm_source(sent)
    )
    return lambda: sender.send_weights()


def vllm_nccl(client: Any, sent: Sent, *, port: int, ranks: int = 1, rank: int = 0) -> Callable[[], Any]:
    """vLLM's weight transfer by NCCL, in its buckets of 1 GiB. Calling the result is one update.

    Args:
        client, sent, rank: As for `vllm`.
        port: A free port of this host, where trainer and ranks meet.
        ranks: The number of the engine's ranks.
    """
    from vllm.distributed.weight_transfer import nccl_engine

    sender = nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(
        nccl_engine.NCCLTrainerInitInfo(rank=rank, master_address=HOST, master_port=port, world_size=1 + ranks),
        client=client,
        source=_vllm_source(sent),
    )
    return lambda: sender.send_weights()


def _vllm_source(sent: Sent) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    def metadata(_: Any) -> list[Any]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent()]

    def tensors(_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return sent()

    newer = hasattr(WeightSource, "iter_full")  # since vLLM 0.33, which wants a property
    members = {"metadata": functools.cached_property(metadata) if newer else metadata}
    return type("Source", (WeightSource,), {**members, "__iter__": tensors, "iter_full": tensors})()


def sglang(
    update: Callable[[bytes, str | None, bool], Any],
    sent: Sent,
    *,
    packed: bool,
    begin: Callable[[], Any] | None = None,
    end: Callable[[], Any] | None = None,
) -> Callable[[], None]:
    """SGLang's update from tensors, serialised as its callers do. Calling the result is one update.

    Args:
        update: Takes a serialised list of tensors, its format, and whether it is the last of this update.
        sent: Gives the tensors by their names in the checkpoint.
        packed: In flattened buckets of 1 GiB; else all tensors as they are.
        begin, end: Enclose the update, where SGLang has sessions (since 0.5.21).
    """
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    if torch.cuda.is_available():
        monkey_patch_torch_reductions()

    def send() -> None:
        if begin is not None:
            begin()
        named = list(sent())
        if not packed:
            update(MultiprocessingSerializer.serialize(named), None, True)
        buckets = list(cut(named, BUCKET_BYTES)) if packed else []
        for number, bucket in enumerate(buckets):
            flat = FlattenedTensorBucket(named_tensors=bucket)
            content = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
            update(MultiprocessingSerializer.serialize(content), "flattened_bucket", number == len(buckets) - 1)
        if end is not None:
            end()

    return send


def sglang_nccl(
    join: Callable[[dict[str, Any]], Any],
    update: Callable[[dict[str, Any]], Any],
    sent: Sent,
    *,
    port: int,
    backend: str,
    begin: Callable[[], Any],
    end: Callable[[], Any],
    ranks: int = 1,
) -> Callable[[], None]:
    """SGLang's update by a process group of the trainer and the engine, in flattened buckets of 1 GiB.

    Args:
        join, update: Pass arguments to the engine's `init_weights_update_group` and `update_weights_from_distributed`.
        sent: Gives the tensors by their names in the checkpoint.
        port: A free port of this host, where trainer and ranks meet.
        backend: Of torch: `nccl` or `gloo`.
        begin, end: Enclose the update.
        ranks: The number of the engine's ranks.
    """
    from sglang.srt.utils import init_custom_process_group
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    meeting = {"group_name": GROUP, "backend": backend, "world_size": 1 + ranks}
    pool = ThreadPoolExecutor(1)  # the engine answers when it has taken part
    joined = pool.submit(join, {**meeting, "master_address": HOST, "master_port": port, "rank_offset": 1})
    group = init_custom_process_group(**meeting, init_method=f"tcp://{HOST}:{port}", rank=0)
    joined.result()

    def send() -> None:
        begin()
        buckets = list(cut(list(sent()), BUCKET_BYTES))
        for number, bucket in enumerate(buckets):
            flat = FlattenedTensorBucket(named_tensors=bucket)
            content = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": GROUP,
                "load_format": "flattened_bucket",
                "flush_cache": number == len(buckets) - 1,
            }
            updated = pool.submit(update, content)
            torch.distributed.broadcast(flat.get_flattened_tensor(), src=0, group=group)
            updated.result()
        end()

    return send


def cut(named: list[tuple[str, torch.Tensor]], nbytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Lists of at most `nbytes`; a larger tensor has a list of its own."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > nbytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket
