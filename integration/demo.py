"""Reinforcement learning on one machine's memory: an engine and a trainer take turns, and every claim is checked.

    python -m integration.demo --engine vllm

A real engine's server and a real trainer process share a model. Each round rolls out, puts the engine to sleep
without its weights, trains on the rollouts, wakes the engine in stages with the new weights streamed in between,
and rolls out again. Exit code 1 if a check fails; a picture of both processes' memory is written at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from integration import demo_picture, trainer_process
from integration.demo_output import Output, gigabytes
from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from integration.json_process import Child
from integration.models import SHAPES, write_model
from integration.timeline import Stage, Timeline, resident_bytes

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12], [100, 200, 300, 400], [17, 3, 950, 21]]
SEED = 20
ANSWERS, TOKENS = 8, 16  # answers to each prompt, tokens of each answer
COMPARED_TOKENS = 8
TRAINING_STEPS = 2
KV_BYTES = 6 << 30  # most of an engine's memory, as on a GPU
GIVEN_BACK = 2 / 3  # the least share of its memory that a sleeping engine frees
RUNNING = 32  # requests at once
CHECKING = {"compare checksums", "trainer's tokens", "engine's tokens"}  # the stages that only check


class Demo:
    """The rounds, their measurements and their checks."""

    def __init__(self, server: Server, trainer: Child, timeline: Timeline, output: Output) -> None:
        self._server = server
        self._trainer = trainer
        self._timeline = timeline
        self._output = output
        self._round = 0
        self._target: int | None = None
        self._seconds: dict[str, list[float]] = {}  # by step
        self._slept: list[tuple[int, int]] = []  # by sleep, the engine's bytes before and after
        self._streamed = 0  # bytes of an update
        self._tokens = [0, 0]  # the engine's greedy tokens that equal the trainer's, and all its greedy tokens
        self._refused = [0, 0]  # refused requests, and all requests that the engine should refuse
        self.rewards: dict[float, float] = {}  # by the timeline's seconds
        self.checks: dict[str, bool] = {}

    def check(self, name: str, passed: bool) -> None:
        """Record a check; one failure anywhere fails it."""
        self.checks[name] = self.checks.get(name, True) and passed

    def step(self, name: str, run: Callable[[], Any], note: Callable[[Any], str] = lambda result: "") -> Any:
        """Run and time one step, as a stage of the picture and a line of the output.

        Args:
            name: The step's name.
            run: The step.
            note: Returns the end of the line for a result, and may check the result.
        """
        self._output.begin(f"round {self._round}  {name}")
        with self._timeline.stage(name):
            result = run()
        seconds = self._timeline.stages[-1].seconds
        self._seconds.setdefault(name, []).append(seconds)
        self._output.end(seconds, self._timeline.take(), note(result))
        return result

    def start(self) -> list[list[int]]:
        """Replace the engine's dummy weights by the trainer's. Returns the engine's greedy tokens."""
        self._sleep()
        self._call_trainer("load trainer", "load")
        return self._hand_over("0")

    def run_round(self, number: int) -> None:
        self._round = number
        answers = self._roll_out()
        self._sleep()
        self._call_trainer("load trainer", "load")
        prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(answers))]
        self._call_trainer(
            "train", "train", prompts=prompts, answers=answers, target=self._target, steps=TRAINING_STEPS
        )
        self._call_trainer("offload optimiser", "offload_optimizer")
        self._hand_over(str(number))

    def _hand_over(self, version: str) -> list[list[int]]:
        """Give the memory and the new weights to the engine. Returns the engine's greedy tokens."""
        control = self._server.control
        self.step("wake weights", partial(control.wake_up, ["weights"]))
        self._must_refuse("asleep")
        self._update(version)
        expected = self._call_trainer("trainer's tokens", "greedy", prompts=PROMPTS, tokens=COMPARED_TOKENS)
        self._call_trainer("offload weights", "offload_weights")
        self._must_refuse("asleep")
        self.step("wake KV cache", partial(control.wake_up, ["kv_cache", "cuda_graph"]))
        return self._compare_tokens(expected)

    def finish(self) -> None:
        """Roll out once more, with the last weights, and check the states that no round reaches."""
        self._round += 1
        self._roll_out()
        rewards = list(self.rewards.values())
        self.check("the reward goes up", rewards[-1] > rewards[0])
        control = self._server.control
        control.sleep(0)
        self._must_refuse("paused")
        control.wake_up()
        control.sleep(2)
        control.wake_up()
        self._must_refuse("stale")
        # Each side uses what the other one frees. Only half of it counts, because for a while both hold the weights.
        given_back = [self._timeline.peak(name) - min(self._timeline.samples[name]) for name in ("engine", "trainer")]
        peaks = self._timeline.peak("engine") + self._timeline.peak("trainer")
        saved = peaks - self._timeline.peak_together()
        self.check("together they need less memory than side by side", saved >= min(given_back) / 2)

    def round_shown(self) -> list[Stage]:
        """The stages from the last but one to the last roll-out, without the stages that only check."""
        stages = self._timeline.stages
        *_, first, last = (number for number, stage in enumerate(stages) if stage.name == "roll out")
        return [stage for stage in stages[first : last + 1] if stage.name not in CHECKING]

    def numbers(self) -> dict[str, str]:
        """The main figures of the run; seconds and bytes are medians."""
        before, after = (statistics.median(column) for column in zip(*self._slept, strict=True))
        seconds = {name: f"{statistics.median(found):.2f} s" for name, found in self._seconds.items()}
        together = self._timeline.peak_together()
        peaks = self._timeline.peak("engine") + self._timeline.peak("trainer")
        rewards = list(self.rewards.values())
        return {
            "memory that the sleeping engine gives back": f"{1 - after / before:.0%}, {gigabytes(before - after)}",
            "to put it to sleep takes": seconds["sleep level 2"],
            "to wake its weights, still empty": seconds["wake weights"],
            f"to stream {gigabytes(self._streamed)} of new weights": seconds["stream weights"],
            "to wake its KV cache": seconds["wake KV cache"],
            "memory of both, as they take turns": f"{gigabytes(together)} at most; side by side {gigabytes(peaks)}",
            "greedy tokens identical to the trainer's": "{} of {}".format(*self._tokens),
            "requests refused, as they should be": "{} of {}".format(*self._refused),
            "reward": f"{rewards[0]:.3f} at first, {rewards[-1]:.3f} after {len(rewards) - 1} updates",
        }

    def _call_trainer(self, step: str, method: str, **arguments: Any) -> Any:
        return self.step(step, partial(self._trainer.call, method, **arguments))

    def _roll_out(self) -> list[list[int]]:
        def ask(number: int) -> list[int]:
            seed = 1000 * self._round + number
            return self._server.generate(PROMPTS[number % len(PROMPTS)], TOKENS, temperature=1.0, seed=seed)

        def run() -> list[list[int]]:
            with ThreadPoolExecutor(RUNNING) as pool:
                return list(pool.map(ask, range(ANSWERS * len(PROMPTS))))

        return self.step("roll out", run, self._reward)

    def _reward(self, answers: list[list[int]]) -> str:
        """The share of the target token, which training makes likelier: the first token of the first answer."""
        if self._target is None:
            self._target = answers[0][0]
        tokens = [token for answer in answers for token in answer]
        reward = tokens.count(self._target) / len(tokens)
        self.rewards[self._timeline.now()] = reward
        return f"reward {reward:.3f}"

    def _sleep(self) -> None:
        before = self._timeline.take()["engine"]
        self.step("sleep level 2", partial(self._server.control.sleep, 2), partial(self._check_sleep, before))
        self._must_refuse("asleep")

    def _check_sleep(self, before: int, answer: dict[str, Any]) -> str:
        after = self._timeline.take()["engine"]
        self._slept.append((before, after))
        engines = self._server.control.memory()["engines"]
        tags = [tag for engine in engines for rank in engine["ranks"] for tag in rank["tags"].values()]
        total = sum(tag["bytes"] for tag in tags)
        self.check(
            "the memory freed is at least 90% of the tags' bytes, every round", before - after >= 0.9 * total > 0
        )
        self.check("the sleeping engine gives back two thirds of its memory", before - after >= GIVEN_BACK * before)
        return f"freed {gigabytes(before - after)} of the tags' {gigabytes(total)}"

    def _update(self, version: str) -> None:
        """Stream the trainer's weights, and compare what arrived."""
        self._streamed = self._call_trainer("stream weights", "push", url=self._server.url, version=version)
        control = self._server.control
        self.check("the weight version is the trainer's", control.weight_version() == version)

        def checksums() -> bool:
            with ThreadPoolExecutor(1) as pool:
                own = pool.submit(self._trainer.call, "checksums")
                return control.checksums()["tensors"] == own.result()

        equal = self.step("compare checksums", checksums, lambda equal: "equal" if equal else "DIFFERENT")
        self.check("the engine's checksums equal the trainer's", equal)

    def _compare_tokens(self, expected: list[list[int]]) -> list[list[int]]:
        """Returns the engine's greedy tokens."""

        def run() -> list[list[int]]:
            return [self._server.generate(prompt, COMPARED_TOKENS) for prompt in PROMPTS]

        answered = self.step("engine's tokens", run)
        pairs = [pair for own, other in zip(expected, answered, strict=True) for pair in zip(own, other, strict=True)]
        self._tokens[0] += sum(own == other for own, other in pairs)
        self._tokens[1] += len(pairs)
        self.check("the engine's greedy tokens equal the trainer's own, every round", answered == expected)
        return answered

    def _must_refuse(self, reason: str) -> None:
        response = self._server.post(PROMPTS[0])
        refused = response.status_code == 503 and "retry-after" in response.headers
        details = response.json()["error"]["details"] if refused else {}
        self._refused[0] += refused
        self._refused[1] += 1
        self.check(f"a request is refused while {reason}", refused and details["reason"] == reason)


def compare_engines(folder: Path, engine: str, tokens: list[list[int]], shape: str) -> tuple[str, bool] | None:
    """Save this engine's first greedy tokens, and compare them with those of another engine with equal weights."""
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
    parser.add_argument("--quick", action="store_true", help="a smaller model, for CI")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    arguments = parser.parse_args()
    engine = arguments.engine
    arguments.out.mkdir(parents=True, exist_ok=True)
    shape = "small" if arguments.quick else "250m"
    with tempfile.TemporaryDirectory(prefix="rl-memory-demo-") as scratch, Output(Console()) as output:
        start = time.monotonic()
        folder = write_model(Path(scratch, "model"), SHAPES[shape])
        launch = Launch(folder, dummy_weights=True, kv_bytes=KV_BYTES, max_running=RUNNING)
        log = arguments.out / f"{engine}.log"
        output.say(f"{engine} and a trainer start, with a Qwen2 of random weights; the engine's log is {log}")
        output.begin("start")
        server = Server(ENGINES[engine](), launch, log)
        trainer = None
        try:
            trainer = trainer_process.start(folder, SEED)
            server.wait_ready()
            output.say(f"both are ready after {time.monotonic() - start:.0f} s")
            sources = {
                "engine": partial(resident_bytes, server.processes()),
                "trainer": partial(resident_bytes, [psutil.Process(trainer.process.pid)]),
            }
            with Timeline(sources) as timeline:
                output.watch(timeline.samples)
                demo = Demo(server, trainer, timeline, output)
                first = demo.start()
                for number in range(1, arguments.rounds + 1):
                    demo.run_round(number)
                demo.finish()
            compared = compare_engines(arguments.out, engine, first, shape)
            if compared is not None:
                demo.check(*compared)
        finally:
            if trainer is not None:
                trainer.close()
            server.stop()
        picture = arguments.out / f"memory-{engine}.png"
        name = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
        title = f"{name} and a trainer take turns with one machine's memory"
        demo_picture.draw(picture, title, timeline, demo.round_shown(), demo.rewards)
        output.table("checks", {name: "passed" if passed else "FAILED" for name, passed in demo.checks.items()})
        output.table("to remember", demo.numbers())
        output.say(f"\nthe picture of it: {picture} ({time.monotonic() - start:.0f} s in all)")
    return 0 if all(demo.checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
