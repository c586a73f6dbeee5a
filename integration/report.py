"""Tables and plots from the records in `integration/results/`, for the README and the documentation.

    python -m integration.report

Rewrites the text between the markers in README.md and the pages of docs/, and the plots in docs/.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from integration import (
    report_kinds,
    report_plan,
    report_remote,
    report_steps,
    report_turns,
    report_upstream,
    report_weights,
)
from integration.models import SHAPES, weight_bytes
from integration.records import command_of_all_subjects
from integration.report_weights import Metrics, Record, Run

REPOSITORY = Path(__file__).parents[1]
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


class Place(NamedTuple):
    """Where generated lines stand: between two markers of a page."""

    page: Path
    name: str = "benchmark"

    @property
    def markers(self) -> tuple[str, str]:
        return f"<!-- {self.name} table -->", f"<!-- end of {self.name} table -->"

    def replaced(self, text: str, lines: list[str]) -> str:
        """A page's text with `lines` between the markers. The text must have both markers."""
        begin, end = self.markers
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        return "\n".join([before + begin, "", *lines, "", end]) + after


#: Each metric's row title, the factor to the unit of the table, that unit, and the digits after the point.
METRICS = {
    "sleep_l1_first_s": ("sleep level 1 (weights kept), first time", 1000, "ms", 0),
    "sleep_l1_later_s": ("sleep level 1, weights changed since the last copy", 1000, "ms", 0),
    "sleep_l1_clean_s": ("sleep level 1, weights unchanged", 1000, "ms", 0),
    "wake_weights_s": ("wake the weights (level 1)", 1000, "ms", 0),
    "wake_kv_s": ("wake the KV cache (level 1)", 1000, "ms", 0),
    "sleep_l2_s": ("sleep level 2 (weights dropped)", 1000, "ms", 0),
    "wake_l2_s": ("wake weights and KV cache (level 2)", 1000, "ms", 0),
    "gpu_left_mib": ("GPU memory in use while asleep", 1, "MiB", 0),
    "host_held_mib": ("resident host memory while asleep", 1, "MiB", 0),
    "decode_tok_s_before": ("decoding, before the first sleep", 1, "tokens/s", 0),
    "decode_tok_s": ("decoding, after all cycles", 1, "tokens/s", 0),
    "request_start_s": ("a request of 256 tokens, just after the start", 1000, "ms", 1),
    "request_s": ("a request of 256 tokens, once host memory is prepared", 1000, "ms", 1),
    "ttft_s_before": ("time to first token, before the first sleep", 1000, "ms", 1),
    "ttft_s": ("time to first token, after all cycles", 1000, "ms", 1),
    "startup_s": ("start-up", 1, "s", 0),
    "drift_mib": ("GPU memory added by {cycles} more cycles", 1, "MiB", 0),
    "drift_sleep_ratio": ("sleeps, the last 20 of {cycles} / the first 20", 1, "x", 2),
    "drift_wake_ratio": ("wakes, the last 20 of {cycles} / the first 20", 1, "x", 2),
    "tokens_identical": ("tokens identical after every cycle", 1, "", 0),
    "difference": ("log-probabilities after the cycles, largest difference", 1, "nats", 3),
    "difference_awake": ("log-probabilities without a sleep, largest difference", 1, "nats", 3),
}

EXPERTS = {"30b-a3b": "Qwen3-30B-A3B shape", "moe": "12 of 48 layers of the Qwen3-30B-A3B shape"}
#: The metrics that the README shows.
HEADLINE = [
    metric
    for metric in METRICS
    if not metric.startswith(("startup", "drift", "difference", "request")) and not metric.endswith("_before")
]

#: Times that grow with the bytes of the weights.
BY_BYTES = {
    "sleep_l1_later_s": "sleep level 1",
    "wake_weights_s": "wake the weights (level 1)",
    "sleep_l2_s": "sleep level 2",
    "wake_l2_s": "wake (level 2)",
}
#: The rows of the picture of times: the metrics of the engine alone and of the plugin; the shortest time counts.
BARS = {
    "first sleep\nthat keeps the weights": (["sleep_l1_first_s"], ["sleep_l1_first_s"]),
    "later sleep,\nweights changed": (["sleep_l1_later_s"], ["sleep_l1_later_s"]),
    "later sleep,\nweights unchanged": (["sleep_l1_clean_s"], ["sleep_l1_clean_s"]),
    "wake the weights\nfrom host memory": (["wake_weights_s"], ["wake_weights_s"]),
    "sleep that drops\nweights and KV cache": (["sleep_l2_s"], ["sleep_l2_s"]),
    "wake both\nafter it": (["wake_l2_s"], ["wake_l2_s"]),
    "new weights\nfrom the trainer": (["update_native_s", "update_native_packed_s"], ["update_direct_s"]),
}
#: The rows that the first page of the documentation shows.
FRONT = [row for row in BARS if not row.startswith(("later sleep", "wake both"))]
COPY_BYTES_S = 55.5e9  # bytes per second of a bare copy between page-locked host memory and an H200, either way

WITHOUT_ENGINE = "none"  # the engine in records without an engine
DRIVER = "driver"  # the model in the records of `bench_driver`


def load() -> tuple[dict[Run, Metrics], dict[str, Record]]:
    """The measurements, and by file name the reports of test runs (`tests/run_report.py`)."""
    runs: dict[Run, Metrics] = defaultdict(lambda: defaultdict(dict))
    test_runs: dict[str, Record] = {}
    for path in sorted((REPOSITORY / "integration" / "results").glob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict):  # the report of a test run or of a demo
            if "summary" in content:
                test_runs[path.name] = content
            continue
        if "metric" not in content[0] or "engine_version" not in content[0]:  # of kinds of weights, or of trainers
            continue
        # The page tells of several ranks, of whole training steps, of turns, and of the preparation of host memory
        # outside these tables.
        if {"tp", "gpus", "engines", "round"} & content[0].keys():
            continue
        for record in content:
            runs[run_of(path, record)][record["metric"]][record["subject"]] = record
    return dict(sorted(runs.items(), key=lambda item: by_size(item[0]))), test_runs


def run_of(path: Path, record: Record) -> Run:
    """The run of a record. The file's name ends with the host, unless it is the usual host."""
    host = path.stem.partition(f"{record['model']}-")[2].replace("-", " ")
    return Run(record["engine"], record["engine_version"], record["model"], host)


def by_size(run: Run) -> tuple[Any, ...]:
    """Engines by name, the newest version first, small models before large ones."""
    newest_first = [-int(part) for part in run.version.split(".") if part.isdecimal()]
    return run.engine, newest_first, weight_bytes(run.model), run.model, run.host


def value(record: Record | None) -> str:
    if record is None:
        return "-"
    if record["metric"] == "tokens_identical":
        return "yes" if record["median"] == 1 else "**no**"
    _, scale, unit, digits = METRICS[kind(record["metric"])]
    return f"{record['median'] * scale:.{digits}f} {unit}"


def table(metrics: Metrics) -> list[str]:
    lines = ["| | engine alone | with the plugin |", "|---|---:|---:|"]
    for metric in rows_of(metrics):
        title = METRICS[kind(metric)][0].format(cycles=metric.rpartition("_")[2])
        subjects = metrics[metric]
        lines.append(f"| {title} | {value(subjects.get('native'))} | {value(subjects.get('plugin'))} |")
    return lines


def kind(metric: str) -> str:
    """The key in `METRICS`: the metrics of many cycles end with the number of cycles."""
    return re.sub(r"^(drift_\w+)_\d+$", r"\1", metric)


def rows_of(metrics: Metrics) -> list[str]:
    """The metrics that have a row in a table, in the order of `METRICS`."""
    order = list(METRICS)
    return sorted((metric for metric in metrics if kind(metric) in METRICS), key=lambda one: order.index(kind(one)))


def newest(runs: dict[Run, Metrics], metric: str) -> list[Run]:
    """For each engine the newest version with this metric, 7B on the usual host; `runs` has the newest first."""
    found: dict[str, Run] = {}
    for run, metrics in runs.items():
        if run.model == "7b" and not run.host and metric in metrics:
            found.setdefault(run.engine, run)
    return [found[engine] for engine in NAMES if engine in found]


def headline(runs: dict[Run, Metrics]) -> list[str]:
    """The newest version of each engine at 7B: the engine alone beside the engine with the plugin, and updates."""
    shown = newest(runs, "sleep_l1_first_s")
    lines = ["| | " + " | ".join(f"{NAMES[run.engine]} {run.version} | with the plugin" for run in shown) + " |"]
    lines.append("|---|" + "---:|---:|" * len(shown))
    for metric in HEADLINE:
        cells = [value(runs[run].get(metric, {}).get(subject)) for run in shown for subject in ("native", "plugin")]
        lines.append(f"| {METRICS[metric][0]} | " + " | ".join(cells) + " |")
    record = runs[shown[0]]["sleep_l1_first_s"]["plugin"]
    setting = f"The shape of Qwen2.5-7B in bfloat16 on one {record['gpu']}, CUDA graphs on"
    lines += ["", *report_weights.headline(runs, newest(runs, "update_direct_s"), NAMES)]
    link = "[docs/benchmarks.md](docs/benchmarks.md) has all figures and how they were measured."
    return [*lines, f"{setting}.", link]


def front(runs: dict[Run, Metrics]) -> list[str]:
    """The five rows of the documentation's first page: the engine alone beside the engine with the plugin."""
    shown = newest(runs, "sleep_l1_first_s")
    times = {run: bars(runs[run]) for run in shown}
    lines = ["| | " + " | ".join(f"{NAMES[run.engine]} {run.version} | with the plugin" for run in shown) + " |"]
    lines.append("|---|" + "---:|---:|" * len(shown))
    for row in FRONT:
        found = [times[run][row].get(subject) for run in shown for subject in ("native", "plugin")]
        cells = ["-" if seconds is None else f"{1000 * seconds:.0f} ms" for seconds in found]
        lines.append(f"| {' '.join(row.split())} | " + " | ".join(cells) + " |")
    same = [value(runs[run]["tokens_identical"].get(subject)) for run in shown for subject in ("native", "plugin")]
    return [*lines, f"| {METRICS['tokens_identical'][0]} | " + " | ".join(same) + " |"]


def test_table(test_runs: dict[str, Record]) -> list[str]:
    """The results of `make test-gpu`, one line per run."""
    if not test_runs:
        return []
    about = "Reports of `make test-gpu`, or of a part of that suite, in `integration/results/`."
    lines = ["### Tests on a GPU", "", about, ""]
    lines += ["| engine | torch | GPU | tests | seconds | commit | report |", "|---|---|---|---|---:|---|---|"]
    for name, run in test_runs.items():
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in run["summary"].items())
        seconds = sum(test["seconds"] for test in run["tests"].values())
        cells = [
            f"{NAMES[run['engine']]} {run['engine_version']}",
            run["versions"]["torch"],
            ", ".join(run["gpus"]) or "-",
            outcomes if run["complete"] else f"{outcomes}; cut short",
            f"{seconds:.0f}",
            run["commit"] or "-",
            f"`{name}`",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def wire_pages(runs: dict[Run, Metrics]) -> list[str]:
    """The measurements without an engine, weight stream and driver: one table per run, with every time."""
    pages: list[str] = []
    for run, metrics in runs.items():
        if run.engine != WITHOUT_ENGINE:
            continue
        records = [subjects["plugin"] for subjects in metrics.values() if subjects["plugin"]["unit"] == "s"]
        first = records[0]
        alone = "The driver alone" if run.model == DRIVER else f"The weight stream alone, {run.model} shape"
        nbytes = max(record.get("bytes", 0) for record in records)  # some rows are of a part, or of no bytes
        title = f"### {', '.join(filter(None, [alone, run.host]))} ({nbytes / 1e9:.1f} GB), {first['gpu']}"
        pages += [title, "", "| | median | best | worst |", "|---|---:|---:|---:|"]
        for record in records:
            name = record["metric"].removesuffix("_s").replace("_", " ")
            times = " | ".join(f"{1000 * record[key]:.1f} ms" for key in ("median", "min", "max"))
            pages.append(f"| {name} | {times} |")
        pages += ["", f"Measured by `{first['command']}`.", ""]
    return pages


def describe(run: Run, metrics: Metrics) -> str:
    record = next(iter(next(iter(metrics.values())).values()))
    engine = f"{NAMES[run.engine]} {run.version}"
    shape = EXPERTS.get(run.model, f"Qwen2.5-{run.model.upper()} shape")
    gpus = {1: "one", 2: "two", 4: "four"}[record.get("tensor_parallel", 1)]
    described = f"{engine}, {shape}, {gpus} {record['gpu']}, torch {record['torch']}"
    return f"{described}, {run.host}" if run.host else described


def draw_times(runs: dict[Run, Metrics], path: Path) -> None:
    """Draw the times that users wait for as bars: one panel for each engine, a logarithmic axis, each bar labelled."""
    from matplotlib import pyplot as plt

    colours = {"native": "#9a9a9a", "plugin": "#1f6fb2"}
    labels = {"native": "the engine alone", "plugin": "with the plugin"}
    figure, panels = plt.subplots(1, len(runs), figsize=(13, 5.2), sharey=True, constrained_layout=True, squeeze=False)
    for axis, (run, metrics) in zip(panels[0], runs.items(), strict=True):
        for row, times in enumerate(bars(metrics).values()):
            for offset, (subject, colour) in zip((-0.2, 0.2), colours.items(), strict=True):
                if subject not in times:
                    axis.text(11, row + offset, "not measured", va="center", color=colour)
                    continue
                milliseconds = 1000 * times[subject]
                axis.barh(row + offset, milliseconds, 0.38, color=colour, label=None if row else labels[subject])
                gain = times["native"] / times["plugin"] if subject == "plugin" and "native" in times else 0
                text = f" {milliseconds:,.0f} ms"
                if gain > 1:
                    text += f", {gain:.{0 if gain >= 10 else 1}f} times as fast"
                axis.text(milliseconds, row + offset, text, va="center", color=colour if gain else "#404040")
        axis.set_yticks(range(len(BARS)), list(BARS))
        axis.set(
            xscale="log",
            xlim=(10, 200_000),
            xticks=[10, 100, 1_000, 10_000],
            title=f"{NAMES[run.engine]} {run.version}",
        )
        axis.set_xticklabels(["10 ms", "100 ms", "1 s", "10 s"])
        axis.spines[["top", "right"]].set_visible(False)
    panels[0][0].invert_yaxis()  # the panels share the axis
    panels[0][-1].legend(frameon=False, loc="lower right")
    run, metrics = next(iter(runs.items()))
    setting = f"{weight_bytes(run.model) / 1e9:.1f} GB of weights on one {metrics['sleep_l1_first_s']['plugin']['gpu']}"
    figure.suptitle(f"How long the engine is waited for, {setting} (logarithmic; shorter is better)", fontweight="bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def bars(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Seconds by row of the picture and by subject; a subject without a measurement is left out."""
    found: dict[str, dict[str, float]] = {}
    for row, names in BARS.items():
        for subject, candidates in zip(("native", "plugin"), names, strict=True):
            times = [metrics[name][subject]["median"] for name in candidates if subject in metrics.get(name, {})]
            if times:
                found.setdefault(row, {})[subject] = min(times)
    return found


def sizes(runs: dict[Run, Metrics]) -> dict[tuple[str, str], list[Run]]:
    """By engine and version, its runs, if they cover models of more than one size."""
    measured: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run, metrics in runs.items():
        if run.model in SHAPES and not run.host and "plugin" in metrics.get("sleep_l1_later_s", {}):
            measured[run[:2]].append(run)
    return {engine: found for engine, found in measured.items() if len(found) > 1}


def draw_sizes(runs: dict[Run, Metrics], path: Path) -> None:
    """Draw times against the bytes of the weights, one panel for each engine; nothing if no engine has two sizes."""
    from matplotlib import pyplot as plt

    shown = sizes(runs)
    if not shown:
        return
    figure, axes = plt.subplots(1, len(shown), figsize=(6 * len(shown), 4.5), constrained_layout=True, squeeze=False)
    for axis, ((engine, version), found) in zip(axes[0], shown.items(), strict=True):
        largest = max(weight_bytes(run.model) for run in found) / 1e9
        for metric, title in BY_BYTES.items():
            records = [(weight_bytes(run.model) / 1e9, runs[run].get(metric, {}).get("plugin")) for run in found]
            points = [(size, record["median"]) for size, record in records if record is not None]
            axis.plot(*zip(*points, strict=True), marker="o", label=title)
        axis.plot([0, largest], [0, largest * 1e9 / COPY_BYTES_S], "k:", label="55.5 GB/s")
        axis.set(title=f"{NAMES[engine]} {version} with the plugin", xlabel="weights, GB", ylabel="seconds")
        axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def texts() -> dict[Place, list[str]]:
    """By place, the lines there."""
    found, test_runs = load()
    engines = {run: metrics for run, metrics in found.items() if run.engine != WITHOUT_ENGINE}
    runs = {run: metrics for run, metrics in engines.items() if rows_of(metrics)}
    pages: list[str] = test_table(test_runs)
    for run, metrics in runs.items():
        records = [record for metric in rows_of(metrics) for record in metrics[metric].values()]
        commands = dict.fromkeys(map(command_of_all_subjects, records))
        measured = ", ".join(f"`{command}`" for command in commands)
        pages += [f"### {describe(run, metrics)}", "", *table(metrics), "", f"Measured by {measured}.", ""]
    for run, metrics in engines.items():
        pages += report_weights.page(describe(run, metrics), metrics)
    pages += wire_pages(found)
    pages += ["![times, engine alone and with the plugin](benchmarks.png)", ""]
    if sizes(runs):
        pages += ["![times against the bytes of the weights](benchmarks-sizes.png)", ""]
    docs, results = REPOSITORY / "docs", REPOSITORY / "integration" / "results"
    return {
        Place(docs / "benchmarks.md"): pages,
        Place(docs / "benchmarks.md", "remote"): report_remote.pages(results, NAMES),
        Place(docs / "benchmarks.md", "steps"): report_steps.pages(results, docs, NAMES),
        Place(docs / "benchmarks.md", "turns"): report_turns.pages(results, NAMES),
        Place(docs / "compatibility.md"): report_upstream.table(results, NAMES),
        Place(docs / "compatibility.md", "kinds"): report_kinds.table(results, NAMES),
        Place(docs / "plan.md", "records"): report_plan.table(results),
        **{Place(docs / "plan.md", name): report_plan.output(name) for name in report_plan.SHOWN},
        Place(docs / "index.md"): front(engines),
        Place(REPOSITORY / "README.md"): headline(engines),
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import matplotlib

    matplotlib.use("Agg")
    runs, _ = load()
    draw_times({run: runs[run] for run in newest(runs, "sleep_l1_first_s")}, REPOSITORY / "docs" / "benchmarks.png")
    draw_sizes(runs, REPOSITORY / "docs" / "benchmarks-sizes.png")
    report_plan.draw_plan(REPOSITORY / "docs" / "plan.png")
    for place, lines in texts().items():
        place.page.write_text(place.replaced(place.page.read_text(), lines))


if __name__ == "__main__":
    main()
