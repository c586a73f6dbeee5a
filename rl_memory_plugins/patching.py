"""Add the plugin loader to an installed engine that has none, and take it out again.

The diffs and their manifest stand in `patches/`. The manifest names, for each release, the one diff that fits
it and the SHA-256 of every target file before and after, so a file that somebody else changed is seen.
Everything here works on files only: no engine is imported.

Files change all together or not at all. Beside the engine's package, in `.rl_memory_patch/<engine>/`, lie the
original files and `state.json`, which says what was changed, with the hashes. Both are written before the first
file changes, so that a process killed half-way leaves what `apply` needs to finish and `revert` to undo.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from .errors import StateConflictError, UnsupportedError
from .unified_diff import DiffError, FileDiff, apply_hunks, parse_diff

__all__ = [
    "ENGINES",
    "EngineNotFoundError",
    "FileModifiedError",
    "Installation",
    "PatchConflictError",
    "PatchReport",
    "VersionNotSupportedError",
    "apply",
    "check",
    "find_installation",
    "patches_dir",
    "revert",
]

ENGINES = ("sglang", "vllm")

Status = Literal["native", "unpatched", "applied", "partial"]
"""`native`: the engine loads plugins itself. `partial`: a process was killed while it applied or reverted."""


class EngineNotFoundError(UnsupportedError):
    pass


class VersionNotSupportedError(UnsupportedError):
    """`details["supported"]` lists the versions that have a diff."""


class FileModifiedError(StateConflictError):
    """`details["files"]` lists the files that are not as released, or not as the patch left them."""


class PatchConflictError(StateConflictError):
    """The engine carries a patch that this version of the package did not record, or records differently."""


@dataclass(frozen=True)
class Installation:
    """An engine on disk. `root` is the directory that holds its package, usually site-packages."""

    engine: str
    version: str
    root: Path

    @property
    def state_dir(self) -> Path:
        # Beside the package, not inside: after an uninstall, what is left of a package's directory would still
        # be importable as a namespace package.
        return self.root / ".rl_memory_patch" / self.engine


@dataclass(frozen=True)
class PatchReport:
    """What was found or done. `diff` and `files` are empty where no diff is needed; `changed` was written."""

    engine: str
    version: str
    root: str
    status: Status
    diff: str = ""
    files: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Patch:
    """One diff, as it applies to one release: per file its hunks and the hashes before and after."""

    name: str
    digest: str
    files: list[FileDiff]
    hashes: dict[str, list[str]]


def patches_dir() -> Path:
    """Where the diffs are: inside the package when installed from a wheel, at the top of a source checkout."""
    here = Path(__file__).parent
    for directory in (here / "patches", here.parent / "patches"):
        if (directory / "manifest.json").is_file():
            return directory
    raise FileNotFoundError(f"no patches/manifest.json in {here} or {here.parent}")


def find_installation(engine: str, path: Path | None = None) -> Installation:
    """The engine in `path` (a site-packages directory), or the one that this interpreter would import.

    Raises:
        EngineNotFoundError: There is none, or it has no metadata that tell its version.
    """
    if path is not None:
        root = path.resolve()
    else:
        spec = util.find_spec(engine)
        locations = list(spec.submodule_search_locations or ()) if spec else []
        if not locations:
            raise EngineNotFoundError(f"{engine} is not installed for this interpreter", engine=engine)
        root = Path(locations[0]).resolve().parent
    found = list(metadata.distributions(name=engine, path=[str(root)]))
    if not found and path is None:  # an editable install keeps its metadata elsewhere
        found = list(metadata.distributions(name=engine))
    if not found or not (root / engine).is_dir():
        raise EngineNotFoundError(f"no {engine} with its metadata in {root}", engine=engine, root=str(root))
    return Installation(engine, found[0].version, root)


def check(installation: Installation, *, allow_modified: bool = False) -> PatchReport:
    """Whether the patch is applied, and if not, whether it fits. Writes nothing.

    Args:
        allow_modified: Accept files that differ from the release, if each hunk fits at exactly one place.

    Raises:
        VersionNotSupportedError: No diff for this version, and the engine has no loader of its own.
        FileModifiedError: A target file is missing, differs from the release, or changed since it was patched.
        PatchConflictError: Patched already, with another diff or without a record.
    """
    return _inspect(installation, allow_modified)[0]


def apply(installation: Installation, *, allow_modified: bool = False) -> PatchReport:
    """Apply the patch; where it is applied already, or not needed, change nothing.

    Arguments and errors are those of `check`, and an `OSError`; after any of them every file is as it was.
    """
    report, patch, contents = _inspect(installation, allow_modified)
    if patch is None or not contents:
        return report
    if report.status == "unpatched":
        _record(installation, patch, contents)
    try:
        _replace_all(installation, contents)
    except BaseException:
        if report.status == "unpatched":
            _forget(installation)
        raise
    return _report(installation, "applied", patch.name, patch.hashes, tuple(contents))


def revert(installation: Installation) -> PatchReport:
    """Put the original files back, byte for byte; where no patch is recorded, change nothing.

    Raises:
        FileModifiedError: A patched file changed since, or a backup did.
    """
    state = _read_state(installation)
    if state is None:
        native = (installation.root / _manifest()[installation.engine]["loader"]).is_file()
        return _report(installation, "native" if native else "unpatched")
    contents = {}
    damaged = []
    for path in _with_hash(installation, state, "after"):
        backup = installation.state_dir / "backup" / path
        contents[path] = backup.read_bytes() if backup.is_file() else b""
        if _sha256(contents[path]) != state["files"][path][0]:
            damaged.append(path)
    if damaged:
        raise FileModifiedError(
            f"the backup of {', '.join(damaged)} is damaged; reinstall {installation.engine}",
            files=damaged,
        )
    _replace_all(installation, contents)
    _forget(installation)
    return _report(installation, "unpatched", state["diff"], state["files"], tuple(contents))


def _inspect(inst: Installation, allow_modified: bool) -> tuple[PatchReport, _Patch | None, dict[str, bytes]]:
    """The report of `check`, the diff, and the new content of each file that `apply` would have to write."""
    state = _read_state(inst)
    if state is not None:
        patch = _select(inst)
        if state["diff_sha256"] != patch.digest:
            raise PatchConflictError(
                f"{inst.engine} {state['version']} is patched with another {state['diff']}; revert it first",
                diff=state["diff"],
                version=state["version"],
            )
        todo = _with_hash(inst, state, "before")
        contents = {f.path: _patched(inst, f, state["files"][f.path]) for f in patch.files if f.path in todo}
        return _report(inst, "partial" if todo else "applied", patch.name, patch.hashes), patch, contents
    if (inst.root / _manifest()[inst.engine]["loader"]).is_file():
        return _report(inst, "native"), None, {}
    patch = _select(inst)
    current = {path: _hash_of(inst.root / path) for path in patch.hashes}
    if any(current[path] == after for path, (_, after) in patch.hashes.items()):
        raise PatchConflictError(
            f"{inst.engine} {inst.version} carries {patch.name} without a record; reinstall it to remove it",
            diff=patch.name,
        )
    changed = [path for path, (before, _) in patch.hashes.items() if current[path] != before]
    if any(current[path] is None for path in changed) or (changed and not allow_modified):
        raise FileModifiedError(
            f"{', '.join(changed)} differ from {inst.engine} {inst.version} as released", files=changed
        )
    contents = {f.path: _patched(inst, f, None if f.path in changed else patch.hashes[f.path]) for f in patch.files}
    return _report(inst, "unpatched", patch.name, patch.hashes), patch, contents


def _manifest() -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((patches_dir() / "manifest.json").read_text())
    return manifest


def _select(inst: Installation) -> _Patch:
    version = inst.version.split("+")[0]  # a local label such as +cu129 names the same release
    patches = _manifest()[inst.engine]["patches"]
    for name, versions in patches.items():
        if version in versions:
            text = (patches_dir() / name).read_bytes()
            return _Patch(name, _sha256(text), parse_diff(text), versions[version])
    supported = [version for versions in patches.values() for version in versions]
    raise VersionNotSupportedError(
        f"there is no patch for {inst.engine} {inst.version}, only for {', '.join(supported) or 'no version'}",
        engine=inst.engine,
        version=inst.version,
        supported=supported,
    )


def _patched(inst: Installation, file: FileDiff, hashes: list[str] | None) -> bytes:
    try:
        new = apply_hunks((inst.root / file.path).read_bytes(), file.hunks)
    except DiffError as error:
        raise FileModifiedError(f"{file.path}: {error}", files=[file.path]) from error
    if hashes is not None and _sha256(new) != hashes[1]:
        raise PatchConflictError(f"{file.path}: the patched file is not the recorded one", files=[file.path])
    return new


def _read_state(inst: Installation) -> dict[str, Any] | None:
    """The record of a patch that is in place at least in part; a reinstalled engine leaves only a stale one."""
    file = inst.state_dir / "state.json"
    if not file.is_file():
        return None
    state: dict[str, Any] = json.loads(file.read_text())
    in_place = any(_hash_of(inst.root / path) == after for path, (_, after) in state["files"].items())
    return state if in_place else None


def _with_hash(inst: Installation, state: dict[str, Any], which: Literal["before", "after"]) -> list[str]:
    """The files whose content is the one before, or after, the patch; every file must be one of both."""
    current = {path: _hash_of(inst.root / path) for path in state["files"]}
    changed = [path for path, hashes in state["files"].items() if current[path] not in hashes]
    if changed:
        raise FileModifiedError(f"{', '.join(changed)} changed after the patch was applied", files=changed)
    column = 0 if which == "before" else 1
    return [path for path, hashes in state["files"].items() if current[path] == hashes[column]]


def _record(inst: Installation, patch: _Patch, contents: dict[str, bytes]) -> None:
    _forget(inst)
    files = {}
    for path, new in contents.items():
        original = (inst.root / path).read_bytes()
        backup = inst.state_dir / "backup" / path
        backup.parent.mkdir(parents=True, exist_ok=True)
        backup.write_bytes(original)
        files[path] = [_sha256(original), _sha256(new)]
    state = {"version": inst.version, "diff": patch.name, "diff_sha256": patch.digest, "files": files}
    (inst.state_dir / "state.json").write_text(json.dumps(state, indent=2) + "\n")


def _forget(inst: Installation) -> None:
    if inst.state_dir.exists():
        shutil.rmtree(inst.state_dir)
        if not any(inst.state_dir.parent.iterdir()):
            inst.state_dir.parent.rmdir()


def _replace_all(inst: Installation, contents: dict[str, bytes]) -> None:
    """Give every file its new content, or, when anything fails, leave every file as it was."""
    originals = {path: (inst.root / path).read_bytes() for path in contents}
    staged: dict[str, Path] = {}
    replaced: list[str] = []
    try:
        for path, content in contents.items():
            staged[path] = _stage(inst, path, content)
        for path, temporary in staged.items():
            # A new file under the old name: installers hard-link files from a cache, which must stay as it is.
            temporary.replace(inst.root / path)
            replaced.append(path)
    except BaseException:
        for path in replaced:
            _stage(inst, path, originals[path]).replace(inst.root / path)
        raise
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _stage(inst: Installation, path: str, content: bytes) -> Path:
    """A file with `content` and the mode of `path`, in the state directory, which is on the same volume."""
    descriptor, name = tempfile.mkstemp(dir=inst.state_dir)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    shutil.copymode(inst.root / path, name)
    return Path(name)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _hash_of(path: Path) -> str | None:
    return _sha256(path.read_bytes()) if path.is_file() else None


def _report(
    inst: Installation,
    status: Status,
    diff: str = "",
    files: dict[str, Any] | None = None,
    changed: tuple[str, ...] = (),
) -> PatchReport:
    return PatchReport(inst.engine, inst.version, str(inst.root), status, diff, tuple(files or ()), changed)
