"""The engines' own weight updates from a trainer on the same GPU, with their own trainer's halves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

Sent = Callable[[], Iterator[tuple[str, torch.Tensor]]]
BUCKET_BYTES = 1 << 30


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

    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    def metadata(_: Any) -> list[Any]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent()]

    def tensors(_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return sent()

    newer = hasattr(WeightSource, "iter_full")  # since vLLM 0.33, which wants a property
    members = {"metadata": functools.cached_property(metadata) if newer else metadata}
    source = type("Source", (WeightSource,), {**members, "__iter__": tensors, "iter_full": tensors})()
    sender = ipc_engine.IPCTrainerWeightTransferEngine.trainer_init(
        ipc_engine.IPCTrainerInitInfo(rank=rank, **buffer), client=client, source=source
    )
    return lambda: sender.send_weights()


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
