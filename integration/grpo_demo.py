"""GRPO on one device: a real engine answers, a trainer learns from the answers, and both share the memory in turns.

    python -m integration.grpo_demo --engine vllm --device cuda
    python -m integration.grpo_demo --engine sglang --quick        # on the CPU

The model is made here, with random weights, and the reward can be verified: see `integration.grpo`. In each step the
engine samples answers from the current weights, sleeps at level 2 while the trainer computes, and gets the new weights
by the library's `RolloutHandoff`; the trainer's model and optimiser sleep in host memory while the engine works. On the
CPU the same calls run, but a sleep there copies from memory to memory.

Writes a JSON record, a picture of the memory over time, and the timeline of the engine and its trainer: a page, its
picture, and a trace for ui.perfetto.dev. The exit code is 1 if a check fails, such as the rise of the reward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from integration import grpo
from integration.engines import ENGINES
from integration.engines.base import Launch, Server, gpu_used_bytes
from integration.models import SHAPES, Shape, new_model, write_model
from integration.subjects import add_commit, engine_version
from integration.timeline import Timeline
from rl_memory_plugins.tags import TagState
from rl_memory_plugins.timeline import History, html_page, perfetto_trace, pictures, read_handoffs, timeline_in
from rl_memory_plugins.trainer import ModelSource, PausableMemory, RolloutHandoff
from rl_memory_plugins.weights.checksums import tensor_checksum

SEED = 11
RISE = 0.2  # the least rise of the mean reward from the first to the last steps
ENDS = 5  # the number of first steps, and of last steps
CLIENTS = 64


class Scale(NamedTuple):
    """The size of a run."""

    shape: Shape
    prompts: int  # of each step
    answers: int  # to each prompt
    steps: int
    kv_bytes: int


SCALES = {
    "quick": Scale(SHAPES["tiny"], 8, 16, 14, 64 << 20),
    "cpu": Scale(SHAPES["small"], 16, 16, 20, 256 << 20),
    "cuda": Scale(SHAPES["1.5b"], 32, 16, 24, 100 << 30),
}


class Demo:
    """One run: the loop, what it measured, and its checks."""

    def __init__(
        self,
        server: Server,
        policy: grpo.Policy,
        memory: PausableMemory,
        timeline: Timeline,
        scale: Scale,
        handoffs: Path,
    ) -> None:
        self.handoffs = handoffs
        self._server = server
        self._policy = policy
        self._timeline = timeline
        self._scale = scale
        self._generator = torch.Generator().manual_seed(SEED)
        self._dtype = getattr(torch, server.launch.dtype)
        self._handoff = RolloutHandoff(
            server.control,
            ModelSource(policy.model, dtype=self._dtype),
            weights=[memory.part("parameters")],
            others=[memory.part("gradients", "optimizer")],
        )
        self.steps: list[dict[str, Any]] = []
        self.ends: list[float] = []  # the end of each step, in the timeline's seconds
        self.checks: dict[str, bool] = {}

    def check(self, name: str, passed: bool) -> None:
        """Record a check; one failure anywhere fails it."""
        self.checks[name] = self.checks.get(name, True) and passed

    def run(self) -> None:
        with self._timeline.stage("to the engine"):
            self._handoff.sync("0")  # the engine has dummy weights
        for number in range(1, self._scale.steps + 1):
            self._step(number)
        with self._timeline.stage("roll out"):
            _, answers, _ = self._roll_out(str(self._scale.steps))
            self.check("after the last step the engine answers", len(answers) == self._scale.prompts)
        rewards = [step["reward"] for step in self.steps]
        first, last = statistics.mean(rewards[:ENDS]), statistics.mean(rewards[-ENDS:])
        self.check(f"the mean reward of {ENDS} steps rises by {RISE}", last > first + RISE)
        self._compare_weights()

    def _step(self, number: int) -> None:
        seconds: dict[str, float] = {}
        start = time.perf_counter()
        with self._timeline.stage("roll out"):
            prompts, answers, logprobs = self._roll_out(str(number - 1))
        seconds["roll out"] = time.perf_counter() - start
        with self._timeline.stage("to the trainer"):
            report = self._handoff.release()
        self.check("the engine admits nothing while the trainer has the device", self._is_closed())
        start = time.perf_counter()
        with self._timeline.stage("train"):
            own = self._policy.train(prompts, answers)
        seconds["train"] = time.perf_counter() - start
        with self._timeline.stage("to the engine"):
            self._handoff.sync(str(number), report)
        report.append_to(self.handoffs)
        self.check("the engine has the version that was sent", self._server.control.weight_version() == str(number))
        # The ratio in the loss has a meaning only if engine and trainer compute the same policy.
        gap = float((own - torch.tensor(logprobs)).abs().mean())
        self.check("engine and trainer agree on the log-probabilities", gap < 0.05)
        rewards = [grpo.reward(p, a) for p, group in zip(prompts, answers, strict=True) for a in group]
        step = {
            "step": number,
            "reward": statistics.mean(rewards),
            "logprob_gap": gap,
            "weight_version": str(number),
            "seconds": {**seconds, **report.seconds},
            "moved_bytes": report.moved_bytes,
            "update": {key: report.update[key] for key in ("bytes", "buckets", "transport")},
        }
        self.steps.append(step)
        self.ends.append(self._timeline.now())
        total = sum(step["seconds"].values())
        print(f"step {number:2}: reward {step['reward']:.3f}, gap {gap:.1e}, {total:.2f} s", flush=True)

    def _roll_out(self, version: str) -> tuple[list[list[int]], list[list[list[int]]], list[list[list[float]]]]:
        """Sample answers from the weights of this version.

        Returns: the prompts; by prompt its answers; by prompt and answer the engine's log-probability of each token.
        """
        each = self._scale.answers
        prompts = grpo.make_prompts(self._scale.prompts, self._generator)
        seeds = torch.randint(1 << 31, (len(prompts) * each,), generator=self._generator).tolist()
        kind = self._server.kind

        def ask(job: tuple[int, int]) -> tuple[list[int], list[float]]:
            number, seed = job
            sampling = {"temperature": 1.0, "seed": seed, "logprobs": True}
            response = self._server.post(prompts[number // each], grpo.ANSWER_TOKENS, **sampling)
            answer = response.raise_for_status().json()
            versions = (response.headers["x-weight-version"], response.headers["x-weight-version-end"])
            self.check("every answer names the weights that were sent last", versions == (version, version))
            return kind.tokens(answer), kind.logprobs(answer)

        with ThreadPoolExecutor(CLIENTS) as pool:
            found = list(pool.map(ask, enumerate(seeds)))
        groups = [found[start : start + each] for start in range(0, len(found), each)]
        tokens = [[tokens for tokens, _ in group] for group in groups]
        return prompts, tokens, [[logprobs for _, logprobs in group] for group in groups]

    def _is_closed(self) -> bool:
        return self._server.post([5, 6, 7, 8]).status_code == 503

    def _compare_weights(self) -> None:
        self._handoff.release()
        own = {name: tensor_checksum(p.detach().to(self._dtype)) for name, p in self._policy.model.named_parameters()}
        self._handoff.sync("final")
        self.check("the engine's checksums equal the trainer's", self._server.control.checksums()["tensors"] == own)


def export(server: Server, handoffs: Path, name: Path) -> None:
    """Write the timeline of the engine and its trainer: a page, its pictures, and a trace; see docs/timeline.md."""
    engine = timeline_in(server.control.timeline())
    history = History({server.url: engine}, {handoffs.name: read_handoffs(handoffs)})
    name.with_suffix(".html").write_text(html_page(history))
    name.with_suffix(".trace.json").write_text(perfetto_trace(history))
    for device, picture in pictures(history).items():
        name.with_suffix(f".{device}.svg").write_text(picture)


def memory_sources(server: Server, memory: PausableMemory) -> dict[str, Any]:
    """The functions that read each side's memory. A GPU's driver may not tell processes apart; torch knows its own."""
    if server.launch.device == "cpu":
        own = psutil.Process()
        return {"engine": server.resident_bytes, "trainer": lambda: own.memory_info().rss}

    def trainer() -> int:
        asleep = sum(tag.bytes for tag in memory.status().values() if tag.state is not TagState.RESIDENT)
        return int(torch.cuda.memory_reserved()) - asleep  # torch counts sleeping memory as its own

    return {
        "all of the GPU": gpu_used_bytes,
        "engine": lambda: max(gpu_used_bytes() - trainer(), 0),
        "trainer": trainer,
    }


def draw(path: Path, demo: Demo, timeline: Timeline, title: str, device: str) -> None:
    """Draw the rewards, the memory of the whole run, and the memory of two steps in its middle."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (rewards, whole, part) = plt.subplots(3, 1, figsize=(13, 11), constrained_layout=True)
    rewards.plot(demo.ends, [step["reward"] for step in demo.steps], marker="o", markersize=3)
    rewards.set(ylabel="mean reward", ylim=(0, 1), title=title)
    label = "resident memory" if device == "cpu" else "GPU memory"
    timeline.plot(whole, label)
    timeline.plot(part, label)
    middle = len(demo.ends) // 2
    part.set(xlim=(demo.ends[middle - 1], demo.ends[middle + 1]), title="two steps of it")
    rewards.set(xlim=whole.get_xlim())
    figure.savefig(path, dpi=110)
    plt.close(figure)


def record(
    arguments: argparse.Namespace, demo: Demo, timeline: Timeline, scale: Scale, parameters: int
) -> dict[str, Any]:
    peaks = {name: max(samples, default=0) >> 20 for name, samples in timeline.samples.items()}
    return {
        "engine": arguments.engine,
        "engine_version": engine_version(arguments.engine),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "commit": arguments.commit,
        "command": "python -m integration.grpo_demo " + " ".join(sys.argv[1:]),
        "parameters": parameters,
        "scale": scale._asdict() | {"shape": scale.shape._asdict()},
        "checks": demo.checks,
        "peak_mib": peaks,
        "steps": demo.steps,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model and fewer steps")
    parser.add_argument("--steps", type=int, default=None)
    add_commit(parser)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    arguments = parser.parse_args()
    scale = SCALES["quick" if arguments.quick else arguments.device]
    scale = scale._replace(steps=arguments.steps or scale.steps, shape=scale.shape._replace(vocabulary=grpo.VOCABULARY))
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"grpo-{arguments.engine}-{arguments.device}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-memory-grpo-")), "model")
        launch = Launch(
            folder,
            device=arguments.device,
            dummy_weights=True,
            kv_bytes=scale.kv_bytes,
            max_running=scale.prompts * scale.answers,
        )
        write_model(folder, scale.shape, dtype=launch.dtype)
        server = Server(ENGINES[arguments.engine](), launch, arguments.out / f"{name}.log")
        stack.callback(server.stop)
        model = new_model(folder, SEED)  # while the engine starts
        server.wait_ready()
        print(f"{arguments.engine} is ready", flush=True)
        torch.set_float32_matmul_precision("high")
        server.control.sleep(2)  # makes room for the trainer's parameters
        policy = grpo.Policy(model, arguments.device)
        memory = PausableMemory(policy.model, policy.optimizer, device=policy.device)
        with Timeline(memory_sources(server, memory)) as timeline:
            handoffs = arguments.out / f"{name}-handoffs.jsonl"
            handoffs.unlink(missing_ok=True)
            demo = Demo(server, policy, memory, timeline, scale, handoffs)
            demo.run()
        export(server, handoffs, arguments.out / f"{name}-timeline")
    parameters = sum(p.numel() for p in model.parameters())
    title = f"GRPO of a model of {parameters / 1e6:,.0f} M parameters: {arguments.engine} and a trainer on one device"
    draw(arguments.out / f"{name}.png", demo, timeline, title, arguments.device)
    found = record(arguments, demo, timeline, scale, parameters)
    (arguments.out / f"{name}.json").write_text(json.dumps(found, indent=1))
    for check, passed in demo.checks.items():
        print(f"{'passed' if passed else 'FAILED'}: {check}")
    return 0 if all(demo.checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
