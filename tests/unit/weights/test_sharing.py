"""Parameters that share memory: tied ones, views of one storage, views of other shapes. A byte that is written through
one name is written for all."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.weights.identity import identity
from rl_memory_plugins.weights.manifest import Manifest, TensorSpec
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.plan import trace
from rl_memory_plugins.weights.unwritten import UnwrittenMarks

ROWS, COLUMNS = 6, 16


@st.composite
def sharing_models(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Up to six parameters over two storages: rows of them, all of them, columns, transposed or flat."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
    storages = [torch.zeros(ROWS, COLUMNS, dtype=dtype) for _ in range(2)]
    parameters = {}
    for number in range(draw(st.integers(1, 6))):
        view = draw(st.sampled_from(storages))
        first, last = sorted((draw(st.integers(0, ROWS)), draw(st.integers(0, ROWS))))
        view = view[first:last]
        # 8 columns in a row, because a mark of integers is a pattern of 8 elements
        view = draw(st.sampled_from([view, view[:, :8], view[:, 8:]]))
        shape = draw(st.sampled_from(["as it is", "transposed", "flat"]))
        if shape == "transposed" and dtype.is_floating_point:
            view = view.t()
        elif shape == "flat" and view.is_contiguous():
            view = view.view(-1)
        parameters[f"p{number}"] = view
    return parameters


def bytes_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of all elements."""
    found: set[int] = set()
    for tensor in tensors:
        offsets = torch.zeros(tensor.shape, dtype=torch.int64)
        for dimension, stride in enumerate(tensor.stride()):
            extent = [1] * tensor.dim()
            extent[dimension] = tensor.shape[dimension]
            offsets = offsets + (torch.arange(tensor.shape[dimension]) * stride).view(extent)
        found |= {tensor.data_ptr() + int(one) * tensor.element_size() for one in offsets.flatten()}
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_an_update_is_complete_if_it_covers_all_memory(data: st.DataObject) -> None:
    """However many names are missing: the trace of a manifest and the marks of a load by others both say so."""
    parameters = data.draw(sharing_models())
    sent = data.draw(st.lists(st.sampled_from(sorted(parameters)), unique=True))
    is_complete = bytes_of(parameters[name] for name in sent) == bytes_of(parameters.values())

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parameters[name].copy_(tensor)

    dtype = str(next(iter(parameters.values())).dtype)[6:]
    manifest = Manifest([TensorSpec(name, dtype, tuple(parameters[name].shape)) for name in sent])
    if is_complete:
        trace(load, manifest, expected=parameters)
    else:
        with pytest.raises(ManifestError, match="missing"):
            trace(load, manifest, expected=parameters)
    marks = UnwrittenMarks(parameters.values)
    load((name, torch.ones_like(parameters[name])) for name in sent)
    assert marks.are_gone is is_complete


def test_a_tied_parameter_needs_no_name_of_its_own() -> None:
    """Two parameters over one storage, of which a checkpoint has one, on the path of a trainer's update."""
    embedding = torch.zeros(4, 8)
    parameters = {"embedding": embedding, "head": embedding.view(32).view(4, 8), "norm": torch.zeros(8)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            parameters[name].copy_(tensor)

    loader = ModelLoader(load, lambda: parameters)
    specs = [TensorSpec("embedding", "float32", (4, 8)), TensorSpec("norm", "float32", (8,))]
    plan = loader.plan(Manifest(specs), loader.drop_outdated())
    plan.apply("embedding", torch.full((4, 8), 3.0))
    assert parameters["head"].eq(3).all()
    with pytest.raises(ManifestError, match=r"embedding"):
        loader.plan(Manifest(specs[1:]), loader.drop_outdated())


def test_shared_memory_has_one_identity_by_its_bytes() -> None:
    from rl_memory_plugins.memory.host import HostDevice

    tied, copied = torch.rand(8), torch.rand(8)
    copied.copy_(tied)
    assert identity([tied, tied.view(2, 4)], HostDevice(0)) == identity([copied, tied], HostDevice(0))
