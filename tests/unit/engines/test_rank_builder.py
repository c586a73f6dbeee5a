"""Which memory of a model a level-2 sleep may lose."""

from __future__ import annotations

import torch

from rl_memory_plugins.engines.rank_builder import parameter_blocks
from rl_memory_plugins.memory.allocator import Block


class Shared(torch.nn.Module):
    """Parameters and a buffer in one storage, and a padded parameter in a storage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = torch.arange(64, dtype=torch.float32)
        self.weight = torch.nn.Parameter(self.storage[:16].view(4, 4).t())
        self.sparse = torch.nn.Parameter(self.storage[32:64:2])
        self.register_buffer("scales", self.storage[16:32])
        self.padding = torch.zeros(4, 8)
        self.padded = torch.nn.Parameter(self.padding[:, :4])


def test_a_buffer_in_the_storage_of_a_parameter_is_not_lost() -> None:
    model = Shared()
    assert list(parameter_blocks(model)) == [
        Block(model.weight.data_ptr(), 64),
        Block(model.padding.data_ptr(), 128),
    ]
