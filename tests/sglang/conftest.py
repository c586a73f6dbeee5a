"""Tests of the SGLang adapter beside the common suite, on a real SGLang. One server starts for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.engines.base import REPOSITORY, Launch, Server
from integration.engines.sglang import Sglang
from integration.models import SHAPES, new_model, write_model
from integration.waiting import wait_until

PROMPT = [5, 6, 7, 8]
SEED, OTHER_SEED = 1, 2
WATCHDOG_S = 10


class WatchedSglang(Sglang):
    """With a watchdog that a test can outwait."""

    def command(self, launch: Launch, port: int) -> list[str]:
        return [*super().command(launch, port), "--watchdog-timeout", str(WATCHDOG_S)]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", SHAPES["tiny"], seed=SEED)


@pytest.fixture(scope="session")
def first_weights(model_folder: Path) -> Any:
    """The checkpoint's weights, as the trainer has them."""
    return new_model(model_folder, SEED)


@pytest.fixture(scope="session")
def other_weights(model_folder: Path) -> Any:
    return new_model(model_folder, OTHER_SEED)


@pytest.fixture(scope="session")
def running_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    launch = Launch(model_folder, options={"implicit_update_session": True, "poison": True, "drain_timeout_s": 60})
    with Server(WatchedSglang(), launch, tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server


@pytest.fixture(scope="session")
def first_tokens(running_server: Server) -> list[int]:
    """The greedy answer under the checkpoint's weights, before anything has slept."""
    return running_server.generate(PROMPT)


@pytest.fixture
def server(running_server: Server, first_weights: Any, first_tokens: list[int]) -> Iterator[Server]:
    """Awake, with the checkpoint's weights; afterwards alive, and able to get there again by our calls alone."""
    yield running_server
    assert running_server.is_running(), running_server.tail()
    control = running_server.control
    control.wake_up()
    if control.memory()["content"] == "valid" and running_server.generate(PROMPT) == first_tokens:
        return
    control.update_weights(first_weights)
    assert running_server.generate(PROMPT) == first_tokens


@pytest.fixture(scope="session")
def python(model_folder: Path) -> Callable[..., str]:
    """Runs a script in a new process and returns what it printed; `FOLDER` in it is the model's folder."""
    environment = {**os.environ, **Sglang().environment(Launch(model_folder))}
    path = [environment["PYTHONPATH"], str(REPOSITORY)]
    environment["PYTHONPATH"] = os.pathsep.join(path)

    def run(script: str, **extra: str) -> str:
        folder = model_folder.parent / "scripts"
        folder.mkdir(exist_ok=True)
        file = folder / f"script{len(list(folder.iterdir()))}.py"  # a file: schedulers are spawned, and read it
        guarded = 'if __name__ == "__main__":\n' + textwrap.indent(textwrap.dedent(script), "    ")
        file.write_text(f"FOLDER = {str(model_folder)!r}\n{guarded}")
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(file)],
            env={**environment, **extra},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture(scope="session")
def forked_python(model_folder: Path) -> Callable[..., str]:
    """As `python`, in seconds less: SGLang is imported when the script begins, and its processes are forks, too."""
    kind, launch = Sglang(), Launch(model_folder, forked=True)

    def run(script: str, **extra: str) -> str:
        folder = model_folder.parent / "forked_scripts"
        folder.mkdir(exist_ok=True)
        name = f"forked_script{len(list(folder.iterdir()))}"
        output, errors = folder.parent / f"{name}.out", folder.parent / f"{name}.err"
        lines = ["import os", f"FOLDER = {str(model_folder)!r}", 'if __name__ == "__main__":']
        lines.append(f"    os.dup2(os.open({str(errors)!r}, os.O_WRONLY | os.O_CREAT), 2)")
        (folder / f"{name}.py").write_text("\n".join(lines) + "\n" + textwrap.indent(textwrap.dedent(script), "    "))
        environment = {**os.environ, **kind.environment(launch), **extra}
        path = [environment["PYTHONPATH"], str(REPOSITORY), str(folder)]
        process = kind.forks(environment).start(
            [sys.executable, "-m", name], {**environment, "PYTHONPATH": os.pathsep.join(path)}, output
        )
        try:
            wait_until(lambda: process.poll() is not None, "the script ends", 600)
        finally:
            process.kill_group()  # what the script has started, if it fails or hangs
        said = output.read_text()
        assert process.returncode == 0, said[-2000:] + errors.read_text()[-4000:]
        return said

    return run
