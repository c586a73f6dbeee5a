"""What every run of a trainer must show: all steps, log-probabilities that agree, and a reward that rises."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

RISE = 0.2  # of the mean reward from the first `ENDS` steps to the last, where a run is long enough to learn
ENDS = 5


def problems_of(
    subject: str, found: Mapping[tuple[str, str], Sequence[float]], steps: int, largest_gap: float
) -> list[str]:
    """What is not as it should be in the run of one subject.

    Args:
        subject: Its name.
        found: The values of all steps, by subject and metric.
        steps: How many there must be.
        largest_gap: The largest mean difference of log-probabilities, in nat.
    """
    reward, gap = found.get((subject, "reward"), []), found.get((subject, "logprob_difference"), [])
    if len(reward) != steps:
        return [f"{subject}: {len(reward)} of {steps} steps"]
    bad = []
    if not all(one < largest_gap for one in gap):
        bad.append(f"{subject}: the log-probabilities of rollout and trainer differ by {max(gap)}")
    if steps >= 4 * ENDS:
        first, last = statistics.mean(reward[:ENDS]), statistics.mean(reward[-ENDS:])
        if last < first + RISE:
            bad.append(f"{subject}: the reward went from {first:.3f} to {last:.3f}")
    return bad
