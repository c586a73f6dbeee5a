"""The tables of whole training steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration import report, report_steps

MEDIANS = {
    "release_s": 0.5,
    "return_s": 1.0,
    "transition_s": 1.5,
    "first_transition_s": 3.0,
    "transition_limit_s": 1.2,
    "peak_gpu_mib": 2048.0,
    "host_mib": 512.0,
    "losses": 2.0,
}


def records(subject: str, factor: float, losses: list[float], gpus: int = 1) -> list[dict[str, Any]]:
    common = {"engine": "vllm", "engine_version": "0.33.0", "torch": "2.14.1", "gpu": "NVIDIA H200", "gpus": gpus}
    common |= {
        "model": "3b",
        "subject": subject,
        "command": f"python -m integration.bench_step --subject {subject} other --out FILE",
    }
    made = []
    for metric, median in MEDIANS.items():
        scaled = median * (factor if metric in ("release_s", "return_s", "transition_s") else 1)
        made.append({**common, "metric": metric, "median": scaled, "by_step": losses, "bytes": 37e9})
    return made


@pytest.fixture
def results(tmp_path: Path) -> Path:
    both = records("native", 1, [8.0, 7.0]) + records("pausable", 0.5, [8.0, 7.0])
    (tmp_path / "step-vllm-0.33.0-3b.json").write_text(json.dumps(both))
    return tmp_path


def test_a_step_is_compared_with_its_limit_and_with_the_native_one(results: Path) -> None:
    lines = report_steps.pages(results, results, report.NAMES)
    assert lines[0] == "### Steps of vLLM 0.33.0, 3B shape, one NVIDIA H200, torch 2.14.1"
    assert "| | natively | `PausableMemory` |" in lines
    assert "| transition: both, ms | 1500 | 750 |" in lines
    assert "| transition / limit | 1.25 | 0.62 |" in lines
    assert "| first / later | 2.00 | 4.00 |" in lines
    assert "| transition / native | 1.00 | 0.50 |" in lines
    assert "| most memory in use on a GPU, GiB | 2.0 | 2.0 |" in lines
    assert any("37.0 GB" in line and "equal bit by bit" in line for line in lines)
    assert "Measured by `python -m integration.bench_step --out FILE`." in lines


def test_the_limit_is_the_shortest_that_a_subject_measured(results: Path) -> None:
    path = results / "step-vllm-0.33.0-3b.json"
    found = json.loads(path.read_text())
    for record in found:
        if (record["metric"], record["subject"]) == ("transition_limit_s", "pausable"):
            record["median"] = 1.5
    path.write_text(json.dumps(found))
    assert "| transition / limit | 1.25 | 0.62 |" in report_steps.pages(results, results, report.NAMES)


def test_losses_that_differ_show(tmp_path: Path) -> None:
    both = records("native", 1, [8.0, 7.0]) + records("offloader", 1, [8.0, 7.5])
    (tmp_path / "step-vllm.json").write_text(json.dumps(both))
    assert any("**not equal**" in line for line in report_steps.pages(tmp_path, tmp_path, report.NAMES))


def test_one_subject_is_not_compared_with_itself(tmp_path: Path) -> None:
    (tmp_path / "step-vllm.json").write_text(json.dumps(records("native", 1, [8.0, 7.0])))
    assert not any("losses" in line for line in report_steps.pages(tmp_path, tmp_path, report.NAMES))


def test_pictures_of_the_documentation_are_shown(results: Path) -> None:
    folder = results / "steps"
    folder.mkdir()
    (folder / "step-vllm-3b-pausable.svg").touch()
    shown = [line for line in report_steps.pages(results, results, report.NAMES) if line.startswith("![")]
    assert len(shown) == 1
    assert shown[0].endswith("(steps/step-vllm-3b-pausable.svg)")


def test_records_of_steps_make_no_table_of_sleeps(results: Path, monkeypatch) -> None:
    folder = results / "integration" / "results"
    folder.mkdir(parents=True)
    (results / "step-vllm-0.33.0-3b.json").rename(folder / "step-vllm-0.33.0-3b.json")
    monkeypatch.setattr(report, "REPOSITORY", results)
    runs, _ = report.load()
    assert not runs
