"""A whole training step: how long the GPU takes from the engine to the trainer and back.

    python -m integration.bench_step --engine vllm --model 3b --out results.json --pictures pictures
    python -m integration.bench_step --device cpu --model tiny --steps 3 --subject offloader pausable --out cpu.json

Each subject is a process of its own with a real engine and a real trainer on one GPU: AdamW, parameters and states in
float32, computation in bfloat16. A step is a rollout, the handoff to the trainer, a short training, and the way back.

    native      the engine's own sleep and update by IPC; parameters and states move as verl moves those of FSDP2
    offloader   a `RolloutHandoff` with an `Offloader`
    pausable    a `RolloutHandoff` with a `PausableMemory`

    release_s            from the last token until the trainer may compute
    return_s             from the end of the training to the first token
    transition_s         both, of each step but the first
    first_transition_s   both, of the first step
    transition_limit_s   the bytes that must cross the link, each way over what the link carries that way
    peak_gpu_mib         the most memory in use on the GPU, by the driver's count; host_mib the same of host memory

The losses of all subjects must be equal; if not, the exit code is 1. A picture shows the GPU's bytes by owner.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from integration import records
from integration.engines import ENGINES
from integration.engines.base import Launch, Server, gpu_used_bytes
from integration.models import SHAPES, write_model
from integration.records import Records
from integration.subjects import described, succeeds
from integration.timeline import Timeline

SUBJECTS = ("native", "offloader", "pausable")
PROMPTS = [[5 + i, 6 + i, 7 + i, 8 + i] for i in range(8)]
TOKENS = 32
LINK_BYTES = 2 << 30


def run_subject(arguments: argparse.Namespace) -> None:
    import torch

    from integration import step_trainer
    from integration.engines.native import NATIVE

    cuda = arguments.device == "cuda"
    launch = Launch(
        arguments.folder, device=arguments.device, dummy_weights=True, kv_bytes=int(arguments.kv_gib * 2**30)
    )
    kinds = NATIVE if arguments.subject == "native" else ENGINES
    common = described(
        "bench_step",
        arguments.engine,
        arguments.model,
        arguments.subject,
        arguments.commit,
        gpu=None if cuda else "none",
        words=arguments.given,
    )
    figures = Records(arguments.out, common, by_step=True)
    idle = gpu_used_bytes() if cuda else 0
    log = arguments.out.parent / f"step-{arguments.engine}-{arguments.subject}.log"
    with Server(kinds[arguments.engine](), launch, log) as server:
        host_free = psutil.virtual_memory().available
        into, out_of = link(arguments.device)
        trainer = step_trainer.Trainer(arguments.folder, arguments.device)
        way = step_trainer.way(arguments.subject, trainer, arguments.engine, server.url, launch.dtype)

        def of_trainer() -> int:
            return way.trainer_bytes() if cuda else 0

        sources = {
            "trainer": of_trainer,
            "engine": lambda: (gpu_used_bytes() - idle if cuda else 0) - of_trainer(),
            "host": lambda: host_free - psutil.virtual_memory().available,
        }
        losses: list[float] = []
        releases, returns = [], []
        with Timeline(sources) as timeline:
            for step in range(arguments.steps + 1):
                if step:
                    with timeline.stage("rollout"):
                        server.generate(PROMPTS[step % len(PROMPTS)], TOKENS)
                start = time.perf_counter()
                with timeline.stage("release"):
                    seconds = way.release()
                releases.append(time.perf_counter() - start)
                with timeline.stage("training"):
                    losses.append(trainer.train(step))
                    if cuda:
                        torch.cuda.synchronize()
                start = time.perf_counter()
                with timeline.stage("return"):
                    seconds = {name: a + b for (name, a), b in zip(way.back().items(), seconds.values(), strict=True)}
                    server.generate(PROMPTS[0], 1)
                returns.append(time.perf_counter() - start)
        # The first release finds the trainer on the GPU, so the first whole transition is the first return and the next
        # release.
        transitions = [back + release for back, release in zip(returns, releases[1:], strict=False)]
        figures.add("release_s", releases[2:], "s", {"steps": {name: round(one, 4) for name, one in seconds.items()}})
        figures.add("return_s", returns[1:], "s")
        figures.add("transition_s", transitions[1:], "s")
        figures.add("first_transition_s", transitions[:1], "s")
        nbytes = moved_bytes(trainer)
        figures.add("transition_limit_s", [nbytes / into + nbytes / out_of], "s", {"bytes": nbytes, "each_way": True})
        figures.add("link_gb_s", [into / 1e9, out_of / 1e9], "GB/s, to the GPU and back")
        if cuda:
            figures.add("peak_gpu_mib", [peak(timeline) / 2**20], "MiB")
        figures.add("host_mib", [timeline.peak("host") / 2**20], "MiB")
        figures.add("losses", losses, "nats")
        if arguments.pictures:
            draw(timeline, arguments.pictures / f"step-{arguments.engine}-{arguments.model}-{arguments.subject}.svg")


def link(device: str) -> tuple[float, float]:
    """Bytes per second of one large copy to the device and back, from page-locked memory."""
    import torch

    there = torch.zeros(LINK_BYTES if device == "cuda" else LINK_BYTES >> 6, dtype=torch.uint8, device=device)
    here = torch.zeros(there.shape, dtype=torch.uint8, pin_memory=device == "cuda")
    found = []
    for destination, source in ((there, here), (here, there)):
        best = float("inf")
        for _ in range(3):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            destination.copy_(source)
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        found.append(there.nbytes / best)
    return found[0], found[1]


def moved_bytes(trainer: Any) -> int:
    """The bytes that leave the GPU in a step, and come back: parameters and the state of the optimiser."""
    states = itertools.chain.from_iterable(state.values() for state in trainer.optimizer.state.values())
    return sum(tensor.nbytes for tensor in itertools.chain(trainer.model.parameters(), states))


def peak(timeline: Timeline) -> int:
    both = zip(timeline.samples["trainer"], timeline.samples["engine"], strict=True)
    return max(sum(pair) for pair in both)


def draw(timeline: Timeline, file: Path) -> None:
    """The bytes on the GPU by owner, over the last two steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    file.parent.mkdir(parents=True, exist_ok=True)
    timeline.samples.pop("host")
    figure, axes = pyplot.subplots(figsize=(11, 4))
    timeline.plot(axes, "memory of the GPU")
    rollouts = [stage for stage in timeline.stages if stage.name == "rollout"]
    axes.set_xlim(rollouts[-2].start if len(rollouts) > 1 else 0, timeline.stages[-1].end)
    figure.savefig(file, bbox_inches="tight")
    pyplot.close(figure)


def losses_agree(out: Path) -> bool:
    losses = [record["by_step"] for record in records.read(out) if record["metric"] == "losses"]
    return all(one == losses[0] for one in losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--model", choices=sorted(SHAPES), default="3b")
    parser.add_argument("--subject", choices=SUBJECTS, nargs="+", default=list(SUBJECTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is only for trying the script")
    parser.add_argument("--steps", type=int, default=10, help="training steps after the one that makes the states")
    parser.add_argument("--kv-gib", type=float, default=20, help="the engine's KV cache")
    parser.add_argument("--commit", default="unknown", help="commit of this repository, for the record")
    parser.add_argument("--timeout", type=float, default=400, help="seconds that each subject may take")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the model, in a subject's process
    arguments = parser.parse_args()
    arguments.out = arguments.out.absolute()
    if arguments.folder is not None:
        arguments.given = sys.argv[1 : sys.argv.index("--folder")]
        [arguments.subject] = arguments.subject
        run_subject(arguments)
        return
    ended = True
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch, arguments.model), SHAPES[arguments.model])
        for subject in arguments.subject:
            command = [sys.executable, "-m", "integration.bench_step", *sys.argv[1:], "--folder", str(folder)]
            ended = succeeds([*command, "--subject", subject], arguments.timeout) and ended
    for record in records.read(arguments.out):
        print(f"{record['subject']:10} {record['metric']:20} {record['median']:12.4f} {record['unit']}")
    if not ended or not losses_agree(arguments.out):
        raise SystemExit("a subject failed" if not ended else "the losses differ")


if __name__ == "__main__":
    main()
