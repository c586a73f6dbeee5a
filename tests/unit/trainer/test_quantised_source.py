"""What a trainer sends for a quantised checkpoint: read back element by element, as the formats define it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer import ModelSource, QuantisedSource
from rl_memory_plugins.trainer.once import Once
from rl_memory_plugins.trainer.sources import quantised
from rl_memory_plugins.trainer.sources.drafted import with_draft

ROWS, COLUMNS, GROUP = 24, 64, 32
FP8 = torch.float8_e4m3fn


def compressed(layout: str, weights: dict[str, Any], **activations: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    if activations:
        group["input_activations"] = activations
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def bits_of(packed: torch.Tensor, row: int, column: int, bits: int, dimension: int, order: Any = None) -> int:
    """One integer of a packed tensor, by its place before packing."""
    place = [row, column]
    index, inside = divmod(place[dimension], 32 // bits)
    place[dimension] = index
    inside = inside if order is None else order.index(inside)
    return (int(packed[tuple(place)]) >> (bits * inside)) & (2**bits - 1)


def by_scale(t: dict[str, torch.Tensor], row: int, column: int) -> float:
    return float(t["weight"].float()[row, column] * t["weight_scale"])


def by_row(t: dict[str, torch.Tensor], row: int, column: int) -> float:
    return float(t["weight"].float()[row, column] * t["weight_scale"][row, 0])


def by_block(t: dict[str, torch.Tensor], row: int, column: int) -> float:
    scale = t.get("weight_scale_inv", t.get("weight_scale"))
    assert scale is not None
    return float(t["weight"].float()[row, column] * scale[row // 16, column // 48])


def by_packed(t: dict[str, torch.Tensor], row: int, column: int) -> float:
    zero = bits_of(t["weight_zero_point"], row, column // GROUP, 4, 0) if "weight_zero_point" in t else 8
    return (bits_of(t["weight_packed"], row, column, 4, 1) - zero) * float(t["weight_scale"][row, column // GROUP])


def by_gptq(t: dict[str, torch.Tensor], row: int, column: int, bits: int = 4, stored: int = 1) -> float:
    group = int(t["g_idx"][column])
    zero = bits_of(t["qzeros"], group, row, bits, 1) + stored
    return (bits_of(t["qweight"], column, row, bits, 0) - zero) * float(t["scales"][group, row])


def by_awq(t: dict[str, torch.Tensor], row: int, column: int) -> float:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    zero = bits_of(t["qzeros"], column // GROUP, row, 4, 1, order)
    return (bits_of(t["qweight"], column, row, 4, 1, order) - zero) * float(t["scales"][column // GROUP, row])


CHANNEL_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[dict[str, Any], Any, float]] = {  # the error allowed, relative to the largest weight
    "fp8 by tensor": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, by_scale, 1 / 16),
    "fp8 by block": ({"quant_method": "fp8", "weight_block_size": [16, 48]}, by_block, 1 / 16),
    "fp8 by block, ue8m0": (
        {"quant_method": "fp8", "weight_block_size": [16, 48], "scale_fmt": "ue8m0"},
        by_block,
        1 / 16,
    ),
    "w8a8_int8": ({"quant_method": "w8a8_int8"}, by_row, 1 / 254),
    "int8 by row": (compressed("int-quantized", CHANNEL_INT8, dynamic=True), by_row, 1 / 254),
    "int8 by tensor": (compressed("int-quantized", {**CHANNEL_INT8, "strategy": "tensor"}), by_scale, 1 / 254),
    "ct fp8 by row": (compressed("float-quantized", {**CHANNEL_INT8, "type": "float"}), by_row, 1 / 16),
    "ct fp8 by block": (
        compressed(
            "float-quantized", {**CHANNEL_INT8, "type": "float", "strategy": "block", "block_structure": [16, 48]}
        ),
        by_block,
        1 / 16,
    ),
    "int4": (compressed("pack-quantized", INT4), by_packed, 1 / 14),
    "int4 with zero points": (compressed("pack-quantized", {**INT4, "symmetric": False}), by_packed, 1 / 14),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}, by_gptq, 1 / 14),
    "gptq with zero points": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}, by_gptq, 1 / 14),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda *args: by_gptq(*args, stored=0),
        1 / 14,
    ),
    "gptq, 8 bits by row": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        lambda *args: by_gptq(*args, bits=8),
        1 / 127,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, by_awq, 1 / 14),
}

#: Variants whose values the formats above show.
LISTED_TOO = {
    "awq by row": {"quant_method": "awq", "bits": 4, "group_size": -1, "version": "gemm"},
    "int4 by row": compressed("pack-quantized", {**INT4, "strategy": "channel"}),
    "int8, packed": compressed("pack-quantized", {**INT4, "num_bits": 8}),
    "int8 by row with zero points, packed": compressed(
        "pack-quantized", {**INT4, "num_bits": 8, "strategy": "channel", "symmetric": False}
    ),
}
ALL = {name: config for name, (config, _, _) in FORMATS.items()} | LISTED_TOO


def weight(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(1)
    made = torch.randn(ROWS, COLUMNS)
    made[3] = 0  # a scale of zero would make NaNs
    return made.to(dtype)


def markers(config: dict[str, Any]) -> list[str]:
    ends = ("weight", "weight_scale", "weight_scale_inv", "weight_packed", "qweight")
    method = config["quant_method"]
    kept = {"fp8": ends[:3], "gptq": ends[4:], "awq": ends[4:]}.get(method, ends[:2] + ends[3:4])
    return [f"layer.{end}" for end in kept]


@pytest.mark.parametrize(("config", "read", "error"), FORMATS.values(), ids=FORMATS)
def test_a_weight_is_rounded_to_the_nearest_value(config: dict[str, Any], read: Any, error: float) -> None:
    tensors = {"norm.weight": torch.ones(4), "layer.weight": weight(), "layer.bias": torch.ones(ROWS)}
    source = QuantisedSource(tensors, config, [*markers(config), "norm.weight"])
    sent = dict(source.tensors())
    assert torch.equal(sent.pop("norm.weight"), tensors["norm.weight"])
    assert torch.equal(sent.pop("layer.bias"), tensors["layer.bias"])
    parts = {name.removeprefix("layer."): tensor for name, tensor in sent.items()}
    largest = float(weight().abs().max())
    for row in range(ROWS):
        for column in range(0, COLUMNS, 5):
            value = read(parts, row, column)
            assert abs(value - float(weight()[row, column])) <= error * largest + 0.004 * abs(value), (row, column)
    assert all(tensor.is_contiguous() for tensor in parts.values())
    if config.get("scale_fmt"):
        assert torch.equal(torch.frexp(parts["weight_scale_inv"])[0], torch.full_like(parts["weight_scale_inv"], 0.5))
    listed = [(spec.name, spec.dtype, tuple(spec.shape)) for spec in source.specs()]
    found = [(name, str(tensor.dtype)[6:], tuple(tensor.shape)) for name, tensor in source.tensors()]
    assert listed == found


@pytest.mark.parametrize(("config", "_read", "_error"), FORMATS.values(), ids=FORMATS)
def test_a_weight_that_is_negated_without_a_copy_is_rounded_as_it_reads(config: Any, _read: Any, _error: Any) -> None:
    negated = torch._neg_view(-weight())  # type: ignore[attr-defined]
    assert negated.is_neg() and torch.equal(negated, weight())
    made = dict(QuantisedSource({"layer.weight": negated}, config, markers(config)).tensors())
    expected = dict(QuantisedSource({"layer.weight": weight()}, config, markers(config)).tensors())
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name].float(), expected[name].float()) for name in expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(32, 64), (96, 32), (64, 160)])
@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_what_is_listed_is_what_is_made(config: Any, shape: Any, dtype: str) -> None:
    source = QuantisedSource({"layer.weight": torch.randn(shape).to(getattr(torch, dtype))}, config, markers(config))
    listed = [(spec.name, spec.dtype, spec.shape) for spec in source.specs()]
    assert listed == [(name, str(one.dtype)[6:], tuple(one.shape)) for name, one in source.tensors()]


LISTED = """
import sys, torch
from rl_memory_plugins.trainer import QuantisedSource
for names, config in eval(sys.argv[1]):
    source = QuantisedSource({"layer.weight": torch.ones(64, 64)}, config, names)
    source.specs()
    assert "torch._dynamo" not in sys.modules, config
"""


def test_to_list_the_tensors_does_not_import_the_compiler() -> None:
    """It takes seconds, in which the engine of a first update would be closed."""
    configs = [(markers(config), config) for config in ALL.values()]
    subprocess.run([sys.executable, "-c", LISTED, repr(configs)], check=True, timeout=100)


@pytest.mark.parametrize(
    ("config", "shape", "why"),
    [
        (FORMATS["gptq"][0], (32, 36), "a group has 32 values"),
        (FORMATS["awq"][0], (36, 32), "a packed word has 8 values"),
        (FORMATS["fp8 by block"][0], (2, 32, 32), "outputs and inputs"),
    ],
)
def test_a_weight_that_the_format_cannot_hold(config: Any, shape: Any, why: str) -> None:
    source = QuantisedSource({"layer.weight": torch.ones(shape)}, config, markers(config))
    with pytest.raises(InvalidRequestError, match=rf"layer\.weight cannot be quantised: .*{why}"):
        source.specs()


def test_names_decide_which_weights_are_quantised() -> None:
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    tensors = {"lm_head.weight": weight(), "layer.weight": weight(), "gate.weight": weight()}
    names = ["lm_head.weight", "layer.weight", "layer.weight_scale_inv", "gate.weight"]
    sent = dict(QuantisedSource(tensors, config, names).tensors())
    assert {name: tensor.dtype for name, tensor in sent.items()} == {
        "lm_head.weight": torch.bfloat16,
        "layer.weight": FP8,
        "layer.weight_scale_inv": torch.float32,
        "gate.weight": torch.bfloat16,
    }


def test_one_weight_at_a_time_is_quantised() -> None:
    made = []

    class Source:
        def specs(self) -> Any:
            raise AssertionError

        def tensors(self) -> Any:
            for name in ("one", "two"):
                made.append(name)
                yield f"{name}.weight", weight()

    names = ["one.weight_scale", "two.weight_scale"]
    arriving = QuantisedSource(Source(), {"quant_method": "fp8"}, names).tensors()
    assert next(arriving)[0] == "one.weight" and made == ["one"]
    assert next(arriving)[0] == "one.weight_scale" and made == ["one"]


BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 48]}


def test_resident_weights_are_rounded_together_and_come_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "GROUP_VALUES", 3 * ROWS * COLUMNS)
    tensors = {f"{number}.weight": weight() + number for number in range(7)}
    tensors["4.weight"] = tensors["4.weight"].half()
    tensors["norm.weight"] = torch.ones(3)
    tensors["7.weight"] = weight()
    names = [f"{number}.weight_scale_inv" for number in range(8)]
    source = QuantisedSource(tensors, BLOCKS, names)
    assert source.stable
    assert source.group_bytes == Once(with_draft(source, source)).group_bytes == 3 * ROWS * COLUMNS
    many = source._format.quantise_many
    assert many is not None
    together: list[int] = []
    counting = source._format._replace(quantise_many=lambda each, into: together.append(len(each)) or many(each, into))
    monkeypatch.setattr(source, "_format", counting)
    sent = list(source.tensors())
    assert together == [3, 2, 1, 2]  # of three weights one has another dtype
    assert [name for name, _ in sent] == [spec.name for spec in source.specs()]
    for name, tensor in sent:
        base = name.rsplit(".", 1)[0]
        alone = dict(QuantisedSource({f"{base}.weight": tensors[f"{base}.weight"]}, BLOCKS, names).tensors())
        assert torch.equal(tensor.float(), alone.get(name, tensor).float())


def test_weights_are_made_in_their_places_in_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The places change as a sender changes them, when the first tensor of the next bucket is taken."""
    tensors = {f"{number}.weight": weight() + number for number in range(8)}
    source = QuantisedSource(tensors, BLOCKS, [f"{number}.weight_scale_inv" for number in range(8)])
    specs = {spec.name: spec for spec in source.specs()}
    expected = dict(source.tensors())
    each = {name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}
    both = ("weight", "weight_scale_inv")
    # The places of four buckets. Of 2 the scales are in the next bucket; the weight of 3 is cut.
    buckets = [[*(f"{i}.{one}" for i in (0, 1) for one in both), "2.weight"], ["2.weight_scale_inv"]]
    buckets += [["3.weight_scale_inv", *(f"{i}.{one}" for i in (4, 5) for one in both)]]
    buckets += [[f"{i}.{one}" for i in (6, 7) for one in both]]
    many = source._format.quantise_many
    assert many is not None
    together: list[int] = []
    counting = source._format._replace(quantise_many=lambda each, into: together.append(len(each)) or many(each, into))
    monkeypatch.setattr(source, "_format", counting)
    places: dict[str, torch.Tensor] = {}
    made = source.tensors_in(places)
    found: dict[str, torch.Tensor] = {}
    for names, end in zip(buckets, ("2.weight", "3.weight", "5.weight_scale_inv", "7.weight_scale_inv"), strict=True):
        places.clear()
        places.update({name: each[name] for name in names})
        while end not in found:
            name, tensor = next(made)
            found[name] = tensor
    assert next(made, None) is None
    assert list(found) == list(expected)
    assert together == [3, 1, 2, 2]
    assert {name for name, tensor in found.items() if tensor is each[name]} == {
        f"{i}.{one}" for i in (0, 1, 4, 5, 6, 7) for one in both
    }
    assert all(torch.equal(tensor.float(), expected[name].float()) for name, tensor in found.items())


def test_a_weight_on_another_device_than_the_bucket_is_made_where_it_lies() -> None:
    """A kernel there would write to an address of the bucket's device."""
    source = QuantisedSource({"a.weight": weight()}, BLOCKS, ["a.weight_scale_inv"])
    places = {spec.name: torch.empty(spec.shape, device="meta") for spec in source.specs()}
    made = dict(source.tensors_in(places))
    assert all(made[name].device.type == "cpu" for name in places)


def test_whether_a_source_is_stable_is_found_out_again_for_each_update() -> None:
    inner = ModelSource({"a.weight": weight()})
    source = QuantisedSource(inner, BLOCKS, ["a.weight_scale_inv"])
    assert source.stable
    source._source = ModelSource({"a.weight": weight()}, dtype=torch.float16)
    assert not source.stable
    source.specs()
    assert not source.stable


def test_a_source_that_makes_its_tensors_gives_one_at_a_time() -> None:
    tensors = {"a.weight": weight(), "b.weight": weight()}
    source = QuantisedSource(ModelSource(tensors, dtype=torch.float16), BLOCKS, ["a.weight_scale_inv"])
    assert not source.stable and source.group_bytes == 0
    assert [name for name, _ in source.tensors()] == ["a.weight", "a.weight_scale_inv", "b.weight"]
    assert all(len(group) <= 1 for group in source._groups())


REFUSED = {
    "fixed scales of activations": {"quant_method": "fp8", "activation_scheme": "static"},
    "an unknown format": {"quant_method": "mxfp4"},
    "inputs in another order": compressed("pack-quantized", {**INT4, "actorder": "group"}),
    "awq of another kernel": {"quant_method": "awq", "bits": 4, "version": "gemv"},
}


@pytest.mark.parametrize("config", REFUSED.values(), ids=REFUSED)
def test_what_weights_alone_do_not_give_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be quantised") as error:
        QuantisedSource({"layer.weight": weight()}, config, ["layer.qweight", "layer.weight_packed"])
    assert error.value.details["field"] == "quantization_config"


def test_the_engine_s_checkpoint_gives_format_and_names(tmp_path: Any) -> None:
    plain = QuantisedSource({"layer.weight": weight()}, {"quant_method": "fp8"}, ["layer.weight_scale"])
    save_file({name: tensor.clone() for name, tensor in plain.tensors()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    sent = dict(QuantisedSource.for_checkpoint({"layer.weight": weight()}, tmp_path).tensors())
    assert sent.keys() == {"layer.weight", "layer.weight_scale"}
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match="is not quantised"):
        QuantisedSource.for_checkpoint({"layer.weight": weight()}, tmp_path)
    with pytest.raises(InvalidRequestError, match="no tensor whose name ends"):
        QuantisedSource({"layer.weight": weight()}, {"quant_method": "fp8"}, ["layer.weight"])


@pytest.mark.parametrize("config", [{"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [16, 48]}])
def test_values_are_divided_by_their_scale_in_float32(config: dict[str, Any]) -> None:
    """In bfloat16 the quotient would be rounded twice."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float32).bfloat16()
    name = "weight_scale_inv" if "weight_block_size" in config else "weight_scale"
    made = dict(QuantisedSource({"a.weight": weight}, config, [f"a.{name}"]).tensors())
    scale = made[f"a.{name}"]
    if scale.dim():
        scale = scale.repeat_interleave(16, 0)[:ROWS].repeat_interleave(48, 1)[:, :COLUMNS]
    assert torch.equal(made["a.weight"].float(), (weight.float() / scale).to(FP8).float())


@pytest.mark.parametrize("block", [[128], [1, 128, 128], 128, "ab"])
def test_a_block_is_rows_and_columns(block: Any) -> None:
    config = {"quant_method": "fp8", "weight_block_size": block}
    with pytest.raises(InvalidRequestError, match="a block is rows and columns") as caught:
        QuantisedSource({"a.weight": torch.ones(2, 2)}, config, ["a.weight_scale_inv"])
    assert caught.value.details["field"] == "quantization_config"
