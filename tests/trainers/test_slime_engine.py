"""The adapter for slime and miles on a real SGLang on the CPU, which starts as slime's actor starts it.

With the trainers' sources (SLIME_SOURCE, MILES_SOURCE) their own senders, iterators, conversions and engine actors run,
on two ranks; see `slime_on_cpu`. Without them a stand-in runs that has their interface.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.engines.base import Launch, Server
from integration.engines.sglang import Sglang
from integration.models import SHAPES, new_model, write_model
from rl_memory_plugins.hooking import Hooks
from rl_memory_plugins.integrations import slime
from tests.sglang.test_native import asleep
from tests.trainers import slime_on_cpu, slime_stand_in
from tests.vllm.conftest import PROMPT, greedy

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

from process_pair import ProcessPair

pytestmark = pytest.mark.long  # the server and its spawned processes are new interpreters

SERVER = """
import multiprocessing, sys

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    arguments = eval(sys.argv[1])
    multiprocessing.set_start_method("spawn", force=True)
    process = multiprocessing.Process(target=launch_server, args=(ServerArgs(**arguments),))
    process.start()
    process.join()
"""


class SlimeSglang(Sglang):
    """A process that makes `ServerArgs`, and a server that it spawns. Only the environment enables the package."""

    def __init__(self, script: Path) -> None:
        self._script = script

    def command(self, launch: Launch, port: int) -> list[str]:
        arguments = {
            "model_path": str(launch.model),
            "host": launch.host,
            "port": port,
            "device": "cpu",
            "dtype": launch.dtype,
            "attention_backend": "torch_native",
            "disable_overlap_schedule": True,
            "sleep_on_idle": True,
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "log_level": "warning",
            "random_seed": 0,
            "max_running_requests": launch.max_running,
            "max_total_tokens": 4096,
            "enable_memory_saver": True,
            "enable_draft_weights_cpu_backup": True,
            "enable_metrics": True,
        }
        self._script.write_text(SERVER)
        return [sys.executable, "-W", "ignore", str(self._script), repr(arguments)]

    def environment(self, launch: Launch) -> dict[str, str]:
        return {**super().environment(launch), "RL_MEMORY": "implicit_update_session=true"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", SHAPES["tiny"], seed=1)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("server")
    with Server(SlimeSglang(place / "server.py"), Launch(folder), place / "server.log") as server:
        yield server


def content(server: Server) -> str:
    return str(server.control.memory()["content"])


def expected(folder: Path, seed: int) -> list[int]:
    """What `transformers` answers with the weights that a trainer in bfloat16 sends."""
    return greedy(new_model(folder, seed).to(torch.bfloat16).float())


@pytest.fixture
def updater(server: Server, monkeypatch: pytest.MonkeyPatch) -> slime_stand_in.Updater:
    """The stand-in of a trainer of one process."""
    monkeypatch.setattr(slime, "hooks", Hooks("slime", "miles"))
    for name, module in slime_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return slime_stand_in.enabled()(slime_stand_in.handle(server.url))


def cycle(server: Server, updater: Any, tensors: dict[str, torch.Tensor]) -> None:
    """slime's calls between two steps."""
    assert server.http.get("/flush_cache").status_code == 200
    assert server.http.post("/release_memory_occupation", json={}).status_code == 200
    assert asleep(server) == ["cuda_graph", "kv_cache", "weights"]
    assert server.http.post("/resume_memory_occupation", json={"tags": ["weights"]}).status_code == 200
    assert content(server) == "stale"  # level 2
    updater.tensors = tensors
    try:
        updater.update_weights()
    finally:
        tags = ["kv_cache", "cuda_graph"]
        assert server.http.post("/resume_memory_occupation", json={"tags": tags}).status_code == 200


def tensors(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    state = new_model(folder, seed).state_dict()
    return {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}


def test_cycles_of_a_trainer_of_one_process(server: Server, folder: Path, updater: slime_stand_in.Updater) -> None:
    for step, seed in enumerate((2, 3, 4), start=1):
        cycle(server, updater, tensors(folder, seed))
        assert server.generate(PROMPT) == expected(folder, seed)
        assert server.control.weight_version() == str(step)
        assert server.http.get("/model_info").json()["weight_version"] == str(step)
    assert updater.own == []
    assert updater.chunks.conversions == 1 + 3  # the first for the names; no gather before the engine refuses bfloat16


def test_an_update_that_breaks_off_leaves_the_engine_closed_and_the_next_mends_it(
    server: Server, folder: Path, updater: slime_stand_in.Updater
) -> None:
    cycle(server, updater, tensors(folder, 5))
    broken = tensors(folder, 6)
    del broken["model.norm.weight"]
    with pytest.raises(Exception, match=r"model\.norm\.weight"):
        cycle(server, updater, broken)
    assert content(server) in ("stale", "failed")
    assert server.control.weight_version() == "1"
    refused = server.post(PROMPT)
    assert refused.status_code == 503, refused.text
    cycle(server, updater, tensors(folder, 6))
    assert server.generate(PROMPT) == expected(folder, 6)
    assert server.control.weight_version() == "3"  # slime counts syncs, failed ones too


# -- the trainers' own code -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["slime", "miles"])
def name(request: pytest.FixtureRequest) -> str:
    if slime_on_cpu.source_of(request.param) is None:
        pytest.skip(f"{request.param.upper()}_SOURCE names no checkout of {request.param}")
    return str(request.param)


@pytest.fixture
def ranks() -> Iterator[ProcessPair]:
    with ProcessPair() as pair:
        yield pair


def test_the_trainer_s_own_sender_on_an_engine_with_the_package(
    server: Server, folder: Path, name: str, ranks: ProcessPair
) -> None:
    """Megatron's shards, slime's buckets, and the session: slime's is implicit, miles' has a selector."""
    ranks.run(slime_on_cpu.start, name, folder, server.url, False, timeout_s=120)
    for step, seed in enumerate((2, 3), start=1):
        assert ranks.run(slime_on_cpu.update, name, seed, timeout_s=120) == [str(step)] * 2
        assert server.generate(PROMPT) == expected(folder, seed)


def test_the_trainer_s_own_classes_with_the_adapter(
    server: Server, folder: Path, name: str, ranks: ProcessPair
) -> None:
    ranks.run(slime_on_cpu.start, name, folder, server.url, True, timeout_s=120)
    for step, seed in enumerate((4, 5), start=1):
        assert ranks.run(slime_on_cpu.update, name, seed, timeout_s=120) == [str(step)] * 2
        assert server.generate(PROMPT) == expected(folder, seed)
        assert server.control.weight_version() == str(step)
