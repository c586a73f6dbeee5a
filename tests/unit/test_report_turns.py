"""The tables of engines that take turns on one GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration import report, report_turns

SWAPS = {
    "plugin": {"swap_s": 0.4, "swap_limit_s": 0.32, "swap_ratio": 1.25, "swaps": 40, "answers_identical": 1.0},
    "native": {"swap_s": 6.0, "swap_limit_s": 0.6, "swap_ratio": 10.0, "swaps": 4, "answers_identical": 0.0},
    "restart": {"swap_s": 40.0, "swaps": 1, "answers_identical": 1.0},
}
DETAILS = {"swap_limit_s": {"bytes_out": 2e6, "bytes_in": 15.2e9}}


def records(subject: str) -> list[dict[str, Any]]:
    about = {"engine": "vllm", "engine_version": "0.33.0", "torch": "2.14.1", "gpu": "NVIDIA H200", "model": "7b"}
    about |= {"engines": 2, "memory": 0.85, "commit": "abc", "command": f"python -m x --subject {subject}"}
    return [
        {**about, "subject": subject, "metric": metric, "median": median, **DETAILS.get(metric, {})}
        for metric, median in SWAPS[subject].items()
    ]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "turns-vllm-0.33.0-7b.json").write_text(json.dumps([one for each in SWAPS for one in records(each)]))
    return tmp_path


def test_nothing_without_records(tmp_path: Path) -> None:
    assert report_turns.pages(tmp_path, report.NAMES) == []


def test_a_swap_is_compared_with_its_limit_and_with_other_ways(results: Path) -> None:
    lines = report_turns.pages(results, report.NAMES)
    assert lines[0].startswith("### vLLM 0.33.0, two engines of 7B shape, 0.85 of one NVIDIA H200 each")
    assert "| | `take_turns_s` | the engine's own sleep | restart |" in lines
    assert "| swap, s | 0.40 | 6.00 | 40.00 |" in lines
    assert "| bytes copied to the GPU, GB | 15.2 | 15.2 | - |" in lines
    assert "| swap / limit | 1.25 | 10.00 | - |" in lines
    assert "| answers identical | yes | **no** | yes |" in lines
    assert "Measured by `python -m x`, commit abc." in lines


def test_a_subject_that_was_cut_short_has_no_column(tmp_path: Path) -> None:
    started = [{**records("native")[0], "metric": "startup_s"}]
    (tmp_path / "turns-vllm.json").write_text(json.dumps(records("plugin") + started))
    assert "| | `take_turns_s` |" in report_turns.pages(tmp_path, report.NAMES)
    (tmp_path / "turns-vllm.json").write_text(json.dumps(started))
    assert report_turns.pages(tmp_path, report.NAMES) == []


def test_records_of_turns_make_no_table_of_sleeps(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = results / "integration" / "results"
    folder.mkdir(parents=True)
    (results / "turns-vllm-0.33.0-7b.json").rename(folder / "turns-vllm-0.33.0-7b.json")
    monkeypatch.setattr(report, "REPOSITORY", results)
    assert not report.load()[0]
