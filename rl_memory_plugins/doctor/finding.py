"""What one check has found."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

#: The page that findings link to, with an anchor.
PAGE = "docs/troubleshooting.md"


class Status(str, Enum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    NOT_APPLICABLE = "not_applicable"  # nothing was checked; `seen` says why


class Finding(msgspec.Struct, frozen=True):
    """What one check has found.

    Attributes:
        name: The check's name; the runner sets it.
        status: A warning may be as you want it. A failure stops an engine or breaks a promise of the contract.
        seen: What the check saw, for a person.
        remedy: What to do; empty if nothing is to be done.
        docs: The part of the documentation that says more; the runner sets it.
        details: What the check saw, for a program: JSON values.
    """

    name: str
    status: Status
    seen: str
    remedy: str = ""
    docs: str = ""
    details: dict[str, Any] = {}


def ok(seen: str, **details: Any) -> Finding:
    return Finding("", Status.OK, seen, details=details)


def warning(seen: str, remedy: str, **details: Any) -> Finding:
    return Finding("", Status.WARNING, seen, remedy, details=details)


def failure(seen: str, remedy: str, **details: Any) -> Finding:
    return Finding("", Status.FAILURE, seen, remedy, details=details)


def not_applicable(why: str, **details: Any) -> Finding:
    return Finding("", Status.NOT_APPLICABLE, why, details=details)


_ORDER = (Status.NOT_APPLICABLE, Status.OK, Status.WARNING, Status.FAILURE)


def worst(findings: list[Finding]) -> Finding:
    """One finding of several about the same: the worst status, and the words of all that are not better than it.

    Args:
        findings: At least one.
    """
    status = max((finding.status for finding in findings), key=_ORDER.index)
    told = [finding for finding in findings if finding.status is status]
    details = {key: value for finding in findings for key, value in finding.details.items()}
    remedies = dict.fromkeys(finding.remedy for finding in told if finding.remedy)
    return Finding("", status, "; ".join(finding.seen for finding in told), "; ".join(remedies), details=details)
