"""One kind on one engine: each way against fresh engines of the same checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from integration.kinds import table, ways
from integration.kinds.checkpoints import tensors_of, write_adapter
from integration.kinds.quantised import TRAINED
from integration.kinds.subject import DEVICE, SUBJECTS, Answer, Subject
from integration.kinds.table import Kind
from rl_memory_plugins.errors import ManifestError, RLMemoryError, UnsupportedError
from rl_memory_plugins.trainer import QuantisedSource
from tests.vllm.child import Child

SEED, OTHER_SEED = 1, 2
REASON_LENGTH = 300
LINES_SHOWN = 40
WRONG = "wrong"  # an answer that is not a fresh engine's
FRESH_ONES_DIFFER = "fresh engines of the same files differ"
#: vLLM's errors of processes that did not start name no cause.
REFERENCE = re.compile(r"[Ss]ee (?:root cause above|stack trace for root cause)")
START_TIMEOUT_S = 600.0
#: An error in a log, after the prefixes of processes and loggers.
LOGGED_ERROR = re.compile(
    r"^(?:\([^)]*\) *)?(?:ERROR [\d-]+ [\d:]+ *)?(?:\[.*?\] *)?([\w.]*(?:Error|Exception)\b.*)", re.M
)
ON_GPU = DEVICE == "cuda"


class Outcome(NamedTuple):
    way: str
    outcome: str  # passed, refused, failed or engine_cannot
    reason: str = ""


class Checkpoint(NamedTuple):
    folder: Path
    seed: int
    answer: Answer | None = None  # of a fresh engine


class WrongAnswerError(AssertionError):
    """The engine answered as no fresh engine of the weights does."""


def run(
    engine: str,
    name: str,
    folder: Path,
    wanted: tuple[str, ...],
    *,
    logs: Path | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Outcome]:
    """The outcome of every way of a kind.

    Args:
        engine: The engine's name.
        name: The kind's name.
        folder: An empty folder.
        wanted: The ways to try; those that the kind does not have are left out.
        logs: A folder for the logs of the engines, which outlasts this process; `folder` if None.
        start_timeout_s: How long one engine may take to start.
    """
    starter = Starter(engine, name, folder, logs or folder, start_timeout_s)
    tried = [way for way in table.KINDS[name].ways if way in wanted]
    starter.write()
    try:
        starter.ask()
    except Exception as error:
        reason = starter.reason(error)
        starter.show_log()
        outcome = starter.verdict_without_package(error, start=True)
        for way in tried:
            yield Outcome(way, outcome, reason)
        return
    try:
        for way in tried:
            yield starter.outcome(way)
    finally:
        starter.stop()


class Starter:
    """Starts the engines of a kind."""

    def __init__(self, engine: str, kind: str, folder: Path, logs: Path, start_timeout_s: float) -> None:
        # Children look the kind up by its name: functions that write checkpoints do not travel.
        self._engine, self._kind, self._folder = engine, kind, folder
        self._start_timeout_s = start_timeout_s
        self._subject: Child | None = None
        self._repeats: bool | None = None  # whether a second fresh engine answers as the first did
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / "none.log"  # of the engine that has started last
        self._checkpoints = [Checkpoint(folder / "first", SEED), Checkpoint(folder / "other", OTHER_SEED)]

    def write(self) -> None:
        apart(_write, self._kind, self._folder, self._checkpoints)

    def ask(self) -> None:
        """Start an engine on each checkpoint; that on the first stays."""
        first, other = self._checkpoints
        answers = self._fresh_answer(other)
        self._subject = self.start(first.folder)
        own = self._subject(steady_answer)
        if own == answers:
            raise WrongAnswerError("fresh engines of both checkpoints answer the same")
        self._checkpoints = [first._replace(answer=own), other._replace(answer=answers)]

    def _fresh_answer(self, checkpoint: Checkpoint) -> Answer:
        engine = self.start(checkpoint.folder)
        try:
            answer: Answer = engine(steady_answer)
        finally:
            engine.stop()
        return answer

    def start(self, folder: Path, *, plugin: bool = True) -> Child:
        """An engine on a checkpoint.

        Raises:
            TimeoutError: the engine did not start in time.
        """
        self._log = self._logs / f"{len(list(self._logs.glob('*.log')))}.log"
        adapter = self._folder / "adapter"
        child = start(self._engine, self._kind, folder, self._log, adapter, plugin=plugin)
        child.wait_ready(self._start_timeout_s)
        return child

    def stop(self) -> None:
        if self._subject is not None:
            self._subject.stop()
        self._subject = None

    def outcome(self, way: str) -> Outcome:
        if self._repeats is False:
            return Outcome(way, "engine_cannot", FRESH_ONES_DIFFER)
        if self._subject is None:
            self._subject = self.start(self._checkpoints[0].folder)
        try:
            outcome, reason = self._subject(try_way, way, self._kind, self._checkpoints)
        except Exception as error:  # the engine is gone
            outcome, reason = "failed", self.reason(error)
        if outcome in ("failed", WRONG):
            self.show_log()
        if outcome != "passed":
            self.stop()
        if outcome == WRONG:
            outcome, reason = self._verdict_of_fresh_engines(reason)
        if outcome in ("failed", "refused") and way == ways.OWN:
            outcome = self.verdict_without_package(outcome)
        return Outcome(way, outcome, self.cleaned(reason))

    def _verdict_of_fresh_engines(self, reason: str) -> tuple[str, str]:
        """`engine_cannot` if a further fresh engine answers otherwise too, such as from memory that nothing fills."""
        if self._repeats is None:
            other = self._checkpoints[1]
            try:
                self._repeats = self._fresh_answer(other) == other.answer
            except Exception as error:
                print("  a further fresh engine:", self.reason(error), flush=True)
                return "failed", reason
        return ("failed", reason) if self._repeats else ("engine_cannot", FRESH_ONES_DIFFER)

    def verdict_without_package(self, found: Any, *, start: bool = False) -> str:
        """`engine_cannot` if the engine fails too when the package is not enabled.

        An engine that has no answer in time may still be compiling; that says nothing about what it can do.
        """
        if isinstance(found, TimeoutError):
            return "failed"
        first, other = self._checkpoints
        try:
            engine = self.start(first.folder, plugin=False)
            try:
                if start:
                    engine(steady_answer)
                else:
                    engine(load_without_package, other)
            finally:
                engine.stop()
        except Exception as error:
            print("  without the package:", self.reason(error), flush=True)
            return "failed" if isinstance(error, TimeoutError) else "engine_cannot"
        return found if isinstance(found, str) else "failed"

    def reason(self, error: Exception) -> str:
        """What an error says; of an engine that has ended or that refers to its log, the last error in that log."""
        said = str(error) or type(error).__name__
        if not isinstance(error, EOFError) and not REFERENCE.search(said):
            return self.cleaned(said)
        errors = [line for line in LOGGED_ERROR.findall(self._text()) if not REFERENCE.search(line)]
        if errors:
            return self.cleaned(errors[-1])
        if isinstance(error, EOFError):
            return "the engine's process ended without an error in its log"
        return self.cleaned(said)

    def show_log(self) -> None:
        """Print the end of the log of the engine that has started last."""
        lines = self._text().splitlines()[-LINES_SHOWN:]
        print(f"  the last lines of {self._log}:", *lines, sep="\n    ", flush=True)

    def _text(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def cleaned(self, text: str) -> str:
        return cleaned(text, self._folder)


def cleaned(text: str, folder: Path) -> str:
    """The last line that says something, without paths of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "For further information" not in line]
    line = (lines or [""])[-1].replace(str(folder), "FOLDER")
    return re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+", "", line)[:REASON_LENGTH]


def _write(name: str, folder: Path, checkpoints: list[Checkpoint]) -> None:
    kind = table.KINDS[name]
    for checkpoint in checkpoints:
        kind.write(checkpoint.folder, checkpoint.seed, dtype_of(kind))
    if kind.adapter:
        write_adapter(folder / "adapter", checkpoints[0].folder)


def steady_answer(subject: Subject) -> Answer:
    """The answer of an engine that has answered before: at its first request an engine may still compile.

    Raises:
        WrongAnswerError: the next answer is another one.
    """
    subject.answer()
    subject.forget()
    answer = subject.answer()
    subject.forget()
    if difference := subject.answer().difference(answer, "its last answer"):
        raise WrongAnswerError(f"the engine answers the same prompts differently each time: {difference}")
    return answer


def load_without_package(subject: Subject, other: Checkpoint) -> None:
    subject.answer()  # as the package's engine has
    subject.load(other.folder)
    expect(subject, other)


def try_way(subject: Subject, way: str, name: str, checkpoints: list[Checkpoint]) -> tuple[str, str]:
    """An outcome, or `WRONG`, and its reason. The engine has the first checkpoint's weights, before and after."""
    (first, other), kind = checkpoints, table.KINDS[name]
    load = {
        ways.STREAM: push,
        ways.PARTIAL: push_in_parts,
        ways.RECOVERY: break_off_and_push,
        ways.OWN: lambda subject, kind, checkpoint: subject.load(checkpoint.folder),
    }[way]
    when = "after a load"
    try:
        for checkpoint in (other, first):
            load(subject, kind, checkpoint)
            expect(subject, checkpoint)
        when = "after a level-2 sleep"
        for checkpoint in (other, first) if way != ways.PARTIAL else ():
            subject.sleep(2)
            subject.wake_up(["weights"])
            load(subject, kind, checkpoint)
            subject.wake_up()
            expect(subject, checkpoint)
        when = "after a level-1 sleep"
        subject.sleep(1)
        subject.wake_up()
        expect(subject, first)
    except (ManifestError, UnsupportedError) as error:
        return ("refused" if _unchanged(subject, first) else "failed"), f"{type(error).__name__}: {_short(error)}"
    except WrongAnswerError as error:
        return WRONG, f"{when} {error}"
    except Exception as error:
        return "failed", f"{type(error).__name__}: {_short(error)}"
    return "passed", ""


def _short(error: Exception) -> str:
    """One line; of a manifest's mismatches the first of each kind."""
    mismatches = error.details.get("mismatches", ()) if isinstance(error, RLMemoryError) else ()
    by_kind = {mismatch["kind"]: f"{mismatch['kind']} {mismatch['name']}" for mismatch in reversed(mismatches)}
    return "; ".join(by_kind.values()) or " ".join(str(error).split())


def _unchanged(subject: Subject, first: Checkpoint) -> bool:
    try:
        subject.forget()
        return subject.content() == "valid" and subject.answer() == first.answer
    except Exception:
        return False


def expect(subject: Subject, checkpoint: Checkpoint) -> None:
    assert checkpoint.answer is not None
    if difference := subject.answer().difference(checkpoint.answer, "a fresh engine's"):
        raise WrongAnswerError(difference)


def dtype_of(kind: Kind) -> str:
    """The dtype of a kind's weights. The engines' kernels for GPUs need 16 bits."""
    return "bfloat16" if ON_GPU and kind.dtype == "float32" else kind.dtype


def trained(kind: Kind, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, where a trainer has them: on the engine's own GPU, unless the engine has several."""
    device = "cuda" if ON_GPU and kind.tp == 1 else "cpu"
    return {name: tensor.to(device) for name, tensor in tensors_of(checkpoint.folder).items()}


def weights(kind: Kind, checkpoint: Checkpoint) -> Any:
    if not kind.module:
        return trained(kind, checkpoint)
    import transformers

    before = checkpoint.folder / TRAINED
    folder = before if before.exists() else checkpoint.folder
    [name] = transformers.AutoConfig.from_pretrained(folder).architectures
    model_class = getattr(transformers, name)
    model = model_class.from_pretrained(folder, dtype=getattr(torch, dtype_of(kind)))
    model = model.to("cuda") if ON_GPU else model
    return QuantisedSource.for_checkpoint(model, checkpoint.folder) if folder == before else model


def push(subject: Subject, kind: Kind, checkpoint: Checkpoint) -> None:
    subject.push(weights(kind, checkpoint))


def push_in_parts(subject: Subject, kind: Kind, checkpoint: Checkpoint) -> None:
    """The first layer, and then the rest."""
    everything = trained(kind, checkpoint)
    first = {name for name in everything if re.search(r"\b(layers|blocks|h)\.0\.", name)}
    for names in (first, everything.keys() - first):
        subject.push({name: tensor for name, tensor in everything.items() if name in names}, partial=True)


def break_off_and_push(subject: Subject, kind: Kind, checkpoint: Checkpoint) -> None:
    tensors = trained(kind, checkpoint)
    try:
        subject.push(Breaking(tensors), bucket_bytes=1 << 16)
    except (ManifestError, UnsupportedError):
        raise
    except (RuntimeError, RLMemoryError):
        if subject.content() != "failed":
            raise
    subject.push(tensors)


class Breaking:
    """A trainer that raises after half of the tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def specs(self) -> Any:
        from rl_memory_plugins.weights.source import spec_of

        return [spec_of(name, tensor) for name, tensor in self._tensors.items()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(self._tensors.items()):
            if number > len(self._tensors) // 2:
                raise RuntimeError("the trainer broke")
            yield item


def start(engine: str, name: str, folder: Path, log: Path, adapter: Path, *, plugin: bool) -> Child:
    """A fresh engine that is starting, in a process of its own that writes into `log`."""
    kind = table.KINDS[name]
    options = {"dtype": dtype_of(kind), **(kind.vllm if engine == "vllm" else kind.sglang)}
    if kind.tp > 1:
        options |= {"tensor_parallel_size" if engine == "vllm" else "tp_size": kind.tp}
    return Child(
        make,
        log,
        Start(engine, folder, options, kind.task, plugin, str(adapter) if kind.adapter else ""),
        environment=environment(engine, folder, kind),
        # SGLang's modules use the GPU when they are imported; vLLM's core does if it has several ranks.
        forked=engine == "vllm" and not (ON_GPU and kind.tp > 1),
        wait=False,
    )


class Start(NamedTuple):
    engine: str
    folder: Path
    options: dict[str, Any]
    task: str
    plugin: bool
    adapter: str


def make(log: Path, start: Start) -> Subject:
    for stream in (1, 2):  # an engine's processes write there
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    if start.engine == "sglang":
        torch.multiprocessing.set_sharing_strategy("file_system")
        if not ON_GPU:  # SGLang's build for CPUs comes with none of these kernels
            from tests.aids.sglang_fork import sglang_fork
            from tests.aids.sglang_unpinned import sglang_unpinned
            from tests.sglang import torch_kernels

            torch.set_num_threads(1)
            sglang_fork.register()
            torch_kernels.register()
            if start.adapter:
                sglang_unpinned.register()
    subject = SUBJECTS[start.engine]
    return subject(start.folder, start.options, task=start.task, plugin=start.plugin, adapter=start.adapter)


def environment(engine: str, folder: Path, kind: Kind) -> dict[str, str]:
    from integration.engines import ENGINES
    from integration.engines.base import Launch

    found = ENGINES[engine]().environment(Launch(folder, tp=kind.tp, forked=True, device=DEVICE))
    found.pop("SGLANG_DISABLED_MODEL_ARCHS", None)  # the process of which all engines are forks has imported them
    if ON_GPU:  # both engines prefer kernels for blocks that are compiled at first use
        return {**found, "SGLANG_ENABLE_JIT_DEEPGEMM": "0", "VLLM_USE_DEEP_GEMM": "0"}
    return {**found, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a process of its own, so that this one never runs PyTorch's threads."""
    child = Child(_nothing, environment={}, forked=False)
    try:
        return child(_call, function, arguments)
    finally:
        child.stop()


class _Nothing:
    def shutdown(self) -> None: ...


def _nothing() -> _Nothing:
    return _Nothing()


def _call(_: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return function(*arguments)
