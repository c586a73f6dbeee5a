"""Released wheels for the tests of `patches/`, and the manifest computed from them.

`python -m tests.patches.releases` rewrites `patches/manifest.json` after a diff was changed or a version added.

Wheels are downloaded once into `$RL_MEMORY_TEST_WHEELS` (default `~/.cache/rl_memory_plugins/wheels`) with the
ordinary `pip`. A wheel that cannot be had is an error: these tests are about real files.
"""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from rl_memory_plugins.unified_diff import apply_hunks, parse_diff

PATCHES = Path(__file__).parents[2] / "patches"

DIFFS = {
    "sglang-0.5.5.diff": ["0.5.5"],
    "sglang-0.5.5.post1-0.5.9.diff": [
        *("0.5.5.post1", "0.5.5.post2", "0.5.5.post3", "0.5.6", "0.5.6.post1", "0.5.6.post2"),
        *("0.5.7", "0.5.8", "0.5.8.post1", "0.5.9"),
    ],
    "sglang-0.5.10.diff": ["0.5.10", "0.5.10.post1"],
}
VERSIONS = [version for versions in DIFFS.values() for version in versions]


def wheel(version: str) -> Path:
    """The wheel of an SGLang release that is pure Python (those before 0.5.11)."""
    default = Path.home() / ".cache" / "rl_memory_plugins" / "wheels"
    cache = Path(os.environ.get("RL_MEMORY_TEST_WHEELS", default))
    file = cache / f"sglang-{version}-py3-none-any.whl"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(cache), f"sglang=={version}"], check=True)
    return file


def unpack(version: str, site: Path) -> None:
    """What `pip install --no-deps` would put into site-packages, without byte code."""
    with zipfile.ZipFile(wheel(version)) as archive:
        archive.extractall(site)


def manifest() -> dict:
    """Per engine the file whose presence means a loader of its own, and per diff and version the hashes."""
    patches = {}
    for name, versions in DIFFS.items():
        files = parse_diff((PATCHES / name).read_bytes())
        patches[name] = {version: _hashes(version, files) for version in versions}
    return {
        "sglang": {"loader": "sglang/srt/plugins/__init__.py", "patches": patches},
        "vllm": {"loader": "vllm/plugins/__init__.py", "patches": {}},
    }


def _hashes(version, files):
    with zipfile.ZipFile(wheel(version)) as archive:
        originals = {file.path: archive.read(file.path) for file in files}
    pairs = {file.path: (originals[file.path], apply_hunks(originals[file.path], file.hunks)) for file in files}
    return {path: [hashlib.sha256(content).hexdigest() for content in pair] for path, pair in pairs.items()}


if __name__ == "__main__":
    (PATCHES / "manifest.json").write_text(json.dumps(manifest(), indent=2) + "\n")
