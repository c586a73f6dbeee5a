"""The file of `rl-memory serve FILE.yaml`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.serve.configuration import ServeFile, read
from rl_memory_plugins.server.answers import Memory
from rl_memory_plugins.server.responses import json_response
from rl_memory_plugins.tags import Content

DOCS = Path(__file__).parents[3] / "docs"

SHORT = """
models:
  - {name: a, engine: vllm, model: m, args: [--max-model-len, 4096]}
  - {name: b, engine: sglang, model: n, python: /env/bin/python, env: {CUDA_VISIBLE_DEVICES: 1}, port: 9000}
"""


def written(folder: Path, text: str, front: int = 8000) -> ServeFile:
    path = folder / "models.yaml"
    path.write_text(text)
    return read(path, front)


def test_a_file_is_read(tmp_path: Path) -> None:
    found = written(tmp_path, SHORT)
    first, second = found.models
    assert first.args == ["--max-model-len", "4096"] and second.env == {"CUDA_VISIBLE_DEVICES": "1"}
    assert (first.python, second.python) == (sys.executable, "/env/bin/python")
    assert found.ports(8000) == [8001, 9000]


def test_engines_take_turns_unless_the_file_says_how(tmp_path: Path) -> None:
    found = written(tmp_path, SHORT + "rl_memory: {take_turns_s: 1, eager_backup: true}")
    entry = found.models[0].model_copy(update={"rl_memory": {"take_turns_s": 2}})
    assert found.options(entry) == {"take_turns_s": 2, "wake_on_request_s": 600.0, "eager_backup": True}


ENTRY = {"name": "a", "engine": "vllm", "model": "m"}


@pytest.mark.parametrize(
    "content, said",
    [
        ({"models": []}, "models: List should have at least 1 item"),
        ({"models": [{**ENTRY, "engine": "trt"}]}, "models.0.engine: Input should be 'vllm' or 'sglang'"),
        ({"models": [{**ENTRY, "mode": "m"}]}, "models.0.mode: Extra inputs"),
        ({"models": [{"name": "a", "engine": "vllm"}]}, "models.0.model: Field required"),
        ({"models": [{**ENTRY, "args": ["--port=1"]}]}, "--port: rl-memory serve sets this itself"),
        ({"models": [{**ENTRY, "args": ["--served_model_name", "x"]}]}, "--served-model-name: rl-memory serve sets"),
        ({"models": [{**ENTRY, "env": {"A=B": "1"}}]}, "models.0.env: Value error, 'A=B': a name has no `=`"),
        ({"models": [{**ENTRY, "env": {"": "1"}}]}, "'': a name has no `=`"),
        ({"models": [{**ENTRY, "env": {"A": "x\0"}}]}, "'A': a name has no `=`, and neither it nor its value a NUL"),
        ({"models": [{**ENTRY, "env": {"VLLM_API_KEY": "k"}}]}, "VLLM_API_KEY: rl-memory serve sets this itself"),
        ({"models": [ENTRY, ENTRY]}, "two models are called 'a'"),
        ({"models": [{**ENTRY, "port": 8000}]}, "the port 8000 of model 'a' is taken twice"),
        ({"models": [{**ENTRY, "rl_memory": {"poisson": 1}}]}, "model 'a': bad rl_memory options: poisson"),
        ({"models": [{**ENTRY, "rl_memory": {"take_turns_s": None}}]}, "take_turns_s must be a number"),
        ([ENTRY], "the file: Input should be"),
        (None, "the file: Input should be"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(said)) as caught:
        written(tmp_path, json.dumps(content))
    assert "models.yaml" in caught.value.message


def test_a_port_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="model 'a' would have the port 65536"):
        written(tmp_path, SHORT, front=65535)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot read .*missing\.yaml"):
        read(tmp_path / "missing.yaml", 8000)
    with pytest.raises(InvalidRequestError, match="is not YAML"):
        written(tmp_path, "models: [")


def test_the_files_of_the_page_are_good(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n# models\.yaml\n(.*?)```", (DOCS / "several-models.md").read_text(), re.DOTALL)
    assert examples
    for example in examples:
        written(tmp_path, example)


@pytest.mark.parametrize("version", ["default", "\udcff"], ids=["text", "no text"])
def test_the_probe_of_the_page_finds_admission_in_the_answer(version: str) -> None:
    [pattern] = re.findall(r"\| grep -q '(.*)'", (DOCS / "several-models.md").read_text())
    answers = [
        bytes(json_response(Memory(opened, None, False, version, Content.VALID, [])).body) for opened in (True, False)
    ]
    assert [pattern.encode() in answer for answer in answers] == [True, False]
