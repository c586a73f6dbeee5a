"""Adapters that a trainer sends: in use at once, by version, beside requests and over sleeps.

They have a server of their own: the server of all other tests is a plain one, which takes no adapters.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from integration.engines import ENGINES
from integration.engines.base import Launch, Server, events_of
from rl_memory_plugins.errors import InvalidRequestError, ManifestError, StateConflictError, WeightUpdateError
from rl_memory_plugins.trainer import ModelSource
from tests import lora
from tests.conformance.conftest import PROMPT, Weights, assert_greedy, long_answer, reference
from tests.conformance.test_freeze import start_of_generation

MAX_RANK = 8
LONG_PROMPT = [2 + index % 900 for index in range(300)]  # longer than a block of the KV cache

Adapter = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    kind = ENGINES[request.config.getoption("--engine")]()
    log = tmp_path_factory.mktemp("adapters") / "server.log"
    with Server(kind, dataclasses.replace(launch, adapter_rank=MAX_RANK), log) as server:
        yield server


@pytest.fixture
def server(running: Server, base: torch.nn.Module) -> Iterator[Server]:
    """Awake, with the checkpoint's weights and without adapters; afterwards it is so again."""
    yield running
    assert running.is_running(), running.tail()
    for adapter in adapters(running):
        running.control.remove_adapter(adapter["name"])
    assert running.control.memory()["admitting"]
    assert_greedy(base, PROMPT, running.generate(PROMPT))


@pytest.fixture(scope="module")
def base(weights: Weights) -> torch.nn.Module:
    return weights.first


def adapters(server: Server) -> list[dict[str, Any]]:
    """The adapters that the status lists. All data-parallel engines list the same."""
    first, *others = [engine["adapters"] for engine in server.control.memory()["engines"]]
    assert all(other == first for other in others)
    return list(first)


def assert_adapted(model: torch.nn.Module, adapter: Adapter, tokens: list[int], prompt: list[int] = PROMPT) -> None:
    """The tokens are those of the model with the adapter merged into it."""
    assert_greedy(lora.merged(reference(model), adapter), prompt, tokens)


def test_an_adapter_answers_by_its_name_at_once(server: Server, base: torch.nn.Module) -> None:
    before = server.control.memory()
    adapter = lora.tensors(base, 1)
    report = server.control.update_adapter("policy", adapter, lora.config(), adapter_version="step 1")
    assert report["tensors"] == len(adapter) and report["engine"]["adapter_version"] == "step 1"
    response = server.post(PROMPT, adapter="policy")
    tokens = server.kind.tokens(response.json())
    assert_adapted(base, adapter, tokens)
    assert response.headers["x-adapter-version"] == "step%201"
    plain = server.post(PROMPT)
    assert_greedy(base, PROMPT, server.kind.tokens(plain.json()))
    assert server.kind.tokens(plain.json()) != tokens
    assert "x-adapter-version" not in plain.headers
    after = server.control.memory()
    (listed,) = adapters(server)
    assert (listed["name"], listed["version"]) == ("policy", "step 1") and listed["bytes"] == report["bytes"]
    for field in ("weight_version", "content"):
        assert after[field] == before[field]
    for engine, engine_before in zip(after["engines"], before["engines"], strict=True):
        for rank, rank_before in zip(engine["ranks"], engine_before["ranks"], strict=True):
            assert rank["content_epoch"] == rank_before["content_epoch"]


@pytest.mark.parametrize("targets", [("v_proj",), ("k_proj", "up_proj"), ("q_proj", "k_proj", "v_proj", "gate_proj")])
def test_parts_of_packed_layers(server: Server, base: torch.nn.Module, targets: tuple[str, ...]) -> None:
    """Engines hold `q`, `k` and `v` in one matrix. SGLang itself would drop these parts, or fail on them."""
    adapter = lora.tensors(base, 1, targets=targets)
    server.control.update_adapter("policy", adapter, lora.config(targets=targets))
    assert_adapted(base, adapter, server.generate(LONG_PROMPT, adapter="policy"), LONG_PROMPT)


def test_a_new_version_finds_no_prefix_of_the_former(server: Server, base: torch.nn.Module) -> None:
    for step in (1, 2, 3):
        adapter = lora.tensors(base, step)
        report = server.control.update_adapter("counted", adapter, lora.config())
        assert report["engine"]["adapter_version"] == str(step)
        first, again = (server.post(LONG_PROMPT, adapter="counted").json() for _ in range(2))
        assert server.kind.cached_tokens(first) == 0
        if server.launch.dp == 1:  # else another engine may have answered
            assert server.kind.cached_tokens(again) > 0
        for answer in (first, again):
            assert_adapted(base, adapter, server.kind.tokens(answer), LONG_PROMPT)


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_survive_sleeps(server: Server, weights: Weights, level: int) -> None:
    sent = {name: lora.tensors(weights.first, seed) for name, seed in (("one", 1), ("two", 2), ("three", 3))}
    for name, adapter in sent.items():  # one more than vLLM itself keeps
        server.control.update_adapter(name, adapter, lora.config())
    for model in (weights.other, weights.first):
        server.control.sleep(level)
        with pytest.raises(StateConflictError, match="asleep"):
            server.control.update_adapter("one", sent["one"], lora.config())
        server.control.wake_up(["weights"])
        if level == 2:
            server.control.update_weights(model)
        server.control.wake_up()
        for name, adapter in sent.items():
            assert_adapted(model if level == 2 else weights.first, adapter, server.generate(PROMPT, adapter=name))


def without(adapter: Adapter, part: str) -> tuple[str, Adapter]:
    """The adapter without one tensor, and the name of the tensor that is alone then."""
    left_out = next(name for name in adapter if part in name)
    other = {"lora_A": "lora_B", "lora_B": "lora_A"}[part]
    return left_out.replace(part, other), {name: adapter[name] for name in adapter if name != left_out}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lora.config(2 * MAX_RANK), "rank"),
        ({**lora.config(), "use_dora": True}, "(?i)dora"),
        ({"r": lora.RANK, "target_modules": ["q_proj"]}, "lora_alpha"),
    ],
    ids=["rank", "dora", "incomplete"],
)
def test_a_configuration_that_the_engine_cannot_serve_is_refused(
    server: Server, base: torch.nn.Module, config: Mapping[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        server.control.update_adapter("policy", lora.tensors(base, 1), config, timeout_s=20)
    assert adapters(server) == []


def test_what_does_not_fit_is_refused_before_a_byte_moves(server: Server, base: torch.nn.Module) -> None:
    adapter = lora.tensors(base, 1)
    server.control.update_adapter("policy", adapter, lora.config(), adapter_version="right")
    wide = lora.tensors(base, 1, rank=2 * MAX_RANK)
    some = next(name for name in adapter if "layers.0.self_attn.o_proj.lora_A" in name)
    beyond = {name.replace("layers.0", "layers.99"): tensor for name, tensor in adapter.items()}
    (alone_a, only_a), (alone_b, only_b) = without(adapter, "lora_B"), without(adapter, "lora_A")
    unfit: list[tuple[str, str, Adapter]] = [
        ("shape", some, wide),
        ("shape", some, {**adapter, some: adapter[some][:, :-1].contiguous()}),
        ("unknown", some.replace("layers.0", "layers.99"), beyond),
        ("unknown", "model.norm.weight", {**adapter, "model.norm.weight": torch.ones(4)}),
        ("missing", alone_a, only_a),
        ("missing", alone_b, only_b),
    ]
    for kind, name, tensors in unfit:
        with pytest.raises(ManifestError) as caught:
            server.control.update_adapter("policy", tensors, lora.config(), timeout_s=20)
        assert (kind, name) in {(found["kind"], found["name"]) for found in caught.value.details["mismatches"]}
    (listed,) = adapters(server)
    assert listed["version"] == "right"
    assert_adapted(base, adapter, server.generate(PROMPT, adapter="policy"))


class Breaking(ModelSource):
    """Fails in the middle."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(super().tensors(), 5)
        raise RuntimeError("the trainer fails")


def test_an_update_that_breaks_off_leaves_the_former_version(server: Server, base: torch.nn.Module) -> None:
    adapter = lora.tensors(base, 1)
    server.control.update_adapter("policy", adapter, lora.config())
    for name in ("policy", "never"):
        with pytest.raises(WeightUpdateError, match="the trainer fails"):
            server.control.update_adapter(name, Breaking(lora.tensors(base, 2)), lora.config(), bucket_bytes=4096)
    assert_adapted(base, adapter, server.generate(PROMPT, adapter="policy"))
    assert 400 <= server.post(PROMPT, adapter="never").status_code < 500
    assert server.control.memory()["admitting"]


@pytest.mark.long
def test_requests_run_while_adapters_change(server: Server, base: torch.nn.Module) -> None:
    """Requests of other adapters go on, and those of the changed one finish with the version that they began with."""
    sent = {name: lora.tensors(base, seed) for name, seed in (("stays", 1), ("changes", 2))}
    for name, adapter in sent.items():
        server.control.update_adapter(name, adapter, lora.config())
    newer = lora.tensors(base, 3)
    with ThreadPoolExecutor(len(sent)) as pool:
        server.wait_held(0)
        running = {
            name: pool.submit(server.post, PROMPT, long_answer(server), stream=True, adapter=name) for name in sent
        }
        server.wait_held(len(sent))
        start_of_generation()
        server.control.update_adapter("changes", newer, lora.config())
        server.control.update_adapter("added", newer, lora.config())
        assert not any(request.done() for request in running.values())
        server.control.remove_adapter("added")
        assert_adapted(base, newer, server.generate(PROMPT, adapter="changes"))
        answers = {name: request.result(120) for name, request in running.items()}
    for name, answer in answers.items():
        assert answer.status_code == 200, answer.text
        tokens = server.kind.streamed_tokens(events_of(answer.text))
        assert len(tokens) == long_answer(server)
        assert_adapted(base, sent[name], tokens)


def test_a_removed_adapter_is_gone(server: Server, base: torch.nn.Module) -> None:
    server.control.update_adapter("policy", lora.tensors(base, 1), lora.config(), adapter_version="last")
    assert server.control.remove_adapter("policy")["adapter_version"] == "last"
    assert 400 <= server.post(PROMPT, adapter="policy").status_code < 500
    with pytest.raises(InvalidRequestError, match="no adapter"):
        server.control.remove_adapter("policy")
    assert adapters(server) == []


def test_all_ranks_of_all_engines_have_an_adapter(server: Server, base: torch.nn.Module) -> None:
    for step, name in enumerate(("policy", "policy", "other")):
        adapter = lora.tensors(base, step)
        report = server.control.update_adapter(name, adapter, lora.config())
        assert len(report["receivers"]) == server.launch.ranks
        for _ in range(3):  # data-parallel engines take turns
            assert_adapted(base, adapter, server.generate(PROMPT, adapter=name))
    narrow = {name: tensor[: len(tensor) // 2].contiguous() for name, tensor in adapter.items() if "lora_B" in name}
    with pytest.raises(ManifestError):  # what a rank holds, and not what a checkpoint does
        server.control.update_adapter("policy", {**adapter, **narrow}, lora.config(), timeout_s=20)
    server.control.remove_adapter("policy")
    assert_adapted(base, adapter, server.generate(PROMPT, adapter="other"))
