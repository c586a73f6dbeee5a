"""The streams that run the copies of a buffer."""

from __future__ import annotations

import pytest
import torch

from rl_memory_plugins.weights.buffers.streams import Streams


class FakeStream:
    def __init__(self, gpu, handle):
        self.gpu, self.cuda_stream = gpu, handle
        self.synchronized = 0

    def synchronize(self):
        self.synchronized += 1


@pytest.fixture
def gpus(monkeypatch):
    """The handles of the current streams by GPU, and the streams that torch has made."""
    current, made = {0: 0, 1: 0}, []

    def make(gpu):
        made.append(FakeStream(gpu, current[gpu]))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "current_stream", make)
    return current, made


@pytest.mark.parametrize("has_handles", [True, False])
def test_each_stream_that_was_current_is_waited_for(gpus, monkeypatch, has_handles):
    current, made = gpus
    if has_handles:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current.__getitem__, raising=False)
    else:
        monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    streams = Streams()
    asked = []
    for gpu, handle in [(0, 0), (0, 0), (0, 7), (1, 7), (1, 0), (0, 0)]:
        current[gpu] = handle
        found = streams.current(gpu)
        assert (found.gpu, found.cuda_stream) == (gpu, handle)
        asked.append(found)
    streams.synchronize()
    assert all(stream.synchronized == 1 for stream in set(asked))
    assert len(made) == (5 if has_handles else 6)


def test_a_stream_that_is_asked_for_again_is_waited_for_again(gpus, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", gpus[0].__getitem__, raising=False)
    streams = Streams()
    for count in (1, 2):
        streams.current(0)
        streams.synchronize()
        assert sum(stream.synchronized for stream in gpus[1]) == count
