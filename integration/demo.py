"""Reinforcement learning on one machine's memory: an engine and a trainer take turns, and every claim is checked.

    python -m integration.demo --engine vllm

A real engine's server and a real trainer process share a model. Each round rolls out, puts the engine to sleep
without its weights, trains on the rollouts, wakes the engine in stages with the new weights streamed in between,
and rolls out again. Exit code 1 if a check fails; a picture of both processes' memory is written at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from integration.models import SHAPES, write_model
from integration.timeline import Timeline
from integration.trainer_process import TrainerProcess

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12], [100, 200, 300, 400], [17, 3, 950, 21]]
SEED = 20
LEARNING_RATE = 0.3
TRAINING_STEPS = 4


class Demo:
    """The rounds, their measurements and their checks."""

    def __init__(self, server: Server, trainer: TrainerProcess, timeline: Timeline, answers: int, tokens: int) -> None:
        self._server = server
        self._trainer = trainer
        self._timeline = timeline
        self._answers = answers  # for each prompt
        self._tokens = tokens
        self._target: int | None = None
        self.rewards: list[float] = []
        self.checks: dict[str, bool] = {}
        self.table = Table("round", "step", "seconds", "engine MiB", "trainer MiB", "note", title="live")
        self._round = 0

    def check(self, name: str, passed: bool) -> None:
        """Record a check; one failure anywhere fails it."""
        self.checks[name] = self.checks.get(name, True) and passed

    def step(self, name: str, run: Any) -> Any:
        """Run one step, timed, as a stage of the picture and a row of the table."""
        with self._timeline.stage(name):
            start = time.perf_counter()
            result = run()
            seconds = time.perf_counter() - start
        note = result if isinstance(result, str) else ""
        self.table.add_row(
            str(self._round),
            name,
            f"{seconds:.2f}",
            str(self._server.resident_bytes() >> 20),
            str(self._trainer.resident_bytes() >> 20),
            note,
        )
        return result

    def start(self) -> None:
        """The trainer's first weights into the engine, which began with dummy ones."""
        self._trainer.call("load")
        self.step("first update", lambda: self._update("0"))
        self.step("offload trainer", lambda: self._trainer.call("offload"))

    def run_round(self, number: int) -> None:
        control = self._server.control
        self._round = number
        answers = self.step("roll out", self._roll_out)
        self.step("sleep level 2", self._sleep)
        self._must_refuse("asleep")
        self.step("load trainer", lambda: self._trainer.call("load"))
        self.step("train", lambda: self._train(answers))
        self.step("wake weights", lambda: control.wake_up(["weights"])["status"])
        self._must_refuse("asleep")
        self.step("stream weights", lambda: self._update(str(number)))
        expected = [self._trainer.call("greedy", prompt, 8) for prompt in PROMPTS]
        self.step("offload trainer", lambda: self._trainer.call("offload"))
        self._must_refuse("asleep")
        self.step("wake KV cache", lambda: control.wake_up(["kv_cache", "cuda_graph"])["status"])
        answered = [self._server.generate(prompt, 8) for prompt in PROMPTS]
        self.check("the engine's greedy tokens equal the trainer's own, every round", answered == expected)

    def finish(self) -> None:
        """One more roll-out under the last weights, and the states that a healthy run never shows."""
        self._round += 1
        answers = self.step("roll out", self._roll_out)
        self.rewards.append(self._reward(answers))
        self.check("the reward goes up", self.rewards[-1] > self.rewards[0])
        control = self._server.control
        control.sleep(0)
        self._must_refuse("paused")
        control.wake_up()
        control.sleep(2)
        control.wake_up()
        self._must_refuse("stale")

    def _roll_out(self) -> list[list[int]]:
        def ask(job: tuple[int, list[int]]) -> list[int]:
            seed, prompt = job
            return self._server.generate(prompt, self._tokens, temperature=1.0, seed=seed)

        jobs = [(1000 * self._round + number, PROMPTS[number % len(PROMPTS)]) for number in range(self._count())]
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(ask, jobs))

    def _count(self) -> int:
        return self._answers * len(PROMPTS)

    def _reward(self, answers: list[list[int]]) -> float:
        """The share of tokens that are the one to be made likelier: the first token of the first answer."""
        if self._target is None:
            self._target = answers[0][0]
        tokens = [token for answer in answers for token in answer]
        return tokens.count(self._target) / len(tokens)

    def _sleep(self) -> str:
        before = self._server.resident_bytes()
        report = self._server.control.sleep(2)["report"]
        freed = before - self._server.resident_bytes()
        engines = self._server.control.memory()["engines"]
        tags = [tag for engine in engines for rank in engine["ranks"] for tag in rank["tags"].values()]
        total = sum(tag["bytes"] for tag in tags)
        self.check("RSS freed is at least 90% of the tags' bytes, every round", freed >= 0.9 * total > 0)
        return f"freed {freed >> 20} of {total >> 20} MiB in {report['seconds']['total']:.3f} s"

    def _train(self, answers: list[list[int]]) -> str:
        self.rewards.append(self._reward(answers))
        prompts = [PROMPTS[number % len(PROMPTS)] for number in range(self._count())]
        self._trainer.call("train", prompts, answers, self._target, LEARNING_RATE, TRAINING_STEPS)
        return f"reward {self.rewards[-1]:.4f}"

    def _update(self, version: str) -> str:
        report = self._trainer.call("push", self._server.url, version)
        control = self._server.control
        self.check("the weight version is the trainer's", control.weight_version() == version)
        own = self._trainer.call("checksums")
        self.check("the engine's checksums equal the trainer's", control.checksums()["tensors"] == own)
        return f"{report['bytes'] >> 20} MiB in {report['engine']['report']['seconds']['total']:.3f} s"

    def _must_refuse(self, reason: str) -> None:
        response = self._server.post(PROMPTS[0])
        refused = response.status_code == 503 and "retry-after" in response.headers
        details = response.json()["error"]["details"] if refused else {}
        self.check(f"a request is refused while {reason}", refused and details["reason"] == reason)


def compare_engines(folder: Path, engine: str, tokens: list[list[int]], shape: str) -> tuple[str, bool] | None:
    """Keep this engine's first greedy tokens, and compare them with another engine's of the same weights."""
    mine = {"shape": shape, "seed": SEED, "prompts": PROMPTS, "tokens": tokens}
    (folder / f"tokens-{engine}.json").write_text(json.dumps(mine))
    for other in ENGINES:
        path = folder / f"tokens-{other}.json"
        if other != engine and path.exists():
            theirs = json.loads(path.read_text())
            if {**theirs, "tokens": None} == {**mine, "tokens": None}:
                return f"equal weights give equal tokens on {engine} and {other}", theirs["tokens"] == tokens
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a smaller model and shorter answers, for CI")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    arguments = parser.parse_args()
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    shape = "small" if arguments.quick else "demo"
    answers, tokens = (8, 16) if arguments.quick else (12, 24)
    with tempfile.TemporaryDirectory(prefix="rl-memory-demo-") as scratch:
        folder = write_model(Path(scratch, "model"), SHAPES[shape])
        launch = Launch(folder, dummy_weights=True, kv_bytes=256 << 20, max_running=16)
        log = arguments.out / f"{arguments.engine}.log"
        console.print(f"starting {arguments.engine} and a trainer on a {shape} Qwen2; the engine's log is {log}")
        server = Server(ENGINES[arguments.engine](), launch, log)
        trainer = None
        try:
            trainer = TrainerProcess(folder, SEED)
            server.wait_ready()
            sources = {"engine": server.resident_bytes, "trainer": trainer.resident_bytes}
            with Timeline(sources) as timeline:
                demo = Demo(server, trainer, timeline, answers, tokens)
                with Live(demo.table, console=console, refresh_per_second=4):
                    demo.start()
                    first = [server.generate(prompt, 8) for prompt in PROMPTS]
                    for number in range(1, arguments.rounds + 1):
                        demo.run_round(number)
                    demo.finish()
            compared = compare_engines(arguments.out, arguments.engine, first, shape)
            if compared is not None:
                demo.check(*compared)
        finally:
            if trainer is not None:
                trainer.stop()
            server.stop()
    picture = arguments.out / f"memory-{arguments.engine}.png"
    timeline.draw(picture, f"{arguments.engine} and a trainer taking turns: {arguments.rounds} rounds")
    verdicts = Table("check", "", title="checks")
    for name, passed in demo.checks.items():
        verdicts.add_row(name, "[green]passed[/]" if passed else "[red]FAILED[/]")
    console.print(verdicts)
    console.print("rewards by round: " + ", ".join(f"{reward:.4f}" for reward in demo.rewards))
    console.print(f"memory over time: {picture}")
    return 0 if all(demo.checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
