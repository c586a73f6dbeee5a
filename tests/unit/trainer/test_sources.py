"""Sources of one process: plain modules, checkpoints on disk, generators."""

import json
from collections.abc import Mapping

import pytest
import torch
from live_bytes import LiveBytes
from models import Tied, collected, same, whole
from safetensors.torch import save_file
from torch import nn

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer import CheckpointSource, ModelSource, Offloader, StreamSource
from rl_memory_plugins.trainer.sources import outgoing
from rl_memory_plugins.weights.manifest import TensorSpec
from rl_memory_plugins.weights.source import ResidentSource, TensorSource, spec_of


def test_a_module_is_sent_with_its_buffers_and_tied_weights_once():
    model = Tied()
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    got = collected(ModelSource(model))
    assert "head.weight" not in got and "blocks.0.scale" in got and "scratch" not in got
    expected = whole(model)
    del expected["scratch"]
    same(got, expected)


def test_a_module_is_looked_at_anew_for_every_update():
    model = Tied()
    source = ModelSource(model)
    before = collected(source)
    model.norm = nn.LayerNorm(8, bias=False)
    after = collected(source)
    assert set(before) - set(after) == {"norm.bias"}


class Lazy(Mapping):
    """A state dict that makes each tensor when it is asked for."""

    def __len__(self):
        return 20

    def __iter__(self):
        return iter(f"w{i}" for i in range(20))

    def __getitem__(self, name):
        return torch.full((2,), float(name[1:]))


def test_a_mapping_may_make_its_tensors_when_they_are_asked_for():
    assert [spec.name for spec in ModelSource(Lazy()).specs()] == list(Lazy())
    same(collected(ModelSource(Lazy())), dict(Lazy()))


def test_wrappers_leave_no_trace_in_names():
    tensors = {"_orig_mod.a._checkpoint_wrapped_module.w": torch.zeros(1), "_fsdp_wrapped_module.b": torch.zeros(1)}
    assert list(collected(ModelSource(tensors))) == ["a.w", "b"]


def test_dtype_is_for_floating_point_only_and_rename_may_leave_out():
    tensors = {"a": torch.randn(3), "count": torch.tensor([3]), "drop": torch.zeros(1)}
    source = ModelSource(tensors, dtype=torch.bfloat16, rename=lambda name: None if name == "drop" else name.upper())
    same(collected(source), {"A": tensors["a"].bfloat16(), "COUNT": tensors["count"]})


def test_offloaded_tensors_are_read_where_they_are():
    model = Tied()
    expected = whole(model)
    offloader = Offloader(model, moves=lambda tensor: True)
    offloader.offload()
    source = ModelSource(model)
    held = offloader._host.arena.held_bytes
    with LiveBytes() as live:
        got = {name: tensor.clone() for name, tensor in source.tensors()}
    same(got, expected)
    assert live.peak == sum(tensor.nbytes for tensor in expected.values())  # the test's own clones
    assert offloader._host.arena.held_bytes == held
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters())


def test_casting_holds_one_tensor_at_a_time():
    tensors = {f"{i}": torch.randn(1000) for i in range(20)}
    with LiveBytes() as live:
        for _name, _tensor in ModelSource(tensors, dtype=torch.bfloat16).tensors():
            del _tensor
    assert live.peak == 2000


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on another device."""

    device = torch.device("meta")


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 4)])
def test_a_cast_piece_by_piece_is_the_same(monkeypatch, shape):
    monkeypatch.setattr(outgoing, "PIECE", 4)
    tensor = torch.randn(shape).mT if len(shape) == 2 else torch.randn(shape)
    for given in (tensor, tensor.as_subclass(Elsewhere)):
        made = torch.empty(tensor.shape, dtype=torch.bfloat16)
        outgoing.copy_into(made, given)
        assert torch.equal(made, tensor.bfloat16())


def test_only_plain_tensors_in_their_dtype_are_resident():
    model = Tied()
    source = ModelSource(model)
    assert isinstance(source, ResidentSource)
    addresses = [tensor.data_ptr() for tensor in source.resident()]
    assert addresses == [tensor.data_ptr() for _, tensor in source.tensors()]
    assert ModelSource(model, dtype=torch.bfloat16).resident() is None
    assert ModelSource(model, dtype=torch.float32).resident() is not None


@pytest.fixture
def checkpoint(tmp_path):
    """Three files, of which the index names two."""
    files = {
        "model-1.safetensors": {"a": torch.randn(4, 3), "b": torch.randn(5).bfloat16()},
        "model-2.safetensors": {"c": torch.tensor([[1, 2]]), "d": torch.randn(2, 2).to(torch.float8_e4m3fn)},
        "consolidated.safetensors": {"a": torch.zeros(1)},
    }
    for name, tensors in files.items():
        save_file(tensors, tmp_path / name)
    weights = {name: file for file, tensors in files.items() if "model" in file for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return tmp_path, files["model-1.safetensors"] | files["model-2.safetensors"]


def test_a_checkpoint_follows_its_index(checkpoint):
    folder, expected = checkpoint
    got = collected(CheckpointSource(folder))
    assert torch.equal(got.pop("d").float(), expected.pop("d").float())
    same(got, expected)


def test_a_checkpoint_may_be_one_file_renamed_and_cast(checkpoint):
    folder, expected = checkpoint
    source = CheckpointSource(folder / "model-1.safetensors", dtype=torch.float16, rename=lambda name: f"model.{name}")
    same(collected(source), {f"model.{name}": expected[name].half() for name in "ab"})


def test_a_folder_without_an_index_gives_all_its_files(tmp_path):
    for name in "xy":
        save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    assert list(collected(CheckpointSource(tmp_path))) == ["x", "y"]


@pytest.mark.parametrize("kind", ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"])
def test_a_checkpoint_may_hold_floats_of_eight_bits(tmp_path, kind):
    tensor = torch.tensor([0.5, 1, 2]).to(getattr(torch, f"float8_{kind}"))
    save_file({"scale": tensor}, tmp_path / "model.safetensors")
    got = collected(CheckpointSource(tmp_path))["scale"]
    assert got.dtype == tensor.dtype and torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


def test_missing_files_are_found_before_anything_is_sent(checkpoint, tmp_path_factory):
    folder, _ = checkpoint
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(InvalidRequestError) as caught:
        CheckpointSource(folder)
    assert caught.value.details["missing"] == [str(folder / "model-2.safetensors")]
    with pytest.raises(InvalidRequestError):
        CheckpointSource(tmp_path_factory.mktemp("empty"))


def test_a_stream_runs_anew_for_every_update_and_lazily():
    made = []

    def make():
        for number in range(3):
            made.append(number)
            yield f"{number}", torch.full((2,), float(number))

    source = StreamSource([TensorSpec(f"{i}", "bfloat16", (2,)) for i in range(3)], make, dtype=torch.bfloat16)
    tensors = source.tensors()
    assert made == []
    next(tensors)
    assert made == [0]
    for _ in range(2):
        same(collected(source), {f"{i}": torch.full((2,), float(i)).bfloat16() for i in range(3)})


def test_all_are_tensor_sources(checkpoint):
    specs = [spec_of("a", torch.zeros(2))]
    for source in (ModelSource({}), CheckpointSource(checkpoint[0]), StreamSource(specs, dict)):
        assert isinstance(source, TensorSource)
