"""What `rl-memory plan` says of the runs in `integration/results`, beside what was measured, for docs/plan.md."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from integration.models import FP8_BLOCKS, SHAPES, Shape, config
from rl_memory_plugins.plan import Plan, plan

MIB = 1 << 20
CACHE_MIB = 512
"""What torch's cache holds at most during a sleep, in records from before it was emptied (commit 0d919c4)."""
OLD_COMMIT = "7c6ed08"
UNGROUPED_COMMIT = "a68f60b"
"""Of a record in which a quantised source rounded its tensors one by one."""
WAITING_COMMIT = "4ef79c4"
"""Of a record in which engines opened only when the trainer had left."""

#: The runs that a page shows: the arguments of `rl-memory plan` behind the model.
SHOWN = {
    "fits": ["--gpu", "h100-80", "--tp", "2", "--trainer", "fsdp2", "--optimizer", "adamw", "--host-gib", "256"],
    "lacks": ["--gpu", "h100-80", "--trainer", "fsdp2", "--optimizer", "adamw"],
}
SHOWN_MODEL = "qwen2.5-7b"

SHARE = 0.6
"""Of the memory of a GPU, the share of an engine of `bench_gpu` whose command does not say it."""


class Compared(NamedTuple):
    """One figure, in MiB.

    Attributes:
        fitted: A constant of `rl_memory_plugins/plan/measured.py` was taken from this figure.
        slack: By how much the measured one may be too large, because torch's cache is in it.
    """

    record: str
    subject: str
    figure: str
    measured: float
    planned: float
    fitted: bool = False
    slack: float = 0.0

    @property
    def ratio(self) -> float:
        """The planned one over the measured one, without as much of the slack as brings it nearest to 1."""
        return self.planned / min(max(self.planned, self.measured - self.slack), self.measured)


def model_folder(folder: Path, shape: Shape, *, fp8: bool = False) -> Path:
    """A model's folder with its configuration alone."""
    folder.mkdir(parents=True, exist_ok=True)
    extra = {"quantization_config": FP8_BLOCKS} if fp8 else {}
    (folder / "config.json").write_text(json.dumps({**config(shape, "bfloat16"), **extra}))
    return folder


def compared(results: Path) -> list[Compared]:
    """All figures of memory that runs with the package have left, beside those of their plans."""
    with tempfile.TemporaryDirectory() as scratch:

        def planned(shape: Shape, *, fp8: bool = False, **options: Any) -> Plan:
            return plan(model_folder(Path(scratch, "model"), shape, fp8=fp8), **options)

        makers = (_asleep, _ranks, _steps, _grpo, _trl, _verl, _updates, _wire, _fsdp)
        return [one for maker in makers for one in maker(results, planned)]


Planned = Callable[..., Plan]


def _records(results: Path, pattern: str) -> Iterator[tuple[Path, dict[str, dict[str, dict[str, Any]]]]]:
    """By file, the records by subject and metric."""
    for path in sorted(results.glob(pattern)):
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for record in json.loads(path.read_text()):
            found.setdefault(record["subject"], {})[record["metric"]] = record
        yield path, found


def _gpu(record: dict[str, Any]) -> str:
    return "h200-141" if "H200" in str(record.get("gpu") or record.get("device")) else "h100-80"


def _asleep(results: Path, planned: Planned) -> Iterator[Compared]:
    gpu_of = ("sleep-vllm-0.33.0-7b", "sleep-vllm-0.33.0-32b", "sleep-sglang-0.5.20-7b-third-host")
    host_of = ("sleep-vllm-0.32.0-7b-third-host", "sleep-sglang-0.5.20-7b-third-host")
    for path, found in _records(results, "sleep-*.json"):
        metrics = found["plugin"]
        if "host_held_mib" not in metrics:  # measured at level 2 only
            continue
        about = metrics["host_held_mib"]
        _, _, given = about["command"].partition("--memory ")
        fraction, tp = float(given.split()[0]) if given else SHARE, about.get("tensor_parallel", 1)
        common = {"gpu": _gpu(about), "engine": about["engine"], "fraction": fraction, "max_running": 64, "level": 1}
        made = planned(SHAPES[about["model"]], trainer="none", tp=tp, **common)
        if "gpu_left_mib" in metrics:
            slack = CACHE_MIB if about["commit"] == OLD_COMMIT else 0
            left = metrics["gpu_left_mib"]["median"]
            sizes = left, made.phase("sleep").total / MIB
            yield Compared(path.stem, "plugin", "GPU, asleep", *sizes, path.stem in gpu_of, slack)
        host = metrics["host_held_mib"]["median"]
        yield Compared(path.stem, "plugin", "host, asleep", host, made.host_total / MIB, path.stem in host_of)


def _ranks(results: Path, planned: Planned) -> Iterator[Compared]:
    for path, found in _records(results, "ranks-*-7b-tp2-h200.json"):
        record = found["plugin"]["left_mib_first"]
        made = planned(SHAPES["7b"], gpu="h200-141", engine=record["engine"], tp=2, max_running=64, trainer="none")
        left = made.phase("sleep").total / MIB
        yield Compared(path.stem, "plugin", "GPU, asleep", record["median"], left, fitted=True)


def _steps(results: Path, planned: Planned) -> Iterator[Compared]:
    """`bench_step`: 4 x 64 tokens, 4 requests; if its command does not say otherwise, a KV cache of 20 GiB."""
    for path, found in _records(results, "step-*.json"):
        for subject, metrics in found.items():
            if subject == "native" or metrics["losses"].get("gpus", 1) > 1:
                continue
            record = metrics["peak_gpu_mib"]
            _, _, given = record["command"].partition("--kv-gib ")
            kv_gib = float(given.split()[0]) if given else 20.0
            options = {"gpu": _gpu(record), "engine": record["engine"], "kv_gib": kv_gib, "max_running": 4}
            training = {"trainer": "plain", "micro_tokens": 256, "checkpointing": False}
            made = planned(SHAPES[record["model"]], dtype="float16", **options, **training)
            opens_early = subject == "pausable_overlap" and record["commit"] != WAITING_COMMIT
            peak = max(made.peak.total, made.beside if opens_early else 0)
            yield Compared(path.stem, subject, "GPU, peak", record["median"], peak / MIB)
            # The engine runs before the measurement begins.
            host = sum(made.host[part] for part in ("trainer processes", "parameters", "optimizer")) / MIB
            yield Compared(path.stem, subject, "host, trainer", metrics["host_mib"]["median"], host)


def _grpo(results: Path, planned: Planned) -> Iterator[Compared]:
    """`grpo_demo`: one batch of 512 answers of 12 tokens, all in float32."""
    for path in sorted(results.glob("grpo-*-h200.json")):
        record = json.loads(path.read_text())
        scale = record["scale"]
        answers = scale["prompts"] * scale["answers"]
        options = {"gpu": "h200-141", "engine": record["engine"], "kv_gib": scale["kv_bytes"] / 2**30}
        training = {"trainer": "plain", "precision": "fp32", "micro_tokens": answers * 12, "checkpointing": False}
        made = planned(Shape(**scale["shape"]), dtype="float16", max_running=answers, **options, **training)
        peaks = record["peak_mib"]
        whole = peaks["all of the GPU"], made.peak.total / MIB
        yield Compared(path.stem, "demo", "GPU, peak", *whole, fitted=record["engine"] == "vllm")
        own = made.phase("training").trainer - made.trainer.process
        yield Compared(path.stem, "demo", "GPU, trainer's tensors", peaks["trainer"], own / MIB)


def _trl(results: Path, planned: Planned) -> Iterator[Compared]:
    """The trainer stays on the GPU. vLLM has 0.6 of it."""
    for path, found in _records(results, "trl-*-h100.json"):
        options = {"gpu": "h100-80", "fraction": 0.6, "trainer": "plain", "offload": "none"}
        made = planned(SHAPES["1.5b"], micro_tokens=512 * 12, checkpointing=False, **options)
        for subject in ("plugin", "adapter"):
            peak, released = (found[subject][name]["median"] for name in ("peak_gpu_mib", "released_mib"))
            yield Compared(path.stem, subject, "GPU, peak", peak, made.peak.total / MIB)
            freed = (made.phase("rollout").engine - made.phase("sleep").engine) / MIB
            yield Compared(path.stem, subject, "GPU, given back by a sleep", released, freed)


def _verl(results: Path, planned: Planned) -> Iterator[Compared]:
    """FSDP2 without offloading. vLLM has 0.4 of each GPU."""
    for path, found in _records(results, "verl-vllm-0.26.0-1.5b-*.json"):
        for subject in sorted(found.keys() - {"native"}):
            record = found[subject]["peak_gpu_mib"]
            options = {"gpu": _gpu(record), "fraction": 0.4, "tp": 2 if "2 NVIDIA" in record["device"] else 1}
            training = {"micro_tokens": 128 * 24, "checkpointing": False, "offload": "none"}
            made = planned(SHAPES["1.5b"], **options, **training)
            yield Compared(path.stem, subject, "GPU, peak", record["median"], made.peak.total / MIB)


def _updates(results: Path, planned: Planned) -> Iterator[Compared]:
    """`bench_weights`: the tensors are on the trainer's GPU in the engine's dtype."""
    for path, found in _records(results, "weights-*.json"):
        if "peak_extra_mib_trainer_staged" not in found["plugin"]:
            continue
        record = found["plugin"]["peak_extra_mib_trainer_staged"]
        name = record["model"].removesuffix("-fp8")
        fp8 = name != record["model"]
        options = {"gpu": _gpu(record), "engine": record["engine"], "trainer": "plain", "precision": "bf16"}
        made = planned(SHAPES[name], fp8=fp8, fraction=0.5, **options)
        buckets = made.trainer.buckets / MIB
        if not (fp8 and record["commit"] == UNGROUPED_COMMIT):
            yield Compared(path.stem, "plugin", "GPU, trainer's buckets", record["median"], buckets, fitted=fp8)
        engine = found["plugin"]["peak_extra_mib_engine_staged"]["median"]
        if engine > 1:
            yield Compared(path.stem, "plugin", "GPU, engine's update", engine, made.engine.update / MIB, fitted=fp8)


def _wire(results: Path, planned: Planned) -> Iterator[Compared]:
    for path, found in _records(results, "wire-*.json"):
        for metric, record in found["plugin"].items():
            _, staged, size = metric.rpartition("staged_")
            if staged and metric.startswith("peak_extra"):
                bucket = int(size.removesuffix("mib"))
                shape = SHAPES[path.stem.removeprefix("wire-")]
                made = planned(shape, gpu="h200-141", trainer="plain", precision="bf16", bucket_mib=bucket)
                figure = f"GPU, buckets of {bucket} MiB"
                yield Compared(path.stem, "plugin", figure, record["median"], made.trainer.buckets / MIB)


def _fsdp(results: Path, planned: Planned) -> Iterator[Compared]:
    """What each of two FSDP2 processes moves."""
    for path in sorted(results.glob("fsdp-*.json")):
        record = json.loads(path.read_text())
        made = planned(SHAPES[record["shape"]], gpu="h200-141", tp=2, kv_gib=60)
        moved = record["ranks"][0][1]["moved_bytes"]
        for figure, step, nbytes in (
            ("parameters", "offload", made.trainer.parameters),
            ("optimiser's states", "offload_others", made.trainer.optimizer),
        ):
            yield Compared(path.stem, "rank 0", f"GPU, {figure}", moved[step] / MIB, nbytes / MIB)


def table(results: Path) -> list[str]:
    lines = ["| record | subject | what | measured, MiB | planned, MiB | planned / measured |"]
    lines.append("|---|---|---|---:|---:|---:|")
    for one in compared(results):
        note = " (fitted)" if one.fitted else f" (less up to {one.slack} of cache)" if one.slack else ""
        cells = f"{one.measured:.0f} | {one.planned:.0f} | {one.ratio:.3f}{note}"
        lines.append(f"| `{one.record}` | {one.subject} | {one.figure} | {cells} |")
    return lines


def output(name: str) -> list[str]:
    """A run of the command, as a block of a page. Its terminal has 80 columns."""
    from typer.testing import CliRunner

    from rl_memory_plugins import cli

    words = SHOWN[name]
    with tempfile.TemporaryDirectory() as scratch, mock.patch.dict(os.environ, {"COLUMNS": "80", "TERM": "dumb"}):
        folder = model_folder(Path(scratch, SHOWN_MODEL), SHAPES["7b"])
        done = CliRunner().invoke(cli.app, ["plan", str(folder), *words])
    command = " ".join(["rl-memory plan", SHOWN_MODEL, *words])
    lines = [line.rstrip() for line in done.output.splitlines()]
    return ["```console", f"$ {command}", *lines, "$ echo $?", str(done.exit_code), "```"]


def draw_plan(file: Path) -> None:
    """The picture of the first run that the page shows."""
    from rl_memory_plugins.plan.picture import draw

    with tempfile.TemporaryDirectory() as scratch:
        made = plan(model_folder(Path(scratch, SHOWN_MODEL), SHAPES["7b"]), gpu="h100-80", tp=2)
    draw(made, file)
