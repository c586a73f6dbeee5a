"""The version of weights that an engine's own call has loaded, e.g. from disk, and that the caller has not named.

A load of other weights never keeps the version of the former weights. A load of weights that have had a version before
gets that version again: a load of the engine's first checkpoint is `default`. All other loaded weights are named by a
hash of their bytes, so that equal weights have equal versions on every engine.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import msgspec

from rl_memory_plugins.controller import Controller
from rl_memory_plugins.coordination import RankGroup, raise_failures
from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.tags import Content

logger = logging.getLogger(__name__)

PREFIX = "loaded:"
_MOST_KNOWN = 64


class Loaded(msgspec.Struct, frozen=True):
    """What one rank tells of its latest load.

    Attributes:
        source: The path or the call, for a person.
        content: The content of the rank's weights after the load.
        before: The identity of the weights before the load; empty if they were not valid.
        after: The identity of the weights now.
    """

    source: str
    content: Content
    before: str
    after: str


class LoadedVersions:
    """Names loaded weights, for the controller of one engine.

    Args:
        ranks: The ranks of the engine.
        controller: The controller of the engine. It shows the version of the present weights, which are valid.
    """

    def __init__(self, ranks: RankGroup, controller: Controller) -> None:
        self._ranks = ranks
        self._controller = controller
        self._loads = 0
        self._versions: dict[str, str] = {}  # by the identity of the weights on all ranks
        # Such engines hold different experts, so their hashes differ, but one version must name the weights of all.
        self._counts = controller.capabilities.steps_with_peers
        if not self._counts:
            try:
                present = [reply.result for reply in raise_failures(ranks.call("identity"))]
                self._learn(_of_all(present), controller.status.weight_version)
            except RLMemoryError:
                logger.exception("the first weights have no identity: a load of equal weights gets another version")

    def after_load(self, given: str | None = None) -> str | None:
        """The version of the weights after a load. Every rank calls this after the same loads.

        Args:
            given: The version that the caller has given.

        Returns: `None` if nothing was loaded, or the content is not valid.
        """
        answers = [reply.result for reply in raise_failures(self._ranks.call("loaded"))]
        if all(answer is None for answer in answers):
            return None
        if None in answers:  # the load had no weights of this pipeline stage
            present = [reply.result for reply in raise_failures(self._ranks.call("identity"))]
            answers = [
                answer or {"source": "", "content": rank.content, "before": identity, "after": identity}
                for answer, rank, identity in zip(answers, self._controller.status.ranks, present, strict=True)
            ]
        loads = msgspec.convert(answers, list[Loaded])
        self._loads += 1
        if any(load.content is not Content.VALID for load in loads):
            return None
        former = self._controller.status.weight_version
        if self._counts:
            version = given or f"{PREFIX}{self._loads}"
        else:
            version = self._version_of(loads, former, given)
        if version != former:
            source = next(load.source for load in loads if load.source)
            logger.warning("%s has replaced the weights %r: their version is now %r", source, former, version)
        return version

    def _version_of(self, loads: Sequence[Loaded], former: str, given: str | None) -> str:
        before, after = (_of_all([getattr(load, when) for load in loads]) for when in ("before", "after"))
        known = self._versions.get(after)
        self._learn(before, former)
        if before and before == after:
            known = former
        elif before and known == former:  # a trainer has loaded weights since, and has not named them
            known = None
        version = given or known or f"{PREFIX}{after or self._loads}"
        self._learn(after, version)
        return version

    def _learn(self, identity: str, version: str) -> None:
        if identity:
            self._versions.pop(identity, None)
            self._versions[identity] = version
            while len(self._versions) > _MOST_KNOWN:
                del self._versions[next(iter(self._versions))]


def _of_all(identities: Sequence[str]) -> str:
    """The identity of the weights on all ranks, 16 hexadecimal digits; empty if that of a rank is unknown."""
    if not all(identities):
        return ""
    return hashlib.blake2b("".join(identities).encode(), digest_size=8).hexdigest()
