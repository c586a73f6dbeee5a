"""One iteration over a source for several readers."""

import threading
import time

import torch

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
