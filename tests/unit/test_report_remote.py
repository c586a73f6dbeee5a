"""The tables of updates from one GPU to another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from integration import report, report_remote

MEDIANS = {"update_first_s": 1.5, "update_s": 0.25, "gb_per_s": 60.0, "closed_s": 0.2, "peak_extra_mib_engine": 900.4}


def records(subject: str, transport: str, *without: str) -> list[dict[str, Any]]:
    common = {"engine": "vllm", "engine_version": "0.33.0", "torch": "2.14.1", "gpu": "NVIDIA H200", "gpus": 2}
    common |= {"model": "7b", "subject": subject, "transport": transport, "bytes": 15231233024, "command": "run --it"}
    return [
        {**common, "metric": metric, "median": median, "min": median / 2, "max": median * 2}
        for metric, median in MEDIANS.items()
        if metric not in without
    ]


def test_nothing_without_records(tmp_path: Path) -> None:
    assert report_remote.pages(tmp_path, report.NAMES) == []


def test_a_row_for_each_subject(tmp_path: Path) -> None:
    both = records("plugin", "nccl") + records("broadcast", "nccl", "closed_s", "peak_extra_mib_engine")
    (tmp_path / "remote-vllm-0.33.0-7b.json").write_text(json.dumps(both))
    lines = report_remote.pages(tmp_path, report.NAMES)
    assert lines[0] == "### From one NVIDIA H200 to another: vLLM 0.33.0, 7B shape (15.2 GB), torch 2.14.1"
    rows = [line for line in lines if "`nccl`" in line]
    assert [row.split(" | ")[2:] for row in rows] == [
        ["250.0", "125.0 to 500.0", "60.0", "1500", "-", "-", "- |"],
        ["250.0", "125.0 to 500.0", "60.0", "1500", "200.0", "-", "900 |"],
    ]
    assert "limit" in rows[0] and "the plugin" in rows[1]
    assert lines[-2] == "Measured by `run --it`."


def test_a_subject_that_failed_before_its_updates_has_no_row(tmp_path: Path) -> None:
    (tmp_path / "remote-vllm-0.33.0-7b.json").write_text(json.dumps(records("native", "nccl", "update_s")))
    assert report_remote.pages(tmp_path, report.NAMES) == []


def test_the_tables_of_one_gpu_leave_these_records_out(tmp_path: Path, monkeypatch: Any) -> None:
    results = tmp_path / "integration" / "results"
    results.mkdir(parents=True)
    (results / "remote-vllm-0.33.0-7b.json").write_text(json.dumps(records("plugin", "nccl")))
    monkeypatch.setattr(report, "REPOSITORY", tmp_path)
    assert report.load() == ({}, {})
