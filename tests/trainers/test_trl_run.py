"""What `integration.trainers.trl_grpo` objects to."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from integration.trainers.trl_grpo import problems

SUBJECTS = ("native", "plugin", "adapter", "server")


def objections(device: str, steps: int, changes: dict[tuple[str, str], list[float]]) -> list[str]:
    """Those to a run that is as it should be but for the changes."""
    rise = [0.25 + 0.7 * step / steps for step in range(steps)]
    values: dict[tuple[str, str], list[float]] = {}
    for subject in SUBJECTS:
        values[subject, "reward"], values[subject, "logprob_difference"] = rise, [0.001] * steps
        if subject in ("plugin", "adapter"):
            values[subject, "released_mib"] = [1.0] * steps
    records: list[dict[str, Any]] = [
        {"subject": subject, "metric": metric, "by_step": by_step}
        for (subject, metric), by_step in {**values, **changes}.items()
    ]
    return problems(records, Namespace(device=device, steps=steps, subjects=SUBJECTS))


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({}, None),
        ({("server", "reward"): [0.5] * 6}, None),  # its seeds are its own
        ({("adapter", "reward"): [0.25] * 6}, "reward is not the same"),
        ({("plugin", "logprob_difference"): [0.0011] * 6}, "logprob_difference is not the same"),
        ({("server", "logprob_difference"): [0.06] * 6}, "differ by 0.06"),
        ({("server", "logprob_difference"): [float("nan")] * 6}, "differ by nan"),
        ({("adapter", "released_mib"): [1.0, 0.0]}, "released nothing"),
        ({("plugin", "reward"): [0.25] * 3}, "3 of 6 steps"),
    ],
)
def test_on_a_cpu(changes: dict[tuple[str, str], list[float]], objection: str | None) -> None:
    found = objections("cpu", 6, changes)
    assert any(objection in one for one in found) if objection else found == []


def test_a_long_run_must_learn() -> None:
    assert objections("cuda", 20, {}) == []
    [found] = objections("cuda", 20, {("adapter", "reward"): [0.25] * 20})
    assert found.startswith("adapter: the reward went from 0.250")
