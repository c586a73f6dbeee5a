"""The kinds of weights: their table, and what the records say."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from integration import report_kinds
from integration.kinds import run, table
from integration.kinds.checkpoints import Write, tensors_of, with_file
from integration.kinds.quantised import TRAINED, block_fp8, gptq
from integration.kinds.run import cleaned
from integration.kinds.subject import Answer
from integration.kinds.ways import WAYS


def test_every_change_tries_a_third_of_the_kinds() -> None:
    chosen = set().union(*table.CHOSEN.values())
    assert chosen <= set(table.KINDS)
    assert 3 * len(chosen) >= len(table.KINDS)


def test_two_checkpoints_of_a_kind_differ_in_every_tensor(tmp_path: Path) -> None:
    """A tensor that is equal in both could be lost unnoticed."""
    kind = table.KINDS["dense"]
    first, other = (tensors_of(kind.write(tmp_path / str(seed), seed, kind.dtype)) for seed in (1, 2))
    assert first.keys() == other.keys()
    assert all((first[name] != other[name]).any() for name in first)


def test_scales_of_a_kv_cache_differ_in_every_layer_and_with_the_weights(tmp_path: Path) -> None:
    """An update that lost them, or mixed them up, would go unnoticed."""
    kind = table.KINDS["FP8 KV cache with scales"]
    both = [tensors_of(kind.write(tmp_path / str(seed), seed, kind.dtype)) for seed in (1, 2)]
    scales = [float(one) for tensors in both for name, one in tensors.items() if name.endswith(("k_scale", "v_scale"))]
    assert len(scales) == 2 * 2 * 2  # checkpoints, layers, keys and values
    assert len({*scales}) == len(scales)


@pytest.mark.parametrize(("name", "quantise"), [("FP8 in blocks", block_fp8), ("GPTQ int4", gptq)])
def test_what_a_trainer_quantises_has_the_names_of_a_quantised_checkpoint(
    name: str, quantise: Callable[[Write], Write], tmp_path: Path
) -> None:
    kind = table.KINDS[f"{name}, from a module in 16 bits"]
    sent = tensors_of(kind.write(tmp_path / "sent", 1, kind.dtype))
    trained = tmp_path / "sent" / TRAINED
    expected = tensors_of(
        quantise(lambda folder, *_: shutil.copytree(trained, folder))(tmp_path / "tool", 1, kind.dtype)
    )
    assert {one: (tensor.shape, tensor.dtype) for one, tensor in sent.items()} == {
        one: (tensor.shape, tensor.dtype) for one, tensor in expected.items()
    }


@pytest.mark.parametrize("name", [name for name in table.KINDS if name.endswith(", experts") and "engine" not in name])
def test_routers_of_quantised_experts_stay_as_they_are(name: str, tmp_path: Path) -> None:
    """As in published checkpoints. Engines quantise a router that the configuration does not name."""
    kind = table.KINDS[name]
    kind.write(tmp_path, 1, kind.dtype)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    ignored = [*config.get("ignore", ()), *config.get("modules_to_not_convert", ())]
    patterns = [one.removeprefix("re:") if one.startswith("re:") else re.escape(one) + "$" for one in ignored]
    routers = [one.removesuffix(".weight") for one in tensors_of(tmp_path) if one.endswith(".gate.weight")]
    assert routers
    assert all(any(re.match(pattern, router) for pattern in patterns) for router in routers)
    assert all(tensors_of(tmp_path)[f"{router}.weight"].dtype == torch.bfloat16 for router in routers)


def test_a_file_beside_the_weights(tmp_path: Path) -> None:
    def write(folder: Path, *_: Any) -> Path:
        return folder

    assert with_file(write, "more.json", one=1)(tmp_path, 1, "") == tmp_path
    assert json.loads((tmp_path / "more.json").read_text()) == {"one": 1}


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


class Engine:
    """Instead of a process with an engine: it writes a log and fails."""

    def __init__(self, log: Path, text: str, error: Exception) -> None:
        log.write_text(text)
        self._error = error

    def wait_ready(self, timeout_s: float) -> None:
        raise self._error

    def stop(self) -> None: ...


def outcomes(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, error: Exception) -> list[run.Outcome]:
    """Of a kind whose engines do not start."""
    monkeypatch.setattr(run.Starter, "write", lambda _: None)
    monkeypatch.setattr(run, "start", lambda engine, kind, folder, log, adapter, **_: Engine(log, text, error))
    return list(run.run("vllm", "dense", folder, WAYS, logs=folder / "logs", start_timeout_s=1))


VLLM_LOG = """
(EngineCore pid=7) ERROR 11-26 11:56:44 [core.py:1155] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-26 11:56:44 [core.py:1155] ValueError: no kernel
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
SGLANG_LOG = "[2026-11-26 11:56:44] Scheduler hit an exception\nModuleNotFoundError: No module named 'x'\n"


@pytest.mark.parametrize(
    ("log", "error", "reason"),
    [
        (VLLM_LOG, RuntimeError("Engine core initialization failed. See root cause above."), "ValueError: no kernel"),
        (SGLANG_LOG, EOFError(), "ModuleNotFoundError: No module named 'x'"),
        ("", EOFError(), "the engine's process ended without an error in its log"),
        (VLLM_LOG, RuntimeError("wrong option"), "wrong option"),
    ],
)
def test_the_reason_of_an_engine_that_does_not_start_is_the_cause_in_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: str, error: Exception, reason: str
) -> None:
    found = outcomes(monkeypatch, tmp_path, log, error)
    assert {(one.outcome, one.reason) for one in found} == {("engine_cannot", reason)}


def test_the_log_of_an_engine_that_does_not_start_is_shown_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes(monkeypatch, tmp_path, "\n".join(f"line {number};" for number in range(100)), EOFError())
    shown = capsys.readouterr().out
    assert "line 99;" in shown and "line 60;" in shown and "line 59;" not in shown
    assert (tmp_path / "logs" / "0.log").read_text().startswith("line 0;")


def test_an_engine_that_is_slow_is_not_called_unable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = outcomes(monkeypatch, tmp_path, "", TimeoutError("no answer within 1 s"))
    assert {(one.outcome, one.reason) for one in found} == {("failed", "no answer within 1 s")}
    assert len(list((tmp_path / "logs").glob("*.log"))) == 1, "no second start"


class Answering:
    """A subject that gives these answers, one after the other, and the last one for good."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)

    def answer(self) -> Answer:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def forget(self) -> None: ...


def said(token: int, value: float) -> Answer:
    return Answer([[token]], [[value]])


def test_an_engine_is_asked_until_it_repeats_itself() -> None:
    first: Any = Answering(said(1, 0.5), said(2, 0.5))
    assert run.steady_answer(first) == said(2, 0.5)


@pytest.mark.parametrize(
    ("last", "how"),
    [
        (said(2, 0.5), "tokens differ from its last answer"),
        (said(1, 0.25), "values differ from its last answer by up to 0.25"),
        (said(1, math.nan), "values are not numbers"),
    ],
)
def test_how_an_engine_does_not_repeat_itself(last: Answer, how: str) -> None:
    never: Any = Answering(said(3, 0.5), said(1, 0.5), last)
    with pytest.raises(run.WrongAnswerError, match=f"differently each time: {how}$"):
        run.steady_answer(never)


@pytest.mark.parametrize(("again", "outcome", "tried"), [("other", "failed", 3), ("chance", "engine_cannot", 1)])
def test_a_wrong_answer_counts_only_if_fresh_engines_agree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, again: str, outcome: str, tried: int
) -> None:
    """Such as of a model with memory that nothing fills. Then no further way can be compared."""
    answers = iter(["other", "first", again])
    calls = []

    class Child:
        def __call__(self, function: Any, *_: Any) -> Any:
            calls.append(function)
            return (run.WRONG, "differs") if function is run.try_way else next(answers)

        def stop(self) -> None: ...

    monkeypatch.setattr(run.Starter, "write", lambda _: None)
    monkeypatch.setattr(run.Starter, "start", lambda *_, **__: Child())
    found = list(run.run("vllm", "dense", tmp_path, WAYS[:3]))
    assert [one.outcome for one in found] == 3 * [outcome]
    assert calls.count(run.try_way) == tried
