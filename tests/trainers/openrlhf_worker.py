"""OpenRLHF's worker extension, with what it asks of CUDA answered for a CPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap


class OnCpu(WorkerWrap):
    def update_weight_cuda_ipc(self, *args: Any, **kwargs: Any) -> None:
        with (
            mock.patch("openrlhf.trainer.ray.utils.get_physical_gpu_id", lambda: "cpu"),
            mock.patch.object(torch.cuda, "synchronize"),
        ):
            super().update_weight_cuda_ipc(*args, **kwargs)


def handles(tensor: torch.Tensor) -> dict[str, Any]:
    """The tensor in the form in which OpenRLHF passes handles: a function and its arguments, the seventh the device."""
    content = tensor.view(torch.uint8).numpy().tobytes()
    return {"cpu": (_made, [content, tensor.dtype, tuple(tensor.shape), None, None, None, 0])}


def _made(content: bytes, dtype: torch.dtype, shape: tuple[int, ...], *_: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
