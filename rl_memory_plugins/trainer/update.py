"""A weight update from all processes of a trainer to all their engines."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from rl_memory_plugins.errors import InvalidRequestError, RLMemoryError
from rl_memory_plugins.full_collections import postponed
from rl_memory_plugins.own_host import host_id
from rl_memory_plugins.trainer.adapters import Adapter, as_adapter
from rl_memory_plugins.trainer.engine_handle import Post, as_engines, post_adapter_of, post_update_of
from rl_memory_plugins.trainer.once import Once
from rl_memory_plugins.trainer.outcomes import Outcome, devices_of, outcomes_of
from rl_memory_plugins.trainer.peers import Peers
from rl_memory_plugins.trainer.push import EngineCall, most_specific, specificity
from rl_memory_plugins.trainer.several import SeveralEngines
from rl_memory_plugins.trainer.sites import Site, fail_senders, server_of, this_site
from rl_memory_plugins.trainer.sources.drafted import with_draft
from rl_memory_plugins.trainer.sources.model import Tensors, as_source
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.addresses import Endpoints
from rl_memory_plugins.weights.answers import Findings, of_senders
from rl_memory_plugins.weights.buffers import SENT
from rl_memory_plugins.weights.division import Division, Need, Share, decide
from rl_memory_plugins.weights.doors import without_ports
from rl_memory_plugins.weights.manifest import Manifest, manifest_error
from rl_memory_plugins.weights.overrides import as_sharded
from rl_memory_plugins.weights.sender import DEFAULT_TIMEOUT_S, WeightSender
from rl_memory_plugins.weights.shards import Layout, Layouts
from rl_memory_plugins.weights.source import ShardedSource, TensorSource

ON_FAILURE = ("abort", "continue")


@postponed()  # on all processes: those that only take part in the gathers hold up the others
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
    adapter: Adapter | str | None = None,
    on_failure: str = "abort",
    base_version: str | None = None,
    shards: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Update all engines. All trainer processes call the function, and it succeeds on all or fails on all.

    With `on_failure="continue"` it succeeds if an engine has the new weights, and the report names the others.

    All processes iterate over the source once and in step, because a source may gather. A process sends to the engine
    ranks on its own GPU. An engine rank on a GPU without a trainer process receives from the process that controls its
    engine. All other processes only take part in the gathers. The gathers begin after every receiver has accepted the
    manifest. If a receiver fails, its sender continues to gather, so that no other process hangs. If the source fails
    on one process during its collectives, the other processes wait until the process group of the source times out,
    and then fail.

    With `shards=True` each process sends what it holds, and nothing is gathered, where that can be done.

    Args:
        engines: The engines that this process controls; see `RolloutHandoff`. Each engine belongs to one process.
        tensors: The tensors to send, the same on every process.
        peers: The processes of the trainer; by default this process alone.
        draft: The tensors of the draft model, as for `push_weights`, the same on every process.
        partial, weight_version, mode, timeout_s: As for `push_weights`, the same on every process.
        adapter: Update this LoRA adapter, and not the base weights; a name stands for `Adapter(name)`. `tensors` is
            then a PEFT model, or has the names of `adapter_model.safetensors`; `weight_version` is the version of the
            adapter, and `mode` has no meaning.
        on_failure: What follows if an engine fails, the same on every process. `abort`: the update fails at all
            engines. None begins before all have accepted the manifest; afterwards the failure of one leaves all that
            are not done `failed`. `continue`: each engine gets the update or fails for itself. Each then has a sender
            of its own, with its own staging, and a port of `advertise` is that of the first engine of a process; the
            others take the ports that follow. An engine that falls silent holds the others up for `timeout_s`, once,
            unless all tensors of the source exist. The engines therefore wait for the trainer for `timeout_s` times
            their number plus one.
        base_version: The version that the weights of the engines must have. An engine with another one refuses the
            update before anything is sent. A partial update with `on_failure="continue"` needs it: an engine that was
            away would mix two versions.
        shards: Send shards from where they lie, with each process at its own addresses; the same on every process. An
            update for which that cannot be done gathers as without it, and `sent_from_shards` of the report is 0:
            docs/several-machines.md has the cases. Needs `transport` or `advertise`.
        **options: Options of `weights.sender.WeightSender`, e.g. `bucket_bytes`.

    Returns: the sender's report of this process, and under `engines` the answers of the engines that it controls,
        `None` for one that has failed. `receivers` has the engine ranks that connect to this process first: it may be
        empty although this process has sent them its shards (`sent_from_shards`, in bytes). Under `failed`, with
        `on_failure="continue"`, an `EngineFailure` for each engine of any process that has failed.

    Raises:
        InvalidRequestError: `on_failure` is unknown, a partial update that may continue names no `base_version`, or
            processes that send shards have different `bucket_bytes` or `slots`.
        RLMemoryError: on every process the most specific error; see `Peers.share`. If an engine may have changed,
            `details["engines"]` has an `Outcome` for each engine, as a dict.
    """
    require_on_failure(on_failure)
    if on_failure == "continue" and partial and base_version is None:
        raise InvalidRequestError(
            "a partial update that may leave engines out needs base_version, the version that the weights of the "
            "engines must have: an engine that was left out before would mix two versions",
            field="base_version",
        )
    engines = as_engines(engines)
    peers = peers or Peers()
    adapter = as_adapter(adapter)
    wait_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    if adapter is None:
        source = with_draft(as_source(tensors), None if draft is None else as_source(draft))
    else:
        source = adapter.source(tensors)
    request: dict[str, Any] = {} if base_version is None else {"base_version": base_version}
    if adapter is None:
        request |= {"weight_version": weight_version, "mode": mode}
    else:
        request |= {"name": adapter.name, "adapter_version": weight_version}
    post_of = post_update_of if adapter is None else post_adapter_of
    config = None if adapter is None else functools.partial(adapter.sent_config, tensors)
    if on_failure == "continue":
        update = SeveralEngines(engines, source, peers, wait_s, options)
        return update.push(request, post_of, partial=partial, config=config)
    sites: list[Site] = peers.agree(lambda: this_site(devices_of(engines, wait_s)), as_type=Site)
    token = sites[0].token
    served = [
        device
        for controller, site in enumerate(sites)
        for devices in site.engines
        for device in devices
        if server_of(device, controller, sites) == peers.rank
    ]
    may_divide = shards and peers.size > 1 and as_sharded(source) is not None and _may_be_sent(options)
    begin = _Begin(peers, may_divide=may_divide)
    sender: WeightSender | None = None
    report: dict[str, Any] = {}
    failure: Exception | None = None
    posts: list[Post] = []
    calls: list[EngineCall] = []

    def listen() -> _Opened:
        nonlocal sender
        posts.extend(post_of(engine) for engine in engines)
        if served:
            sender = WeightSender(served, timeout_s=wait_s, token=token, senders=begin, **options)
        return _Opened({} if sender is None else sender.endpoints, begin.may_divide)

    def listen_for_others() -> bool:
        """After those that serve ranks: another process of this host may need the port."""
        nonlocal sender
        with contextlib.suppress(InvalidRequestError):
            sender = sender or WeightSender([], timeout_s=wait_s, token=token, senders=begin, **options)
        return sender is not None

    try:
        if config is not None:
            request["config"] = peers.agree(config)[peers.rank]
        opened = peers.agree(listen, as_type=_Opened)
        begin.may_divide = all(one.may_divide for one in opened) and all(peers.agree(listen_for_others))
        if sender is not None and not served and not begin.may_divide:
            sender.close()
            sender = None
        for post, devices in zip(posts, sites[peers.rank].engines, strict=True):
            endpoints = {device: opened[server_of(device, peers.rank, sites)].endpoints[device] for device in devices}
            fail = functools.partial(fail_senders, [(device, endpoints[device]) for device in devices], token)
            body = {"endpoints": endpoints, "token": token, "timeout_s": timeout_s, **request}
            calls.append(EngineCall(post, body, fail))
        try:
            report = _send(sender, source, begin, partial)
        except Exception as error:
            failure = wire.as_update_error(error)
    finally:
        if sender is not None:
            sender.close()
    deadline = wire.Deadline(wait_s)  # of all: several engines that say nothing do not wait for each other
    errors = [call.finish(wait_s, deadline) for call in calls]
    failure = most_specific([failure, *errors])
    try:
        outcomes = outcomes_of(engines, errors, peers.rank, wait_s)
        peers.share(outcomes, failure, specificity, as_type=list[Outcome], beside="engines")
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        del failure, errors  # breaks the reference cycle between the errors and this frame
    return {**report, "engines": [call.answer for call in calls]}


def require_on_failure(on_failure: Any) -> None:
    """Check what follows if an engine fails; see `push_from_all`.

    Raises:
        InvalidRequestError: it is neither `abort` nor `continue`.
    """
    if on_failure not in ON_FAILURE:
        raise InvalidRequestError(
            f"on_failure is one of {', '.join(ON_FAILURE)}, not {on_failure!r}",
            field="on_failure",
            got=on_failure,
            allowed=list(ON_FAILURE),
        )


def require_options(options: Mapping[str, Any]) -> None:
    """Check the options of `push_from_all` before an engine sleeps for the update.

    Raises:
        InvalidRequestError: an option is unknown or has a bad value.
    """
    of_update = {"draft", "partial", "shards"}
    allowed = of_update | inspect.signature(WeightSender).parameters.keys() - {"receivers", "token", "senders"}
    unknown = sorted(options.keys() - allowed)
    if unknown:
        raise InvalidRequestError(
            f"unknown options of a weight update: {', '.join(unknown)}", got=unknown, allowed=sorted(allowed)
        )
    of_sender = options.keys() - of_update
    sender = {name: options[name] for name in of_sender if options[name] is not None}
    if "advertise" in sender:  # a port may be in use now: by an update, or by another process that checks its options
        sender["advertise"] = without_ports(sender["advertise"])
    WeightSender(**sender).close()


class _Opened(NamedTuple):
    """The sender of a process.

    Attributes:
        endpoints: Those of the ranks that it serves.
        may_divide: See `_Begin`.
    """

    endpoints: Endpoints
    may_divide: bool


def _may_be_sent(options: Mapping[str, Any]) -> bool:
    """Whether ranks may get the bytes themselves, and not share memory with this process."""
    transport = options.get("transport", "auto")
    return transport in SENT or (transport == "auto" and options.get("advertise") is not None)


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
    return {
        "bytes": 0,
        "tensors": 0,
        "buckets": 0,
        "unused": [],
        "seconds": {},
        "receivers": [],
        "sent_from_shards": 0,
        "gathered": once.gathered,
    }


def _cause_first(error: Exception) -> int:
    """As `specificity`. A process that fails keeps ranks and other processes waiting, whose errors name a stall."""
    has_stalled = isinstance(error, RLMemoryError) and error.details.get("reason") == "stalled"
    return 2 * specificity(error) + (not has_stalled)


class _Begin:
    """The agreement of all processes to begin. Each takes part exactly once, before it reads a tensor of the source.

    Attributes:
        agreed: Whether the update begins; `None` until this process has taken part.
        may_divide: Whether the processes may send their shards; the same on all of them once all listen.
    """

    def __init__(self, peers: Peers, *, may_divide: bool) -> None:
        self.peers = peers
        self.may_divide = may_divide
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

    def divide(
        self, manifest: Manifest, source: ShardedSource, needs: list[Need], places: list[str]
    ) -> Division | None:
        """See `Senders`. All processes call it, once all have settled.

        Raises:
            InvalidRequestError: see `decide`. On all processes.
        """
        if not self.may_divide:
            return None

        def own() -> Share:
            each = source.layouts()
            layouts = None if each is None else Layouts.made_of(self._among_peers(one) for one in each)
            return Share(manifest.digest(), layouts, needs, places, host_id(), manifest.bucket_bytes, manifest.slots)

        self.agreed = False  # an error reaches all processes here, and none of them gathers
        division = decide(self.peers.agree(own, as_type=Share), self.peers.rank)
        self.agreed = True
        if division is not None:
            left_out = zip(division.layouts.of, manifest.tensors, strict=True)
            source.leave_out({spec.name for number, spec in left_out if number >= 0})
        return division

    def linked(self, error: RLMemoryError | None = None) -> None:
        """See `Senders`."""
        self.agreed = False  # an error reaches all processes here, and none of them has read a tensor
        self.peers.share(None, error, _cause_first)
        self.agreed = True

    def _among_peers(self, layout: Layout | None) -> Layout | None:
        """A layout over the ranks of the world as one over these processes, if they hold all of it."""
        if layout is None:
            return None
        ranks = [self.peers.rank_of(rank) for rank in layout.holders]
        holders = tuple(rank for rank in ranks if rank is not None)
        return Layout(holders, layout.boxes) if len(holders) == len(ranks) else None
