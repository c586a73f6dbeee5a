"""Prints an examination for a person."""

from __future__ import annotations

import textwrap

from rl_memory_plugins.doctor.examination import Examination
from rl_memory_plugins.doctor.finding import Status
from rl_memory_plugins.extras import needs

with needs("cli"):
    from rich.console import Console
    from rich.text import Text

_STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILURE: "bold red"}
_INDENT = " " * 8


def show(examination: Examination) -> None:
    console = Console(highlight=False)

    def below(text: str) -> None:
        lines = textwrap.wrap(text, console.width, initial_indent=_INDENT, subsequent_indent=_INDENT)
        console.print("\n".join(lines), markup=False, soft_wrap=True)

    for finding in examination.findings:
        console.print(Text.assemble((f"{finding.status.value:8}", _STYLES[finding.status]), (finding.name, "bold")))
        below(finding.seen)
        if finding.remedy:
            below(f"→ {finding.remedy} ({finding.docs})")
    console.print(Text("not checked", "bold"))
    for what, why in examination.not_checked.items():
        below(f"{what}: {why}")
    counts = {status: sum(found.status is status for found in examination.findings) for status in _STYLES}
    console.print(f"ok: {counts[Status.OK]}, warnings: {counts[Status.WARNING]}, failures: {counts[Status.FAILURE]}")
