"""Data-parallel engines of one mixture-of-experts model: they step, stop and go on together, or wait for each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from httpx import Response

from integration.engines.base import BackgroundRequest, Launch, Server
from integration.waiting import wait_until
from rl_memory_plugins.errors import DeviceMemoryError, DrainTimeoutError
from tests.conformance.trainers import push
from tests.weight_kinds import PROMPT, TOKENS, checkpoint, install_plugin, renew, started, write_moe

SEED, OTHER_SEED = 3, 7
LONG = 300
SHORT = 6  # of the tokens that a fresh engine answers
DRAIN_S = 8
REST_S = 1.0  # a hundred steps with nothing to do, and more
ANSWER_S = 60

#: A vLLM plugin: the two collectives of the experts that vLLM's CPU platform lacks, and requests that are held on their
#: way to the engines while a file is there, and an engine that comes late to each message while another file is there.
#: Each engine writes a character to a file for each step, whether it has a request or not: `|` for the last of a wave.
PLUGIN = """
    def register():
        import asyncio, os, random, time
        import torch
        from torch import distributed
        from vllm.v1.engine.core import DPEngineCoreProc
        from vllm.v1.engine.core_client import DPAsyncMPClient
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        def all_gatherv(self, tensors, dim=0, sizes=None):
            def gather(tensor):
                rows = sizes or [len(tensor)] * self.world_size
                padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
                padded[: len(tensor)] = tensor
                parts = [torch.empty_like(padded) for _ in rows]
                distributed.all_gather(parts, padded, group=self.device_group)
                return torch.cat([part[:count] for part, count in zip(parts, rows)])

            return [gather(tensor) for tensor in tensors] if isinstance(tensors, list) else gather(tensors)

        def reduce_scatterv(self, tensor, dim=0, sizes=None):
            total = tensor.clone()
            distributed.all_reduce(total, group=self.device_group)
            rows = sizes or [len(tensor) // self.world_size] * self.world_size
            return total.split(rows)[self.rank_in_group].clone()

        add_request_async = DPAsyncMPClient.add_request_async

        async def held(self, request):
            while True:
                try:
                    with open(os.environ["HOLD"], "r+") as file:  # makes no file, unlike "w"
                        file.write("held")
                except FileNotFoundError:
                    break
                await asyncio.sleep(0.05)
            await add_request_async(self, request)

        handle = DPEngineCoreProc._handle_client_request

        def late(self, *request):
            if self.dp_rank == 1 and os.path.exists(os.environ["DELAY"]):
                time.sleep(random.choice([0, 0, 0.02, 0.1]))
            handle(self, *request)

        agree = DPEngineCoreProc._has_global_unfinished_reqs

        def counted(self, unfinished):
            runs = agree(self, unfinished)
            with open(os.environ["STEPS"] + str(self.dp_rank), "a") as file:
                file.write("." if runs else "|")
            return runs

        DPEngineCoreProc._has_global_unfinished_reqs = counted
        DPEngineCoreProc._handle_client_request = late
        DPAsyncMPClient.add_request_async = held
        CpuCommunicator.all_gatherv = all_gatherv
        CpuCommunicator.reduce_scatterv = reduce_scatterv
"""


class Experts:
    """A server of two engines, two checkpoints, and what a fresh engine answers by the first."""

    def __init__(self, server: Server, first: Path, other: Path, faults: Path, hold: Path) -> None:
        self.server, self.first, self.other, self._faults = server, first, other, faults
        self.hold = hold  # a file
        self.delay = hold.with_name("delay")  # another
        self._steps = [hold.with_name(f"steps{engine}") for engine in range(2)]
        self.control = server.control
        self.tokens = self.generate()

    def generate(self) -> list[int]:
        return self.server.generate(PROMPT, TOKENS)

    def fail(self, operation: str, engine: int) -> None:
        """The engine's next such operation fails."""
        (self._faults / f"{operation}.{engine}").touch()

    def assert_answered(self, request: BackgroundRequest, tokens: int, *, aborted: bool) -> None:
        answered = len(self.server.kind.tokens(request.answer()))
        assert answered < tokens if aborted else answered == tokens

    def steps(self) -> list[str]:
        """Of each engine, a character for each step: see `PLUGIN`."""
        return [file.read_text() for file in self._steps]

    def asleep(self) -> list[bool]:
        """Of each engine, whether any of its memory is released."""
        return [
            any(tag["state"] != "resident" for tag in engine["ranks"][0]["tags"].values())
            for engine in self.control.memory()["engines"]
        ]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experts]:
    folder = tmp_path_factory.mktemp("experts")
    site = install_plugin(folder / "site", "vllm.general_plugins", PLUGIN)
    first, other = (write_moe(folder / name, seed, "float32") for name, seed in (("a", SEED), ("b", OTHER_SEED)))
    faults = folder / "faults"
    faults.mkdir()
    options = {"poison": True, "fault_dir": str(faults), "drain_timeout_s": DRAIN_S}
    launch = Launch(first, dp=2, options=options, forked=True)
    hold = folder / "hold"
    files = {name.upper(): str(hold.with_name(name)) for name in ("hold", "delay", "steps")}
    with started("vllm", launch, folder / "server.log", sites=[site], **files) as server:
        yield Experts(server, first, other, faults, hold)


@pytest.fixture(autouse=True)
def serves_as_before(experts: Experts) -> Iterator[None]:
    yield
    experts.control.wake_up()
    assert experts.generate() == experts.tokens


@pytest.mark.parametrize("mode", ["abort", pytest.param("wait", marks=pytest.mark.long), "keep"])
def test_a_sleep_while_one_of_them_runs_a_request(experts: Experts, mode: str) -> None:
    tokens = LONG // 6 if mode == "wait" else LONG  # which must end before the drain's timeout
    with experts.server.generating(PROMPT, tokens) as request:
        experts.control.sleep(1, mode=mode)
        assert experts.asleep() == [True, True]
        experts.control.wake_up()
        experts.assert_answered(request, tokens, aborted=mode == "abort")


@pytest.mark.long
def test_a_request_that_is_frozen_over_an_update(experts: Experts) -> None:
    preemptions = experts.server.kind.recomputations(experts.server.http, {})
    with experts.server.generating(PROMPT, LONG) as request:
        push(experts.server, checkpoint(experts.other), mode="freeze")
        request.assert_running()
        experts.assert_answered(request, LONG, aborted=False)
    assert experts.server.kind.recomputations(experts.server.http, {}) == preemptions
    other = experts.generate()
    renew(experts.server, experts.other)
    assert experts.generate() == other != experts.tokens
    push(experts.server, checkpoint(experts.first))


def test_new_weights(experts: Experts) -> None:
    renew(experts.server, experts.other)
    assert experts.generate() != experts.tokens
    push(experts.server, checkpoint(experts.first))


@pytest.mark.parametrize("engine", [0, 1])
def test_a_wake_without_memory_on_one_of_them(experts: Experts, engine: int) -> None:
    experts.control.sleep(1)
    experts.fail("reserve", engine)
    with pytest.raises(DeviceMemoryError):
        experts.control.wake_up()
    assert experts.asleep() == [True, True]


@pytest.mark.parametrize("engine", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("then", ["wake_up", *(pytest.param(one, marks=pytest.mark.long) for one in ("abort", "keep"))])
def test_a_release_that_fails_on_one_of_them(experts: Experts, engine: int, then: str) -> None:
    """The other one sleeps now, so neither may step: not to go on, and not to stop once more."""
    with experts.server.generating(PROMPT, LONG) as request:
        experts.fail("release", engine)
        with pytest.raises(DeviceMemoryError):
            experts.control.sleep(1, ["kv_cache"], mode="keep")
        assert sorted(experts.asleep()) == [False, True]
        assert experts.server.post(PROMPT).status_code == 503
        request.assert_running()
        if then != "wake_up":
            experts.control.sleep(1, mode=then)
            assert experts.asleep() == [True, True]
        experts.control.wake_up()
        experts.assert_answered(request, LONG, aborted=then == "abort")


@pytest.mark.long
def test_resuming_by_vllms_own_call_while_one_of_them_is_closed(experts: Experts) -> None:
    experts.fail("release", 0)
    with pytest.raises(DeviceMemoryError):
        experts.control.sleep(1)
    response = experts.server.http.post("/resume")
    assert response.status_code >= 400
    assert "cannot resume" in response.text
    assert sorted(experts.asleep()) == [False, True]


def test_resuming_what_runs_does_nothing(experts: Experts) -> None:
    """vLLM's own resume is an all-reduce, to which an engine that runs a request does not come."""
    with experts.server.generating(PROMPT, LONG) as request, ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            responses = [pool.submit(experts.server.http.post, "/resume", timeout=30) for _ in range(2)]
            assert [response.result().status_code for response in responses] == [200, 200]
            assert len(experts.generate()) == TOKENS
        experts.assert_answered(request, LONG, aborted=False)


def answers(experts: Experts, calls: list[Callable[[], Response]]) -> list[Response]:
    """What the calls answer that are made at once."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [answering.result() for answering in [pool.submit(call) for call in calls]]


def resume(experts: Experts) -> Response:
    return experts.server.http.post("/resume", timeout=ANSWER_S)


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.long), True], ids=["in time", "one engine late"])
def maybe_late(request: pytest.FixtureRequest, experts: Experts) -> Iterator[None]:
    if request.param:
        experts.delay.touch()
    yield
    experts.delay.unlink(missing_ok=True)


@pytest.mark.usefixtures("maybe_late")
def test_rounds_that_end_with_two_resumes_and_requests_at_once(
    request: pytest.FixtureRequest, experts: Experts
) -> None:
    """Stock: two resumes beside requests hang after some rounds, and one engine answers no more."""

    def ask() -> Response:
        return experts.server.http.post(kind.generation_route, json=kind.request(PROMPT, SHORT), timeout=ANSWER_S)

    kind, again = experts.server.kind, partial(resume, experts)
    for number in range(request.config.getoption("--rounds")):
        level, tags = [(1, ["kv_cache"]), (2, ["kv_cache"]), (1, None)][number % 3]
        experts.control.sleep(level, tags, mode=("abort", "keep")[number % 2])
        experts.control.wake_up()
        responses = answers(experts, [again, ask, ask, again, ask])
        assert [response.status_code for response in responses] == [200] * 5
        tokens = [kind.tokens(responses[index].json()) for index in (1, 2, 4)]
        assert tokens == [experts.tokens[:SHORT]] * 3


def paused(experts: Experts) -> None:
    assert experts.server.http.post("/pause?mode=keep").status_code == 200


def asleep(experts: Experts) -> None:
    experts.control.sleep(1)


def without_cache(experts: Experts) -> None:
    experts.control.sleep(1, ["kv_cache"], mode="keep")


@pytest.mark.usefixtures("maybe_late")
@pytest.mark.parametrize("close", [paused, asleep, without_cache], ids=lambda state: state.__name__)
def test_without_a_request_the_engines_come_to_rest(experts: Experts, close: Callable[[Experts], None]) -> None:
    """A resume of closed engines takes steps with nothing to do until its wave ends. Other resumes take none."""

    def resume_twice() -> None:
        responses = answers(experts, [partial(resume, experts)] * 2)
        assert [response.status_code for response in responses] == [200, 200]

    close(experts)
    closed = experts.steps()
    time.sleep(REST_S)
    assert experts.steps() == closed
    experts.control.wake_up()
    resume_twice()

    def have_rested() -> bool:
        """One step on 0.32; before it, engines agree on the end of a wave less often."""
        new = [steps[len(before) :] for steps, before in zip(experts.steps(), closed, strict=True)]
        return all(steps.lstrip(".") == "|" for steps in new)

    wait_until(have_rested, "each engine has ended the wave")
    rested = experts.steps()
    resume_twice()
    time.sleep(REST_S)
    assert experts.steps() == rested


@pytest.mark.parametrize("mode", ["keep", *(pytest.param(one, marks=pytest.mark.long) for one in ("wait", "abort"))])
def test_a_resume_beside_a_pause(experts: Experts, mode: str) -> None:
    """Stock: 500 while the engines agree on the pause, or one of them resumes alone and waits for the other."""

    def call(path: str) -> Response:
        return experts.server.http.post(path, timeout=ANSWER_S)

    experts.delay.touch()
    try:
        for _ in range(10):
            calls = [experts.generate, lambda: call(f"/pause?mode={mode}"), lambda: call("/resume")]
            with ThreadPoolExecutor(3) as pool:
                request, pause, resume = [pool.submit(each) for each in calls]
                answers_of = [pause.result(), resume.result()]
                assert [answer.status_code for answer in answers_of] == [200, 200], [one.text for one in answers_of]
                assert call("/resume").status_code == 200
                assert len(request.result()) <= TOKENS
    finally:
        experts.delay.unlink()


@pytest.mark.long
def test_a_wait_that_takes_too_long_gives_up_and_reopens(experts: Experts) -> None:
    with experts.server.generating(PROMPT, 6 * LONG) as request:
        with pytest.raises(DrainTimeoutError):
            experts.control.sleep(1, mode="wait")
        assert experts.control.memory()["admitting"]
        assert experts.generate() == experts.tokens
        request.assert_running()
        experts.control.sleep(1, mode="abort")
        assert experts.server.kind.was_aborted(request.answer())


@pytest.mark.long
def test_an_abort_overtakes_a_wait(experts: Experts) -> None:
    with ThreadPoolExecutor(1) as pool, experts.server.generating(PROMPT, 5 * LONG) as request:
        waiting = pool.submit(experts.control.sleep, 1, mode="wait")
        experts.server.wait_admitting(False)
        experts.control.sleep(1, mode="abort")
        assert waiting.result()["status"] == "sleeping"
        assert experts.server.kind.was_aborted(request.answer())


def test_a_request_that_comes_when_they_are_closed_does_not_keep_the_next_one_waiting(experts: Experts) -> None:
    with ThreadPoolExecutor(1) as pool:
        experts.hold.touch()
        try:
            late = pool.submit(experts.server.post, PROMPT)
            wait_until(lambda: experts.hold.read_text() == "held", "the request is on its way", 90)
            experts.control.sleep(1)
        finally:
            experts.hold.unlink()
        assert late.result(timeout=90).status_code == 503
        experts.control.wake_up()
        assert pool.submit(experts.generate).result(timeout=90) == experts.tokens
