"""The identity of weights: their bytes and nothing else."""

from __future__ import annotations

import pytest
import torch

from rl_memory_plugins.errors import DeviceMemoryError
from rl_memory_plugins.memory.host import HostDevice
from rl_memory_plugins.weights.identity import identity


@pytest.fixture
def device() -> HostDevice:
    return HostDevice(0)


def test_equal_bytes_are_equal_at_other_addresses(device: HostDevice) -> None:
    first = [torch.rand(3, 5), torch.rand(7).to(torch.bfloat16), torch.empty(0)]
    assert identity(first, device) == identity([one.clone() for one in first], device)
    assert len(identity(first, device)) == 32


@pytest.mark.parametrize("number", [0, 1, 2])
def test_any_changed_element_shows(device: HostDevice, number: int) -> None:
    tensors = [torch.rand(300, 5), torch.rand(5, 6).t(), torch.rand(8, 8)[:, ::2]]
    before = identity(tensors, device)
    tensors[number][2, 3] += 1
    assert identity(tensors, device) != before


def test_the_order_counts(device: HostDevice) -> None:
    one, other = torch.rand(4), torch.rand(4)
    assert identity([one, other], device) != identity([other, one], device)


def test_memory_beside_a_parameter_does_not_count(device: HostDevice) -> None:
    whole = torch.zeros(10)
    before = identity([whole[2:4]], device)
    whole[5] = 1
    assert identity([whole[2:4]], device) == before


def test_parameters_without_bytes_have_no_identity(device: HostDevice) -> None:
    assert identity([torch.zeros(2), torch.zeros(2, device="meta")], device) == ""


def test_a_device_without_memory_for_the_hash(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice(torch.Tensor):
        device = torch.device("cuda")

    def refuse(blocks: object) -> int:
        raise DeviceMemoryError("none is left")

    monkeypatch.setattr(device, "fingerprint", refuse)
    assert identity([torch.zeros(2).as_subclass(OnDevice)], device) == ""
