"""One iteration over a source for several readers."""

import mmap
import threading
import time

import torch

from rl_memory_plugins.trainer import ModelSource, PausableMemory
from rl_memory_plugins.trainer.fan_out import FanOut, Reader
from rl_memory_plugins.trainer.once import Once
from rl_memory_plugins.weights.source import spec_of


class Reusing:
    """Makes each tensor in the memory of the last."""

    def __init__(self):
        self._room = torch.zeros(4)

    def specs(self):
        return [spec_of(str(number), self._room) for number in range(5)]

    def tensors(self):
        for number in range(5):
            self._room.fill_(number)
            yield str(number), self._room


def test_the_source_makes_no_tensor_before_a_late_reader_has_read_the_last():
    fan = FanOut(Once(Reusing()))
    fan.ask()
    found = {late: [] for late in (False, True)}

    def read(reader, late):
        time.sleep(0.2 if late else 0.0)  # the first tensor waits for it
        for name, tensor in reader.tensors():
            time.sleep(0.02)
            found[late].append((name, tensor.tolist()))

    threads = [threading.Thread(target=read, args=(Reader(fan), late)) for late in found]
    for thread in threads:
        thread.start()
    fan.run()
    for thread in threads:
        thread.join(10)
    expected = [(str(number), [float(number)] * 4) for number in range(5)]
    assert found == {False: expected, True: expected}


class Sorted(ModelSource):
    """Lists its tensors in another order than it gives them."""

    def specs(self):
        return sorted(super().specs(), key=lambda spec: spec.name)


def test_tensors_that_all_exist_have_the_names_under_which_the_source_gives_them():
    fan = FanOut(Once(Sorted({name: torch.full((2,), float(ord(name))) for name in "cab"})))
    reader = Reader(fan)
    fan.ask()
    assert [spec.name for spec in reader.specs()] == ["a", "b", "c"] and reader.resident() is not None
    fan.run()
    assert [(name, tensor.tolist()) for name, tensor in reader.tensors()] == [(n, [float(ord(n))] * 2) for n in "cab"]


def test_what_falls_asleep_while_engines_read_it_is_sent_from_where_it_is_then():
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.full((64, mmap.PAGESIZE), 3.0)) for name in "ab"})
    memory, fan = PausableMemory(model), FanOut(Once(ModelSource(model)))
    reader = Reader(fan)
    fan.ask()
    fan.run()
    tensors = reader.tensors()
    assert float(next(tensors)[1].mean()) == 3
    memory.sleep()
    assert float(model["b"].mean()) < 1 and float(next(tensors)[1].mean()) == 3
