"""How long a weight update closes an engine with running requests: modes `freeze` and `keep` against the update alone.

    python -m integration.bench_freeze --engine vllm --model 7b --out results.json
    python -m integration.bench_freeze --device cpu --model tiny --requests 4 --prompt 64 --tokens 400 --out cpu.json

The engine is a server with dummy weights. The trainer is this process, with its tensors on the same GPU. Another
process sends the requests and notes when each token arrives. A round starts the requests, waits until every request has
some tokens, updates the weights, waits until every request has some more, ends the requests, and updates the idle
engine.

    closed_*_s          how long the engine refuses requests, by polling its status; running requests stop within
    stopped_*_s         how long no step runs: the controller's own seconds without the drain, which ends the last step
    update_*_s          the trainer's whole call
    gap_*_s             the longest time without a token of any request, from the begin of the update on
    lost_*_s            gap_*_s less token_interval_s: the time for which all requests stood still
    all_back_*_s        the longest time that one request waited for a token, from the begin of the update on
    recomputed_*        how many requests the engine computed again, by its own counter
    token_interval_s    the median time between two tokens of a request, once no prompt is computed any more
    *_ratio_MODE        closed, stopped, lost and gap: the median with this mode / closed_alone_s, stopped_alone_s for
                        stopped. `alone` is an update of the idle engine
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import torch

from integration.bench_weights import AdmissionWatch
from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from integration.json_process import Child, serve
from integration.models import SHAPES, Shape, checkpoint_shapes, write_model
from integration.records import Records, read
from integration.subjects import add_commit, described
from rl_memory_plugins.errors import InvalidRequestError

MODES = ("freeze", "keep")
START_S = 600.0  # the longest time until every request has a token
TOKENS_BEFORE = 8  # of each request, between the start of a round and its update
TOKENS_AFTER = 4  # of each request, after its update: more than the engine's steps in flight


class Clients:
    """The requests of one round, each a stream, in a process of its own. An event loop in a thread receives tokens."""

    def __init__(self, engine: str, url: str) -> None:
        self._kind = ENGINES[engine]()
        self._url = url
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._streams: list[Future[None]] = []
        self._arrivals: list[list[float]] = []
        self._last: dict[int, str] = {}  # of each request, the last line of its answer

    def start(self, seed: int, requests: int, prompt: int, tokens: int, vocabulary: int) -> None:
        """Start the requests, and return when each has `TOKENS_BEFORE` tokens."""
        numbers = random.Random(seed)
        self._arrivals = [[] for _ in range(requests)]
        self._streams = [
            asyncio.run_coroutine_threadsafe(
                self._stream([numbers.randrange(5, vocabulary) for _ in range(prompt)], tokens, index), self._loop
            )
            for index in range(requests)
        ]
        self._wait(lambda times: len(times) >= TOKENS_BEFORE)

    def finish(self, opened_at: float) -> tuple[list[list[float]], list[Any]]:
        """End the requests once each has `TOKENS_AFTER` tokens that arrived after `opened_at`.

        Returns: for each request, when its tokens arrived, and the last part of its answer.
        """
        self._wait(lambda times: times[-TOKENS_AFTER] > opened_at)
        for stream in self._streams:
            stream.cancel()
        return self._arrivals, [json.loads(self._last[index]) for index in range(len(self._arrivals))]

    def _wait(self, holds: Callable[[list[float]], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not all(map(holds, self._arrivals)):
            if any(stream.done() for stream in self._streams):
                raise InvalidRequestError("a request ended before the update did: give the requests more --tokens")
            if time.monotonic() > deadline:
                raise TimeoutError(f"some requests have no new token after {START_S:g} s")
            time.sleep(0.002)

    async def _stream(self, prompt: list[int], tokens: int, index: int) -> None:
        body = self._kind.request(prompt, tokens, stream=True)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=START_S) as http,
            http.stream("POST", self._kind.generation_route, json=body) as response,
        ):
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data:") and "[DONE]" not in line:
                    self._arrivals[index].append(time.perf_counter())
                    self._last[index] = line.removeprefix("data:")


class Waits:
    """How long requests waited for their tokens.

    Args:
        arrivals: For each request, when its tokens arrived.
        started: When the update began. All requests had tokens by then.

    Attributes:
        interval: The median time between two tokens of a request, after all requests had their first and before
            the update. While other prompts are computed a step takes many times as long.
        gap: The longest time in which no request had a token; it ended after the update began.
        longest: The longest time in which some request had no token; it ended after the update began.
    """

    def __init__(self, arrivals: list[list[float]], started: float) -> None:
        decoding = max(times[0] for times in arrivals)
        pairs = [pair for times in arrivals for pair in itertools.pairwise(times)]
        self.interval = statistics.median(later - at for at, later in pairs if at >= decoding and later < started)
        self.longest = max(later - at for at, later in pairs if later > started)
        merged = itertools.pairwise(sorted(itertools.chain(*arrivals)))
        self.gap = max(later - at for at, later in merged if later > started)


class Bench:
    """Runs the rounds on one server, and records their figures."""

    def __init__(self, server: Server, clients: Child, arguments: argparse.Namespace, figures: Records) -> None:
        self._server = server
        self._clients = clients
        self._arguments = arguments
        self._figures = figures
        self._watch = AdmissionWatch()
        self._values: dict[str, list[float]] = {}
        shape, dtype = SHAPES[arguments.model], getattr(torch, server.launch.dtype)
        self._weights = {
            name: torch.empty(size, dtype=dtype, device=arguments.device).normal_(
                1.0 if name.endswith("norm.weight") else 0.0, 0.02
            )
            for name, size in checkpoint_shapes(shape).items()
        }

    def run(self) -> None:
        for mode in MODES:
            self._update(mode)  # the first update traces the loader and opens memory
        for number in range(self._arguments.repeats):
            for mode in MODES:
                self._round(mode, number)
        for figure, alone in {"closed": "closed", "stopped": "stopped", "lost": "closed", "gap": "closed"}.items():
            for mode in MODES:
                ratio = self._median(f"{figure}_{mode}_s") / self._median(f"{alone}_alone_s")
                self._figures.add(f"{figure}_ratio_{mode}", [ratio], "of the update alone")

    def _round(self, mode: str, number: int) -> None:
        words = self._arguments
        self._clients.call(
            "start",
            seed=number + 1000 * MODES.index(mode),  # no prompt twice: none is in the prefix cache
            requests=words.requests,
            prompt=words.prompt,
            tokens=words.tokens,
            vocabulary=SHAPES[words.model].vocabulary,
        )
        before = self._recomputed([{"meta_info": {"num_retractions": 0}}])
        started = time.perf_counter()
        opened_at = self._update(mode, mode)
        arrivals, answers = self._clients.call("finish", opened_at=opened_at)
        self._add(f"recomputed_{mode}", self._recomputed(answers) - before, "requests")
        waits = Waits(arrivals, started)
        self._add("token_interval_s", waits.interval)
        self._add(f"gap_{mode}_s", waits.gap)
        self._add(f"lost_{mode}_s", waits.gap - waits.interval)
        self._add(f"all_back_{mode}_s", waits.longest)
        self._server.wait_held(0)
        self._update("keep", "alone")

    def _recomputed(self, answers: list[Any]) -> int:
        """See `Engine.recomputations`: a counter of all requests, or of each answer's own."""
        counts = [self._server.kind.recomputations(self._server.http, answer) for answer in answers]
        return sum(counts) if self._arguments.engine == "sglang" else counts[0]

    def _update(self, mode: str, name: str = "") -> float:
        """Update the weights, and record the figures under this name. Returns when the engine opened again."""
        start = time.perf_counter()
        with self._watch:
            report = self._server.control.update_weights(
                self._weights, mode=mode, keep_mapped=self._arguments.keep_mapped
            )
        took = time.perf_counter() - start
        seconds = report["engine"]["report"]["seconds"]
        if name:
            self._add(f"update_{name}_s", took)
            self._add(f"closed_{name}_s", self._watch.closed[-1])
            self._add(f"stopped_{name}_s", seconds["total"] - seconds["drain"], steps=seconds)
        return self._watch.opened_at[-1]

    def _add(self, metric: str, value: float, unit: str = "s", **details: Any) -> None:
        self._values.setdefault(metric, []).append(value)
        self._figures.add(metric, [value], unit, details)

    def _median(self, metric: str) -> float:
        return statistics.median(self._values[metric])


def kv_bytes(shape: Shape, tokens: int, element: int) -> int:
    """The size of a KV cache for so many tokens, with some room."""
    head = shape.head or shape.hidden // shape.heads
    return int(tokens * 2 * shape.layers * shape.kv_heads * head * element * 1.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--model", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is only for trying the script")
    parser.add_argument("--requests", type=int, default=64, help="running requests")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=1024, help="the most tokens of an answer; an update ends earlier")
    parser.add_argument("--repeats", type=int, default=3, help="rounds for each mode")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--keep-mapped", action="store_true", help="the engine keeps the trainer's tensors open")
    add_commit(parser)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the records")
    parser.add_argument("--clients", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.clients:
        streams = Clients(arguments.engine, arguments.clients)
        serve(lambda: {"start": streams.start, "finish": streams.finish})
        return
    context = arguments.prompt + arguments.tokens + 16
    with tempfile.TemporaryDirectory() as scratch:
        launch = Launch(
            Path(scratch, arguments.model),
            tp=arguments.tp,
            dummy_weights=True,
            max_running=arguments.requests,
            context=context,
            device=arguments.device,
        )
        shape = SHAPES[arguments.model]
        launch.kv_bytes = kv_bytes(shape, context * arguments.requests, 4 if arguments.device == "cpu" else 2)
        launch.kv_bytes //= arguments.tp
        write_model(launch.model, shape, dtype=launch.dtype)
        common = described(
            "bench_freeze",
            arguments.engine,
            arguments.model,
            "plugin",
            arguments.commit,
            gpu=None if arguments.device == "cuda" else "none",
        )
        figures = Records(arguments.out, {**common, "requests": arguments.requests, "prompt_tokens": arguments.prompt})
        with Server(ENGINES[arguments.engine](), launch, Path(scratch, "server.log")) as server:
            words = ("--engine", arguments.engine, "--out", str(arguments.out), "--clients", server.url)
            clients = Child("integration.bench_freeze", *words)
            try:
                Bench(server, clients, arguments, figures).run()
            finally:
                clients.close()
    for record in read(arguments.out):
        if "ratio" in record["metric"]:
            print(f"{record['metric']}: {record['median']:.3f}", flush=True)


if __name__ == "__main__":
    main()
