"""Layers that share a parameter are loaded once, in the first of them."""

from __future__ import annotations

import pytest
import torch

from rl_memory_plugins.engines.saved_layers import SavedLayers


class Model(torch.nn.Module):
    def __init__(self, tie: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(4, 8, bias=False)
        self.head = torch.nn.Linear(4, 8)
        if tie == "one object":
            self.head.weight = self.embedding.weight
        elif tie == "one memory":
            self.head.weight.data = self.embedding.weight.data
        elif tie == "a part":
            self.head.weight = torch.nn.Parameter(self.embedding.weight.data[:4])


@pytest.mark.parametrize(
    ("tie", "tied"), [("one object", {"weight"}), ("one memory", {"weight"}), ("a part", set()), ("", set())]
)
def test_a_tied_parameter_belongs_to_the_first_layer(tie: str, tied: set[str]) -> None:
    model = Model(tie)
    layers = SavedLayers(dict(model.named_modules()))
    assert layers.tied(model.head) == tied
    assert layers.tied(model.embedding) == set()


def test_parameters_without_memory_are_not_tied() -> None:
    model = Model("").to("meta")
    assert SavedLayers(dict(model.named_modules())).tied(model.head) == set()
