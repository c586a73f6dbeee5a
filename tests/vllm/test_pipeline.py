"""Pipeline stages: what the common suite with `--pp 2` cannot show. The embedding is tied, so both stages have one."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from integration.engines.base import Launch, Server
from integration.engines.vllm import Vllm
from integration.models import SHAPES, new_model, write_model
from rl_memory_plugins.errors import ManifestError, WeightUpdateError
from tests.aids.vllm_pipeline import vllm_pipeline
from tests.conformance.conftest import assert_greedy
from tests.conformance.test_freeze import answered_by
from tests.conformance.trainers import BreakingSource, push
from tests.vllm.calls import OTHER_SEED, PROMPT, SEED
from tests.vllm.child import Child
from tests.vllm.conftest import engine_options, environment, greedy

STAGES = 2
REQUESTS = 4
TOKENS = 300  # so many that the first request runs when the last begins
EMBEDDING, LAST_LAYER = "model.embed_tokens.weight", "model.layers.3.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("model") / "tied", SHAPES["tiny"]._replace(tied=True), seed=SEED)
    launch = Launch(folder, pp=STAGES, forked=True, max_running=REQUESTS, kv_bytes=64 << 20, options={"poison": True})
    with Server(Vllm(), launch, tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server


@pytest.fixture(scope="module")
def models(running_server: Server) -> list[torch.nn.Module]:
    """With the first weights, and with others."""
    return [new_model(running_server.launch.model, seed, "float32") for seed in (SEED, OTHER_SEED)]


@pytest.fixture
def server(running_server: Server, models: list[torch.nn.Module]) -> Iterator[Server]:
    yield running_server
    running_server.control.wake_up()
    push(running_server, models[0])
    assert running_server.generate(PROMPT) == greedy(models[0])


def parameters_of(server: Server) -> list[int]:
    """The bytes of the weights of each stage."""
    (engine,) = server.control.memory()["engines"]
    return [rank["tags"]["weights"]["bytes"] for rank in engine["ranks"]]


def mixture(models: list[torch.nn.Module], name: str) -> torch.nn.Module:
    """The first model with one tensor of the other."""
    mixed = copy.deepcopy(models[0])
    mixed.load_state_dict({name: models[1].state_dict()[name]}, strict=False)
    return mixed


def test_stages_sleep_in_turns_and_take_one_manifest(server: Server, models: list[torch.nn.Module]) -> None:
    resident = parameters_of(server)
    assert len(resident) == STAGES and all(resident)
    report = server.control.sleep(2)["report"]
    released = {(change["rank"], change["tag"]): change["bytes_released"] for change in report["changes"]}
    assert all(released[rank, tag] for rank in range(STAGES) for tag in ("weights", "kv_cache"))
    server.control.wake_up(["weights"])
    push(server, models[1], weight_version="other")
    assert server.post(PROMPT).status_code == 503
    server.control.wake_up(["kv_cache"])
    server.control.wake_up(["cuda_graph"])
    assert server.generate(PROMPT) == greedy(models[1])
    assert server.control.weight_version() == "other"
    assert parameters_of(server) == resident


def test_checksums_of_a_tied_embedding_are_those_of_both_stages(server: Server, models: list[torch.nn.Module]) -> None:
    from rl_memory_plugins import tensor_checksum

    push(server, models[1])
    checksums = server.control.checksums()
    own = {name: tensor_checksum(tensor) for name, tensor in models[1].named_parameters()}
    assert checksums["tensors"] == own
    assert checksums["partial"] == checksums["opaque"] == []


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("name", [EMBEDDING, LAST_LAYER])
def test_a_part_of_one_stage_or_of_both(
    server: Server, models: list[torch.nn.Module], name: str, transport: str
) -> None:
    """Over TCP nothing at all travels to a stage that has none of the tensors."""
    push(server, models[0])
    report = push(server, {name: models[1].state_dict()[name]}, partial=True, transport=transport)
    mixed = mixture(models, name)
    assert server.generate(PROMPT, 24) == greedy(mixed, tokens=24) != greedy(models[0], tokens=24)
    if transport == "tcp" and name == LAST_LAYER:
        assert sorted(rank["bytes"] for rank in report["receivers"]) == [0, report["bytes"]]


def test_names_are_judged_over_all_stages(server: Server, models: list[torch.nn.Module]) -> None:
    tensors = dict(models[1].state_dict())
    tensors["model.layers.4.mlp.down_proj.weight"] = tensors[LAST_LAYER]  # of no stage
    tensors[LAST_LAYER] = torch.zeros(3, 5)
    del tensors["model.layers.0.input_layernorm.weight"], tensors["model.norm.weight"]
    with pytest.raises(ManifestError) as caught:
        push(server, tensors)
    mismatches = caught.value.details["mismatches"]
    found = [(mismatch["kind"], mismatch["name"], tuple(mismatch["ranks"])) for mismatch in mismatches]
    assert ("unknown", "model.layers.4.mlp.down_proj.weight", (0, 1)) in found
    assert ("shape", LAST_LAYER, (1,)) in found
    assert ("missing", "model.layers.0.input_layernorm.weight", (0,)) in found
    assert ("missing", "model.norm.weight", (1,)) in found
    assert server.generate(PROMPT) == greedy(models[0])


def test_an_update_that_breaks_off_after_one_stage_has_all_closes_the_engine(
    server: Server, models: list[torch.nn.Module]
) -> None:
    """The tensors of the first stage come first."""
    source = BreakingSource(models[1], after=len(models[1].state_dict()) - 3)
    with pytest.raises(WeightUpdateError):
        server.control.update_weights(source, bucket_bytes=1 << 20, timeout_s=60)
    assert server.control.memory()["content"] == "failed"
    assert server.post(PROMPT).status_code == 503
    with pytest.raises(Exception, match="409|valid"):
        push(server, {EMBEDDING: models[1].state_dict()[EMBEDDING]}, partial=True)


def test_weights_of_one_stage_are_kept(server: Server, models: list[torch.nn.Module]) -> None:
    kept = "model.layers.3.*"
    server.control.sleep(2, keep=[kept])
    server.control.wake_up()
    assert server.post(PROMPT).status_code == 503
    push(server, {name: value for name, value in models[1].state_dict().items() if "layers.3." not in name})
    mixed = copy.deepcopy(models[1])
    mixed.load_state_dict({n: v for n, v in models[0].state_dict().items() if "layers.3." in n}, strict=False)
    assert server.generate(PROMPT, 24) == greedy(mixed, tokens=24)


class Running:
    """Requests that began one after the other, so that several batches are on their way through the stages."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor) -> None:
        self.prompts = [[*PROMPT, 50 + number] for number in range(REQUESTS)]
        self._server = server
        self._answers: list[Future[httpx.Response]] = []
        for count, prompt in enumerate(self.prompts, 1):
            self._answers.append(pool.submit(server.post, prompt, TOKENS))
            server.wait_held(count)
            time.sleep(0.05)

    def answers(self) -> list[dict[str, Any]]:
        responses = [answer.result(120) for answer in self._answers]
        assert {response.status_code for response in responses} == {200}, [one.text for one in responses]
        return [response.json() for response in responses]

    def tokens(self) -> list[list[int]]:
        return [self._server.kind.tokens(answer) for answer in self.answers()]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(REQUESTS) as pool:
        yield pool


@pytest.mark.parametrize("mode", [pytest.param("wait", marks=pytest.mark.long), "keep", "abort"])
def test_all_batches_on_their_way_end_before_a_stage_sleeps(
    server: Server, models: list[torch.nn.Module], pool: ThreadPoolExecutor, mode: str
) -> None:
    for level in (1, 0):
        running = Running(server, pool)
        server.control.sleep(level, mode=mode)
        assert server.post(PROMPT).status_code == 503
        server.control.wake_up()
        for prompt, tokens in zip(running.prompts, running.tokens(), strict=True):
            assert mode == "abort" or len(tokens) == TOKENS
            assert_greedy(models[0], prompt, tokens)
        assert server.generate(PROMPT) == greedy(models[0])


def test_frozen_requests_go_on_under_the_new_weights(
    server: Server, models: list[torch.nn.Module], pool: ThreadPoolExecutor
) -> None:
    running = Running(server, pool)
    push(server, models[1], mode="freeze")
    for prompt, tokens in zip(running.prompts, running.tokens(), strict=True):
        assert len(tokens) == TOKENS
        assert 0 < answered_by(*models, prompt, tokens) < TOKENS
    assert server.generate(PROMPT) == greedy(models[1])


def make(folder: Path) -> Any:
    from rl_memory_plugins.vllm import LLM

    vllm_pipeline.register()
    return LLM(**engine_options(folder, pipeline_parallel_size=STAGES), rl_memory={"poison": True})


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[Child]:
    """The engine core in the caller's process, and the stages in processes of their own."""
    with Child(make, model_folder, environment=environment(model_folder, VLLM_ENABLE_V1_MULTIPROCESSING="0")) as child:
        yield child


NUMBERS = itertools.count()


def interrupted(llm: Any, prompts: list[list[int]], steps: int, level: int, mode: str) -> list[tuple[str, list[int]]]:
    """How requests end, which a sleep finds with `steps` more steps behind them. Several batches are on their way."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    names = []
    for prompt in prompts:
        names.append(engine.add_request(str(next(NUMBERS)), {"prompt_token_ids": prompt}, params))
        engine.step()
    ended = {}
    for step in range(1000):
        if step == steps:
            assert engine.engine_core.engine_core.batch_queue
            llm.sleep(level, mode=mode)
            llm.wake_up()
        for output in engine.step() if engine.has_unfinished_requests() else ():
            if output.finished:
                ended[output.request_id] = output.outputs[0].finish_reason, list(output.outputs[0].token_ids)
        if len(ended) == len(names) and step > steps:
            break
    return [ended[name] for name in ended]


@pytest.mark.parametrize(
    ("level", "mode"), [pytest.param(1, "keep", marks=pytest.mark.long), (0, "freeze"), (1, "abort")]
)
def test_a_core_in_the_caller_s_process_has_batches_on_their_way_too(
    llm: Child, model_folder: Path, level: int, mode: str
) -> None:
    model = new_model(model_folder, SEED)
    prompts = [[*PROMPT, 50 + number] for number in range(3)]
    for steps in range(4):
        ended = llm(interrupted, prompts, steps, level, mode)
        assert [reason for reason, _ in ended] == ["abort" if mode == "abort" else "length"] * 3
        for _, tokens in ended:
            assert any(tokens == greedy(model, prompt, len(tokens)) for prompt in prompts)
