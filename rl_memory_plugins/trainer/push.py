"""A weight update in one call: the request to the engine, and the sender that serves it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rl_memory_plugins.errors import ManifestError, RLMemoryError, WeightUpdateError
from rl_memory_plugins.full_collections import postponed
from rl_memory_plugins.memory.threads import on_this_gpu
from rl_memory_plugins.trainer.adapters import Adapter
from rl_memory_plugins.trainer.sources.drafted import with_draft
from rl_memory_plugins.trainer.sources.model import OwnSource, Tensors, as_source
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.sender import DEFAULT_TIMEOUT_S, WeightSender
from rl_memory_plugins.weights.source import TensorSource


def push_weights(
    post: Callable[[dict[str, Any]], Any],
    tensors: Tensors,
    *,
    draft: Tensors | None = None,
    receivers: int | Sequence[str] = 1,
    partial: bool = False,
    weight_version: str | None = None,
    mode: str = "keep",
    timeout_s: float | None = None,
    base_version: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Update the weights of an engine.

    Args:
        post: Posts a body to `/update_weights_from_ipc` and returns the answer. Must raise if the answer is an error
            (the client of this package raises typed errors).
        tensors: A source; or a module or mapping, which is sent as a `ModelSource`. Tensors of a module or mapping that
            are sharded over several processes are refused: see `OwnSource`.
        draft: The tensors of the draft model, under the names of the draft's own checkpoint, as for `tensors`.
        partial: See `WeightSender.send`.
        receivers: The devices of all ranks, or their number.
        weight_version: The version of the weights after the update.
        mode: How the engine treats running requests during the update: a `PauseMode`.
        timeout_s: The longest silence of either side, in seconds. Default: `DEFAULT_TIMEOUT_S` for this side, and the
            option `update_timeout_s` for the engine.
        base_version: The version that the engine's weights must have. With another one the engine refuses the update.
        **options: Options of `weights.sender.WeightSender`, e.g. `bucket_bytes`.

    Returns: the report of the sender, with the answer of the engine under `"engine"`.

    Raises:
        RLMemoryError: the update failed. If both sides fail, the more specific error.
    """
    request = {"weight_version": weight_version, "mode": mode, "timeout_s": timeout_s}
    request |= {} if base_version is None else {"base_version": base_version}
    source = with_draft(as_source(tensors, OwnSource), None if draft is None else as_source(draft, OwnSource))
    return _push(post, request, source, receivers, partial=partial, **options)


def push_adapter(
    post: Callable[[dict[str, Any]], Any],
    name: str,
    tensors: Tensors,
    config: Any = None,
    *,
    receivers: int | Sequence[str] = 1,
    adapter_version: str | None = None,
    peft_name: str = "default",
    timeout_s: float | None = None,
    base_version: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Add a LoRA adapter to an engine, or replace it. The base weights stay as they are.

    Args:
        post: Posts a body to `/update_adapter`; see `push_weights`.
        name: The name by which requests use the adapter.
        tensors: A PEFT model, of which the adapter alone is sent; or a mapping or a source with the names of
            `adapter_model.safetensors`.
        config: PEFT's configuration, or the content of `adapter_config.json`. Default: that of the PEFT model.
        adapter_version: The version of the adapter after the update; a counter by default.
        peft_name: The name of the adapter in the PEFT model.
        base_version: As for `push_weights`: the version of the base weights, not of the adapter.
        receivers, timeout_s, **options: As for `push_weights`.

    Returns: as `push_weights`.

    Raises:
        InvalidRequestError: there is no configuration, or the engine cannot serve an adapter with it.
        RLMemoryError: as for `push_weights`. After every error the engine has the adapter's former version, or none.
    """
    adapter = Adapter(name, config, peft_name)
    request = {
        "name": name,
        "config": adapter.sent_config(tensors),
        "adapter_version": adapter_version,
        "timeout_s": timeout_s,
    }
    request |= {} if base_version is None else {"base_version": base_version}
    return _push(post, request, adapter.source(tensors, OwnSource), receivers, **options)


@postponed()
def _push(
    post: Callable[[dict[str, Any]], Any],
    request: dict[str, Any],
    source: TensorSource,
    receivers: int | Sequence[str],
    *,
    partial: bool = False,
    **options: Any,
) -> dict[str, Any]:
    wait_s = DEFAULT_TIMEOUT_S if request["timeout_s"] is None else request["timeout_s"]
    sender = WeightSender(receivers, timeout_s=wait_s, **options)
    call = EngineCall(post, {"endpoints": sender.endpoints, "token": sender.token, **request}, sender.cancel)
    report: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        report = sender.send(source, partial=partial)
    except Exception as error:
        failure = error
    failure = most_specific([failure, call.finish(wait_s)])
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # breaks the reference cycle between the error and this frame
    return {**report, "engine": call.answer}


class EngineCall:
    """A thread that asks an engine to update its weights. The engine answers once it has them.

    Args:
        post: Posts `body` to `/update_weights_from_ipc` and returns the answer.
        on_error: Called with the error if the request fails: then no rank of the engine connects to its sender.

    Attributes:
        answer: The answer of the engine, after `finish`.
    """

    def __init__(
        self,
        post: Callable[[dict[str, Any]], Any],
        body: dict[str, Any],
        on_error: Callable[[RLMemoryError], object],
    ) -> None:
        self._on_error = on_error
        self._error: RLMemoryError | None = None
        self.answer: Any = None
        ask = on_this_gpu(lambda: post(body))
        self._thread = threading.Thread(target=self._run, args=(ask,), name="rl-memory-update-weights", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # this process cannot start more threads
            self._fail(error)

    def finish(self, timeout_s: float, deadline: wire.Deadline | None = None) -> RLMemoryError | None:
        """Wait for the answer. Returns the error of the request, or a `WeightUpdateError` after `timeout_s` seconds.

        Args:
            deadline: When these seconds are over, if they have begun before.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout_s if deadline is None else deadline.remaining())
        if self._thread.is_alive():
            return WeightUpdateError(f"the engine did not answer within {timeout_s:g} s", reason="stalled")
        error, self._error = self._error, None  # the error's traceback refers to this object
        return error

    def _run(self, ask: Callable[[], Any]) -> None:
        try:
            self.answer = ask()  # may fail before it asks: the GPU can be broken
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = wire.as_update_error(error)
        if self._error is not error:
            self._error.__cause__ = error
        self._on_error(self._error)


def most_specific(errors: Iterable[Exception | None]) -> Exception | None:
    """The error that names the cause most precisely, the first of several, or None without an error."""
    return max((error for error in errors if error is not None), key=specificity, default=None)


def specificity(error: Exception) -> int:
    """How precisely an error names the cause. If several sides of an update fail, the highest is raised.

    The sender's `ManifestError` covers all ranks. A `WeightUpdateError` may only say that the peer disconnected, and
    the listener's that a rank did not connect: the engine may know why.
    """
    if isinstance(error, ManifestError):
        return 3 if any("ranks" in mismatch for mismatch in error.details.get("mismatches", ())) else 2
    if isinstance(error, WeightUpdateError):
        return 0 if "missing" in error.details and error.details.get("reason") == "stalled" else 1
    return 2 if isinstance(error, RLMemoryError) else 0
