"""What a monitor reads at an engine's `/metrics`, what docs/monitoring.md says of it, and what the dashboard asks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from integration.engines.base import REPOSITORY, Server

DOCS = REPOSITORY / "docs"
DASHBOARD = DOCS / "monitoring" / "dashboard.json"
ALERTS = DOCS / "monitoring" / "alerts.yaml"
OF_PROMETHEUS = {"job", "instance"}
"""The labels that Prometheus adds."""

Labels = dict[str, str]


class Scrape:
    """The samples of this package in one answer of `/metrics`."""

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self._samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("rl_memory_") and not sample.name.endswith("_created"):
                    self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    @property
    def labels(self) -> dict[str, set[str]]:
        """The names of the labels, by the name of the samples."""
        return {name: {label for labels, _ in found for label in labels} for name, found in self._samples.items()}

    def samples(self, name: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """Those whose labels have these values."""
        for found, value in self._samples.get(f"rl_memory_{name}", ()):
            if labels.items() <= found.items():
                yield found, value

    def total(self, name: str, **labels: str) -> float:
        """The sum of these samples; 0 if there are none."""
        return sum(value for _, value in self.samples(name, **labels))

    def present(self, name: str, label: str, **labels: str) -> set[str]:
        """The values of a label whose samples are 1."""
        return {found[label] for found, value in self.samples(name, **labels) if value == 1}


def scrape(server: Server) -> Scrape:
    return Scrape(server.http.get("/metrics").raise_for_status().text)


def documented() -> dict[str, set[str]]:
    """The names of the samples that docs/monitoring.md lists, each with the names of its labels."""
    found: dict[str, set[str]] = {}
    rows = re.findall(
        r"^\| `(rl_memory_\w+)` \| (\w+) \| ([^|]*)\|", (DOCS / "monitoring.md").read_text(), re.MULTILINE
    )
    for name, kind, cell in rows:
        labels = set(re.findall(r"`(\w+)`", cell))
        if kind == "histogram":
            found |= {f"{name}_count": labels, f"{name}_sum": labels, f"{name}_bucket": labels | {"le"}}
        else:
            found[name] = labels
    return found


def expressions() -> list[str]:
    """The PromQL of the dashboard's panels and variables, and of the alerts."""
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in panels_of(dashboard) for target in panel.get("targets", ())]
    variables = [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    return [*asked, *variables, *alerts().values()]


def panels_of(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def alerts() -> dict[str, str]:
    """The PromQL of each alert, by its name."""
    return dict(re.findall(r"^ *- alert: (\w+)\n *expr: (.*)$", ALERTS.read_text(), re.MULTILINE))


def names_in(expression: str) -> dict[str, set[str]]:
    """The metrics of this package that an expression names, each with the labels that it matches or groups by."""
    grouped = {
        label.strip()
        for labels in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
        for label in labels.split(",")
        if label.strip()
    }
    asked = re.findall(r"label_values\(.*,\s*(\w+)\)", expression)
    found: dict[str, set[str]] = {}
    for name, matchers in re.findall(r"\b(rl_memory_\w+)(?:\{([^}]*)\})?", expression):
        found.setdefault(name, set()).update(re.findall(r"(\w+)\s*[=!]", matchers), grouped, asked)
    return found
