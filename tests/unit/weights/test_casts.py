"""Casts of an update: those that the engine's own loader makes, and no others."""

import pytest
import torch
from safetensors.torch import save_file
from toys import Rank, ToyModel, checkpoint, update

from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.trainer import ModelSource, StreamSource
from rl_memory_plugins.weights.casts import CastRule
from rl_memory_plugins.weights.checkpoint_files import DTYPES, EngineCheckpoint, dtypes_in
from rl_memory_plugins.weights.manifest import TensorSpec

WIDENING = {"from": "bfloat16", "to": "float32", "direction": "widening", "tensors": 1, "names": ["norm.weight"]}


def with_norm(dtype, seed=3):
    tensors = checkpoint(seed)
    tensors["norm.weight"] = tensors["norm.weight"].to(dtype)
    return tensors


def masters(seed=3):
    return {name: tensor.float() + 1e-4 for name, tensor in checkpoint(seed).items()}


def refused(outcome):
    assert isinstance(outcome, ManifestError)
    return {m["name"]: m["expected"] for m in outcome.details["mismatches"] if m["kind"] == "dtype"}


def test_a_cast_that_keeps_every_value_is_made_and_reported():
    rank = Rank()
    sent = with_norm(torch.bfloat16)
    outcome, (thread,) = update([rank], sent)
    assert thread.report["casts"] == outcome["receivers"][0]["casts"] == [WIDENING]
    assert torch.equal(rank.model.norm, sent["norm.weight"].float())


def test_a_cast_that_rounds_needs_a_dtype_that_the_trainer_has_chosen():
    rank = Rank()
    before = rank.model.snapshot()
    assert set(refused(update([rank], masters())[0]).values()) == {"bfloat16"}
    rank.model.assert_unchanged(before)
    outcome, (thread,) = update([rank], ModelSource(masters(), dtype=torch.float32))
    (cast,) = thread.report["casts"]
    assert (cast["from"], cast["to"], cast["direction"]) == ("float32", "bfloat16", "narrowing")
    assert cast["tensors"] == len(cast["names"]) == 8 and "norm.weight" not in cast["names"]
    assert torch.equal(rank.model.o, masters()["o.weight"].bfloat16())
    assert torch.equal(rank.model.norm, masters()["norm.weight"])  # not rounded on the way


def test_a_stream_with_a_dtype_has_chosen_it():
    sent = masters()
    specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in sent.items()]
    rank = Rank()
    assert refused(update([rank], StreamSource(specs, sent.items))[0])
    assert not isinstance(update([rank], StreamSource(specs, sent.items, dtype=torch.float32))[0], Exception)
    assert torch.equal(rank.model.o, sent["o.weight"].bfloat16())


@pytest.mark.parametrize("options", [{"strict": True}, {"strict": True, "any": True}])
def test_strict_dtypes_refuses_every_cast(options):
    rank = Rank(casts=CastRule(**options))
    assert refused(update([rank], with_norm(torch.bfloat16))[0]) == {"norm.weight": "float32"}
    assert "norm.weight" in refused(update([rank], ModelSource(with_norm(torch.float64), dtype=torch.float64))[0])


def test_any_cast_is_made_when_the_engine_is_told_to():
    rank = Rank(casts=CastRule(any=True))
    sent = with_norm(torch.float64)
    assert not isinstance(update([rank], sent)[0], Exception)
    assert torch.equal(rank.model.norm, sent["norm.weight"].float())


def test_the_engine_casts_its_own_checkpoint_as_at_its_start(tmp_path):
    """A float32 checkpoint of a bfloat16 engine. Of the same tensors, only those of the same dtype are taken."""
    sent = masters()
    save_file({**sent, "q.weight": sent["q.weight"].half()}, tmp_path / "model.safetensors")
    rank = Rank(casts=CastRule(checkpoint=EngineCheckpoint(lambda: (str(tmp_path), None)).specs))
    assert refused(update([rank], sent)[0]) == {"q.weight": "bfloat16"}
    sent["q.weight"] = sent["q.weight"].half()
    assert not isinstance(update([rank], sent)[0], Exception)
    assert torch.equal(rank.model.o, sent["o.weight"].bfloat16())


@pytest.mark.parametrize("sent", ["float8_e4m3fn", "int8", "int64"])
@pytest.mark.parametrize("held", ["bfloat16", "float8_e4m3fn", "int32"])
def test_a_quantised_tensor_is_never_cast_to_another_meaning(sent, held):
    assert sent == held or not CastRule().allows(TensorSpec("a", sent, (1,), chosen=True), held)
    assert not CastRule().allows(TensorSpec("a", "float32", (1,), chosen=True), "float8_e4m3fn")


def test_an_engine_without_readable_files_has_no_checkpoint(tmp_path, caplog):
    assert EngineCheckpoint(lambda: (str(tmp_path), None)).specs() == {}
    assert EngineCheckpoint(lambda: ("nobody/has-this-model", None)).specs() == {}
    assert not caplog.records
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    assert EngineCheckpoint(lambda: (str(tmp_path), None)).specs() == {}
    assert "cannot read" in caplog.text


def test_the_files_of_an_index_are_read(tmp_path):
    for number in (1, 2):
        tensor = torch.zeros(2, dtype=[torch.bfloat16, torch.float8_e4m3fn][number - 1])
        save_file({f"{number}": tensor}, tmp_path / f"{number}.safetensors")
    save_file({"other": torch.zeros(1)}, tmp_path / "not-of-the-index.safetensors")
    index = '{"weight_map": {"1": "1.safetensors", "2": "2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert dtypes_in(tmp_path) == {"1": "bfloat16", "2": "float8_e4m3fn"}


def test_dtypes_of_files_have_the_names_of_torch(tmp_path):
    tensors = {name: torch.zeros(2, 3, dtype=getattr(torch, name)) for name in DTYPES.values() if hasattr(torch, name)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    specs = EngineCheckpoint(lambda: (str(tmp_path), None)).specs()
    assert specs == {name: TensorSpec(name, name, (2, 3)) for name in tensors}
    assert {"bfloat16", "float8_e4m3fn"} <= set(specs)


def test_a_sharded_rank_reports_the_casts_of_its_own_memory():
    ranks = [Rank(ToyModel(i, 2), i) for i in range(2)]
    _, threads = update(ranks, with_norm(torch.bfloat16))
    assert [thread.report["casts"] for thread in threads] == [[WIDENING]] * 2
