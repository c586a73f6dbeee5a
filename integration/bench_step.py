"""A whole training step: how long the GPU takes from the engine to the trainer and back.

    python -m integration.bench_step --engine vllm --model 3b --out results.json --pictures pictures
    python -m integration.bench_step --engine vllm --model 7b --gpus 2 --out results.json --pictures pictures
    python -m integration.bench_step --device cpu --model tiny --steps 3 --subject offloader pausable --out cpu.json

Each subject is a process of its own with a real engine and a real trainer on one GPU: AdamW, parameters and states in
float32, computation in bfloat16. With several GPUs the engine is tensor-parallel, and the trainer is FSDP2 with one
process on each GPU. A step is a rollout, the handoff to the trainer, a short training, and the way back.

    native            the engine's own sleep and update by IPC; parameters and states move as verl moves those of FSDP2
    offloader         a `RolloutHandoff` with an `Offloader`
    pausable          a `RolloutHandoff` with a `PausableMemory`, without overlap
    pausable_overlap  the same with overlap: the states return while forward and backward run; with room for all, the
                      trainer leaves behind the open engine

    release_s            from the last token until the trainer may compute; `steps` are medians of the handoff's own,
                         with the parts of the update by its sender (`sync_`) and by the slowest rank (`sync_rank_`)
    return_s             from the end of the training to the first token
    transition_s         both, of each step but the first
    first_transition_s   both, of the first step, with its release and its steps; pausable memory has had some seconds
                         to prepare its copies, as during the first rollout
    training_s           forward, backward and step, with the wait for states that are still on their way
    step_s               a whole step without the rollout: release, training and return
    transition_limit_s   the bytes that must cross the link, each way over what the link carries that way; of several
                         GPUs the slowest
    trainer_left_mib     what a trainer in a `PausableMemory` leaves on its GPU while it sleeps, by cause; of several
                         GPUs the most
    peak_gpu_mib         the most memory in use on a GPU, by the driver's count; host_mib the same of host memory,
                         of the whole machine; both of two more steps, which are not timed

The losses of all subjects must be equal bit by bit; if not, the exit code is 1. With two GPUs they are too: the sum of
two ranks' gradients does not depend on the order. A picture shows the bytes of the first GPU by owner.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from integration import records
from integration.engines import ENGINES
from integration.engines.base import Launch, Server, used_bytes_by_gpu
from integration.models import SHAPES, write_model
from integration.records import Records
from integration.subjects import add_commit, described, succeeds
from integration.timeline import Timeline

if TYPE_CHECKING:
    from integration.step_ranks import Ranks

SUBJECTS = ("native", "offloader", "pausable", "pausable_overlap")
PROMPTS = [[5 + i, 6 + i, 7 + i, 8 + i] for i in range(8)]
TOKENS = 32
LINK_BYTES = 2 << 30
SAMPLED_STEPS = 2  # whose memory is sampled, after those that are measured


def run_subject(arguments: argparse.Namespace) -> None:
    from integration.engines.native import NATIVE

    cuda = arguments.device == "cuda"
    if cuda:
        import pynvml

        pynvml.nvmlInit()  # otherwise every sample starts and stops the library
    launch = Launch(
        arguments.folder,
        tp=arguments.gpus,
        device=arguments.device,
        dummy_weights=True,
        kv_bytes=int(arguments.kv_gib * 2**30),
        compiled=False,  # the engine's own speed does not matter here, and it starts sooner
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
    figures = Records(arguments.out, {**common, "gpus": arguments.gpus}, by_step=True)
    idle = used_bytes_by_gpu() if cuda else [0]
    log = arguments.out.parent / f"step-{arguments.engine}-{arguments.subject}.log"
    words = (arguments.folder, arguments.device, arguments.subject, arguments.engine)
    with Server(kinds[arguments.engine](), launch, log) as server, ExitStack() as stack:
        host_free = psutil.virtual_memory().available
        trainer: OneProcess | Ranks
        if arguments.gpus == 1:
            trainer = OneProcess(*words, server.url, launch.dtype)
        else:
            from integration.step_ranks import Ranks

            board = Path(arguments.folder, "board")
            trainer = stack.enter_context(Ranks(arguments.gpus, *words, server.url, launch.dtype, board))
        links = trainer.begin()

        def used() -> list[int]:
            return [now - before for now, before in zip(used_bytes_by_gpu(), idle, strict=True)] if cuda else [0]

        def of_trainer() -> int:
            return trainer.trainer_bytes() if cuda else 0

        sources = {
            "trainer": of_trainer,
            "engine": lambda: used()[0] - of_trainer(),
            "fullest": lambda: max(used()),
            "host": lambda: host_free - psutil.virtual_memory().available,
        }
        losses: list[float] = []
        releases, trainings, returns = [], [], []
        released: list[dict[str, float]] = []  # by step of the handoff, of each step; and the same of the way back
        returned: list[dict[str, float]] = []

        def make_step(number: int, stage: Callable[[str], AbstractContextManager[None]]) -> None:
            if number:
                with stage("rollout"):
                    server.generate(PROMPTS[number % len(PROMPTS)], TOKENS)
            with stage("release"):
                start = time.perf_counter()
                released.append(trainer.release())
                releases.append(time.perf_counter() - start)
            with stage("training"):
                start = time.perf_counter()
                losses.append(trainer.train(number))
                trainings.append(time.perf_counter() - start)
            with stage("return"):
                start = time.perf_counter()
                returned.append(trainer.back())
                server.generate(PROMPTS[0], 1)
                returns.append(time.perf_counter() - start)

        time.sleep(arguments.settle_s)
        for number in range(arguments.steps + 1):
            make_step(number, lambda name: nullcontext())
        seconds = [summed(*ways) for ways in zip(released, returned, strict=True)]
        measured = {name: statistics.median(one.get(name, 0.0) for one in seconds[1:]) for name in seconds[-1]}
        # The first release finds the trainer on the GPU, so the first whole transition is the first return and the next
        # release.
        transitions = [back + release for back, release in zip(returns, releases[1:], strict=False)]
        figures.add("release_s", releases[2:], "s", {"steps": rounded(measured)})
        figures.add("return_s", returns[1:], "s")
        figures.add("transition_s", transitions[1:], "s")
        first = {"release_s": round(releases[1], 4), "steps": rounded(summed(returned[0], released[1]))}
        figures.add("first_transition_s", transitions[:1], "s", first)
        figures.add("training_s", trainings[2:], "s")
        steps = [sum(parts) for parts in zip(releases, trainings, returns, strict=True)]
        figures.add("step_s", steps[2:], "s")
        moved = trainer.moved_bytes()
        limits = [nbytes / into + nbytes / out_of for nbytes, (into, out_of) in zip(moved, links, strict=True)]
        figures.add("transition_limit_s", [max(limits)], "s", {"bytes": max(moved), "each_way": True})
        figures.add("link_gb_s", [min(way) / 1e9 for way in zip(*links, strict=True)], "GB/s, to the GPU and back")
        figures.add("losses", losses, "nats")
        # A sample takes milliseconds and the GIL, so these steps are not measured. If they take too long for the time
        # limit, the records are there.
        trainer.sample()
        with Timeline(sources) as timeline:
            for number in range(arguments.steps + 1, arguments.steps + 1 + SAMPLED_STEPS):
                make_step(number, timeline.stage)
        left = max(trainer.left(), key=lambda causes: sum(causes.values()))
        if left:
            causes = {cause: round(nbytes / 2**20, 1) for cause, nbytes in left.items()}
            figures.add("trainer_left_mib", [sum(left.values()) / 2**20], "MiB", {"causes": causes})
        if cuda:
            figures.add("peak_gpu_mib", [timeline.peak("fullest") / 2**20], "MiB")
        figures.add("host_mib", [timeline.peak("host") / 2**20], "MiB")
        if arguments.pictures:
            shape = arguments.model if arguments.gpus == 1 else f"{arguments.model}-tp{arguments.gpus}"
            draw(timeline, arguments.pictures / f"step-{arguments.engine}-{shape}-{arguments.subject}.svg")


def summed(*parts: dict[str, float]) -> dict[str, float]:
    """The seconds of each step in all parts."""
    return {name: sum(one.get(name, 0.0) for one in parts) for part in parts for name in part}


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(one, 4) for name, one in seconds.items()}


class OneProcess:
    """A trainer on one GPU, in this process, with the methods of `step_ranks.Ranks`."""

    def __init__(self, folder: Path, device: str, subject: str, engine: str, url: str, dtype: str) -> None:
        from integration import step_trainer

        self._trainer = step_trainer.Trainer(folder, device)
        self._make = lambda: step_trainer.way(subject, self._trainer, engine, url, dtype)

    def begin(self) -> list[tuple[float, float]]:
        links = [link(self._trainer.device)]
        self._way = self._make()
        self.release, self.back, self.trainer_bytes = self._way.release, self._way.back, self._way.trainer_bytes
        return links

    def sample(self) -> None:
        """This process reads its bytes itself."""

    def train(self, step: int) -> float:
        return self._trainer.train(step)

    def moved_bytes(self) -> list[int]:
        return [moved_bytes(self._trainer)]

    def left(self) -> list[dict[str, int]]:
        return [self._way.left()]


def link(device: str, meet: Callable[[], None] = lambda: None) -> tuple[float, float]:
    """Bytes per second of one large copy to the device and back, from page-locked memory.

    Args:
        meet: Waits for the other processes that measure their links at the same time.
    """
    import torch

    there = torch.zeros(LINK_BYTES if device == "cuda" else LINK_BYTES >> 6, dtype=torch.uint8, device=device)
    here = torch.zeros(there.shape, dtype=torch.uint8, pin_memory=device == "cuda")
    found = []
    for destination, source in ((there, here), (here, there)):
        best = float("inf")
        for _ in range(3):
            if device == "cuda":
                torch.cuda.synchronize()
            meet()
            start = time.perf_counter()
            destination.copy_(source)
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        found.append(there.nbytes / best)
    if device == "cuda":
        del there, destination, source
        torch.cuda.empty_cache()
    return found[0], found[1]


def moved_bytes(trainer: Any) -> int:
    """The bytes that leave this process's GPU in a step, and come back: parameters and the state of the optimiser."""
    states = itertools.chain.from_iterable(state.values() for state in trainer.optimizer.state.values())
    tensors = itertools.chain(trainer.model.parameters(), states)
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)


def draw(timeline: Timeline, file: Path) -> None:
    """The bytes on the GPU by owner, over the last two steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    file.parent.mkdir(parents=True, exist_ok=True)
    for name in ("fullest", "host"):
        timeline.samples.pop(name)
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
    parser.add_argument("--gpus", type=int, default=1, help="ranks of the engine and of the trainer, one on each GPU")
    parser.add_argument(
        "--kv-gib",
        type=float,
        default=None,
        help="the engine's KV cache on each GPU; by default 20, and 0.06 on the CPU",
    )
    parser.add_argument(
        "--settle-s",
        type=float,
        default=None,
        help="seconds before the first step, to prepare host memory as in a rollout; by default 20, on the CPU 0",
    )
    add_commit(parser)
    parser.add_argument("--timeout", type=float, default=400, help="seconds that each subject may take")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the model, in a subject's process
    arguments = parser.parse_args()
    arguments.out = arguments.out.absolute()
    if arguments.kv_gib is None:
        arguments.kv_gib = {"cuda": 20, "cpu": 0.06}[arguments.device]
    if arguments.settle_s is None:
        arguments.settle_s = {"cuda": 20, "cpu": 0}[arguments.device]
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
        print(f"{record['subject']:17} {record['metric']:20} {record['median']:12.4f} {record['unit']}")
    if not ended or not losses_agree(arguments.out):
        raise SystemExit("a subject failed" if not ended else "the losses differ")


if __name__ == "__main__":
    main()
