"""All findings of one run of the doctor."""

from __future__ import annotations

from typing import Any

import msgspec

import rl_memory_plugins
from rl_memory_plugins.doctor import runner
from rl_memory_plugins.doctor.finding import Finding, Status
from rl_memory_plugins.doctor.rows import ROWS, NotFound
from rl_memory_plugins.doctor.table import LOCAL


class Examination(msgspec.Struct, frozen=True):
    """The findings, and what was not checked.

    Attributes:
        findings: Those that checked something.
        not_checked: What was not checked, and why: checks that are not applicable, and what no check looks at.
    """

    findings: list[Finding]
    not_checked: dict[str, str]

    @property
    def healthy(self) -> bool:
        """Whether no check failed. Warnings are allowed."""
        return all(finding.status is not Status.FAILURE for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON values, as `rl-memory doctor --json` prints them."""
        return {
            "version": rl_memory_plugins.__version__,
            "healthy": self.healthy,
            "findings": msgspec.to_builtins(self.findings),
            "not_checked": self.not_checked,
        }


def examine(against: str | None = None, api_key: str = "") -> Examination:
    """Check this machine, this environment and, if it is named, a running engine. Changes nothing.

    Takes as long as an import of each installed engine. No check takes longer than its deadline.

    Args:
        against: The address of an engine's server, e.g. `http://127.0.0.1:8000`.
        api_key: The engine's admin or API key, if it has one.
    """
    findings = runner.run(LOCAL)
    if against is not None:
        from rl_memory_plugins.doctor.against import ask

        findings += ask(against, api_key)
    checked = [finding for finding in findings if finding.status is not Status.NOT_APPLICABLE]
    not_checked = {finding.name: finding.seen for finding in findings if finding.status is Status.NOT_APPLICABLE}
    if against is None:
        not_checked["a running engine"] = "name it: --against URL"
    else:
        not_checked["the hooks in the workers' processes"] = "a missing one stops the start of an engine"
    unseen = sum(isinstance(found, NotFound) for found in ROWS.values())
    not_checked[f"{unseen} of the {len(ROWS)} rows of docs/troubleshooting.md"] = "docs/doctor.md lists them"
    return Examination(checked, not_checked)
