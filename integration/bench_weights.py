"""Weight updates on a GPU through a whole engine: by the plugin and by the engine's own routes, in the same session.

    python -m integration.bench_weights --engine vllm --model 7b --out results.json
    python -m integration.bench_weights --engine vllm --model 7b --fp8 --out results.json

Each subject is a process of its own, with the engine's offline class, dummy weights and CUDA graphs. The trainer is
another process on the same GPU (`bench_weights_trainer`) and sends a checkpoint's tensors through the engine's public
methods; one pipe connects the two processes. After every route the script compares the engine's checksums (with the
plugin) and its tokens. The same numbers must give the same tokens by every route, and other numbers must give others.

    update_*_s               the trainer's whole call, from making the sender to the engine's answer
    update_*_first_s         the first such call: it traces the loader, opens memory, makes CUDA contexts
    validate_*_first_s       of it, the engine's check of the manifest. The first route's is of an unknown one
    engine_closed_*_s        how long the engine refuses requests, by polling its status
    peak_extra_mib_*         GPU memory beyond the memory held before, in one more update. The trainer's part is exact
                             (torch's peak and its staging buffer); the engine's part is the rest of the GPU's change
    engine_closed_s          equals engine_closed_direct_s
    peak_extra_mib_engine, peak_extra_mib_trainer    the highest over all routes

Routes: `direct` sends the trainer's own tensors and keeps them open. `direct_unkept` opens them for each update.
`staged` packs buckets. `cpu` sends offloaded tensors from page-locked host memory. `native` uses the engine's own route
with one IPC handle per tensor, `native_packed` the engine's own route with buckets of 1 GiB.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from integration import bench_weights_trainer, records
from integration.kinds.checkpoints import configure
from integration.models import SHAPES, fp8_config, write_model
from integration.offline import sglang_answers, start_sglang, start_vllm, vllm_answers
from integration.records import Records
from integration.subjects import add_commit, described, engine_version, succeeds
from rl_memory_plugins.weights.sender import DEFAULT_BUCKET_BYTES

PROMPTS = [[5 + i, 6 + i, 7 + i, 8 + i] for i in range(4)]
TOKENS = 16
SUBJECTS = ("plugin", "native")
OPTIONS = {"host_arena_max_bytes": 1 << 20}
"""No engine sleeps here, and no host memory for a sleep need be made during the first updates."""

POLL_S = 0.0001


class AdmissionWatch:
    """Polls the status boards of the engines among this process's children, and notes how long they refuse requests.

    Attributes:
        closed: The seconds of each time that the engines refused requests.
        opened_at: The end of each time, by `time.perf_counter`.
    """

    def __init__(self) -> None:
        import psutil

        from rl_memory_plugins.board import BoardReader

        directory = Path(tempfile.gettempdir(), f"rl-memory-{os.getuid()}")
        here = {process.pid for process in psutil.Process().children(recursive=True)}
        paths = [path for path in directory.glob("*.board") if int(path.name.split("-", 1)[0]) in here]
        self._readers = [BoardReader(str(path)) for path in paths]
        self._over = threading.Event()
        self._since: float | None = None
        self.closed: list[float] = []
        self.opened_at: list[float] = []

    def __enter__(self) -> None:
        self._over.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            self._look()

    def _look(self) -> None:
        from rl_memory_plugins.admission import first_refusal

        refused = first_refusal([reader.read() for reader in self._readers]) is not None
        now = time.perf_counter()
        if refused and self._since is None:
            self._since = now
        elif not refused and self._since is not None:
            self.closed.append(now - self._since)
            self.opened_at.append(now)
            self._since = None


class Subject(ABC):
    """An engine's offline class. The trainer process may call every public method, `record` and `about`."""

    engine: Any
    plugin: bool
    record: Any
    about: Any
    _watch: AdmissionWatch | None = None

    def devices(self) -> list[str]:
        return [rank.device for engine in self.engine.memory_status() for rank in engine.ranks]

    def update(self, body: dict[str, Any]) -> Any:
        self._watch = self._watch or AdmissionWatch()
        with self._watch:
            report = self.engine.update_weights_from_ipc(**body)
        return msgspec.to_builtins(report)

    def closed(self) -> list[float]:
        """For each update since the last call, the seconds during which the engine refused requests."""
        if self._watch is None:
            return []
        found, self._watch.closed = self._watch.closed, []
        return found

    def checksums(self) -> Any:
        return msgspec.to_builtins(self.engine.weight_checksums()) if self.plugin else None

    @abstractmethod
    def tokens(self) -> list[list[int]]:
        """Greedy answers, one request after the other: the rounding in a batch depends on its other requests."""

    @abstractmethod
    def native_init(self, info: dict[str, Any]) -> bool:
        """Prepare for updates. Returns whether `native_start` and `native_finish` must enclose each update."""

    @abstractmethod
    def native_start(self) -> None: ...

    @abstractmethod
    def native_update(self, *arguments: Any) -> None: ...

    @abstractmethod
    def native_finish(self) -> None: ...


class VllmSubject(Subject):
    transfer = "ipc"  # vLLM's name of its own route
    options: Mapping[str, Any] = {}

    def __init__(self, model: Path, plugin: bool, device: str, memory: float) -> None:
        self.plugin = plugin
        switch: dict[str, Any] = {"additional_config": {"rl_memory": OPTIONS}} if plugin else {}
        if not plugin:
            switch = {"weight_transfer_config": {"backend": self.transfer}} if device == "cuda" else {}
        if device == "cuda":  # a KV cache of the usual size: a reset takes time for every block
            where: dict[str, Any] = {"gpu_memory_utilization": memory}
            if SHAPES[model.name].experts:  # this backend transforms no weights: checksums need the checkpoint's layout
                where["moe_backend"] = "triton"
        else:
            where = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
        self.engine = start_vllm(
            model,
            dtype="bfloat16" if device == "cuda" else "float32",
            max_model_len=512,
            max_num_seqs=8,
            **{**where, **switch, **self.options},
        )

    def tokens(self) -> list[list[int]]:
        return [answer for prompt in PROMPTS for answer in vllm_answers(self.engine, [prompt], TOKENS)]

    def native_init(self, info: dict[str, Any]) -> bool:
        self.engine.init_weight_transfer_engine({"init_info": info})
        return True

    def native_start(self) -> None:
        self.engine.start_weight_update()

    def native_update(self, *arguments: Any) -> None:
        self.engine.update_weights({"update_info": arguments[0]})

    def native_finish(self) -> None:
        self.engine.finish_weight_update()
        self.engine.reset_prefix_cache()  # vLLM's route does not


class SglangSubject(Subject):
    def __init__(self, model: Path, plugin: bool, device: str, memory: float) -> None:
        self.plugin = plugin
        switch = {"rl_memory": OPTIONS} if plugin else {}
        if device == "cuda":
            where: dict[str, Any] = {
                "dtype": "bfloat16",
                "attention_backend": "triton",
                "disable_prefill_cuda_graph": True,
                "mem_fraction_static": memory,
            }
        else:
            where = {
                "dtype": "float32",
                "device": "cpu",
                "attention_backend": "torch_native",
                "disable_overlap_schedule": True,
                "max_total_tokens": 4096,
            }
        self.engine = start_sglang(model, context_length=512, max_running_requests=8, **where, **switch)

    def tokens(self) -> list[list[int]]:
        return [answer for prompt in PROMPTS for answer in sglang_answers(self.engine, [prompt], TOKENS)]

    def native_update(self, *arguments: Any) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        payload, load_format, last = arguments  # the last update flushes the caches
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload], load_format=load_format, flush_cache=last
        )
        manager = self.engine.tokenizer_manager
        require_success(self.engine.loop.run_until_complete(manager.update_weights_from_tensor(request, None)))

    def native_init(self, info: dict[str, Any]) -> bool:
        return hasattr(self.engine, "begin_weight_update")  # since 0.5.21

    def native_start(self) -> None:
        require_success(self.engine.begin_weight_update())

    def native_finish(self) -> None:
        require_success(self.engine.end_weight_update())


def require_success(answer: Any) -> None:
    """Raise SGLang's message if its answer is no success."""
    if not answer[0]:
        raise RuntimeError(answer[1])


ENGINES: dict[str, Any] = {"vllm": VllmSubject, "sglang": SglangSubject}


# -- one subject ----------------------------------------------------------------------------------------------


def run_subject(arguments: argparse.Namespace) -> list[str]:
    """Measure one subject; returns the routes that failed."""
    with tempfile.TemporaryDirectory() as scratch:
        dtype = "bfloat16" if arguments.device == "cuda" else "float32"
        model = write_model(Path(scratch, arguments.model), SHAPES[arguments.model], dtype=dtype)
        if arguments.fp8:
            configure(model, quantization_config=fp8_config(SHAPES[arguments.model]))
        subject = ENGINES[arguments.engine](model, arguments.subject == "plugin", arguments.device, arguments.memory)
        common = described(
            "bench_weights",
            arguments.engine,
            label(arguments),
            arguments.subject,
            arguments.commit,
            gpu=None if arguments.device == "cuda" else "none",
            words=arguments.given,
        )
        figures = Records(arguments.out, common)
        subject.record, subject.about = figures.add, figures.about
        # The trainer starts last: an engine measures the GPU's memory at its start, and nobody else may change it then.
        context = mp.get_context("spawn")
        pipe, inside = context.Pipe()
        trainer = context.Process(
            target=bench_weights_trainer.main,
            args=(
                inside,
                arguments.engine,
                arguments.subject,
                arguments.model,
                arguments.device,
                arguments.repeats,
                arguments.bucket_mib << 20,
                arguments.fp8,
            ),
            daemon=True,
        )
        trainer.start()
        inside.close()
        return serve(pipe, subject)


def serve(pipe: Connection, subject: Subject) -> list[str]:
    """Answer the trainer's calls until it is done; returns the routes that failed."""
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return ["the trainer's process ended"]
        if name == "done":
            failed: list[str] = arguments[0]
            return failed
        try:
            pipe.send((getattr(subject, name)(*arguments), ""))
        except Exception as error:
            traceback.print_exc()
            pipe.send((None, f"{type(error).__name__}: {error}"))


def label(arguments: argparse.Namespace) -> str:
    """The model's name in the records."""
    return f"{arguments.model}-fp8" if arguments.fp8 else str(arguments.model)


# -- all subjects ---------------------------------------------------------------------------------------------


def environment(engine: str, device: str, scratch: Path) -> dict[str, str]:
    """The environment of a subject: on the CPU with stand-ins for kernels, for vLLM 0.26 with a stand-in for `ray`."""
    found = {"HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # vLLM pickles IPC handles
    paths = [os.environ.get("PYTHONPATH", "")]
    if device == "cpu":
        from integration.engines import ENGINES as SERVERS
        from integration.engines.base import Launch

        found |= SERVERS[engine]().environment(Launch(scratch))
        paths.append(found.get("PYTHONPATH", ""))
    else:
        found["VLLM_USE_FLASHINFER_SAMPLER"] = os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if engine == "vllm":
        try:
            import ray  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            (scratch / "ray.py").write_text("def get(value):\n    return value\n")
            paths.append(str(scratch))
    return {**os.environ, **found, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--model", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--subject", choices=SUBJECTS, default=None, help="by default both, one after the other")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is only for trying the script")
    parser.add_argument("--fp8", action="store_true", help="the engine's checkpoint is FP8 in blocks of 128 by 128")
    parser.add_argument("--memory", type=float, default=0.4, help="share of the GPU's memory that the engine takes")
    parser.add_argument("--repeats", type=int, default=7, help="updates per route after the first one")
    parser.add_argument("--bucket-mib", type=int, default=DEFAULT_BUCKET_BYTES >> 20, help="largest bucket, in MiB")
    add_commit(parser)
    parser.add_argument("--timeout", type=float, default=280, help="seconds that one subject may take")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out = arguments.out.absolute()
    arguments.given = [word for word in sys.argv[1:] if word != "--inside"]
    if arguments.inside:
        failed = run_subject(arguments)
        if failed:
            print(f"{arguments.subject}: failed: {', '.join(failed)}", flush=True)
        sys.stdout.flush()
        os._exit(1 if failed else 0)  # an engine's shutdown can take long, and `run_bounded` kills its processes
    succeeded = True
    for subject in [arguments.subject] if arguments.subject else SUBJECTS:
        command = [sys.executable, "-m", "integration.bench_weights", *sys.argv[1:], "--subject", subject, "--inside"]
        with tempfile.TemporaryDirectory() as scratch:
            variables = environment(arguments.engine, arguments.device, Path(scratch))
            succeeded = succeeds(command, arguments.timeout, variables) and succeeded
    compare_answers(arguments.out, arguments.engine, label(arguments))
    sys.exit(0 if succeeded else 1)


def compare_answers(out: Path, engine: str, model: str) -> None:
    """Print whether equal weights gave equal tokens by every route of both subjects.

    Within a subject a difference is a failure of the route. Between the subjects it is not: each engine compiles its
    own kernels, and with random weights the rounding can decide between two tokens.
    """
    run = {"engine": engine, "engine_version": engine_version(engine), "model": model}
    answers = {
        record["metric"]: record["median"]
        for record in records.read(out)
        if record["metric"].startswith("answers_") and run.items() <= record.items()
    }
    agree = len(set(answers.values())) == 1
    print(f"the answers by all routes are {'the same' if agree else f'not the same: {answers}'}", flush=True)


if __name__ == "__main__":
    main()
