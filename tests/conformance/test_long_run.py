"""An engine of its own: hundreds of updates, weights that are not finite, and at last a worker that is killed."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from integration.engines import ENGINES
from integration.engines.base import Launch, Server
from integration.models import SHAPES, new_model, write_model
from integration.waiting import wait_until
from rl_memory_plugins.errors import RLMemoryError, WeightUpdateError
from rl_memory_plugins.trainer import ModelSource, RolloutHandoff
from tests.conformance.conftest import OTHER_SEED, PROMPT, SEED, greedy
from tests.conformance.trainers import BreakingSource

WARM_UP = 50  # updates
BUCKET_BYTES = 4 << 20
GROWTH_BYTES = 16 << 20  # of a process, in allocators that fill up; any large tensor, kept by each update, is more


@pytest.fixture(scope="module")
def own_server(
    request: pytest.FixtureRequest, ray_address: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    device = request.config.getoption("--device")
    folder = tmp_path_factory.mktemp("model") / "tiny"
    launch = Launch(
        folder,
        tp=request.config.getoption("--tp"),
        pp=request.config.getoption("--pp"),
        options={"check_finite": True},
        device=device,
        forked=request.config.getoption("--fork"),
        kv_bytes=64 << 20,
        ray=ray_address,
    )
    write_model(folder, SHAPES["tiny"], dtype=launch.dtype, seed=SEED)
    kind = ENGINES[request.config.getoption("--engine")]()
    with Server(kind, launch, tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server


@pytest.fixture(scope="module")
def model(own_server: Server) -> torch.nn.Module:
    launch = own_server.launch
    return new_model(launch.model, OTHER_SEED, launch.dtype).to(launch.device)


def held(processes: list[psutil.Process]) -> dict[int, tuple[int, int, int]]:
    """By process: descriptors, mappings of weights, resident bytes."""
    gc.collect()
    found = {}
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        found[process.pid] = (process.num_fds(), maps.count("rl-memory-weights"), process.memory_info().rss)
    return found


def test_hundreds_of_updates_grow_nothing(
    request: pytest.FixtureRequest, own_server: Server, model: torch.nn.Module
) -> None:
    """Of either side: this process is the trainer's."""
    source = ModelSource(model)

    def update(times: int) -> None:
        for _ in range(times):
            own_server.control.update_weights(source, bucket_bytes=BUCKET_BYTES)

    update(WARM_UP)
    processes = [psutil.Process(), *own_server.processes()]
    before, occupied = held(processes), own_server.occupied_bytes()
    update(request.config.getoption("--updates") - WARM_UP)

    def growth() -> list[tuple[int, int, int]]:
        after = held(processes)
        return [tuple(a - b for a, b in zip(after[one.pid], before[one.pid], strict=True)) for one in processes]

    # a server may close the connection of the last call a moment later
    wait_until(lambda: all(fds <= 0 and maps <= 0 for fds, maps, _ in growth()), "no descriptor or mapping is left", 20)
    for process, (_, _, resident) in zip(processes, growth(), strict=True):
        assert resident < GROWTH_BYTES, f"{process}: {resident} bytes more"
    assert own_server.occupied_bytes() - occupied < GROWTH_BYTES * len(processes)
    assert own_server.generate(PROMPT) == greedy(model, PROMPT)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(own_server: Server, model: torch.nn.Module, value: float) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    tensors = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    tensors[name][3, 5] = value
    with pytest.raises(WeightUpdateError) as caught:
        own_server.control.update_weights(tensors, bucket_bytes=BUCKET_BYTES)
    assert (caught.value.details["reason"], caught.value.details["name"]) == ("not finite", name)
    assert own_server.control.memory()["content"] == "failed"
    assert own_server.post(PROMPT).status_code == 503
    own_server.control.update_weights(model, bucket_bytes=BUCKET_BYTES)
    assert own_server.generate(PROMPT) == greedy(model, PROMPT)


def test_a_worker_that_is_killed_in_an_update_is_an_error(own_server: Server, model: torch.nn.Module) -> None:
    """Last, since nothing is left of the engine. The handoff ends at once, and so do all that are tried after it."""

    class Killing(BreakingSource):
        def __init__(self) -> None:
            super().__init__(model, after=20)

        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(self._inner.tensors()):
                if number == 20:
                    workers(own_server)[-1].kill()
                yield item

    handoff = RolloutHandoff(own_server.control, Killing(), bucket_bytes=1 << 20, timeout_s=300, transport="shm")
    start = time.monotonic()
    with pytest.raises(RLMemoryError) as caught:
        handoff.sync()
    assert caught.value.details["step"] == "sync"
    with pytest.raises(RLMemoryError):
        handoff.release()
    with pytest.raises(RLMemoryError):
        handoff.sync()
    assert time.monotonic() - start < 100, "it waited for an engine that is gone"


def workers(server: Server) -> list[psutil.Process]:
    """The processes that have opened the trainer's shared memory."""
    found = [p for p in server.processes() if "rl-memory-weights" in Path(f"/proc/{p.pid}/maps").read_text()]
    assert len(found) == server.launch.ranks
    return found
