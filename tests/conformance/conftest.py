"""One suite for every engine and device: `pytest tests/conformance --engine vllm --tp 2`, `… --device cuda`.

A session starts one server. After each test the engine is brought to the known state: awake, valid, holding
the checkpoint's weights. That a test leaves the engine able to get there is part of what is tested.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.engines import ENGINES
from integration.engines.base import REPOSITORY, Launch, Server
from integration.engines.vllm import RAY
from integration.models import SHAPES, new_model, write_model
from integration.ray_nodes import ray_nodes
from rl_memory_plugins.weights.checksums import tensor_checksum

PROMPT = [5, 6, 7, 8]
SEED, OTHER_SEED = 3, 7  # with these no short answer of this suite hangs on less than ROUNDING
ROUNDING = 0.02  # of a logit in float16, generously; the logits' standard deviation is 0.45
DRAIN_S = 45.0  # the engine's option; longer than any one answer of this suite takes
STALL_S = 10.0  # the engine's option; long enough for a trainer on a busy machine


class Weights:
    """The trainer's copies of two sets of weights, on the engine's device."""

    def __init__(self, launch: Launch) -> None:
        self.first = new_model(launch.model, SEED, launch.dtype).to(launch.device)
        self.other = new_model(launch.model, OTHER_SEED, launch.dtype).to(launch.device)

    @staticmethod
    def checksums(model: torch.nn.Module) -> dict[str, str]:
        return {name: tensor_checksum(tensor) for name, tensor in model.named_parameters()}


def reference(model: torch.nn.Module) -> torch.nn.Module:
    """The model as transformers computes it on the CPU, in float32: itself if it is there, else a copy."""
    if all((tensor.device.type, tensor.dtype) == ("cpu", torch.float32) for tensor in model.parameters()):
        return model
    return copy.deepcopy(model).float().cpu()


def greedy(model: torch.nn.Module, prompt: list[int], tokens: int = 8) -> list[int]:
    """What transformers itself answers."""
    from transformers import DynamicCache

    model, cache = reference(model), DynamicCache()
    ids = [torch.tensor([prompt])]
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(model(ids[-1], past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(ids[1:], dim=1)[0].tolist()


def long_answer(server: Server) -> int:
    """Tokens that take some seconds, in which something else can happen."""
    return (320 if server.launch.ranks == 1 else 200) if server.launch.device == "cpu" else 1500


def assert_greedy(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the model's choice after those before it, but for rounding.

    On a GPU kernels sum in an order that depends on the batch, and some choices of a long answer are so close
    that two right answers part there.
    """
    with torch.no_grad():
        logits = reference(model)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    lost = logits.max(1).values - chosen
    assert float(lost.max()) < ROUNDING, f"token {int(lost.argmax())} of {len(tokens)} is not the model's choice"


@pytest.fixture(scope="session")
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "small"
    dtype = Launch(folder, device=request.config.getoption("--device")).dtype
    return write_model(folder, SHAPES["small"], dtype=dtype, seed=SEED)


@pytest.fixture(scope="session")
def weights(launch: Launch) -> Weights:
    return Weights(launch)


@pytest.fixture(scope="session")
def fault_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def ray_address(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[str]:
    """Of the Ray whose nodes have the ranks; empty without one."""
    if not request.config.getoption("--ray"):
        yield ""
        return
    aids = {"PYTHONPATH": os.pathsep.join([str(RAY), str(REPOSITORY)]), "RAY_worker_niceness": "0"}
    with ray_nodes(2, {"RAY_AUTH_MODE": "disabled", **aids}) as address:
        yield address


@pytest.fixture(scope="session")
def launch(request: pytest.FixtureRequest, model_folder: Path, fault_dir: Path, ray_address: str) -> Launch:
    tp, pp, dp = (request.config.getoption(f"--{name}") for name in ("tp", "pp", "dp"))
    return Launch(
        model_folder,
        tp=tp,
        pp=pp,
        dp=dp,
        options={
            "fault_dir": str(fault_dir),
            "update_timeout_s": STALL_S,
            "drain_timeout_s": DRAIN_S,
            "poison": True,
            "share_host_backups": dp > 1,
        },
        # One arrangement has a key and the other has none, so that both rules are tested on a real server.
        api_key="secret-key" if tp * pp * dp > 1 else "",
        host="0.0.0.0",
        device=request.config.getoption("--device"),
        forked=request.config.getoption("--fork"),
        ray=ray_address,
    )


@pytest.fixture(scope="session")
def running_server(
    request: pytest.FixtureRequest, launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    kind = ENGINES[request.config.getoption("--engine")]()
    with Server(kind, launch, tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server


@pytest.fixture(scope="session")
def first_tokens(running_server: Server) -> list[int]:
    """The greedy answer under the checkpoint's weights, before anything has slept."""
    return running_server.generate(PROMPT)


@pytest.fixture(scope="session")
def restored() -> list[Server]:
    """The server while it is in the known state: none while a test runs, and after a test that left it unusable."""
    return []


@pytest.fixture
def server(
    running_server: Server, weights: Weights, first_tokens: list[int], fault_dir: Path, restored: list[Server]
) -> Iterator[Server]:
    if not restored:
        restore(running_server, weights, first_tokens)
    restored.clear()
    yield running_server
    assert running_server.is_running(), running_server.tail()
    for fault in fault_dir.iterdir():
        fault.unlink()
    restore(running_server, weights, first_tokens)
    restored.append(running_server)


def restore(server: Server, weights: Weights, first_tokens: list[int]) -> None:
    """Bring the engine to the known state by correct calls alone."""
    control = server.control
    control.wake_up()
    if control.memory()["content"] == "valid" and server.generate(PROMPT) == first_tokens:
        return
    control.update_weights(weights.first)
    assert server.generate(PROMPT) == first_tokens


def pytest_report_header(config: Any) -> str:
    options = {name: config.getoption(f"--{name}") for name in ("engine", "device", "tp", "pp", "dp")}
    return ", ".join(f"{name}: {value}" for name, value in options.items())
