"""vLLM's metrics of sleep in the states that its own sleep does not have, as a monitor reads them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.engines.base import Launch, Server
from integration.engines.vllm import Vllm
from rl_memory_plugins import commands
from rl_memory_plugins.client import EngineClient
from rl_memory_plugins.engines.vllm.metrics import measured

AWAKE, IN_HOST_MEMORY, DISCARDED = "awake", "weights_offloaded", "discard_all"


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    launch = Launch(model_folder, forked=True)
    with Server(Vllm(), launch, tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server


def scraped(server: Server) -> set[str]:
    """The states that `vllm:engine_sleep_state` shows; the empty set if something but no weights sleep."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(server.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == "vllm:engine_sleep_state"]
    assert {sample.labels["sleep_state"] for sample in samples} == {AWAKE, IN_HOST_MEMORY, DISCARDED}
    return {sample.labels["sleep_state"] for sample in samples if sample.value == 1}


def native_rpc(control: EngineClient) -> None:
    """A sleep that vLLM's own call asks for in the engine's process."""
    control._http.post("/collective_rpc", json={"method": "sleep", "kwargs": {"level": 2}}).raise_for_status()


@pytest.mark.parametrize(
    ("act", "shown"),
    [
        (lambda control: None, {AWAKE}),
        (lambda control: control.sleep(0), set()),
        (lambda control: control.sleep(1), {IN_HOST_MEMORY}),
        (lambda control: control.sleep(1, ["weights"]), {IN_HOST_MEMORY}),
        (lambda control: control.sleep(1, ["kv_cache"]), set()),
        (lambda control: (control.sleep(1), control.wake_up(["weights"])), set()),
        (lambda control: (control.sleep(1), control.wake_up(["kv_cache"])), {IN_HOST_MEMORY}),
        (lambda control: (control.sleep(1, ["weights"]), control.sleep(2, ["kv_cache"])), {IN_HOST_MEMORY}),
        (lambda control: (control.sleep(1), control.wake_up()), {AWAKE}),
        (lambda control: control.sleep(2, ["kv_cache"]), set()),
        (lambda control: control.sleep(2, ["weights"]), {DISCARDED}),
        (lambda control: (control.sleep(2), control.wake_up(["kv_cache"])), {DISCARDED}),
        (native_rpc, {DISCARDED}),
        (lambda control: (control.sleep(2), control.wake_up()), {AWAKE}),
    ],
)
def test_the_sleep_state(server: Server, act: Callable[[EngineClient], Any], shown: set[str]) -> None:
    """Stock: the level of the last sleep counts until all is awake, whatever part of it sleeps."""
    act(server.control)
    try:
        assert scraped(server) == shown
    finally:
        server.control.wake_up()
    assert scraped(server) == {AWAKE}


def test_operations_are_measured_where_vllm_measures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock: its routes measure them since 0.33. The routes of this package stand in the place of these."""
    seen: list[str] = []

    @contextmanager
    def record(operation: str) -> Iterator[None]:
        seen.append(operation)
        yield

    for module, function in (
        ("vllm.entrypoints.serve.dev.sleep.metrics", "sleep_mode_operation_metrics"),
        ("vllm.entrypoints.rl.online.metrics", "weight_operation_metrics"),
    ):
        stand_in = types.ModuleType(module)
        setattr(stand_in, function, lambda: types.SimpleNamespace(record=record))
        monkeypatch.setitem(sys.modules, module, stand_in)
    for command in (commands.Sleep(), commands.WakeUp(), commands.UpdateWeights({"*": "/s"}, "token")):
        with measured(command):
            pass
    assert seen == ["sleep", "wake", "update"]
