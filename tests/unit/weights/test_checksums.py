import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import EXPERTS, Rank, ToyModel, checkpoint, update

from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.weights import checksums
from rl_memory_plugins.weights.checksums import merge_checksums, merge_engines, region_checksum, tensor_checksum


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn],
)
def test_every_element_and_its_place_count(dtype):
    tensor = (torch.randn(6, 5) * 40).to(dtype)
    whole = tensor_checksum(tensor)
    assert len(whole) == 16 and int(whole, 16)
    assert tensor_checksum(tensor.t().contiguous().t()) == whole  # whatever the strides
    swapped = tensor.clone()
    swapped[0], swapped[1] = tensor[1], tensor[0]
    assert torch.equal(swapped.float(), tensor.float()) or tensor_checksum(swapped) != whole
    changed = tensor.clone().view(-1).view(torch.uint8)
    changed[3] ^= 1
    assert tensor_checksum(changed.view(dtype).view(6, 5)) != whole
    assert tensor_checksum(tensor[:0]) == "0" * 16
    assert tensor_checksum(tensor[0, 0]) == tensor_checksum(tensor[0, :1])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_disjoint_regions_add_up(rows, columns, data):
    tensor = torch.randn(rows, columns)
    row, column = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    parts = [tensor[:row, :column], tensor[row:, :column], tensor[:row, column:], tensor[row:, column:]]
    total = sum(region_checksum(p.clone(), p.shape, p.stride(), p.storage_offset()) for p in parts if p.numel())
    assert f"{total % 2**64:016x}" == tensor_checksum(tensor)


def test_chunks_do_not_matter(monkeypatch):
    tensor = torch.randn(37, 11, 5)
    whole = tensor_checksum(tensor)
    monkeypatch.setattr(checksums, "CHUNK_ELEMENTS", 16)
    assert tensor_checksum(tensor) == whole


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_add_up_to_the_trainers_checksums(tp):
    ranks = [Rank(ToyModel(i, tp), i) for i in range(tp)]
    tensors = checkpoint(1)
    update(ranks, tensors)
    merged = merge_checksums([rank.receiver.checksums() for rank in ranks])
    assert merged.layout == "checkpoint"
    assert merged.opaque == ["packed.weight", "scale"]
    assert merged.partial == ["lm_head.weight"]  # which the engine does not hold
    known = tensors.keys() - set(merged.opaque) - set(merged.partial)
    assert merged.tensors == {name: tensor_checksum(tensors[name]) for name in known}
    assert len(known) == 6 + EXPERTS
    ranks[-1].model.o.data[0, 0] += 1
    changed = merge_checksums([rank.receiver.checksums() for rank in ranks])
    assert {name for name in known if changed.tensors[name] != merged.tensors[name]} == {"o.weight"}


def test_replicas_that_differ_are_a_fault():
    ranks = [Rank(ToyModel(i, 2), i) for i in range(2)]
    update(ranks, checkpoint(1))
    ranks[1].model.norm.data[0] += 1
    with pytest.raises(EngineFaultError, match=r"norm\.weight"):
        merge_checksums([rank.receiver.checksums() for rank in ranks])


def test_before_an_update_the_engines_own_names_are_used():
    ranks = [Rank(ToyModel(i, 2), i) for i in range(2)]
    merged = merge_checksums([rank.receiver.checksums() for rank in ranks])
    assert merged.layout == "engine"
    assert merged.tensors["norm@1"] == tensor_checksum(ranks[1].model.norm)
    update(ranks[:1], checkpoint(1))
    with pytest.raises(EngineFaultError):
        merge_checksums([rank.receiver.checksums() for rank in ranks])


def replicas(tp):
    """Two data-parallel engines with the same weights."""
    engines = [[Rank(ToyModel(i, tp), i) for i in range(tp)] for _ in range(2)]
    for ranks in engines:
        update(ranks, checkpoint(1))
    return engines


def sums(engines):
    return merge_engines([[rank.receiver.checksums() for rank in ranks] for ranks in engines])


@pytest.mark.parametrize("tp", [1, 2])
def test_one_engine_answers_as_it_always_did(tp):
    [ranks, _] = replicas(tp)
    assert sums([ranks]) == merge_checksums([rank.receiver.checksums() for rank in ranks])
    assert set(msgspec.to_builtins(sums([ranks]))) == {"layout", "tensors", "partial", "opaque"}


@pytest.mark.parametrize("tp", [1, 2])
def test_replicas_that_agree_answer_as_one(tp):
    engines = replicas(tp)
    merged = sums(engines)
    alone = sums(engines[:1])
    assert (merged.tensors, merged.partial, merged.opaque) == (alone.tensors, alone.partial, alone.opaque)
    assert merged.differing == []
    assert merged.engines == [alone, alone]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_replica_that_differs_is_named_and_cannot_pass_for_the_trainers(tp):
    engines = replicas(tp)
    before = sums(engines)
    engines[1][-1].model.o.data[0, 0] += 1
    merged = sums(engines)
    assert merged.differing == ["o.weight"]
    assert merged.tensors == {name: value for name, value in before.tensors.items() if name != "o.weight"}
    own = tensor_checksum(checkpoint(1)["o.weight"])
    assert [one.tensors["o.weight"] == own for one in merged.engines] == [True, False]


def test_experts_spread_over_engines_are_whole_together():
    """Each engine alone has some rows; as in `test_ranks_add_up…`, but the ranks are engines."""
    engines = [[Rank(ToyModel(i, 2), i)] for i in range(2)]
    update([rank for [rank] in engines], checkpoint(1))
    merged = sums(engines)
    assert merged.tensors["o.weight"] == tensor_checksum(checkpoint(1)["o.weight"])
    assert all("o.weight" in one.partial for one in merged.engines)
    assert merged.differing == []


def test_an_update_that_reached_one_engine_only_is_a_fault():
    engines = [[Rank(ToyModel(0, 1), 0)] for _ in range(2)]
    before = sums(engines)
    assert before.layout == "engine"
    assert before.tensors == before.engines[0].tensors
    update(engines[0], checkpoint(1))
    with pytest.raises(EngineFaultError, match="and others have not"):
        sums(engines)
