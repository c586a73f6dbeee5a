"""Agreements of a trainer's processes that are interrupted, or last long."""

from __future__ import annotations

import datetime
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from process_pair import ProcessPair

from integration.waiting import wait_until
from rl_memory_plugins.trainer import Peers


@pytest.fixture(scope="module")
def pair():
    with ProcessPair() as found:
        yield found


def interrupted(rank, flag):
    """Rank 0 gets a Ctrl-C while it waits for rank 1, as at the end of a body."""
    peers, found = Peers(), []
    for step in ("training", "sleep", "wake"):
        peers.step = step
        if rank == 0 and step == "training":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in a shell's background
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        elif step == "training":
            wait_until(flag.exists, "the interrupt")
        try:
            found.append(peers.share(f"{step} of {rank}"))
        except KeyboardInterrupt:
            found.append("interrupted")
            flag.touch()
    return found


def test_an_interrupt_in_an_agreement_leaves_the_processes_in_step(pair, tmp_path):
    training, *later = (["training of 0", "training of 1"], ["sleep of 0", "sleep of 1"], ["wake of 0", "wake of 1"])
    assert pair.run(interrupted, tmp_path / "interrupted") == [["interrupted", *later], [training, *later]]


def longest_wait(rank):
    group = Peers()._group
    return (
        group._get_backend(torch.device("cpu")).options._timeout > datetime.timedelta(days=1) and dist.is_initialized()
    )


def test_a_process_may_save_a_checkpoint_for_hours(pair):
    """torch's default of 30 minutes would count the others as gone."""
    assert pair.run(longest_wait) == [True, True]
