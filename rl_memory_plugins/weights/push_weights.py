"""A whole weight update in one call: the sender, and the engine that is told of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.errors import ManifestError, RLMemoryError, WeightUpdateError
from rl_memory_plugins.memory.threads import on_this_gpu
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
    """Update an engine's weights: the whole exchange in one call.

    Args:
        post: Sends the body that it is given to `/update_weights_from_ipc` and returns the answer; it raises
            where the answer is an error (this package's client raises the typed one).
        tensors: What to send; see `WeightSender.send` for this and `partial`.
        receivers: The devices of all ranks, or their number.
        weight_version: The engine's version of the weights after the update.
        mode: What happens to running requests meanwhile.
        timeout_s: The longest silence of either side. Where not given, `DEFAULT_TIMEOUT_S` on this side, and on the
            engine's its option `update_timeout_s`.
        transport: How the bytes travel; see `WeightSender` for this and `keep_mapped`.

    Returns: the sender's report, with the engine's answer under `"engine"`.

    Raises:
        RLMemoryError: the more specific one, where both sides fail.
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
    except RuntimeError as error:  # no more threads
        sender.close()
        raise wire.as_update_error(error) from None
    report: dict[str, Any] = {}
    try:
        report = sender.send(tensors, partial=partial)
    except Exception as error:
        failures.append(error)
    thread.join(wait_s)
    if failures:
        try:
            raise max(failures, key=specificity)
        finally:
            failures.clear()  # or they and this frame keep each other
    if not answers:
        raise WeightUpdateError(f"the engine has the weights but did not answer within {wait_s:g} s", reason="stalled")
    return {**report, "engine": answers[0]}


def specificity(error: Exception) -> int:
    """The sender's `ManifestError` covers all ranks; a `WeightUpdateError` may only say that a peer left."""
    if isinstance(error, ManifestError):
        return 3 if any("ranks" in mismatch for mismatch in error.details.get("mismatches", ())) else 2
    if isinstance(error, WeightUpdateError):
        return 1
    return 2 if isinstance(error, RLMemoryError) else 0
