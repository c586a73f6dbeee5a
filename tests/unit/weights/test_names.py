"""Which memory of a model a level-2 sleep may lose, and which of it a caller names."""

from __future__ import annotations

import difflib
import fnmatch

import torch

from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.weights.names import SOUGHT, NamedWeights, parameter_blocks


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


class Tied(torch.nn.Module):
    """Two layers, an output layer that is the embedding, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(8, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.lm_head = torch.nn.Linear(4, 8, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("inv_freq", torch.zeros(4))


def test_globs_choose_parameters_by_any_of_their_names() -> None:
    model = Tied()
    names = NamedWeights(lambda: model)
    embedding = Block(model.embed_tokens.weight.data_ptr(), 128)
    assert names.chosen(["lm_head.*"]) == names.chosen(["embed_tokens.weight"]) == {"embed_tokens.weight": embedding}
    assert set(names.chosen(["layers.*.weight", "*.1.*"])) == {"layers.0.weight", "layers.1.weight", "layers.1.bias"}
    assert names.chosen(["inv_freq"]) == {}


def test_parameters_that_no_load_fills_are_always_chosen() -> None:
    model = Tied()
    names = NamedWeights(lambda: model, unfilled=lambda: ["layers.0.bias", "of another model"])
    assert set(names.chosen([])) == {"layers.0.bias"}
    assert set(names.chosen(["layers.*.weight"])) == {"layers.0.bias", "layers.0.weight", "layers.1.weight"}
    assert NamedWeights(Tied).chosen([]) == {}


def test_a_parameter_among_buffers_is_chosen_with_its_storage() -> None:
    model = Shared()
    assert NamedWeights(lambda: model).chosen(["sparse"]) == {"sparse": Block(model.storage.data_ptr(), 256)}


def test_a_glob_that_matches_nothing_comes_with_the_nearest_names() -> None:
    names = NamedWeights(Tied, draft=Shared)
    assert names.unmatched(["lm_head.weight", "inv_*", "*.bias", "draft.padded", "draft.*"]) == {}
    unmatched = names.unmatched(["layers.0.weigt", "LAYERS.0.weight", "draft.layers.*"])
    assert set(unmatched) == {"layers.0.weigt", "LAYERS.0.weight", "draft.layers.*"}
    assert unmatched["layers.0.weigt"][0] == "layers.*.weight"
    assert NamedWeights(Tied).unmatched(["draft.*"]) == {}  # as in vLLM: an engine without a draft has none to keep


def test_thousands_of_names_take_no_search_each(monkeypatch) -> None:
    """A caller who names all experts, by the checkpoint's names by mistake: the engine stands still for the answer."""
    model, searches = Tied(), []
    names = NamedWeights(lambda: model)
    search = difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda *args, **kw: searches.append(args) or search(*args, **kw))
    monkeypatch.setattr(fnmatch, "filter", lambda *args: searches.append(args) or [])
    wrong = [f"layers.{number}.weigt" for number in range(5000)]
    unmatched = names.unmatched(["lm_head.weight", *wrong])
    assert list(unmatched) == wrong
    assert unmatched[wrong[0]][0] == "layers.*.weight" and unmatched[wrong[-1]] == []
    assert set(names.chosen(["layers.0.weight", *wrong])) == {"layers.0.weight"}
    assert len(searches) == SOUGHT
