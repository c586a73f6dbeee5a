"""A weight update from all processes of a trainer to all their engines."""

from __future__ import annotations

import contextlib
import functools
import inspect
import secrets
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError
from rl_memory_plugins.trainer.adapters import Adapter
from rl_memory_plugins.trainer.engine_handle import as_engines, post_adapter_of
from rl_memory_plugins.trainer.gpu import own_gpu
from rl_memory_plugins.trainer.once import Once
from rl_memory_plugins.trainer.peers import Peers
from rl_memory_plugins.trainer.push import EngineCall, most_specific, specificity
from rl_memory_plugins.trainer.sources.drafted import with_draft
from rl_memory_plugins.trainer.sources.model import Tensors, as_source
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.addresses import Endpoints, places_of
from rl_memory_plugins.weights.answers import Findings, of_senders
from rl_memory_plugins.weights.dial import dial
from rl_memory_plugins.weights.manifest import manifest_error
from rl_memory_plugins.weights.sender import DEFAULT_TIMEOUT_S, WeightSender
from rl_memory_plugins.weights.source import TensorSource


class _Site(NamedTuple):
    """A trainer process."""

    token: str  # a proposal; all processes use the token of the first
    gpu: str | None  # the UUID
    engines: list[list[str]]  # the device names of each engine that the process controls


def push_from_all(
    engines: Any,
    tensors: Tensors,
    peers: Peers | None = None,
    *,
    draft: Tensors | None = None,
    partial: bool = False,
    weight_version: str | None = None,
    mode: str = "keep",
    timeout_s: float | None = None,
    adapter: Adapter | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Update all engines. All trainer processes call the function, and it succeeds on all or fails on all.

    All processes iterate over the source once and in step, because a source may gather. A process sends to the engine
    ranks on its own GPU. An engine rank on a GPU without a trainer process receives from the process that controls its
    engine. All other processes only take part in the gathers. The gathers begin after every receiver has accepted the
    manifest. If a receiver fails, its sender continues to gather, so that no other process hangs. If the source fails
    on one process during its collectives, the other processes wait until the process group of the source times out,
    and then fail.

    Args:
        engines: The engines that this process controls; see `RolloutHandoff`. Each engine belongs to one process.
        tensors: The tensors to send, the same on every process.
        peers: The processes of the trainer; by default this process alone.
        draft: The tensors of the draft model, as for `push_weights`, the same on every process.
        partial, weight_version, mode, timeout_s: As for `push_weights`, the same on every process.
        adapter: Update this LoRA adapter, and not the base weights. `tensors` is then a PEFT model, or has the names of
            `adapter_model.safetensors`; `weight_version` is the version of the adapter, and `mode` has no meaning.
        **options: Options of `weights.sender.WeightSender`, e.g. `bucket_bytes`.

    Returns: the sender's report of this process (`receivers` is empty if it did not send), and under `engines` the
        answers of the engines that it controls.

    Raises:
        RLMemoryError: on every process the most specific error; see `Peers.share`.
    """
    engines = as_engines(engines)
    peers = peers or Peers()
    wait_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    if adapter is None:
        source = with_draft(as_source(tensors), None if draft is None else as_source(draft))
    else:
        source = adapter.source(tensors)
    sites: list[_Site] = peers.agree(
        lambda: _Site(secrets.token_urlsafe(32), own_gpu(), [engine.devices() for engine in engines]), as_type=_Site
    )
    token = sites[0].token
    served = [
        device
        for controller, site in enumerate(sites)
        for devices in site.engines
        for device in devices
        if _server_of(device, controller, sites) == peers.rank
    ]
    begin = _Begin(peers)
    request: dict[str, Any] = {"token": token, "timeout_s": timeout_s}
    if adapter is None:
        request |= {"weight_version": weight_version, "mode": mode}
    else:
        request |= {"name": adapter.name, "adapter_version": weight_version}
    sender: WeightSender | None = None
    report: dict[str, Any] = {}
    failure: Exception | None = None
    calls: list[EngineCall] = []

    def listen() -> Endpoints:
        nonlocal sender
        if not served:
            return {}
        sender = WeightSender(served, timeout_s=wait_s, token=token, senders=begin, **options)
        return sender.endpoints

    try:
        if adapter is not None:
            request["config"] = peers.agree(lambda: adapter.sent_config(tensors))[peers.rank]
        sockets = peers.agree(listen)
        for engine, devices in zip(engines, sites[peers.rank].engines, strict=True):
            endpoints = {device: sockets[_server_of(device, peers.rank, sites)][device] for device in devices}
            fail = functools.partial(_fail_senders, [(device, endpoints[device]) for device in devices], token)
            post = engine.post_update if adapter is None else post_adapter_of(engine)
            calls.append(EngineCall(post, {"endpoints": endpoints, **request}, fail))
        try:
            report = _send(sender, source, begin, partial)
        except Exception as error:
            failure = wire.as_update_error(error)
    finally:
        if sender is not None:
            sender.close()
    failure = most_specific([failure, *(call.finish(wait_s) for call in calls)])
    try:
        peers.share(None, failure, specificity)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        del failure  # breaks the reference cycle between the error and this frame
    return {**report, "engines": [call.answer for call in calls]}


def require_options(options: Mapping[str, Any]) -> None:
    """Check the options of `push_from_all` before an engine sleeps for the update.

    Raises:
        InvalidRequestError: an option is unknown or has a bad value.
    """
    allowed = {"draft", "partial", *inspect.signature(WeightSender).parameters} - {"receivers", "token", "senders"}
    unknown = sorted(options.keys() - allowed)
    if unknown:
        raise InvalidRequestError(
            f"unknown options of a weight update: {', '.join(unknown)}", got=unknown, allowed=sorted(allowed)
        )
    of_sender = options.keys() - {"draft", "partial"}
    sender = {name: options[name] for name in of_sender if options[name] is not None}
    WeightSender(**sender).close()


def _server_of(device: str, controller: int, sites: Sequence[_Site]) -> int:
    """The rank of the trainer process that sends to `device`: the first on that GPU, else `controller`."""
    return next((rank for rank, site in enumerate(sites) if site.gpu == device), controller)


def _send(sender: WeightSender | None, source: TensorSource, begin: _Begin, partial: bool) -> dict[str, Any]:
    """Iterate over the source once, and send if this process has a sender. Returns the report."""
    once = Once(source)
    try:
        if sender is not None:
            return sender.send(once, partial=partial)
        once.specs()  # may prepare `tensors`; and all processes must learn its errors
        while once.negotiable:
            mismatches = begin.consult(None).all_mismatches()
            if not mismatches:
                break
            if not once.revise(mismatches):
                raise manifest_error(mismatches)
            once.specs()
        begin.settle(None)
        once.drain()
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        with contextlib.suppress(Exception):
            if begin.agreed is None:
                begin.settle(None, wire.as_update_error(error))
            elif begin.agreed and begin.peers.size > 1:
                once.drain()
        raise
    finally:
        once.close()
    return {"bytes": 0, "tensors": 0, "buckets": 0, "unused": [], "seconds": {}, "receivers": []}


class _Begin:
    """The agreement of all processes to begin. Each takes part exactly once, before it reads a tensor of the source.

    Attributes:
        agreed: Whether the update begins; `None` until this process has taken part.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.agreed: bool | None = None

    def settle(self, findings: Findings | None, error: Exception | None = None) -> Findings:
        """Share this process's vote, and return the findings of all senders.

        Args:
            findings: Those of this process's sender; `None` without one.
            error: The error that keeps this process from beginning.

        Raises:
            RLMemoryError: a process cannot begin.
            ManifestError: this process has no sender, and no engine rank uses some of the names.
        """
        self.agreed = False
        votes = self.peers.share(findings, error, specificity, as_type=Findings | None)
        found = of_senders([vote for vote in votes if vote is not None])
        mismatches = found.all_mismatches()
        self.agreed = not mismatches
        if mismatches and findings is None:
            raise manifest_error(mismatches)
        return found

    def consult(self, findings: Findings | None) -> Findings:
        """See `Senders`. All processes call it as often, those without a sender too."""
        self.agreed = False  # an error reaches all processes here, and none of them shares another
        votes = self.peers.share(findings, as_type=Findings | None)
        self.agreed = None
        return of_senders([vote for vote in votes if vote is not None])


def _fail_senders(endpoints: Sequence[tuple[str, str | list[str]]], token: str, error: RLMemoryError) -> None:
    """Report a failed request to the senders of these devices and sockets, because no rank of the engine will connect.

    A sender refuses the report if the rank has connected.
    """
    for device, places in endpoints:
        with (
            contextlib.suppress(RLMemoryError),
            contextlib.closing(wire.Connection(dial(places_of(places), None, 1.0), "the trainer")) as connection,
        ):
            connection.send(wire.Hello(wire.PROTOCOL, device, token, rank=-1), 1.0)
            connection.fail(error)
