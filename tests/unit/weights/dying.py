"""Trainers and engines in processes of their own, which end or stop at a message."""

import contextlib
import functools
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from types import SimpleNamespace

import pytest
from toys import Rank, Receiving, checkpoint, loaded

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.trainer.sources.model import as_source
from rl_memory_plugins.weights import wire
from rl_memory_plugins.weights.plan import warm_up
from rl_memory_plugins.weights.sender import WeightSender

warm_up()  # before the processes are forked

_context = multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def process(run, *arguments):
    """Runs `run(pipe, *arguments)` in another process. Yields the other end of its pipe."""
    _start_server()
    ours, theirs = _context.Pipe()
    started = _context.Process(target=run, args=(theirs, *arguments), daemon=True)
    started.start()
    theirs.close()
    try:
        yield ours
    finally:
        started.kill()
        started.join()
        ours.close()


@functools.cache
def _start_server():
    """Have the modules imported once for all processes: that takes longer than a test."""
    _context.set_forkserver_preload(["dying"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server ignores what it is told of it
        forkserver.ensure_running()


def signal_at(message, when, signal, number=1):
    """Sends this process a signal before or after it sends such a message for the so many-th time from now on."""
    send, count = wire.Connection.send, 0

    def watched(self, sent, *arguments):
        nonlocal count
        count += type(sent).__name__ == message
        due = type(sent).__name__ == message and count == number
        if due and when == "before":
            os.kill(os.getpid(), signal)
        send(self, sent, *arguments)
        if due and when == "after":
            os.kill(os.getpid(), signal)

    wire.Connection.send = watched


def trainer(pipe, whole, fault, timeout_s, options):
    """Sends so many whole updates, and one with the fault."""
    for seed in range(whole + 1):
        if seed == whole:
            signal_at(*fault)
        with WeightSender(1, bucket_bytes=256, timeout_s=timeout_s, **options) as sender:
            pipe.send((sender.endpoints, sender.token))
            with contextlib.suppress(RLMemoryError):
                sender.send(as_source(checkpoint(seed, opaque=False)))
            pipe.recv()


def engine(pipe, fault, model):
    """Receives updates as it is told to: endpoints, token and timeout, and whether the fault is due."""
    rank = Rank(model)
    while True:
        endpoints, token, timeout_s, is_due = pipe.recv()
        if is_due:
            signal_at(*fault)
        thread = Receiving(rank, SimpleNamespace(endpoints=endpoints, token=token), timeout_s=timeout_s).join(60)
        expected = loaded(checkpoint(0, opaque=False), opaque=False)
        right = all((one == expected[name]).all() for name, one in rank.model.named_parameters())
        pipe.send((str(thread.error), right))
