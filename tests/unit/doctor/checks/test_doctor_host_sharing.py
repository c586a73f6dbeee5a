"""What processes of one host share."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from rl_memory_plugins.doctor.checks import host_sharing
from rl_memory_plugins.doctor.finding import Status

OK, WARNING, FAILURE = Status.OK, Status.WARNING, Status.FAILURE


def test_processes_of_one_user_share_files():
    assert host_sharing.shared_files().status is OK


def test_a_proc_that_hides_other_processes(monkeypatch):
    monkeypatch.setattr(host_sharing, "_open_through_proc", lambda path: "Permission denied")
    assert host_sharing.shared_files().status is WARNING
    monkeypatch.setenv("RL_MEMORY_SHARE_HOST_BACKUPS", "1")
    assert host_sharing.shared_files().status is FAILURE


def test_a_kernel_without_the_call_that_copies_descriptors(monkeypatch):
    monkeypatch.setattr(host_sharing, "_PIDFD_GETFD", 1 << 20)  # a number that no kernel has
    found = host_sharing.pidfd_getfd()
    assert found.status is WARNING
    assert "not implemented" in found.seen


def test_a_peer_that_passes_nothing(monkeypatch):
    monkeypatch.setattr(host_sharing, "_PEER", "import socket, sys\nsocket.socket(fileno=int(sys.argv[1])).send(b'1')")
    assert host_sharing.shared_files().status is FAILURE


@pytest.mark.parametrize("blocks, status", [(16 << 10, WARNING), (1 << 20, OK)])  # 64 MiB, as Docker gives, and 4 GiB
def test_a_small_shared_memory(monkeypatch, blocks, status):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=blocks, f_bavail=blocks, f_frsize=4096))
    found = host_sharing.shared_memory()
    assert found.status is status
    assert found.details["bytes"] == blocks * 4096


def test_no_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(host_sharing, "SHM", tmp_path / "shm")
    assert host_sharing.shared_memory().status is FAILURE
