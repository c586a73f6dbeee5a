"""`rl-memory patch`: give an engine release without a plugin loader the calls that load plugins."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from rl_memory_plugins import patching
from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.extras import needs
from rl_memory_plugins.patching import Installation, PatchReport

with needs("cli"):
    import typer

app = typer.Typer(no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)

Engine = Annotated[str, typer.Option("--engine", help=f"One of: {', '.join(patching.ENGINES)}.")]
Site = Annotated[
    Path | None,
    typer.Option("--path", help="The site-packages directory to work on; this interpreter's engine if left out."),
]
AllowModified = Annotated[
    bool,
    typer.Option(
        "--allow-modified", help="Accept files that differ from the release, if every hunk fits exactly once."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report, or the error, as JSON.")]

_SAYS = {
    "native": "loads plugins itself, no patch is needed",
    "unpatched": "is not patched",
    "applied": "is patched",
    "partial": "is patched in part, because a run was interrupted: apply or revert again",
}


@app.command()
def check(
    engine: Engine = "sglang", path: Site = None, allow_modified: AllowModified = False, as_json: AsJson = False
) -> None:
    """Say whether the patch is applied, needed, or does not fit. Changes nothing."""
    _run(engine, path, as_json, lambda found: patching.check(found, allow_modified=allow_modified))


@app.command()
def apply(
    engine: Engine = "sglang", path: Site = None, allow_modified: AllowModified = False, as_json: AsJson = False
) -> None:
    """Apply the patch to all files or to none. Stop the engine first: a running one mixes old and new files."""
    _run(engine, path, as_json, lambda found: patching.apply(found, allow_modified=allow_modified))


@app.command()
def revert(engine: Engine = "sglang", path: Site = None, as_json: AsJson = False) -> None:
    """Put the original files back, byte for byte."""
    _run(engine, path, as_json, patching.revert)


def _run(engine: str, path: Path | None, as_json: bool, action: Callable[[Installation], PatchReport]) -> None:
    if engine not in patching.ENGINES:
        raise typer.BadParameter(f"{engine!r} is none of {', '.join(patching.ENGINES)}", param_hint="--engine")
    try:
        report = action(patching.find_installation(engine, path))
    except RLMemoryError as error:
        typer.echo(json.dumps(error.to_record()) if as_json else f"{error.code}: {error.message}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:  # a read-only site-packages, a full disk: every file is as it was
        record = {"error": type(error).__name__, "message": str(error), "details": {}}
        typer.echo(json.dumps(record) if as_json else f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
        return
    fits = f"; {report.diff} fits" if report.status == "unpatched" and report.diff and not report.changed else ""
    typer.echo(f"{report.engine} {report.version} in {report.root} {_SAYS[report.status]}{fits}")
    for changed in report.changed:
        typer.echo(f"  wrote {changed}")
