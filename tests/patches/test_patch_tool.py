"""The tool, on real releases unpacked into directories of their own."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rl_memory_plugins import patching
from rl_memory_plugins.errors import from_record
from rl_memory_plugins.patch_cli import app
from rl_memory_plugins.patching import (
    EngineNotFoundError,
    FileModifiedError,
    PatchConflictError,
    VersionNotSupportedError,
)
from tests.patches import releases
from tests.patches.conftest import snapshot

ENGINE = "sglang/srt/entrypoints/engine.py"
SCHEDULER = "sglang/srt/managers/scheduler.py"


def found(root):
    return patching.find_installation("sglang", root)


def rename_version(root, version):
    """Make the metadata in `root` say another version."""
    (metadata,) = root.glob("sglang-*.dist-info/METADATA")
    text = metadata.read_text()
    metadata.unlink()  # a hard link
    old = next(line for line in text.splitlines() if line.startswith("Version: "))
    metadata.write_text(text.replace(old, f"Version: {version}", 1))


def edit(root, path, text="\n# mine\n"):
    content = (root / path).read_text()
    (root / path).unlink()
    (root / path).write_text(content + text)


def refused(root, error, action=patching.apply, **arguments):
    """`action` raises `error` and changes nothing; the error."""
    before = snapshot(root)
    with pytest.raises(error) as caught:
        action(found(root), **arguments)
    assert snapshot(root) == before
    return caught.value


def test_the_manifest_is_what_the_released_wheels_say():
    assert json.loads((releases.PATCHES / "manifest.json").read_text()) == releases.manifest()


@pytest.mark.parametrize("version", releases.VERSIONS)
def test_check_apply_revert(version, site):
    root = site(version)
    before = snapshot(root)

    report = patching.check(found(root))
    assert (report.status, report.version, report.changed) == ("unpatched", version, ())
    assert snapshot(root) == before

    assert patching.apply(found(root)).changed == report.files
    patched = snapshot(root)
    assert {path for path in before if patched[path] != before[path]} == set(report.files)
    assert {path for path in patched.keys() - before.keys() if not path.startswith(".rl_memory_patch/")} == set()
    for path in report.files:
        compile(patched[path][0], path, "exec")
        assert patched[path][1] == before[path][1], "the mode stays"

    again = patching.apply(found(root))
    assert (again.status, again.changed) == ("applied", ())
    assert patching.check(found(root)).status == "applied"
    assert snapshot(root) == patched

    assert patching.revert(found(root)).changed == report.files
    assert snapshot(root) == before
    assert not (root / ".rl_memory_patch").exists()
    assert patching.revert(found(root)).changed == ()
    assert patching.check(found(root)).status == "unpatched"


def test_an_installers_cache_is_not_written_to(site, released):
    cache = snapshot(released("0.5.9"))
    patching.apply(found(site("0.5.9")))
    assert snapshot(released("0.5.9")) == cache


def test_a_local_version_label_is_the_same_release(site):
    root = site("0.5.9")
    rename_version(root, "0.5.9+cu129")
    assert patching.apply(found(root)).status == "applied"


def test_an_unknown_version_is_refused(site):
    root = site("0.5.9")
    rename_version(root, "0.5.4.post3")
    assert refused(root, VersionNotSupportedError).details["supported"] == releases.VERSIONS
    refused(root, VersionNotSupportedError, patching.check)


def test_a_version_that_the_files_are_not_is_refused(site):
    root = site("0.5.9")
    rename_version(root, "0.5.8")
    assert ENGINE in refused(root, FileModifiedError).details["files"]


def test_a_modified_file_is_refused(site):
    root = site("0.5.9")
    edit(root, SCHEDULER)
    assert refused(root, FileModifiedError).details["files"] == [SCHEDULER]
    refused(root, FileModifiedError, patching.check)


def test_a_missing_file_is_refused(site):
    root = site("0.5.9")
    (root / SCHEDULER).unlink()
    refused(root, FileModifiedError, allow_modified=True)


def test_a_modified_file_in_which_every_hunk_fits_can_be_allowed(site):
    root = site("0.5.9")
    edit(root, SCHEDULER)
    before = snapshot(root)
    assert patching.apply(found(root), allow_modified=True).status == "applied"
    assert (root / SCHEDULER).read_text().endswith("# mine\n")
    assert patching.check(found(root)).status == "applied"
    patching.revert(found(root))
    assert snapshot(root) == before


def test_a_modified_file_in_which_a_hunk_does_not_fit_is_refused_even_then(site):
    root = site("0.5.9")
    text = (root / SCHEDULER).read_text()
    (root / SCHEDULER).unlink()
    (root / SCHEDULER).write_text(text.replace("    # Generate the logger prefix\n", ""))
    assert "hunk 1" in str(refused(root, FileModifiedError, allow_modified=True))


def test_a_file_modified_after_the_patch_is_not_overwritten(site):
    root = site("0.5.9")
    patching.apply(found(root))
    edit(root, SCHEDULER)
    for action in (patching.apply, patching.check, patching.revert):
        assert refused(root, FileModifiedError, action).details["files"] == [SCHEDULER]


def test_a_damaged_backup_is_not_written_back(site):
    root = site("0.5.9")
    patching.apply(found(root))
    (root / ".rl_memory_patch/sglang/backup" / SCHEDULER).write_text("gone")
    assert refused(root, FileModifiedError, patching.revert).details["files"] == [SCHEDULER]


def test_a_patch_without_its_record_is_refused(site):
    root = site("0.5.9")
    patching.apply(found(root))
    (root / ".rl_memory_patch/sglang/state.json").unlink()
    refused(root, PatchConflictError)


def test_a_patch_by_another_version_of_the_diff_must_be_reverted_first(site):
    root = site("0.5.9")
    before = snapshot(root)
    patching.apply(found(root))
    state = root / ".rl_memory_patch/sglang/state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "diff_sha256": "0" * 64}))
    assert refused(root, PatchConflictError).details["version"] == "0.5.9"
    patching.revert(found(root))
    assert snapshot(root) == before


def test_a_reinstalled_engine_can_be_patched_again(site):
    """What an upgrade leaves: new files, new metadata, and the record of the old patch."""
    old, new = site("0.5.8"), site("0.5.9")
    patching.apply(found(old))
    (old / ".rl_memory_patch").rename(new / ".rl_memory_patch")
    assert patching.check(found(new)).status == "unpatched"
    patching.apply(found(new))
    patching.revert(found(new))
    assert not (new / ".rl_memory_patch").exists()


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
def test_an_apply_that_fails_changes_nothing(site, monkeypatch, at, error):
    root = site("0.5.9")
    with failing_replace(monkeypatch, at, error) as failed:
        refused(root, type(error))
    assert failed == [error]
    assert patching.apply(found(root)).status == "applied"


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_revert_that_fails_changes_nothing(site, monkeypatch, at):
    root = site("0.5.9")
    before = snapshot(root)
    patching.apply(found(root))
    with failing_replace(monkeypatch, at, OSError("no space left on device")) as failed:
        refused(root, OSError, patching.revert)
    assert failed
    patching.revert(found(root))
    assert snapshot(root) == before


@pytest.mark.parametrize("finish", [patching.apply, patching.revert])
def test_a_process_killed_in_the_middle_can_be_finished_or_undone(site, finish):
    root = site("0.5.9")
    before = snapshot(root)
    script = (
        "import os, sys; from pathlib import Path; from rl_memory_plugins import patching\n"
        "replace, calls = Path.replace, []\n"
        "def killed(*a):\n    calls.append(a)\n    if len(calls) == 3: os._exit(9)\n    replace(*a)\n"
        "Path.replace = killed\n"
        "patching.apply(patching.find_installation('sglang', Path(sys.argv[1])))"
    )
    environment = {**os.environ, "PYTHONPATH": str(releases.PATCHES.parent)}
    assert subprocess.run([sys.executable, "-c", script, str(root)], env=environment).returncode == 9
    assert patching.check(found(root)).status == "partial"
    finish(found(root))
    assert patching.check(found(root)).status == ("applied" if finish is patching.apply else "unpatched")
    patching.revert(found(root))
    assert snapshot(root) == before


class failing_replace:
    """`Path.replace` raises once, at its call number `at`."""

    def __init__(self, monkeypatch, at, error):
        self.monkeypatch, self.at, self.error = monkeypatch, at, error

    def __enter__(self):
        replace, calls, failed = Path.replace, [], []

        def failing(source, target):
            calls.append(target)
            if len(calls) == self.at:
                failed.append(self.error)
                raise self.error
            replace(source, target)

        self.monkeypatch.setattr(Path, "replace", failing)
        return failed

    def __exit__(self, *_):
        self.monkeypatch.undo()


def test_an_engine_with_a_loader_needs_no_patch(tmp_path):
    for engine, loader, version in (("sglang", "srt/plugins", "0.5.16"), ("vllm", "plugins", "0.11.0")):
        (tmp_path / engine / loader).mkdir(parents=True)
        (tmp_path / engine / loader / "__init__.py").touch()
        (tmp_path / f"{engine}-{version}.dist-info").mkdir()
        (tmp_path / f"{engine}-{version}.dist-info" / "METADATA").write_text(f"Name: {engine}\nVersion: {version}\n")
        before = snapshot(tmp_path)
        for action in (patching.check, patching.apply, patching.revert):
            report = action(patching.find_installation(engine, tmp_path))
            assert (report.status, report.version, report.changed) == ("native", version, ())
        assert snapshot(tmp_path) == before


def test_no_engine_is_a_typed_error(tmp_path):
    with pytest.raises(EngineNotFoundError):
        found(tmp_path)


def test_the_engine_is_found_without_importing_it(site, monkeypatch):
    root = site("0.5.9")
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    installation = patching.find_installation("sglang")
    assert (installation.root, installation.version) == (root, "0.5.9")
    assert "sglang" not in sys.modules


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_line(site):
    root = site("0.5.9")
    checked = run("check", "--path", root)
    assert checked.exit_code == 0 and "is not patched; sglang-0.5.5.post1-0.5.9.diff fits" in checked.stdout
    assert run("apply", "--path", root).stdout.count("wrote sglang/") == 5
    report = json.loads(run("apply", "--path", root, "--json").stdout)
    assert report["status"] == "applied" and report["changed"] == []
    edit(root, SCHEDULER)
    failed = run("revert", "--path", root, "--json")
    assert failed.exit_code == 1
    assert isinstance(from_record(json.loads(failed.stderr)), FileModifiedError)
    assert run("check", "--engine", "llama").exit_code == 2


def test_an_installed_wheel_brings_the_diffs(site, tmp_path):
    """Built by pip in an isolated environment, then run from the unpacked wheel alone."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path / "wheel"),
    ]
    subprocess.run([*command, str(releases.PATCHES.parent)], check=True)
    (wheel,) = (tmp_path / "wheel").glob("rl_memory_plugins-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    root = site("0.5.9")
    program = "from rl_memory_plugins.patch_cli import app; app()"
    for action, status in (("apply", "applied"), ("check", "applied"), ("revert", "unpatched")):
        done = subprocess.run(
            [sys.executable, "-c", program, action, "--json", "--path", str(root)],
            env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        )
        assert json.loads(done.stdout)["status"] == status
