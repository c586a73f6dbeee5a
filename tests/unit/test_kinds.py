"""The kinds of weights: their table, and what the records say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration import report_kinds
from integration.kinds import table
from integration.kinds.checkpoints import tensors_of
from integration.kinds.run import cleaned
from integration.kinds.ways import WAYS


def test_every_change_tries_a_third_of_the_kinds() -> None:
    assert set(table.CHOSEN) <= set(table.KINDS)
    assert 3 * len(table.CHOSEN) >= len(table.KINDS) - 2


def test_two_checkpoints_of_a_kind_differ_in_every_tensor(tmp_path: Path) -> None:
    """A tensor that is equal in both could be lost unnoticed."""
    kind = table.KINDS["dense"]
    first, other = (tensors_of(kind.write(tmp_path / str(seed), seed, kind.dtype)) for seed in (1, 2))
    assert first.keys() == other.keys()
    assert all((first[name] != other[name]).any() for name in first)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Traceback\n  File x\nValueError: no", "ValueError: no"),
        ("ValueError: it is\n    For further information visit https://x", "ValueError: it is"),
        ("in /tmp/abc/first/model", "in FOLDER/first/model"),
        ("cannot import name from /usr/lib/python3/vllm/x.py", "cannot import name from x.py"),
        ("", ""),
    ],
)
def test_a_reason_has_no_path_of_this_machine(text: str, reason: str) -> None:
    assert cleaned(text, Path("/tmp/abc")) == reason


def record(kind: str, way: str, outcome: str, reason: str = "") -> dict[str, str]:
    about = {"engine": "vllm", "engine_version": "0.32.0", "device": "cpu", "commit": "", "command": ""}
    return {**about, "kind": kind, "way": way, "outcome": outcome, "reason": reason}


def test_the_table_of_the_records(tmp_path: Path) -> None:
    stream, partial, _, own = WAYS
    records = [
        record("dense", stream, "passed"),
        record("dense", own, "engine_cannot", "wrong"),
        record("other", stream, "refused", "packed"),
        record("other", partial, "failed", "torn"),
    ]
    (tmp_path / "kinds-vllm-0.32.0-cpu.json").write_text(json.dumps(records))
    lines = report_kinds.table(tmp_path, {"vllm": "vLLM"})
    assert "| dense | yes, , , - |" in lines
    assert "| other | refused, **no**, ,  |" in lines
    assert any("vLLM 0.32.0, cpu: 1" in line for line in lines)
    assert "| vLLM 0.32.0, cpu | other (partial) | failed, `torn` |" in lines
