"""The steps of a handoff, and what was measured in them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rl_memory_plugins.timeline.records import VERSION, Handoff, HandoffStep
from rl_memory_plugins.timing import timed
from rl_memory_plugins.trainer.gpu import own_gpu
from rl_memory_plugins.trainer.offloading import Moved
from rl_memory_plugins.trainer.outcomes import EngineFailure

STEPS = ("sleep", "load", "offload_others", "wake_weights", "sync", "offload", "wake_kv_cache")


@dataclass
class HandoffReport:
    """The measurements of a handoff. A handoff in progress has filled in its finished steps.

    Attributes:
        seconds: Seconds by step; 0.0 for a step that did not run or had nothing to do. Of what leaves during the
            update, only those in which the handoff did nothing else. What leaves behind open engines takes none; if the
            next half must wait for it, the seconds are those of `offload` in its report.
        moved_bytes: Bytes of the trainer that were loaded or offloaded, by step. What leaves behind open engines counts
            at once.
        update: The result of `push_from_all`.
        failed: With `on_failure="continue"` the engines of all processes that the handoff has gone on without. The
            `details["step"]` of an error names the step.
        steps: The steps in the order in which they ran, `training` among them, by the wall clock of this host: the
            clock of the timeline of an engine there; see docs/timeline.md. A step that ran in two parts is there twice.
        trainer_rank: The rank of this process among those of the trainer.

    Args:
        resident: Returns the bytes of the trainer's parts that are on the device.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEPS, 0.0))
    moved_bytes: dict[str, int] = field(default_factory=dict)
    update: dict[str, Any] = field(default_factory=dict)
    failed: list[EngineFailure] = field(default_factory=list)
    steps: list[HandoffStep] = field(default_factory=list)
    trainer_rank: int = 0
    resident: InitVar[Callable[[], int] | None] = None

    def __post_init__(self, resident: Callable[[], int] | None) -> None:
        self._resident = resident
        self._counted = 0  # the latest result of `resident`
        self._is_outdated = True  # other code than the steps has run since
        self._ended_ns: int | None = None  # of the last step, by a clock that nobody sets

    def __getstate__(self) -> dict[str, Any]:
        # the trainer's parts and the clock stay in their process
        return {**vars(self), "_resident": None, "_ended_ns": None}

    def add(self, step: str, moves: Iterable[Moved]) -> int:
        """Add the bytes of these moves to a step. Returns: their sum."""
        total = sum(move.bytes for move in moves)
        self.moved_bytes[step] = self.moved_bytes.get(step, 0) + total
        return total

    @contextmanager
    def timed(self, step: str, *, moves: bool = False) -> Iterator[None]:
        """The body is a step, or a part of one: add its seconds, and note when it ran; see `noted`."""
        with self.noted(step, moves=moves), timed(self.seconds, step):
            yield

    @contextmanager
    def noted(self, step: str, *, moves: bool = False) -> Iterator[None]:
        """The body is a step, or a part of one, that measures its seconds itself. Note when it ran.

        Args:
            moves: Whether the body may move parts of the trainer. To count their bytes takes milliseconds.
        """
        before, start_ns, start = self._count(self._is_outdated), time.time_ns(), time.perf_counter_ns()
        error: str | None = None
        try:
            yield
        except BaseException as failure:
            error = type(failure).__name__
            raise
        finally:
            self._ended_ns = time.perf_counter_ns()
            took_ns = self._ended_ns - start
            self.steps.append(HandoffStep(step, start_ns, took_ns, before, self._count(moves), error))

    def training_ended(self) -> None:
        """The second half of the handoff begins. What lay between the halves was the step `training`."""
        self._is_outdated = True  # gradients and states have been made, or dropped
        if self.steps and self.steps[-1].name != "training":
            last = self.steps[-1]
            start_ns = last.start_ns + last.duration_ns
            held = last.trainer_bytes_after
            if self._ended_ns is None:
                took_ns = max(time.time_ns() - start_ns, 0)
            else:
                took_ns = time.perf_counter_ns() - self._ended_ns
            self.steps.append(HandoffStep("training", start_ns, took_ns, held, held))

    def count_as_gone(self, nbytes: int) -> None:
        """These bytes of the trainer leave behind the current step: what is counted after it is without them."""
        self._counted = max(self._counted - nbytes, 0)

    def _count(self, again: bool) -> int:
        if self._resident is not None and again:
            self._is_outdated = False
            with suppress(Exception):  # what cannot be counted can fail a step by itself, and on all processes
                self._counted = self._resident()
        return self._counted

    def record(self) -> Handoff:
        """The handoff for a timeline; see docs/timeline.md."""
        return Handoff(
            version=VERSION,
            host=socket.gethostname(),
            trainer_rank=self.trainer_rank,
            device=own_gpu() or "cpu",
            steps=sorted(self.steps, key=lambda step: step.start_ns),
            seconds=self.seconds,
            moved_bytes=self.moved_bytes,
            failed_engines=[type(failure.error).__name__ for failure in self.failed],
        )

    def append_to(self, file: str | os.PathLike[str]) -> None:
        """Add the handoff to a file that `rl-memory timeline --handoff` reads: a line of JSON.

        Give each process of a trainer its own file.
        """
        with Path(file).open("ab") as lines:
            lines.write(msgspec.json.encode(self.record()) + b"\n")
