"""A weight update in one call: the request to the engine, and the sender that serves it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.errors import ManifestError, RLMemoryError, WeightUpdateError
from rl_memory_plugins.memory.threads import on_this_gpu
from rl_memory_plugins.trainer.sources.model import OwnSource, as_source
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.sender import DEFAULT_BUCKET_BYTES, DEFAULT_TIMEOUT_S, WeightSender
from rl_memory_plugins.weights.source import TensorSource

if TYPE_CHECKING:
    import torch


def push_weights(
    post: Callable[[dict[str, Any]], Any],
    tensors: TensorSource | torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    receivers: int | Sequence[str] = 1,
    partial: bool = False,
    weight_version: str | None = None,
    mode: str = "keep",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    slots: int = 2,
    timeout_s: float | None = None,
    directory: str | os.PathLike[str] | None = None,
    transport: str = "auto",
    keep_mapped: bool = False,
) -> dict[str, Any]:
    """Update the weights of an engine.

    Args:
        post: Posts a body to `/update_weights_from_ipc` and returns the answer. Must raise if the answer is an error
            (the client of this package raises typed errors).
        tensors: A source; or a module or mapping, which is sent as a `ModelSource`. Tensors of a module or mapping that
            are sharded over several processes are refused: see `OwnSource`.
        partial: See `WeightSender.send`.
        receivers: The devices of all ranks, or their number.
        weight_version: The version of the weights after the update.
        mode: How the engine treats running requests during the update: a `PauseMode`.
        bucket_bytes, slots, directory, transport, keep_mapped: As for `WeightSender`.
        timeout_s: The longest silence of either side, in seconds. Default: `DEFAULT_TIMEOUT_S` for this side, and the
            option `update_timeout_s` for the engine.

    Returns: the report of the sender, with the answer of the engine under `"engine"`.

    Raises:
        RLMemoryError: the update failed. If both sides fail, the more specific error.
    """
    wait_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    sender = WeightSender(
        receivers,
        bucket_bytes=bucket_bytes,
        slots=slots,
        timeout_s=wait_s,
        directory=directory,
        transport=transport,
        keep_mapped=keep_mapped,
    )
    body = {
        "endpoints": sender.endpoints,
        "token": sender.token,
        "weight_version": weight_version,
        "mode": mode,
        "timeout_s": timeout_s,
    }
    answers: list[Any] = []
    failures: list[Exception] = []

    def call() -> None:
        try:
            answers.append(post(body))
        except Exception as error:
            failures.append(error)
            sender.cancel(wire.as_update_error(error))

    thread = threading.Thread(target=on_this_gpu(call), name="rl-memory-update-weights", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # this process cannot start more threads
        sender.close()
        raise wire.as_update_error(error) from None
    report: dict[str, Any] = {}
    try:
        report = sender.send(as_source(tensors, OwnSource), partial=partial)
    except Exception as error:
        failures.append(error)
    thread.join(wait_s)
    if failures:
        try:
            raise max(failures, key=specificity)
        finally:
            failures.clear()  # breaks a reference cycle of the errors and this frame
    if not answers:
        raise WeightUpdateError(
            f"the engine has loaded all weights but did not answer within {wait_s:g} s", reason="stalled"
        )
    return {**report, "engine": answers[0]}


def specificity(error: Exception) -> int:
    """How precisely an error names the cause: the highest is raised if both sides of an update fail.

    The sender's `ManifestError` covers all ranks. A `WeightUpdateError` may only say that the peer disconnected.
    """
    if isinstance(error, ManifestError):
        return 3 if any("ranks" in mismatch for mismatch in error.details.get("mismatches", ())) else 2
    if isinstance(error, WeightUpdateError):
        return 1
    return 2 if isinstance(error, RLMemoryError) else 0
