"""Adapters that a trainer sends: in use at once, by version, beside requests and over sleeps."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from vllm.model_executor.models.utils import WeightsMapper

from integration.engines.base import Launch, Server
from integration.engines.vllm import Vllm
from integration.models import new_model
from rl_memory_plugins.engines.vllm.adapters import _Layers
from rl_memory_plugins.errors import InvalidRequestError, ManifestError, StateConflictError, WeightUpdateError
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.weights.manifest import TensorSpec
from tests import lora
from tests.vllm.conftest import OTHER_SEED, PROMPT, SEED, greedy

MAX_RANK = 8
LONG = [2 + index % 900 for index in range(300)]  # longer than a block of the KV cache


class WithLora(Vllm):
    def command(self, launch: Launch, port: int) -> list[str]:
        flags = ("--enable-lora", "--max-lora-rank", str(MAX_RANK), "--max-loras", "2", "--max-cpu-loras", "2")
        return [*super().command(launch, port), *flags]


@pytest.fixture(scope="module")
def running(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(WithLora(), Launch(model_folder, kv_bytes=64 << 20, forked=True), log) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """Without adapters."""
    yield running
    for adapter in running.control.memory()["engines"][0]["adapters"]:
        running.control.remove_adapter(adapter["name"])


@pytest.fixture(scope="module")
def base(model_folder: Path) -> torch.nn.Module:
    return new_model(model_folder, SEED)


def ask(server: Server, name: str, prompt: list[int] = PROMPT, tokens: int = 8) -> httpx.Response:
    body = {**server.kind.request(prompt, tokens), "model": name}
    return server.http.post(server.kind.generation_route, json=body)


def answer(server: Server, name: str, prompt: list[int] = PROMPT) -> list[int]:
    response = ask(server, name, prompt)
    assert response.status_code == 200, response.text
    return server.kind.tokens(response.json())


def expected(folder: Path, adapter: dict[str, torch.Tensor], prompt: list[int] = PROMPT, seed: int = SEED) -> list[int]:
    return greedy(lora.merged(new_model(folder, seed), adapter), prompt)


def test_an_adapter_answers_by_its_name_at_once(
    server: Server, model_folder: Path, base: torch.nn.Module, first_tokens: list[int]
) -> None:
    before = server.control.memory()
    adapter = lora.tensors(base, 1)
    report = server.control.update_adapter("policy", adapter, lora.config(), adapter_version="step 1")
    assert report["tensors"] == len(adapter) and report["engine"]["adapter_version"] == "step 1"
    wanted = expected(model_folder, adapter)
    assert wanted != first_tokens
    response = ask(server, "policy")
    assert server.kind.tokens(response.json()) == wanted
    assert response.json()["model"] == "policy"
    assert response.headers["x-adapter-version"] == "step%201"
    assert answer(server, "model") == first_tokens
    assert "x-adapter-version" not in ask(server, "model").headers
    assert "policy" in {model["id"] for model in server.http.get("/v1/models").json()["data"]}
    after = server.control.memory()
    (listed,) = after["engines"][0]["adapters"]
    assert (listed["name"], listed["version"]) == ("policy", "step 1") and listed["bytes"] == report["bytes"]
    for field in ("weight_version", "content"):
        assert after[field] == before[field]
    assert after["engines"][0]["ranks"][0]["content_epoch"] == before["engines"][0]["ranks"][0]["content_epoch"]


def test_a_new_version_finds_no_prefix_of_the_former(server: Server, model_folder: Path, base: torch.nn.Module) -> None:
    for step in (1, 2, 3):
        adapter = lora.tensors(base, step)
        assert server.control.update_adapter("counted", adapter, lora.config())["engine"]["adapter_version"] == str(
            step
        )
        wanted = expected(model_folder, adapter, LONG)
        assert answer(server, "counted", LONG) == wanted
        again = ask(server, "counted", LONG).json()
        assert server.kind.tokens(again) == wanted and server.kind.cached_tokens(again) > 0


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_survive_sleeps(
    server: Server, model_folder: Path, base: torch.nn.Module, level: int, first_tokens: list[int]
) -> None:
    adapters = {name: lora.tensors(base, seed) for name, seed in (("one", 1), ("two", 2), ("three", 3))}
    for name, adapter in adapters.items():  # one more than vLLM itself keeps
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
    assert answer(server, "model") == first_tokens


def without(adapter: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    left_out = next(name for name in adapter if part in name)
    return {name: tensor for name, tensor in adapter.items() if name != left_out}


def test_what_does_not_fit_is_refused_before_a_byte_moves(
    server: Server, base: torch.nn.Module, model_folder: Path
) -> None:
    adapter = lora.tensors(base, 1)
    server.control.update_adapter("policy", adapter, lora.config(), adapter_version="right")
    wide = lora.tensors(base, 1, rank=2 * MAX_RANK)
    some = next(name for name in adapter if "layers.0.self_attn.o_proj.lora_A" in name)
    beyond = {name.replace("layers.0", "layers.99"): tensor for name, tensor in adapter.items()}
    unfit: list[tuple[type[Exception], str, Any, Any]] = [
        (InvalidRequestError, "rank", wide, lora.config(2 * MAX_RANK)),
        (InvalidRequestError, "DoRA", adapter, {**lora.config(), "use_dora": True}),
        (InvalidRequestError, "lora_alpha", adapter, {"r": lora.RANK, "target_modules": ["q_proj"]}),
        (ManifestError, "rank", wide, lora.config()),
        (ManifestError, "features", {**adapter, some: adapter[some][:, :-1].contiguous()}, lora.config()),
        (ManifestError, "layers.99", beyond, lora.config()),
        (ManifestError, "unknown", {**adapter, "model.norm.weight": torch.ones(4)}, lora.config()),
        (ManifestError, "lora_B", without(adapter, "lora_B"), lora.config()),
    ]
    for error, text, tensors, config in unfit:
        with pytest.raises(error, match=text):
            server.control.update_adapter("policy", tensors, config, timeout_s=20)
    with pytest.raises(InvalidRequestError, match="served model"):
        server.control.update_adapter("model", adapter, lora.config(), timeout_s=20)
    (listed,) = server.control.memory()["engines"][0]["adapters"]
    assert listed["version"] == "right"
    assert answer(server, "policy") == expected(model_folder, adapter)


class Breaking(ModelSource):
    """Fails in the middle."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from itertools.islice(super().tensors(), 5)
        raise RuntimeError("the trainer fails")


def test_an_update_that_breaks_off_leaves_the_former_version(
    server: Server, base: torch.nn.Module, model_folder: Path, first_tokens: list[int]
) -> None:
    adapter = lora.tensors(base, 1)
    for name in ("policy", "never"):
        if name == "policy":
            server.control.update_adapter(name, adapter, lora.config())
        with pytest.raises(WeightUpdateError, match="the trainer fails"):
            server.control.update_adapter(name, Breaking(lora.tensors(base, 2)), lora.config(), bucket_bytes=4096)
    assert answer(server, "policy") == expected(model_folder, adapter)
    assert ask(server, "never").status_code == 404
    assert answer(server, "model") == first_tokens
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
        body = {**server.kind.request(PROMPT, 200, stream=True), "model": name}
        with httpx.stream("POST", server.url + server.kind.generation_route, json=body, timeout=120) as lines:
            if lines.status_code != 200:
                failures.append(lines.read().decode())
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    texts[name] += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"] or []
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
        assert texts[name] == greedy(lora.merged(new_model(model_folder, SEED), adapter), tokens=200)


def test_a_removed_adapter_is_gone(server: Server, base: torch.nn.Module) -> None:
    server.control.update_adapter("policy", lora.tensors(base, 1), lora.config(), adapter_version="last")
    assert server.control.remove_adapter("policy")["adapter_version"] == "last"
    assert ask(server, "policy").status_code == 404
    assert "policy" not in server.http.get("/v1/models").text
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


def layers(**changes: Any) -> _Layers:
    """Of a model that has experts, an embedding with an adapter, and a classification head."""
    dense = SimpleNamespace(base_layer=SimpleNamespace(input_size=4, output_size=6))
    packed = SimpleNamespace(base_layer=SimpleNamespace(input_size=4, output_size=12, output_sizes=[5, 7]))
    attention = SimpleNamespace(
        base_layer=SimpleNamespace(
            input_size=4, output_size=16, output_sizes=[8, 4, 4], total_num_heads=4, total_num_kv_heads=1, head_size=2
        )
    )
    experts = SimpleNamespace(base_layer=object())
    block = "language_model.model.layers.0"
    manager = SimpleNamespace(
        modules={
            f"{block}.mlp.down_proj": dense,
            f"{block}.mlp.gate_up_proj": packed,
            f"{block}.self_attn.qkv_proj": attention,
            f"{block}.mlp.experts": experts,
            "language_model.model.embed_tokens": SimpleNamespace(base_layer=SimpleNamespace(org_vocab_size=9)),
        },
        packed_modules={
            f"{block}.mlp.gate_up_proj": [f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj"],
            f"{block}.self_attn.qkv_proj": [f"{block}.self_attn.{part}_proj" for part in "qkv"],
            f"{block}.mlp.experts": [f"{block}.mlp.experts.0.{part}_proj" for part in ("gate", "down", "up")],
        },
        model=SimpleNamespace(
            hf_to_vllm_mapper=WeightsMapper(orig_to_new_prefix={"model.language_model.": "language_model.model."}),
            lora_skip_prefixes=["mtp."],
        ),
        is_pooling_model=False,
    )
    loras = SimpleNamespace(_adapter_manager=manager, lora_config=SimpleNamespace(max_lora_rank=4))
    return _Layers(loras, {"r": 2, "modules_to_save": ["score"], **changes})


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(f"base_model.model.{name}", "float32", shape)


BLOCK = "model.language_model.layers.0"


@pytest.mark.parametrize(
    "given",
    [
        spec(f"{BLOCK}.mlp.down_proj.lora_A.weight", 2, 4),
        spec(f"{BLOCK}.mlp.down_proj.lora_B.weight", 6, 2),
        spec(f"{BLOCK}.mlp.up_proj.lora_B.weight", 7, 2),
        spec(f"{BLOCK}.self_attn.q_proj.lora_B.weight", 8, 2),
        spec(f"{BLOCK}.self_attn.v_proj.lora_B.weight", 2, 2),  # the ranks hold copies of the one head
        spec(f"{BLOCK}.mlp.experts.0.down_proj.lora_A.weight", 2, 3),
        spec(f"{BLOCK}.mlp.experts.lora_A.weight", 16, 3),  # all experts in one matrix
        spec(f"{BLOCK}.mlp.experts.base_layer.lora_B.weight", 3, 16),
        spec("model.language_model.embed_tokens.lora_embedding_A", 2, 9),
        spec("model.embed_tokens.base_layer.weight", 9, 4),
        spec("mtp.layers.0.mlp.down_proj.lora_A.weight", 2, 4),
        spec("score.weight", 1, 4),
    ],
    ids=lambda given: given.name,
)
def test_the_names_and_shapes_that_vllm_takes(given: TensorSpec) -> None:
    assert layers().take(given)


@pytest.mark.parametrize(
    ("given", "changes", "problem"),
    [
        (spec(f"{BLOCK}.mlp.down_proj.lora_A.weight", 2, 5), {}, "4 features"),
        (spec(f"{BLOCK}.self_attn.k_proj.lora_B.weight", 4, 2), {}, "2 features"),
        (spec(f"{BLOCK}.mlp.down_proj.lora_A.weight", 3, 4), {}, "rank 3"),
        (spec(f"{BLOCK}.mlp.down_proj.lora_A.weight", 5, 4), {"rank_pattern": {"down": 5}}, "rank 5"),
        (spec(f"{BLOCK}.mlp.down_proj.lora_A.weight", 4), {}, "not that of a matrix"),
        (spec(f"{BLOCK}.mlp.down_proj.lora_magnitude_vector", 6), {}, "unsupported"),
    ],
)
def test_shapes_that_vllm_would_cut_are_refused(given: TensorSpec, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        layers(**changes).take(given)


def test_other_layers_are_not_taken() -> None:
    assert not layers().take(spec("model.language_model.layers.1.mlp.down_proj.lora_A.weight", 2, 4))
    assert not layers().take(spec(f"{BLOCK}.mlp.experts.9.down_proj.lora_A.weight", 2, 3))


PYTHON = """
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from integration.models import new_model
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer import push_adapter
from rl_memory_plugins.vllm import LLM
from tests import lora
from tests.vllm.conftest import PROMPT, SEED, engine_options, greedy
from pathlib import Path

llm = LLM(**engine_options(Path(FOLDER)), enable_lora=True, max_lora_rank=8, max_loras=1)
model = new_model(Path(FOLDER), SEED)

def push(name, seed, **options):
    adapter = lora.tensors(model, seed)
    push_adapter(lambda body: llm.update_adapter_from_ipc(**body), name, adapter, lora.config(), **options)
    return greedy(lora.merged(new_model(Path(FOLDER), SEED), adapter))

def ask(request):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, lora_request=request, use_tqdm=False)
    return list(output.outputs[0].token_ids)

first = push("policy", 1)
request = llm.lora_request("policy")
assert isinstance(request, LoRARequest) and ask(request) == first
second = push("policy", 2, adapter_version="two")
assert second != first
assert ask(llm.lora_request("policy")) == second
assert ask(request) == second, "a request of a former version means the present one"
assert [adapter.version for adapter in llm.memory_status()[0].adapters] == ["two"]
assert ask(None) == greedy(model)
llm.remove_adapter("policy")
for call in (lambda: ask(request), lambda: llm.lora_request("policy"), lambda: llm.remove_adapter("policy")):
    try:
        call()
    except InvalidRequestError as error:
        assert "policy" in error.message
    else:
        raise AssertionError("a removed adapter answered")
assert ask(None) == greedy(model)
print("done")
"""


@pytest.mark.parametrize("processes", ["0", "1"])
def test_adapters_of_an_engine_in_python(python: Any, processes: str) -> None:
    assert "done" in python(PYTHON, VLLM_ENABLE_V1_MULTIPROCESSING=processes)
