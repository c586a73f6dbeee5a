"""A weight update of several engines in which an engine that fails leaves the others alone.

Each process has a `Lane` for each engine of which it serves ranks: a sender, in a thread. The lanes of a process share
one iteration over the source (`FanOut`), which runs in the caller's thread with all collectives. The lanes meet when
their ranks have answered to a manifest, and each meeting is one agreement of all processes. An engine that has failed
by the last meeting takes no part. Afterwards no engine waits for another, but for the tensors that `FanOut` gives to
all at once.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from rl_memory_plugins.errors import RLMemoryError, WeightUpdateError, from_record
from rl_memory_plugins.timing import LONGEST_S
from rl_memory_plugins.trainer.engine_handle import EngineHandle, Post
from rl_memory_plugins.trainer.fan_out import FanOut
from rl_memory_plugins.trainer.lane import Lane
from rl_memory_plugins.trainer.once import Once
from rl_memory_plugins.trainer.outcomes import (
    Outcome,
    behind_relay,
    failures_of,
    number_of,
    on_each,
    outcomes_of,
    record_of,
)
from rl_memory_plugins.trainer.peers import Peers
from rl_memory_plugins.trainer.push import EngineCall, specificity
from rl_memory_plugins.trainer.sites import Site, fail_senders, server_of, this_site
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.addresses import Endpoints
from rl_memory_plugins.weights.answers import Findings, of_senders
from rl_memory_plugins.weights.buffers import TRANSPORTS
from rl_memory_plugins.weights.manifest import manifest_error
from rl_memory_plugins.weights.source import TensorSource

GRACE_S = 10.0
"""How long the engines whose senders have failed may take together to say why, if `timeout_s` is not short."""


class _Member(NamedTuple):
    """One engine of the trainer: the process that controls it, its place there, and its devices."""

    controller: int
    place: int
    devices: list[str]


class _Vote(msgspec.Struct, array_like=True):
    """What a process knows of an engine: the answers of the ranks that it serves, or the record of an error."""

    member: int
    findings: Findings | None = None
    error: dict[str, Any] | None = None


class _Disagreed(Exception):
    """All processes have this error, because a process has shared it before the first byte."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class SeveralEngines:
    """One update of all engines of a trainer; see `push_from_all` with `on_failure="continue"`.

    Args:
        engines: The engines that this process controls.
        source, peers: The tensors, and the processes that iterate over them.
        timeout_s: The longest silence of an engine, in seconds.
        options: Those of `WeightSender`.
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        source: TensorSource,
        peers: Peers,
        timeout_s: float,
        options: dict[str, Any],
    ) -> None:
        self._engines = engines
        self._peers = peers
        self._timeout_s = timeout_s
        self._options = options
        self._fan = FanOut(Once(source))
        self._members: list[_Member] = []
        self._lanes: dict[int, Lane] = {}  # by member, as the next three
        self._own: dict[int, EngineHandle] = {}
        self._calls: dict[int, EngineCall] = {}
        self._errors: dict[int, RLMemoryError] = {}

    def push(
        self,
        request: dict[str, Any],
        post_of: Callable[[EngineHandle], Post],
        *,
        partial: bool,
        config: Callable[[], Any] | None,
    ) -> dict[str, Any]:
        """Update the engines that are well.

        Args:
            request: The fields of the update request but `endpoints`, `token` and `timeout_s`.
            post_of: The method of an engine that posts the request.
            config: Makes the configuration of the adapter.

        Returns: as `push_from_all`.

        Raises:
            RLMemoryError: no engine has got the weights, or the trainer itself has failed.
        """
        failure: Exception | None = None
        try:
            sites = self._muster()
            if config is not None:
                request = {**request, "config": self._peers.agree(config)[self._peers.rank]}
            self._call(sites, request, post_of)
            try:
                for lane in self._lanes.values():
                    lane.start(partial)
                self._run()
            except Exception as error:
                traceback.clear_frames(error.__traceback__)
                failure = error
        finally:
            self._close()
        try:
            errors = self._answers()
            if isinstance(failure, _Disagreed):  # nothing has begun, and all processes have the error
                raise failure.error from None
            failure = None if failure is None else wire.as_update_error(failure)
            outcomes = outcomes_of(self._engines, errors, self._peers.rank, self._timeout_s)
            for place, (engine, answer) in enumerate(zip(self._engines, self._engine_answers(), strict=True)):
                outcomes += behind_relay(answer, self._peers.rank, number_of(engine, place))
            shared = self._peers.share(outcomes, failure, specificity, as_type=list[Outcome], beside="engines")
        finally:
            del failure  # breaks the reference cycle between the error and this frame
        return self._report([outcome for outcomes in shared for outcome in outcomes])

    # -- before the first byte ----------------------------------------------------------------------------------

    def _muster(self) -> list[Site]:
        """Ask all engines for their devices, and share them."""
        found = on_each(self._engines, lambda engine: engine.devices(), self._timeout_s)
        devices = [[] if isinstance(one, RLMemoryError) else one for one in found]
        sites: list[Site] = self._peers.agree(lambda: this_site(devices), as_type=Site)
        self._members = [_Member(rank, *one) for rank, site in enumerate(sites) for one in enumerate(site.engines)]
        for number, member in enumerate(self._members):
            if member.controller == self._peers.rank:
                self._own[number] = self._engines[member.place]
                error = found[member.place]
                if isinstance(error, RLMemoryError):
                    self._errors[number] = error
        return sites

    def _call(self, sites: Sequence[Site], request: dict[str, Any], post_of: Callable[[EngineHandle], Post]) -> None:
        """Open the senders, and ask the engines of this process to connect."""
        token, rank = sites[0].token, self._peers.rank
        posts: dict[int, Post] = {}

        def listen() -> dict[str, Endpoints]:
            posts.update({number: post_of(engine) for number, engine in self._own.items()})
            self._fan.ask()
            for number, member in enumerate(self._members):
                served = [device for device in member.devices if server_of(device, member.controller, sites) == rank]
                if served:
                    self._lanes[number] = Lane(
                        served, self._fan, len(self._lanes), token, self._timeout_s, self._options
                    )
            return {str(number): lane.endpoints for number, lane in self._lanes.items()}

        places = self._peers.agree(listen)
        # While the trainer waits for an engine, the others hear nothing. Each engine can make it wait once. So can the
        # source, if it waits for another trainer.
        patience_s = min((len(self._members) + 1) * self._timeout_s + self._fan.silent_s, LONGEST_S)
        for number in self._own.keys() - self._errors.keys():
            endpoints = {
                device: places[server_of(device, rank, sites)][str(number)][device]
                for device in self._members[number].devices
            }
            fail = functools.partial(fail_senders, list(endpoints.items()), token)
            body = {"endpoints": endpoints, "token": token, "timeout_s": patience_s, **request}
            self._calls[number] = EngineCall(posts[number], body, fail)

    def _agree(self) -> None:
        """Have the lanes meet until the source sends what the engines take, and once more to begin.

        Raises:
            _Disagreed: a process has failed.
        """
        failure: Exception | None = None
        may_revise = self._fan.negotiable
        while True:
            found = self._meet(failure)
            refused = {number: findings.all_mismatches() for number, findings in found.items()}
            mismatches = list(dict.fromkeys(one for several in refused.values() for one in several))
            revised = False
            if may_revise and mismatches:
                try:
                    revised = self._fan.revise(mismatches)
                except Exception as error:
                    failure = error  # the other processes meet once more, whatever they have found
            for number, lane in self._lanes.items():
                if number in self._errors:
                    lane.decide(self._errors[number])
                elif revised:  # also an engine that takes the former specs is asked again
                    lane.decide(found[number]._replace(mismatches=mismatches))
                elif failure is None:
                    lane.decide(found[number])
            if revised:
                may_revise = self._fan.negotiable
                continue
            for number, several in refused.items():
                if several:
                    self._errors[number] = manifest_error(several, found[number].ignored.unknown)
            if not may_revise:
                return
            may_revise = False

    def _meet(self, failure: Exception | None) -> dict[int, Findings]:
        """Share what the lanes of all processes have found. Returns the findings of each engine that has not failed.

        Names that no engine uses are the same for all.

        Raises:
            _Disagreed: a process has failed.
        """
        votes = [_Vote(number, error=record_of(error)) for number, error in self._errors.items()]
        if failure is None:
            for number in self._lanes.keys() - self._errors.keys():
                lane = self._lanes[number]
                findings = lane.findings()
                if findings is not None:
                    votes.append(_Vote(number, findings))
                elif lane.error is not None:
                    votes.append(_Vote(number, error=record_of(lane.error)))
        try:
            shared = self._peers.share(votes, failure, specificity, as_type=list[_Vote])
        except Exception as error:
            raise _Disagreed(error) from None
        by_member: dict[int, list[Findings]] = {number: [] for number in range(len(self._members))}
        for vote in (vote for votes in shared for vote in votes):
            if vote.error is not None:
                self._errors.setdefault(vote.member, from_record(vote.error))
            elif vote.findings is not None:
                by_member[vote.member].append(vote.findings)
        everywhere = of_senders([one for several in by_member.values() for one in several])
        return {
            number: of_senders(several)._replace(ignored=everywhere.ignored, nearest=everywhere.nearest)
            for number, several in by_member.items()
            if number not in self._errors
        }

    # -- the update -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Send to all engines that take the tensors.

        Raises:
            _Disagreed: a process has failed before the first byte.
            Exception: the source of this process has failed.
        """
        self._agree()
        try:
            if not self._members or len(self._errors) < len(self._members):
                self._fan.run(for_others=self._peers.size > 1)
        except Exception:  # after an interrupt nobody waits for the lanes: `_close` ends them
            self._finish()
            raise
        self._finish()

    def _finish(self) -> None:
        for lane in self._lanes.values():
            lane.finish()

    def _close(self) -> None:
        """End everything that has not ended."""
        error = WeightUpdateError("the trainer gave the update up")
        self._fan.fail(error)
        for lane in self._lanes.values():
            lane.cancel(error)
        for number, lane in self._lanes.items():
            lane.close()
            known = self._errors.get(number)
            if lane.error is not None and (known is None or specificity(known) < specificity(lane.error)):
                self._errors[number] = lane.error
        self._fan.close()

    def _answers(self) -> list[RLMemoryError | None]:
        """Wait for the answers of the engines of this process. Returns the error of each."""
        deadline, grace = wire.Deadline(self._timeout_s), wire.Deadline(min(GRACE_S, self._timeout_s / 4))
        errors = []
        for number in self._own:
            error = self._errors.get(number)
            if number in self._calls:
                left = deadline.remaining()
                answer = self._calls[number].finish(left if error is None else min(left, grace.remaining()))
                # An engine that answers has the weights, whatever became of the connections to its ranks.
                error = None if answer is None else answer if error is None else max(error, answer, key=specificity)
            errors.append(error)
        return errors

    def _report(self, outcomes: list[Outcome]) -> dict[str, Any]:
        """The report of this process.

        Raises:
            RLMemoryError: no engine has got the weights.
        """
        failed = failures_of(outcomes, specificity)
        reports = [lane.report for lane in self._lanes.values() if lane.report is not None]
        gathered = {"sent_from_shards": 0, "gathered": self._fan.gathered}
        return {**merged(reports), **gathered, "engines": self._engine_answers(), "failed": failed}

    def _engine_answers(self) -> list[Any]:
        """The answers of the engines of this process; `None` for one that has failed."""
        return [self._calls[number].answer if number in self._calls else None for number in self._own]


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report of the senders of a process. Seconds are those of the slowest."""
    steps = sorted({step for report in reports for step in report["seconds"]})
    whole: dict[str, Any] = {
        name: max((report[name] for report in reports), default=0) for name in ("bytes", "tensors", "buckets")
    }
    whole["unused"] = reports[0]["unused"] if reports else []
    whole["seconds"] = {step: max(report["seconds"].get(step, 0.0) for report in reports) for step in steps}
    whole["receivers"] = [one for report in reports for one in report["receivers"]]
    if reports:
        whole["staging_bytes"] = sum(report["staging_bytes"] for report in reports)
        whole["transport"] = max((report["transport"] for report in reports), key=TRANSPORTS.index)
        whole["fallbacks"] = [one for report in reports for one in report["fallbacks"]]
    return whole
