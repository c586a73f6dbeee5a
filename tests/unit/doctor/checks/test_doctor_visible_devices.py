"""The GPUs that CUDA_VISIBLE_DEVICES leaves."""

from __future__ import annotations

import sys

import pytest

from rl_memory_plugins.doctor.checks import visible_devices
from rl_memory_plugins.doctor.finding import Status

OK, WARNING, FAILURE, NOT_APPLICABLE = Status.OK, Status.WARNING, Status.FAILURE, Status.NOT_APPLICABLE


UUIDS = ["GPU-11111111-aaaa", "GPU-11112222-bbbb", "GPU-33333333-cccc"]


@pytest.mark.parametrize(
    "value, status, visible",
    [
        (None, OK, UUIDS),
        ("2,0", OK, [UUIDS[2], UUIDS[0]]),
        (UUIDS[1], OK, [UUIDS[1]]),
        ("GPU-3333", OK, [UUIDS[2]]),
        ("GPU-1111", FAILURE, []),  # of two GPUs
        ("0,3,1", FAILURE, [UUIDS[0]]),  # CUDA ignores what follows
        ("0,-1", FAILURE, [UUIDS[0]]),
        ("-1", WARNING, None),
        ("1,1", FAILURE, [UUIDS[1]]),
        (f"1,{UUIDS[1]}", FAILURE, [UUIDS[1]]),
        (f"0,{UUIDS[1]}", WARNING, UUIDS[:2]),
        ("", WARNING, None),
        ("GPU-99999999-zzzz", FAILURE, []),
    ],
)
def test_visible_devices_against_uuids(monkeypatch, value, status, visible):
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    monkeypatch.setattr(visible_devices, "all_uuids", lambda: UUIDS)
    monkeypatch.setattr(visible_devices, "has_gpu", lambda: False)
    assert visible_devices.visible_devices().status is NOT_APPLICABLE
    monkeypatch.setattr(visible_devices, "has_gpu", lambda: True)
    found = visible_devices.visible_devices()
    assert found.status is status
    assert found.details.get("visible") == visible


def test_uuids_come_from_nvidia_smi_without_nvml(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho GPU-1\necho GPU-2\n")
    command.chmod(0o755)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(visible_devices, "has_gpu", lambda: True)
    assert visible_devices.all_uuids() == ["GPU-1", "GPU-2"]
    command.unlink()
    assert visible_devices.visible_devices().status is WARNING
