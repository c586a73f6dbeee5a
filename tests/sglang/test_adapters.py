"""Adapters that a trainer sends: in use at once, by version, beside requests and over sleeps."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from integration.engines.base import REPOSITORY, Launch, Server
from integration.engines.sglang import Sglang
from integration.models import new_model
from rl_memory_plugins.errors import InvalidRequestError, ManifestError, StateConflictError, WeightUpdateError
from rl_memory_plugins.trainer import ModelSource
from tests import lora
from tests.sglang.conftest import OTHER_SEED, PROMPT, SEED
from tests.vllm.conftest import greedy

MAX_RANK = 8
LONG = [2 + index % 900 for index in range(300)]


def with_stand_in(variables: dict[str, str]) -> str:
    """The PYTHONPATH with the stand-in for page-locked memory."""
    stand_in = REPOSITORY / "tests" / "aids" / "sglang_unpinned"
    return os.pathsep.join((variables["PYTHONPATH"], str(stand_in), str(REPOSITORY)))


class WithLora(Sglang):
    """SGLang's other kernels of LoRA need a GPU, and its layers ask for page-locked memory; see the stand-in."""

    def command(self, launch: Launch, port: int) -> list[str]:
        layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        flags = ("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(MAX_RANK))
        return [*super().command(launch, port), *flags, "--max-loras-per-batch", "3", "--lora-target-modules", *layers]

    def environment(self, launch: Launch) -> dict[str, str]:
        variables = super().environment(launch)
        return {**variables, "PYTHONPATH": with_stand_in(variables)}


@pytest.fixture(scope="module")
def running(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(WithLora(), Launch(model_folder, kv_bytes=64 << 20, forked=True), log) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """Without adapters."""
    yield running
    assert running.is_running(), running.tail()
    for adapter in running.control.memory()["engines"][0]["adapters"]:
        running.control.remove_adapter(adapter["name"])


@pytest.fixture(scope="module")
def base(model_folder: Path) -> torch.nn.Module:
    return new_model(model_folder, SEED)


def ask(server: Server, name: str | None, prompt: list[int] = PROMPT, tokens: int = 8) -> httpx.Response:
    body = {**server.kind.request(prompt, tokens), "lora_path": name}
    return server.http.post(server.kind.generation_route, json=body)


def answer(server: Server, name: str | None, prompt: list[int] = PROMPT) -> list[int]:
    response = ask(server, name, prompt)
    assert response.status_code == 200, response.text
    return server.kind.tokens(response.json())


def expected(folder: Path, adapter: dict[str, torch.Tensor], prompt: list[int] = PROMPT, seed: int = SEED) -> list[int]:
    return greedy(lora.merged(new_model(folder, seed), adapter), prompt)


def test_an_adapter_answers_by_its_name_at_once(server: Server, model_folder: Path, base: torch.nn.Module) -> None:
    before = server.control.memory()
    adapter = lora.tensors(base, 1)
    report = server.control.update_adapter("policy", adapter, lora.config(), adapter_version="step 1")
    assert report["tensors"] == len(adapter) and report["engine"]["adapter_version"] == "step 1"
    response = ask(server, "policy")
    assert server.kind.tokens(response.json()) == expected(model_folder, adapter) != greedy(base)
    assert response.headers["x-adapter-version"] == "step%201"
    assert answer(server, None) == greedy(base)
    assert "x-adapter-version" not in ask(server, None).headers
    after = server.control.memory()
    (listed,) = after["engines"][0]["adapters"]
    assert (listed["name"], listed["version"]) == ("policy", "step 1") and listed["bytes"] == report["bytes"]
    for field in ("weight_version", "content"):
        assert after[field] == before[field]


@pytest.mark.parametrize("targets", [("v_proj",), ("k_proj", "up_proj"), ("q_proj", "k_proj", "v_proj", "gate_proj")])
def test_parts_of_packed_layers(
    server: Server, model_folder: Path, base: torch.nn.Module, targets: tuple[str, ...]
) -> None:
    """SGLang itself would drop these parts, or fail on them."""
    adapter = lora.tensors(base, 1, targets=targets)
    server.control.update_adapter("policy", adapter, lora.config(targets=targets))
    assert answer(server, "policy", LONG) == expected(model_folder, adapter, LONG)


def test_a_new_version_finds_no_prefix_of_the_former(server: Server, model_folder: Path, base: torch.nn.Module) -> None:
    for step in (1, 2, 3):
        adapter = lora.tensors(base, step)
        report = server.control.update_adapter("counted", adapter, lora.config())
        assert report["engine"]["adapter_version"] == str(step)
        wanted = expected(model_folder, adapter, LONG)
        assert answer(server, "counted", LONG) == wanted
        again = ask(server, "counted", LONG).json()
        assert server.kind.tokens(again) == wanted and server.kind.cached_tokens(again) > 0


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_survive_sleeps(server: Server, model_folder: Path, base: torch.nn.Module, level: int) -> None:
    adapters = {name: lora.tensors(base, seed) for name, seed in (("one", 1), ("two", 2), ("three", 3))}
    for name, adapter in adapters.items():
        server.control.update_adapter(name, adapter, lora.config())
    for seed in (OTHER_SEED, SEED):
        server.control.sleep(level)
        with pytest.raises(StateConflictError, match="asleep"):
            server.control.update_adapter("one", adapters["one"], lora.config(), timeout_s=5)
        server.control.wake_up(["weights"])
        if level == 2:
            server.control.update_weights(new_model(model_folder, seed))
        server.control.wake_up()
        for name, adapter in adapters.items():
            assert answer(server, name) == expected(model_folder, adapter, seed=seed if level == 2 else SEED)
    assert answer(server, None) == greedy(base)


def test_what_does_not_fit_is_refused_before_a_byte_moves(
    server: Server, base: torch.nn.Module, model_folder: Path
) -> None:
    adapter = lora.tensors(base, 1)
    server.control.update_adapter("policy", adapter, lora.config(), adapter_version="right")
    wide = lora.tensors(base, 1, rank=2 * MAX_RANK)
    some = next(name for name in adapter if "layers.0.self_attn.o_proj.lora_A" in name)
    beyond = {name.replace("layers.0", "layers.99"): tensor for name, tensor in adapter.items()}
    without = {name: tensor for name, tensor in adapter.items() if name != some}
    unfit: list[tuple[type[Exception], str, Any, Any]] = [
        (InvalidRequestError, "rank", wide, lora.config(2 * MAX_RANK)),
        (InvalidRequestError, "use_dora", adapter, {**lora.config(), "use_dora": True}),
        (InvalidRequestError, "use_rslora", adapter, {**lora.config(), "use_rslora": True}),
        (InvalidRequestError, "lora_alpha", adapter, {"r": lora.RANK, "target_modules": ["q_proj"]}),
        (InvalidRequestError, "lm_head", adapter, lora.config(targets=("lm_head",))),
        (ManifestError, "shape", wide, lora.config()),
        (ManifestError, "shape", {**adapter, some: adapter[some][:, :-1].contiguous()}, lora.config()),
        (ManifestError, "layers.99", beyond, lora.config()),
        (ManifestError, "unknown", {**adapter, "model.norm.weight": torch.ones(4)}, lora.config()),
        (ManifestError, "other half", without, lora.config()),
    ]
    for error, text, tensors, config in unfit:
        with pytest.raises(error, match=text):
            server.control.update_adapter("policy", tensors, config, timeout_s=20)
    (listed,) = server.control.memory()["engines"][0]["adapters"]
    assert listed["version"] == "right"
    assert answer(server, "policy") == expected(model_folder, adapter)


class Breaking(ModelSource):
    """Fails in the middle."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(super().tensors(), 5)
        raise RuntimeError("the trainer fails")


def test_an_update_that_breaks_off_leaves_the_former_version(
    server: Server, base: torch.nn.Module, model_folder: Path
) -> None:
    adapter = lora.tensors(base, 1)
    server.control.update_adapter("policy", adapter, lora.config())
    for name in ("policy", "never"):
        with pytest.raises(WeightUpdateError, match="the trainer fails"):
            server.control.update_adapter(name, Breaking(lora.tensors(base, 2)), lora.config(), bucket_bytes=4096)
    assert answer(server, "policy") == expected(model_folder, adapter)
    assert ask(server, "never").status_code >= 400
    assert answer(server, None) == greedy(base)
    assert server.control.memory()["admitting"]


def test_requests_run_while_adapters_change(server: Server, base: torch.nn.Module, model_folder: Path) -> None:
    """Requests of other adapters go on, and those of the changed one finish with the version that they began with."""
    adapters = {name: lora.tensors(base, seed) for name, seed in (("stays", 1), ("changes", 2))}
    for name, adapter in adapters.items():
        server.control.update_adapter(name, adapter, lora.config())
    texts: dict[str, list[int]] = {name: [] for name in adapters}
    begun = {name: threading.Event() for name in adapters}
    failures: list[str] = []

    def stream(name: str) -> None:
        body = {**server.kind.request(PROMPT, 150, stream=True), "lora_path": name}
        with httpx.stream("POST", server.url + server.kind.generation_route, json=body, timeout=120) as lines:
            if lines.status_code != 200:
                failures.append(lines.read().decode())
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    texts[name] = json.loads(line.removeprefix("data: "))["output_ids"]
                    begun[name].set()

    threads = [threading.Thread(target=stream, args=(name,)) for name in adapters]
    for thread in threads:
        thread.start()
    for event in begun.values():
        assert event.wait(60)
    newer = lora.tensors(base, 3)
    server.control.update_adapter("changes", newer, lora.config())
    server.control.update_adapter("added", newer, lora.config())
    assert all(thread.is_alive() for thread in threads)
    server.control.remove_adapter("added")
    assert answer(server, "changes") == expected(model_folder, newer)
    for thread in threads:
        thread.join(120)
    assert failures == []
    for name, adapter in adapters.items():
        assert texts[name] == greedy(lora.merged(new_model(model_folder, SEED), adapter), tokens=150)


def test_a_removed_adapter_is_gone(server: Server, base: torch.nn.Module) -> None:
    server.control.update_adapter("policy", lora.tensors(base, 1), lora.config(), adapter_version="last")
    assert server.control.remove_adapter("policy")["adapter_version"] == "last"
    assert ask(server, "policy").status_code >= 400
    with pytest.raises(InvalidRequestError, match="no adapter"):
        server.control.remove_adapter("policy")
    assert server.control.memory()["engines"][0]["adapters"] == []


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"dp": 2}], ids=str)
def test_all_ranks_of_all_engines_have_an_adapter(
    model_folder: Path, base: torch.nn.Module, tmp_path: Path, parallel: dict[str, int]
) -> None:
    launch = Launch(model_folder, kv_bytes=64 << 20, forked=True, **parallel)
    with Server(WithLora(), launch, tmp_path / "server.log") as server:
        for step, name in enumerate(("policy", "policy", "other")):
            adapter = lora.tensors(base, step)
            report = server.control.update_adapter(name, adapter, lora.config())
            assert len(report["receivers"]) == 2
            answers = [answer(server, name) for _ in range(3)]  # data-parallel engines take turns
            assert answers == [expected(model_folder, adapter)] * 3
        narrow = {name: tensor[: len(tensor) // 2].contiguous() for name, tensor in adapter.items() if "lora_B" in name}
        with pytest.raises(ManifestError):  # what a rank holds, and not what a checkpoint does
            server.control.update_adapter("policy", {**adapter, **narrow}, lora.config(), timeout_s=20)
        server.control.remove_adapter("policy")
        assert answer(server, "other") == expected(model_folder, adapter)


PYTHON = """
import torch
torch.multiprocessing.set_sharing_strategy("file_system")
from integration.models import new_model
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.sglang import Engine
from rl_memory_plugins.trainer import Adapter, RolloutHandoff, push_adapter
from tests import lora
from tests.vllm.conftest import greedy

engine = Engine(
    model_path=FOLDER, dtype="float32", device="cpu", attention_backend="torch_native",
    sampling_backend="pytorch", grammar_backend="none", disable_overlap_schedule=True,
    skip_tokenizer_init=True, max_total_tokens=4096, log_level="warning", rl_memory=True,
    enable_lora=True, lora_backend="torch_native", max_lora_rank=8, lora_target_modules=list(lora.TARGETS),
)
model = new_model(FOLDER, 1)

def ask(name):
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return engine.generate(input_ids=[5, 6, 7, 8], sampling_params=sampling, lora_path=name)["output_ids"]

def expected(adapter):
    return greedy(lora.merged(new_model(FOLDER, 1), adapter), [5, 6, 7, 8])

first, second = lora.tensors(model, 1), lora.tensors(model, 2)
push_adapter(lambda body: engine.update_adapter_from_ipc(**body), "policy", first, lora.config())
assert ask("policy") == expected(first)
with RolloutHandoff(engine, second, adapter=Adapter("policy", lora.config())).training("two"):
    assert engine.is_sleeping()
assert ask("policy") == expected(second) != expected(first)
assert [adapter.version for adapter in engine.memory_status()[0].adapters] == ["two"]
engine.remove_adapter("policy")
try:
    engine.remove_adapter("policy")
except InvalidRequestError:
    pass
else:
    raise AssertionError("it was removed twice")
assert ask(None) == greedy(model, [5, 6, 7, 8])
engine.shutdown()
print("done")
"""


def test_adapters_of_an_engine_in_python(python: Callable[..., str]) -> None:
    assert "done" in python(PYTHON, PYTHONPATH=with_stand_in(Sglang().environment(Launch(Path()))))
