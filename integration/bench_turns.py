"""Two engines on one GPU, each with most of its memory, that take turns: how long a request to the sleeping one waits.

    python -m integration.bench_turns --engine vllm --model 7b --out turns-vllm.json
    python -m integration.bench_turns --device cpu --model tiny --swaps 4 --out cpu.json

The script needs the engine and one idle NVIDIA GPU. Requests go to the two servers alternately, one at a time. The
subjects run one after the other, each with two servers that have dummy weights:

    plugin    both servers have the option `take_turns_s`; the client only sends the requests
    native    the engine alone: a client puts one engine to sleep (level 1), wakes the other and sends the request, as a
              proxy in front of them does
    restart   the engine alone: one server is stopped and the other one started

    first_token_s      from the arrival of a request for the sleeping model to its first token
    awake_token_s      the same request once more, to the model that is awake now
    swap_s             first_token_s less awake_token_s, for each swap
    sleep_s, wake_s    the parts of a swap: of `plugin` the means by the server's metrics, without the turn's own waits;
                       of `native` the calls; of `restart` the stop and the start (stop_s, start_s)
    swaps_per_minute   swaps one after the other, with two short requests and 0.1 s without any in each turn
    swap_limit_s       bytes out / link + bytes in / link. `plugin`: bytes by the reports of one more sleep and wake; a
                       backup of weights that have not changed is not copied again. `native`: all weights both ways
    swap_ratio         the median of swap_s / swap_limit_s
    first_sleep_s      the first sleep of an engine, which makes its host memory
    answers_identical  whether each model has answered every request as before its first sleep

A CPU has no `native`: neither engine can sleep there by itself. After `native`, `restart` stops the server that is
awake there, which saves a start.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from integration import records
from integration.bench_step import link
from integration.engines import ENGINES
from integration.engines.base import EngineKind, Launch, Server
from integration.engines.native import NATIVE
from integration.models import SHAPES, weight_bytes, write_model
from integration.records import Records
from integration.subjects import add_commit, described

SUBJECTS = ("plugin", "native", "restart")
PROMPT = [5, 6, 7, 8]
TOKENS = 8
OPTIONS = {"take_turns_s": 0.05, "wake_on_request_s": 120}
REST_S = 0.1  # of each turn; SGLang's scheduler ends if its release finds the last request not quite over
RUNNING = 16  # the most requests at once: decides the CUDA graphs
#: What the engine alone needs to sleep without losing its weights.
SLEEP_FLAGS = {"vllm": ("--enable-sleep-mode",), "sglang": ("--enable-memory-saver", "--enable-weights-cpu-backup")}


def first_token(server: Server) -> tuple[float, list[int]]:
    """Seconds from a request to its first token, and all its tokens."""
    kind, body = server.kind, server.kind.request(PROMPT, TOKENS, stream=True)
    start = time.perf_counter()
    seconds = math.nan
    events: list[dict[str, Any]] = []
    with server.http.stream("POST", kind.generation_route, json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"the engine answered {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
                if math.isnan(seconds) and kind.streamed_tokens(events):
                    seconds = time.perf_counter() - start
    return seconds, kind.streamed_tokens(events)


def ask(server: Server) -> list[int]:
    """What a server answers; it has no request when this returns."""
    tokens = first_token(server)[1]
    time.sleep(REST_S)
    return tokens


def percentile(values: list[float], share: float) -> float:
    """The nearest rank; of few values the largest one."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Swaps:
    """Alternate requests to two servers, of which one is awake.

    Args:
        servers: The first one is awake.
        expected: What each of them has answered before it slept.
        before: Called with the server that is awake and the one that sleeps, before the request to the latter. Returns
            seconds by metric.
    """

    def __init__(
        self,
        servers: list[Server],
        expected: list[list[int]],
        before: Callable[[Server, Server], dict[str, float]] = lambda awake, asleep: {},
    ) -> None:
        self._servers, self._expected, self._before = servers, expected, before
        self.awake = 0
        self.identical = True
        self.seconds: dict[str, list[float]] = {}

    def run(self, most: int, most_s: float) -> float:
        """Swap until one of both limits is reached, but twice at least. Returns the swaps per minute."""
        start = time.perf_counter()
        done = 0
        while done < 2 or (done < most and time.perf_counter() - start < most_s):
            self._swap()
            done += 1
        return 60 * done / (time.perf_counter() - start)

    def _swap(self) -> None:
        target = 1 - self.awake
        begin = time.perf_counter()
        parts = self._before(self._servers[self.awake], self._servers[target])
        sent = time.perf_counter()
        seconds, tokens = first_token(self._servers[target])
        first = sent - begin + seconds
        awake, again = first_token(self._servers[target])
        time.sleep(REST_S)
        self.awake = target
        self.identical = self.identical and tokens == again == self._expected[target]
        for metric, value in {"first_token_s": first, "awake_token_s": awake, "swap_s": first - awake, **parts}.items():
            self.seconds.setdefault(metric, []).append(value)


class Run:
    """The subjects of one run, on one GPU.

    Args:
        folder: Of the model.
        links: Bytes per second to the GPU and back.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path, links: tuple[float, float]) -> None:
        self._arguments = arguments
        self._into, self._out_of = links
        self._launch = Launch(
            folder,
            dummy_weights=True,
            device=arguments.device,
            memory=arguments.memory if arguments.device == "cuda" else 0,
            max_running=RUNNING,
            compiled=False,  # the engine's own speed does not matter here, and it starts sooner
            graphs=not arguments.eager,
        )
        self._running: list[Server] = []  # of `native` the last one stays until `restart` stops it

    def plugin(self) -> None:
        figures = self._figures("plugin")
        kind = ENGINES[self._arguments.engine]()
        self._launch.options = OPTIONS
        first = self._start(kind, "plugin-a", figures)
        tokens = [ask(first)]
        figures.add("first_sleep_s", [seconds_of(lambda: first.control.sleep(1))], "s")
        second = self._start(kind, "plugin-b", figures)
        tokens.append(ask(second))
        first.control.wake_up()  # the second one gives up its turn
        servers = [first, second]
        swaps = Swaps(servers, tokens)
        before = [transitions(server) for server in servers]
        per_minute = swaps.run(self._arguments.swaps, self._arguments.seconds)
        parts = means(before, [transitions(server) for server in servers])
        self._report(figures, swaps, per_minute)
        for operation, metric in {"sleep": "sleep_s", "wake_up": "wake_s"}.items():
            steps = {step: round(mean, 4) for (name, step), mean in parts.items() if name == operation}
            figures.add(metric, [steps["total"]], "s", {"steps": steps})
        awake = servers[swaps.awake]
        out = copied(awake.control.sleep(1))
        self._limit(figures, swaps, out, copied(awake.control.wake_up()))

    def native(self) -> None:
        figures = self._figures("native")
        kind = NATIVE[self._arguments.engine](SLEEP_FLAGS[self._arguments.engine])
        first = self._start(kind, "native-a", figures)
        tokens = [ask(first)]
        figures.add("first_sleep_s", [seconds_of(lambda: self._sleep(first))], "s")
        second = self._start(kind, "native-b", figures)
        tokens.append(ask(second))

        def swap(awake: Server, asleep: Server) -> dict[str, float]:
            return {"sleep_s": seconds_of(lambda: self._sleep(awake)), "wake_s": seconds_of(lambda: self._wake(asleep))}

        swap(second, first)
        servers = [first, second]
        swaps = Swaps(servers, tokens, swap)
        per_minute = swaps.run(self._arguments.swaps, self._arguments.seconds)
        self._report(figures, swaps, per_minute)
        nbytes = weight_bytes(self._arguments.model)
        self._limit(figures, swaps, nbytes, nbytes)
        if "restart" in self._arguments.subject:
            self._stop([servers[1 - swaps.awake]])

    def restart(self) -> None:
        figures = self._figures("restart")
        kind = NATIVE[self._arguments.engine](())
        [old] = self._running or [self._start(kind, "restart-a", figures)]
        expected = ask(old)
        start = time.perf_counter()
        stop_s = seconds_of(lambda: self._stop([old]))
        new = self._start(kind, "restart-b", figures)
        ready = time.perf_counter() - start
        seconds, tokens = first_token(new)
        awake, again = first_token(new)
        figures.add("first_token_s", [ready + seconds], "s", {"p50": ready + seconds, "p99": ready + seconds})
        figures.add("awake_token_s", [awake], "s")
        figures.add("swap_s", [ready + seconds - awake], "s")
        figures.add("stop_s", [stop_s], "s")
        figures.add("start_s", [ready - stop_s], "s")
        figures.add("swaps", [1], "swaps")
        figures.add("swaps_per_minute", [60 / (ready + seconds)], "1/min")
        figures.add("answers_identical", [float(tokens == again == expected)], "bool")

    def _figures(self, subject: str) -> Records:
        given = self._arguments
        gpu = None if given.device == "cuda" else "none"
        common = described("bench_turns", given.engine, given.model, subject, given.commit, gpu=gpu)
        about = {"engines": 2, "memory": self._launch.memory, "graphs": self._launch.graphs}
        figures = Records(given.out, {**common, **about}, by_step=True)
        figures.add("link_gb_s", [self._into / 1e9, self._out_of / 1e9], "GB/s, to the GPU and back")
        return figures

    def _start(self, kind: EngineKind, name: str, figures: Records) -> Server:
        start = time.perf_counter()
        server = Server(kind, self._launch, self._arguments.out.parent / f"turns-{kind.name}-{name}.log")
        server.__enter__()
        self._running.append(server)
        figures.add("startup_s", [time.perf_counter() - start], "s")
        return server

    def _stop(self, servers: list[Server]) -> None:
        self._running = [server for server in self._running if server not in servers]
        if servers:
            with ThreadPoolExecutor(len(servers)) as pool:
                list(pool.map(Server.stop, servers))

    def stop(self) -> None:
        self._stop(self._running)

    def _sleep(self, server: Server) -> None:
        route = {"vllm": "/sleep?level=1", "sglang": "/release_memory_occupation"}[server.kind.name]
        server.http.post(route, json={}).raise_for_status()

    def _wake(self, server: Server) -> None:
        route = {"vllm": "/wake_up", "sglang": "/resume_memory_occupation"}[server.kind.name]
        server.http.post(route, json={}).raise_for_status()

    def _report(self, figures: Records, swaps: Swaps, per_minute: float) -> None:
        for metric, seconds in swaps.seconds.items():
            figures.add(metric, seconds, "s", {"p50": percentile(seconds, 0.5), "p99": percentile(seconds, 0.99)})
        figures.add("swaps", [len(swaps.seconds["swap_s"])], "swaps")
        figures.add("swaps_per_minute", [per_minute], "1/min")
        figures.add("answers_identical", [float(swaps.identical)], "bool")

    def _limit(self, figures: Records, swaps: Swaps, out: int, into: int) -> None:
        limit = out / self._out_of + into / self._into
        figures.add("swap_limit_s", [limit], "s", {"bytes_out": out, "bytes_in": into})
        if limit:
            figures.add("swap_ratio", [statistics.median(swaps.seconds["swap_s"]) / limit], "of the limit")


def copied(answer: dict[str, Any]) -> int:
    """The bytes that a sleep or a wake has copied, by its report."""
    return sum(change["bytes_copied"] for change in answer["report"]["changes"])


def transitions(server: Server) -> dict[tuple[str, str], tuple[float, float]]:
    """By operation and step, the seconds of all transitions of a server so far, and how many there were."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[str, str], dict[str, float]] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples if family.name == "rl_memory_transition_seconds" else ():
            key = (sample.labels.get("operation", ""), sample.labels.get("step", ""))
            kept = found.setdefault(key, {"_sum": 0.0, "_count": 0.0})
            for end in kept:
                if sample.name.endswith(end):
                    kept[end] += sample.value
    return {key: (kept["_sum"], kept["_count"]) for key, kept in found.items()}


def means(
    before: list[dict[tuple[str, str], tuple[float, float]]], after: list[dict[tuple[str, str], tuple[float, float]]]
) -> dict[tuple[str, str], float]:
    """By operation and step, the mean seconds of the transitions between two looks at all servers."""
    found = {}
    for key in {key for one in after for key in one}:
        pairs = [(new.get(key, (0, 0)), old.get(key, (0, 0))) for new, old in zip(after, before, strict=True)]
        seconds, count = (sum(new[part] - old[part] for new, old in pairs) for part in (0, 1))
        if count:
            found[key] = seconds / count
    return found


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` in the body after so long."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--model", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--subject", choices=SUBJECTS, nargs="+", default=list(SUBJECTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is only for trying the script")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory that each engine takes")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs, for a quick try")
    parser.add_argument("--swaps", type=int, default=40, help="the most swaps of a subject")
    parser.add_argument("--seconds", type=float, default=25, help="the longest time for the swaps of a subject")
    parser.add_argument("--timeout", type=float, default=200, help="seconds that each subject may take, with starts")
    add_commit(parser)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records; logs go beside it")
    arguments = parser.parse_args()
    arguments.out = arguments.out.absolute()
    if arguments.device == "cpu" and "native" in arguments.subject:
        print("native: no engine can sleep by itself on a CPU; left out", flush=True)
        arguments.subject = [subject for subject in arguments.subject if subject != "native"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, which stops the servers
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        dtype = Launch(Path(scratch), device=arguments.device).dtype
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:  # its CUDA context ends with it
            links = other.submit(link, arguments.device).result()
        run = Run(arguments, write_model(Path(scratch, arguments.model), SHAPES[arguments.model], dtype=dtype), links)
        for subject in sorted(arguments.subject, key=SUBJECTS.index):
            start = time.perf_counter()
            kept = False
            try:
                with bounded(arguments.timeout):
                    getattr(run, subject)()
                kept = subject == "native" and "restart" in arguments.subject
            except Exception:
                traceback.print_exc()
                failed.append(subject)
            finally:
                if not kept:
                    run.stop()
            print(f"{subject}: {time.perf_counter() - start:.0f} s", flush=True)
    for record in records.read(arguments.out):
        print(f"{record['subject']:8} {record['metric']:18} {record['median']:10.4f} {record['unit']}")
    if failed:
        raise SystemExit(f"did not end well: {', '.join(failed)}")


if __name__ == "__main__":
    main()
