"""Tables and plots from the measurements in `integration/results/`, for the README and the documentation.

    python -m integration.report

Rewrites what stands between the markers in README.md and docs/benchmarks.md, and the plots beside the latter.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from integration import report_weights

REPOSITORY = Path(__file__).parents[1]
BEGIN, END = "<!-- benchmark table -->", "<!-- end of benchmark table -->"

#: What each metric is called in a table, and how many digits of it mean something.
METRICS = {
    "sleep_l1_first_s": ("sleep that keeps the weights, first time", 1000, "ms", 0),
    "sleep_l1_later_s": ("the same, later, weights changed", 1000, "ms", 0),
    "sleep_l1_clean_s": ("the same, weights unchanged", 1000, "ms", 0),
    "wake_weights_s": ("wake the weights from host memory", 1000, "ms", 0),
    "wake_kv_s": ("wake the KV cache after that", 1000, "ms", 0),
    "sleep_l2_s": ("sleep that drops weights and KV cache", 1000, "ms", 0),
    "wake_l2_s": ("wake both after it", 1000, "ms", 0),
    "gpu_left_mib": ("GPU memory left while asleep", 1, "MiB", 0),
    "host_held_mib": ("resident host memory while asleep", 1, "MiB", 0),
    "decode_tok_s": ("decoding, after all of that", 1, "tokens/s", 0),
    "ttft_s": ("time to first token", 1000, "ms", 1),
    "startup_s": ("start-up", 1, "s", 0),
    "drift_mib_200": ("GPU memory after 200 more cycles", 1, "MiB", 0),
    "tokens_identical": ("tokens identical after every cycle", 1, "", 0),
}

EXPERTS = {"30b-a3b": "Qwen3-30B-A3B shape", "moe": "12 of 48 layers of the Qwen3-30B-A3B shape"}
WITHOUT_ENGINE = "none"  # records of the weight stream between two processes

Record = dict[str, Any]
Run = tuple[str, str, str]  # engine, its version, model


def load() -> dict[Run, dict[str, dict[str, Record]]]:
    """Records by run, metric and subject."""
    runs: dict[Run, dict[str, dict[str, Record]]] = defaultdict(lambda: defaultdict(dict))
    for path in sorted((REPOSITORY / "integration" / "results").glob("*.json")):
        for record in json.loads(path.read_text()):
            run = (record["engine"], record["engine_version"], record["model"])
            runs[run][record["metric"]][record["subject"]] = record
    return runs


def value(record: Record | None) -> str:
    if record is None:
        return "-"
    if record["metric"] == "tokens_identical":
        return "yes" if record["median"] == 1 else "**no**"
    _, scale, unit, digits = METRICS[record["metric"]]
    return f"{record['median'] * scale:.{digits}f} {unit}"


def table(metrics: dict[str, dict[str, Record]]) -> list[str]:
    lines = ["| | by itself | with the plugin |", "|---|---:|---:|"]
    for metric, (title, *_) in METRICS.items():
        if metric in metrics:
            subjects = metrics[metric]
            lines.append(f"| {title} | {value(subjects.get('native'))} | {value(subjects.get('plugin'))} |")
    return lines


def wire_pages(runs: dict[Run, dict[str, dict[str, Record]]]) -> list[str]:
    """The weight stream by itself: one table a model, every time that was measured."""
    pages: list[str] = []
    for (engine, _, model), metrics in runs.items():
        if engine != WITHOUT_ENGINE:
            continue
        records = [subjects["plugin"] for subjects in metrics.values() if subjects["plugin"]["unit"] == "s"]
        first = records[0]
        title = f"### The weight stream alone, {model} shape ({first['bytes'] / 1e9:.1f} GB), {first['gpu']}"
        pages += [title, "", "| | median | best | worst |", "|---|---:|---:|---:|"]
        for record in records:
            name = record["metric"].removesuffix("_s").replace("_", " ")
            times = " | ".join(f"{1000 * record[key]:.1f} ms" for key in ("median", "min", "max"))
            pages.append(f"| {name} | {times} |")
        pages += ["", f"Measured by `{first['command']}`.", ""]
    return pages


def describe(run: Run, metrics: dict[str, dict[str, Record]]) -> str:
    record = next(iter(next(iter(metrics.values())).values()))
    engine, version, model = run
    name = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
    shape = EXPERTS.get(model, f"Qwen2.5-{model.upper()} shape")
    return f"{name} {version}, {shape}, one {record['gpu']}, torch {record['torch']}"


def replace(path: Path, lines: list[str]) -> None:
    """Put `lines` between the markers, which must be there."""
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text("\n".join([before + BEGIN, "", *lines, "", END]) + after)


def draw(runs: dict[Run, dict[str, dict[str, Record]]], path: Path) -> None:
    """Bars of the times that users wait for, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = ["sleep_l1_first_s", "sleep_l1_later_s", "sleep_l1_clean_s", "wake_weights_s", "sleep_l2_s", "wake_l2_s"]
    figure, axes = plt.subplots(len(runs), 1, figsize=(10, 3.2 * len(runs)), constrained_layout=True, squeeze=False)
    for axis, (run, metrics) in zip(axes[:, 0], runs.items(), strict=True):
        names = [metric for metric in shown if metric in metrics]
        for offset, subject in ((-0.2, "native"), (0.2, "plugin")):
            heights = [metrics[name].get(subject, {}).get("median", 0) for name in names]
            axis.bar([index + offset for index in range(len(names))], heights, 0.4, label=subject)
        axis.set_xticks(range(len(names)), [name.removesuffix("_s").replace("_", " ") for name in names])
        axis.set(yscale="log", ylabel="seconds", title=describe(run, metrics))
        axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    found = load()
    engines = {run: metrics for run, metrics in found.items() if run[0] != WITHOUT_ENGINE}
    runs = {run: metrics for run, metrics in engines.items() if METRICS.keys() & metrics.keys()}
    if not runs:
        raise SystemExit("no results")
    pages: list[str] = []
    for run, metrics in runs.items():
        command = next(iter(next(iter(metrics.values())).values()))["command"]
        pages += [f"### {describe(run, metrics)}", "", *table(metrics), "", f"Measured by `{command}`.", ""]
    for run, metrics in engines.items():
        pages += report_weights.page(describe(run, metrics), metrics)
    replace(REPOSITORY / "docs" / "benchmarks.md", pages + wire_pages(found))
    draw(runs, REPOSITORY / "docs" / "benchmarks.png")
    headline = [run for run in runs if run[2] == "7b"] or list(runs)
    lines: list[str] = []
    for run in headline:
        lines += [f"{describe(run, runs[run])}:", "", *table(runs[run]), ""]
    lines.append("How it was measured, and all other figures: [docs/benchmarks.md](docs/benchmarks.md).")
    replace(REPOSITORY / "README.md", lines)


if __name__ == "__main__":
    main()
