"""An engine's server as a child process, for the demos, the benchmarks and the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from integration.engines.forks import Forked, Forks
from integration.engines.ports import reserve_port
from integration.waiting import wait_until
from rl_memory_plugins.client import EngineClient, http_client

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 400  # less than a test may take with its start


@dataclass
class Launch:
    """How to start a server."""

    model: Path
    tp: int = 1
    pp: int = 1
    dp: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # the value of --rl-memory
    api_key: str = ""
    host: str = "127.0.0.1"
    dummy_weights: bool = False  # the engine makes random weights: the model folder has none
    kv_bytes: int = 128 << 20
    max_running: int = 4
    context: int = 2048  # the most tokens of a request, prompt and answer, on vLLM
    device: str = "cpu"  # or "cuda"
    forked: bool = False  # on the CPU: server and engine are forks of a process that has imported the engine
    compiled: bool = True  # on a GPU; an engine without compilation captures graphs too, and starts sooner
    graphs: bool = True  # on a GPU; without them an engine starts soonest
    memory: float = 0.0  # the share of the GPU's memory that the engine takes, in place of `kv_bytes`; 0 for none
    ray: str = ""  # the address of the Ray whose nodes have the ranks of vLLM, one each; see `ray_nodes`
    adapter_rank: int = 0  # the highest rank of LoRA adapters; with 0 the engine takes none

    @property
    def ranks(self) -> int:
        return self.ranks_of_engine * self.dp

    @property
    def ranks_of_engine(self) -> int:
        return self.tp * self.pp

    @property
    def dtype(self) -> str:
        """The weights' dtype. The engines' GPU kernels need 16 bits; float16 rounds less than bfloat16."""
        return {"cpu": "float32", "cuda": "float16"}[self.device]


class Sampling(NamedTuple):
    """How an engine answers a request; greedily at temperature 0."""

    stream: bool = False
    temperature: float = 0.0
    seed: int = 0
    logprobs: bool = False
    adapter: str = ""  # the name of a LoRA adapter


class EngineKind(ABC):
    """How to start one engine's server, and how to send it requests."""

    name: str
    generation_route: str
    health_routes: tuple[str, ...] = ("/health",)
    #: The modules that a forked server finds imported, and the variables that change what an import does.
    imports: tuple[str, ...]
    import_variables: tuple[str, ...] = ()
    #: The folders on PYTHONPATH in which a forked server finds what it has imported.
    import_folders: tuple[Path, ...] = ()

    def command(self, launch: Launch, port: int) -> list[str]:
        command = [
            *(sys.executable, "-m", "rl_memory_plugins.cli", "serve", self.name, str(launch.model)),
            *("--served-model-name", "model", "--host", launch.host, "--port", str(port)),
            *("--dtype", launch.dtype, "--rl-memory", json.dumps(launch.options), *self.arguments(launch)),
        ]
        if launch.dummy_weights:
            command += ["--load-format", "dummy"]
        if launch.api_key:
            command += ["--api-key", launch.api_key]
        return command

    @abstractmethod
    def arguments(self, launch: Launch) -> list[str]:
        """The arguments that only this engine has."""

    @abstractmethod
    def environment(self, launch: Launch) -> dict[str, str]: ...

    def request(self, prompt: list[int], tokens: int, stream: bool = False, **sampling: Any) -> dict[str, Any]:
        """The body of a generation request that does not stop before `tokens` tokens; see `Sampling`."""
        return self.body(prompt, tokens, Sampling(stream, **sampling))

    @abstractmethod
    def body(self, prompt: list[int], tokens: int, sampling: Sampling) -> dict[str, Any]:
        """The body of `request`."""

    @abstractmethod
    def tokens(self, answer: dict[str, Any]) -> list[int]:
        """The generated token ids of an answer."""

    @abstractmethod
    def streamed_tokens(self, events: list[dict[str, Any]]) -> list[int]:
        """The generated token ids of an answer in parts; see `events_of`."""

    @abstractmethod
    def logprobs(self, answer: dict[str, Any]) -> list[float]:
        """The log-probability of each generated token, in an answer to a request with `logprobs`."""

    @abstractmethod
    def cached_tokens(self, answer: dict[str, Any]) -> int:
        """How many tokens of the prompt the engine found in its prefix cache, by its own count."""

    @abstractmethod
    def recomputations(self, http: httpx.Client, answer: dict[str, Any]) -> int:
        """A counter of the engine that grows when a request loses its KV cache and is computed again.

        It counts the times of this answer's request, or those of all requests since the start.
        """

    @abstractmethod
    def was_aborted(self, answer: dict[str, Any]) -> bool: ...

    @abstractmethod
    def requests_held(self, http: httpx.Client) -> int:
        """How many requests the engine runs or has queued, by its own count."""

    def forks(self, environment: dict[str, str]) -> Forks:
        """The process of which servers with these variables are forks. It stays, for further servers.

        Further folders on a server's PYTHONPATH have its plugins. It finds them itself, when it loads them.
        """
        key = (self.name, *(environment.get(name) for name in self.import_variables))
        if key not in _FORKS:
            path = os.pathsep.join(map(str, (*self.import_folders, REPOSITORY)))
            _FORKS[key] = Forks(self.imports, {**environment, "PYTHONPATH": path})
        return _FORKS[key]


_FORKS: dict[tuple[str | None, ...], Forks] = {}


def ray_workers() -> list[psutil.Process]:
    """The processes that are vLLM's ranks on nodes of Ray that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("RayWorkerProc" in part for part in process.cmdline()):
                found.append(process)
    return found


class Server:
    """A running server. `with` waits until it is ready, and stops it at the end."""

    def __init__(self, kind: EngineKind, launch: Launch, log: Path) -> None:
        self.kind = kind
        self.launch = launch
        self.log = log
        self._ports, self.port = reserve_port()
        self.url = f"http://127.0.0.1:{self.port}"
        environment = {**os.environ, **kind.environment(launch)}
        environment["PYTHONPATH"] = os.pathsep.join(
            path for path in (environment.get("PYTHONPATH", ""), str(REPOSITORY)) if path
        )
        self._process = self._start(kind.command(launch, self.port), environment)
        self.http = http_client(self.url, launch.api_key, timeout=120)
        self.control = EngineClient(self.url, launch.api_key, timeout_s=120)

    def _start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes] | Forked:
        if self.launch.forked and command[:2] == [sys.executable, "-m"]:
            return self.kind.forks(environment).start(command, environment, self.log)
        with self.log.open("wb") as output:
            return subprocess.Popen(
                command,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                # No new session: Linux schedules each session as one, and an engine that spins on all cores was seen
                # to keep a client in another session from running for seconds.
                process_group=0,
            )

    def __enter__(self) -> Server:
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server exited with {self._process.returncode}:\n{self.tail()}")
            try:
                if self.http.get("/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise RuntimeError(f"the server did not start within {START_TIMEOUT_S} s:\n{self.tail()}")

    def stop(self) -> None:
        self.http.close()
        self.control.close()
        processes = self.processes()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        psutil.wait_procs(processes[:1], timeout=20)
        _, alive = psutil.wait_procs(processes, timeout=5)  # nobody tells them to end once the first has ended
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=10)
        self._ports.close()

    def is_running(self) -> bool:
        """Whether the server's process runs. Unlike SGLang's `/health`, which takes a second, this takes no time."""
        return self._process.poll() is None

    def is_alive(self) -> bool:
        return self.is_running() and self.http.get("/health").status_code == 200

    def is_healthy(self) -> bool:
        """Whether a monitor would let the server live."""
        try:
            return self.http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def processes(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True), *(ray_workers() if self.launch.ray else [])]
        except psutil.NoSuchProcess:
            return []

    def resident_bytes(self) -> int:
        """RSS of all processes of the server."""
        total = 0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def occupied_bytes(self) -> int:
        """The engine's memory: RSS of its processes on the CPU, the memory in use on all GPUs with `device="cuda"`.

        Not every driver tells processes apart, and therefore GPU memory of other processes counts too.
        """
        return gpu_used_bytes() if self.launch.device == "cuda" else self.resident_bytes()

    def post(self, prompt: list[int], tokens: int = 8, **sampling: Any) -> httpx.Response:
        return self.http.post(self.kind.generation_route, json=self.kind.request(prompt, tokens, **sampling))

    def generate(self, prompt: list[int], tokens: int = 8, **sampling: Any) -> list[int]:
        """The generated token ids.

        Raises:
            RuntimeError: the engine refused or failed.
        """
        response = self.post(prompt, tokens, **sampling)
        if response.status_code != 200:
            raise RuntimeError(f"the engine answered {response.status_code}: {response.text}")
        return self.kind.tokens(response.json())

    def wait_held(self, count: int) -> None:
        wait_until(lambda: self.kind.requests_held(self.http) == count, f"the engine has {count} requests")

    def wait_admitting(self, admitting: bool) -> None:
        wait_until(lambda: self.control.memory()["admitting"] == admitting, f"admitting: {admitting}")

    @contextmanager
    def generating(self, prompt: list[int], tokens: int) -> Iterator[BackgroundRequest]:
        """A long request that runs when the body of `with` begins; the engine had no request before."""
        self.wait_held(0)
        request = BackgroundRequest(self, prompt, tokens)
        request.start()
        wait_until(lambda: not request.is_alive() or self.kind.requests_held(self.http) > 0, "the request runs")
        request.assert_running()
        try:
            yield request
        finally:
            request.join(120)
            assert not request.is_alive(), "the request hangs"


class BackgroundRequest(threading.Thread):
    """A request in another thread; `outcome` is the response or the exception."""

    def __init__(self, server: Server, prompt: list[int], tokens: int) -> None:
        super().__init__(daemon=True)
        self._server, self._prompt, self._tokens = server, prompt, tokens
        self.outcome: httpx.Response | Exception | None = None

    def run(self) -> None:
        try:
            self.outcome = self._server.post(self._prompt, self._tokens)
        except httpx.HTTPError as error:
            self.outcome = error

    def assert_running(self) -> None:
        ended = getattr(self.outcome, "text", self.outcome)
        assert self.is_alive(), f"the request ended before it should: {ended}"

    def answer(self) -> dict[str, Any]:
        self.join(120)
        assert isinstance(self.outcome, httpx.Response), self.outcome
        assert self.outcome.status_code == 200, self.outcome.text
        return self.outcome.json()


def events_of(stream: str) -> list[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    return [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]


def gpu_used_bytes() -> int:
    """Memory in use on the GPUs that this process may use, as the driver counts it."""
    return sum(used_bytes_by_gpu())


def used_bytes_by_gpu() -> list[int]:
    """Memory in use on each GPU that this process may use, as the driver counts it."""
    import pynvml

    pynvml.nvmlInit()
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        indices = map(int, visible.split(",")) if visible else range(pynvml.nvmlDeviceGetCount())
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, indices)
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
