"""Plans against what runs on GPUs have measured.

Constants are fitted on some records (`fitted`, and the comments of `plan/measured.py`); the others check them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.report_plan import CACHE_MIB, OLD_COMMIT, Compared, compared

RESULTS = Path(__file__).parents[3] / "integration" / "results"
ALL = compared(RESULTS)
CHECKED = [one for one in ALL if not one.fitted]


def named(one: Compared) -> str:
    return f"{one.record}-{one.subject}-{one.figure}"


@pytest.mark.parametrize("one", CHECKED, ids=named)
def test_a_plan_is_within_a_tenth_of_what_was_measured(one: Compared) -> None:
    assert 0.9 * (one.measured - one.slack) <= one.planned <= 1.1 * one.measured


@pytest.mark.parametrize("one", [one for one in ALL if one.fitted], ids=named)
def test_a_fitted_figure_is_that_of_its_record(one: Compared) -> None:
    assert one.planned == pytest.approx(one.measured, rel=0.01)


def test_every_record_with_memory_is_compared() -> None:
    kinds = ("sleep-", "ranks-", "step-", "grpo-", "trl-", "verl-vllm", "weights-", "wire-", "fsdp-")
    with_memory = {path.stem for path in RESULTS.glob("*.json") if path.stem.startswith(kinds)}
    without = {
        "weights-sglang-0.5.20-0.5b",  # has no staged figure
        "step-vllm-0.33.0-7b-tp2",  # of two GPUs
        "step-sglang-0.5.23-7b-tp2",
        "sleep-vllm-0.33.0-7b-two-ranks",  # at level 2 only
        "sleep-vllm-0.33.0-72b-two-ranks",
        "sleep-vllm-0.33.0-72b-two-ranks-on-another-host",
        "sleep-sglang-0.5.23-7b-two-ranks",
        "ranks-sglang-0.5.23-7b-tp2-suspend-h100",  # an option that plans do not have
        "ranks-vllm-0.33.0-7b-tp2-suspend-h200",
    }
    assert {one.record for one in ALL} == with_memory - without


def test_each_model_and_each_engine_has_figures_that_no_constant_was_taken_from() -> None:
    for word in ("vllm", "sglang", "0.5b", "1.5b", "3b", "7b", "32b", "tp2", "moe"):  # fp8 has one record
        assert [one for one in CHECKED if word in one.record], word


def test_torchs_cache_excuses_old_records_only() -> None:
    assert {one.slack for one in ALL} == {0, CACHE_MIB}
    excused = {one.record for one in ALL if one.slack}
    assert excused and all(OLD_COMMIT in (RESULTS / f"{record}.json").read_text() for record in excused)
