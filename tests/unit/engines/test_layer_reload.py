"""The reload of layers that an engine has transformed: the state of a first load, in the old memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_memory_plugins.engines import layer_reload as reload_module
from rl_memory_plugins.engines import layer_templates, post_load
from rl_memory_plugins.engines.layer_reload import LayerReload, reset
from rl_memory_plugins.errors import ManifestError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights.feed import Feed
from rl_memory_plugins.weights.manifest import Manifest
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.source import spec_of

SIZE = 4


class Kernel:
    """Holds constants of its own, made anew by each step."""

    def __init__(self) -> None:
        self.workspace: torch.Tensor | None = None
        self.steps = 0


class Packing:
    """A quantisation method: eight bits with a scale, transposed. A second step of one object would do nothing."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.packed = False

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.packed:
            return
        self.packed = True
        self.kernel.workspace = torch.zeros(3)
        self.kernel.steps += 1
        scale = layer.weight.abs().max() / 127 * layer.multiplier
        packed = (layer.weight / scale).round().to(torch.int8).t().contiguous()
        self.kernel.row_sums = packed.sum(0)
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale.reshape(1), requires_grad=False)


class Linear(torch.nn.Module):
    def __init__(self, method: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(SIZE, SIZE).fill_(9), requires_grad=False)
        self.weight.weight_loader = self.load
        self.multiplier = torch.nn.Parameter(torch.ones(()), requires_grad=False)  # no checkpoint has it
        self.quant_method = method

    def load(self, parameter: Any, weight: torch.Tensor) -> None:
        assert parameter.shape == weight.shape
        parameter.data.copy_(weight)


class Model(torch.nn.Module):
    """Two transformed layers and a plain one; and `absorbed`, which the loader computes of the second layer."""

    def __init__(self, absorbs: bool = False, method: Any = Packing) -> None:
        super().__init__()
        self.one, self.two = Linear(method()), Linear(method())
        self.norm = torch.nn.Parameter(torch.zeros(SIZE), requires_grad=False)
        self.absorbed = torch.zeros(SIZE)
        self.absorbs = absorbs
        self.loaded: list[str] = []  # what the loader itself got, without the first load and traces

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            if not weight.is_meta:
                self.loaded.append(name)
            if name not in parameters:
                raise ValueError(f"There is no parameter named {name!r}")
            parameter: Any = parameters[name]
            if hasattr(parameter, "weight_loader"):
                parameter.weight_loader(parameter, weight)
            else:
                parameter.data.copy_(weight)
        if self.absorbs:
            self.absorbed.copy_(self.two.weight.sum(0) * 2)


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "one.weight": torch.randn(SIZE, SIZE),
        "norm": torch.randn(SIZE),
        "two.weight": torch.randn(SIZE, SIZE),
    }


def loaded(tensors: dict[str, torch.Tensor], made: type[Model] = Model, **options: Any) -> Model:
    """The model after a first load."""
    model = made(**options)
    post_load.attach(model, templates=True)
    model.load_weights(tensors.items())
    for layer in (model.one, model.two):
        layer.quant_method.process_weights_after_loading(layer)
    model.loaded.clear()
    return model


def state(model: Model) -> dict[str, torch.Tensor]:
    found = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    for name, layer in (("one", model.one), ("two", model.two)):
        found |= {
            f"{name}.{key}": value.clone() for key, value in vars(layer.quant_method.kernel).items() if key != "steps"
        }
    return {**found, "absorbed": model.absorbed.clone()}


def addresses(model: Model) -> dict[str, int]:
    found = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    return {**found, "row sums": model.one.quant_method.kernel.row_sums.data_ptr()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def loader_of(model: Model, graphs: bool = True, reload: dict[str, Any] | None = None, **options: Any) -> ModelLoader:
    watch: Any = post_load.of(model)
    return ModelLoader(
        model.load_weights,
        lambda: dict(model.named_parameters()),
        reload=lambda: LayerReload(
            watch, watch.transformed(), model.load_weights, engine="SGLang", graphs=graphs, **(reload or {})
        ),
        transformed=lambda: post_load.transformed_in(model),
        **options,
    )


def update(loader: ModelLoader, tensors: dict[str, torch.Tensor], *, partial: bool = False) -> Any:
    manifest = Manifest([spec_of(name, tensor) for name, tensor in tensors.items()], partial=partial)
    plan = loader.plan(manifest, loader.drop_outdated())

    def arrivals() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            if name in plan.opaque:
                yield name, tensor
            else:
                plan.apply(name, tensor)

    feed = arrivals()
    loader.load_with_engine(plan, feed)
    assert not list(feed)
    return plan


@pytest.mark.parametrize("absorbs", [False, True])
def test_after_an_update_the_model_is_one_that_loaded_these_weights_first(absorbs: bool) -> None:
    model = loaded(weights(1), absorbs=absorbs)
    loader, before = loader_of(model), addresses(model)
    workspace = model.one.quant_method.kernel.workspace
    for seed in (2, 3, 1):
        plan = update(loader, weights(seed))
        assert_equal(state(model), state(loaded(weights(seed), absorbs=absorbs)))
        assert addresses(model) == before
        assert model.one.quant_method.kernel.workspace is workspace
    assert set(plan.opaque) == ({*weights(1)} if absorbs else {"one.weight", "two.weight"})
    # The loader gets only the layer of which it computes something, and the plain parameter beside it.
    assert set(model.loaded) == ({"norm", "two.weight"} if absorbs else set())


def in_one_slot(loader: ModelLoader, tensors: dict[str, torch.Tensor], bucket: int) -> Any:
    """An update whose tensors come in the same memory, `bucket` of them at a time."""
    plan = loader.plan(Manifest([spec_of(name, tensor) for name, tensor in tensors.items()]), loader.drop_outdated())
    slot = torch.empty(bucket, SIZE * SIZE)
    lent: list[str] = []

    def arrivals() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(tensors.items()):
            place = slot[number % bucket][: tensor.numel()].view(tensor.shape).copy_(tensor)
            if name not in plan.opaque:
                plan.apply(name, tensor)
            elif feed.lends(name):
                lent.append(name)
                yield name, place
            else:
                yield name, tensor
            if number % bucket == bucket - 1:
                feed.finish()
                slot.fill_(float("nan"))
        feed.finish()
        slot.fill_(float("nan"))

    feed = Feed(arrivals())
    loader.load_with_engine(plan, feed)
    return lent, plan


@pytest.mark.parametrize("bucket", [1, 2, 3])
@pytest.mark.parametrize("absorbs", [False, True])
def test_tensors_that_are_only_copied_need_no_memory_of_their_own(absorbs: bool, bucket: int) -> None:
    model = loaded(weights(1), absorbs=absorbs)
    for seed in (2, 3):
        lent, plan = in_one_slot(loader_of(model), weights(seed), bucket)
        assert_equal(state(model), state(loaded(weights(seed), absorbs=absorbs)))
        assert lent == (["one.weight"] if absorbs else ["one.weight", "two.weight"])
        assert plan.is_orderless


class Clearing(Linear):
    def load(self, parameter: Any, weight: torch.Tensor) -> None:
        parameter.data.fill_(7)
        parameter.data[1:].copy_(weight[1:])


def test_writes_that_overlap_keep_their_order() -> None:
    class Overlapping(Model):
        def __init__(self) -> None:
            super().__init__()
            self.one = Clearing(Packing())

    model = loaded(weights(1), made=Overlapping)
    _, plan = in_one_slot(loader_of(model), weights(2), 3)
    assert not plan.is_orderless
    assert_equal(state(model), state(loaded(weights(2), made=Overlapping)))


def test_one_layer_at_a_time_has_temporary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, opened = loaded(weights(1)), []
    loader = loader_of(model)
    original = reload_module._Opened.close

    def close(self: Any, graphs: Any) -> None:
        opened.append([layer.weight.dtype is torch.float32 for layer in (model.one, model.two)])
        original(self, graphs)

    monkeypatch.setattr(reload_module._Opened, "close", close)
    update(loader, weights(2))
    assert opened == [[True, False], [False, True]]


def test_a_partial_update_transforms_its_layers_only() -> None:
    model = loaded(weights(1))
    update(loader_of(model), {"two.weight": weights(2)["two.weight"]}, partial=True)
    assert_equal(state(model), state(loaded({**weights(1), "two.weight": weights(2)["two.weight"]})))


def test_a_partial_update_of_what_no_checkpoint_need_have_brings_the_whole_layer() -> None:
    """Its step would transform memory that nothing has been loaded into."""
    model = loaded(weights(1))
    before = state(model)
    with pytest.raises(ManifestError, match="whole layers"):
        update(loader_of(model), {"one.multiplier": torch.tensor(2.0)}, partial=True)
    assert_equal(state(model), before)
    update(
        loader_of(model), {"one.multiplier": torch.tensor(2.0), "one.weight": weights(2)["one.weight"]}, partial=True
    )
    assert model.one.weight_scale != before["one.weight_scale"]


def test_a_partial_update_has_the_layers_that_the_loader_reads() -> None:
    model = loaded(weights(1), absorbs=True)
    before = state(model)
    with pytest.raises(WeightUpdateError, match="computes other tensors of two"):
        update(loader_of(model), {"one.weight": weights(2)["one.weight"]}, partial=True)
    assert_equal(state(model), before)
    changed = {name: weights(2)[name] for name in ("one.weight", "two.weight")}
    update(loader_of(model), changed, partial=True)
    assert_equal(state(model), state(loaded({**weights(1), **changed}, absorbs=True)))


class Router(Model):
    """A layer that is not transformed has the parameter `bias`, and so has a transformed one, as experts have."""

    def __init__(self) -> None:
        super().__init__()
        gate = torch.nn.Module()
        gate.bias = self.two.bias = torch.nn.Parameter(torch.zeros(SIZE), requires_grad=False)
        self._modules = {"gate": gate, **self._modules}  # before the experts, as in models


def routed(seed: int) -> dict[str, torch.Tensor]:
    return {**weights(seed), "gate.bias": torch.randn(SIZE)}


def test_a_parameter_that_a_plain_layer_has_too_is_loaded_with_that_layer() -> None:
    model, fresh = loaded(routed(1), Router), loaded(routed(2), Router)
    loader, places, shared = loader_of(model), addresses(model), model.two.bias
    for seed in (2, 1, 2):
        update(loader, routed(seed))
    assert_equal(state(model), state(fresh))
    assert addresses(model) == places and model.two.bias is model.gate.bias is shared
    update(loader, {"two.weight": routed(1)["two.weight"]}, partial=True)
    assert torch.equal(model.gate.bias, fresh.gate.bias) and model.two.bias is shared


def test_a_layer_that_keeps_a_copy_of_another_layer_s_parameter_is_refused() -> None:
    model = loaded(routed(1), Router)
    model.two.bias = torch.nn.Parameter(model.gate.bias * 2, requires_grad=False)  # as a step may make one
    with pytest.raises(UnsupportedError, match="copy of a parameter"):
        update(loader_of(model), routed(2))


def test_a_layer_whose_parameters_have_no_memory_yet_is_known() -> None:
    """vLLM makes such parameters while weights arrive, and quantises them (`--quantization fp8`)."""
    assert [
        layer_templates.LayerTemplate(torch.nn.Linear(2, 2, device=one)).is_deferred for one in ("meta", "cpu")
    ] == [
        True,
        False,
    ]


def test_what_the_first_load_left_as_it_was_is_known() -> None:
    watch: Any = post_load.of(loaded(weights(1)))
    assert watch.unfilled() == ["one.multiplier", "two.multiplier"]


def test_a_manifest_is_checked_against_the_checkpoint_s_layout() -> None:
    model = loaded(weights(1))
    before = state(model)
    wrong = {"one.weight": torch.zeros(SIZE, 3), "norm": torch.zeros(SIZE), "unheard.of": torch.zeros(2)}
    with pytest.raises(ManifestError) as error:
        update(loader_of(model), wrong)
    found = {(mismatch["kind"], mismatch["name"]) for mismatch in error.value.details["mismatches"]}
    assert {("shape", "one.weight"), ("unknown", "unheard.of"), ("missing", "two.weight")} <= found
    assert not any("multiplier" in name for _, name in found)
    assert_equal(state(model), before)


def test_an_update_that_breaks_off_leaves_layers_that_the_next_one_can_load(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(weights(1), absorbs=True)
    loader, before = loader_of(model), addresses(model)
    keep = reload_module.SavedLayers.keep_addresses

    def fail(*_: Any) -> None:
        raise WeightUpdateError("the step failed")

    monkeypatch.setattr(reload_module.SavedLayers, "keep_addresses", fail)
    with pytest.raises(WeightUpdateError, match="the step failed"):
        update(loader, weights(2))
    assert addresses(model) == before
    monkeypatch.setattr(reload_module.SavedLayers, "keep_addresses", keep)
    update(loader, weights(3))
    assert_equal(state(model), state(loaded(weights(3), absorbs=True)))
    assert addresses(model) == before


ROWS = 3


class PaddedModel(Model):
    """The first layer has a row that no checkpoint has, for its kernel."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.one.weight.data.zero_()
        self.one.weight.weight_loader = lambda parameter, weight: parameter.data[:ROWS].copy_(weight)


def without_padding(seed: int) -> dict[str, torch.Tensor]:
    return {**weights(seed), "one.weight": weights(seed)["one.weight"][:ROWS]}


@pytest.fixture
def undefined_memory() -> Iterator[None]:
    """`torch.empty` gives NaNs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


class Reading(PaddedModel):
    """Its loader computes something of the padded layer, which then waits for the loader's end."""

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        self.absorbed.copy_(self.one.weight.sum(0))


@pytest.mark.usefixtures("undefined_memory")
@pytest.mark.parametrize("made", [PaddedModel, Reading])
def test_the_padding_of_a_transformed_layer_is_as_after_a_first_load(
    monkeypatch: pytest.MonkeyPatch, made: type[Model]
) -> None:
    """Of large parameters the first values are not kept, and new memory holds anything."""
    monkeypatch.setattr(layer_templates, "_SMALL", 1)
    model = loaded(without_padding(1), made=made)
    specs = {name: spec_of(name, tensor) for name, tensor in without_padding(1).items()}
    loader = loader_of(model, checkpoint=lambda: specs)
    for seed in (2, 3):
        plan = update(loader, without_padding(seed))
        assert set(plan.padding) == {"one.weight"}
        assert_equal(state(model), state(loaded(without_padding(seed), made=made)))
    one = {"one.weight": without_padding(1)["one.weight"]}
    update(loader, one, partial=True)
    assert_equal(state(model), state(loaded({**without_padding(3), **one}, made=made)))


class Optional(Packing):
    """The checkpoint has no tensor of this layer's; its parameter is defined by the step."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.scale.copy_(1.0 if layer.scale <= 0 else layer.scale.item())


def test_a_layer_that_the_checkpoint_leaves_out_gets_its_default_again() -> None:
    """As scales of the KV cache: discarded memory must not keep what lies in it."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)
            self.quant_method = Optional()

    model = Model()
    model.attention = Attention()
    post_load.attach(model, templates=True)
    model.load_weights(weights(1).items())
    for layer in (model.one, model.two, model.attention):
        layer.quant_method.process_weights_after_loading(layer)
    model.attention.scale.data.fill_(float("nan"))
    loader = loader_of(model)
    update(loader, weights(2))
    assert model.attention.scale == 1.0
    update(loader, {**weights(2), "attention.scale": torch.tensor(0.5)})
    assert model.attention.scale == 0.5
    update(loader, {"one.weight": weights(3)["one.weight"]}, partial=True)
    assert model.attention.scale == 0.5
    update(loader, weights(2))
    assert model.attention.scale == 1.0


class Hiding(Packing):
    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        hidden = layer.weight.float() * 2
        self.multiply = lambda x: x @ hidden


def test_a_method_that_hides_derived_weights_is_refused_where_graphs_read_them() -> None:
    model = loaded(weights(1), method=Hiding)
    with pytest.raises(UnsupportedError, match=r"such as one by Hiding.*CUDA graphs"):
        update(loader_of(model), weights(2))
    update(loader_of(model, graphs=False), weights(2))
    x = torch.eye(SIZE)
    assert torch.equal(model.one.quant_method.multiply(x), x @ (model.one.weight.float() * 2))


class Growing(Packing):
    def process_weights_after_loading(self, layer: Any) -> None:
        rows = int((layer.weight > 0).sum())
        layer.index = torch.nn.Parameter(layer.weight.flatten()[:rows].clone(), requires_grad=False)


def test_a_step_that_makes_another_shape_of_other_weights_is_an_error() -> None:
    model = loaded(weights(1), method=Growing)
    with pytest.raises(WeightUpdateError, match=r"changed (one|two)\.index, which must not change"):
        update(loader_of(model), weights(2))
    update(loader_of(model), weights(1))


class BaseKVCacheMethod:
    """As the class of this name in both engines."""

    def process_weights_after_loading(self, layer: Any) -> None:
        scale = float(layer.k_scale)
        layer.k_scale.data.fill_(scale if scale > 0 else 1.0)


class Fp8KVCacheMethod(BaseKVCacheMethod):
    pass


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k_scale = torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        self.quant_method = Fp8KVCacheMethod()


class Cached(Model):
    """With an attention layer whose scale hardly any checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    @classmethod
    def started(cls, tensors: dict[str, torch.Tensor], *, dummy: bool) -> Cached:
        model = cls()
        post_load.attach(model, templates=True, dummy=dummy)
        if dummy:
            for parameter in model.parameters():
                parameter.data.uniform_(1e-4, 1e-3)
        model.load_weights(tensors.items())
        for layer in (model.one, model.two, model.attention):
            layer.quant_method.process_weights_after_loading(layer)
        return model


def test_an_engine_that_began_with_random_numbers_needs_no_scale_of_its_kv_cache() -> None:
    model = Cached.started({}, dummy=True)
    assert 0 < float(model.attention.k_scale) < 1
    loader = loader_of(model)
    with pytest.raises(ManifestError, match="multiplier"):  # no engine has a default for it
        update(loader, weights(1))
    multipliers = {f"{layer}.multiplier": torch.ones(()) for layer in ("one", "two")}
    update(loader, weights(1) | multipliers)
    assert float(model.attention.k_scale) == 1.0  # the default of an engine whose checkpoint has no scale
    update(loader, {**weights(2), **multipliers, "attention.k_scale": torch.tensor(0.5)})
    assert float(model.attention.k_scale) == 0.5


class Numbered(Fp8KVCacheMethod):
    """Gives kernels the scale as a number too, as both engines do."""

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        layer._k_scale_float = float(layer.k_scale)


def test_other_scales_of_the_kv_cache_where_graphs_hold_them_as_numbers() -> None:
    model, new = numbered(), {**weights(2), "attention.k_scale": torch.tensor(0.25)}
    loader = loader_of(model)
    with pytest.raises(WeightUpdateError, match=r"attention._k_scale_float from 0.5 to 0.25"):
        update(loader, new)
    update(loader, {**weights(3), "attention.k_scale": torch.tensor(0.5)})  # with the former scale it can be loaded
    assert_equal(state(model), state(numbered(seed=3)))
    update(loader_of(model, graphs=False), new)
    assert float(model.attention.k_scale) == vars(model.attention)["_k_scale_float"] == 0.25
    assert post_load.cache_scales(model) == {"attention._k_scale_float": 0.25, "attention.k_scale": 0.25}


def test_scales_of_a_kv_cache_are_compared_by_what_kernels_read() -> None:
    """Each head may have a scale, of which the number is the largest. Scales of queries are in no block."""
    model = numbered()
    model.attention.k_scale = torch.nn.Parameter(torch.tensor([0.5, 0.25]))
    model.attention._q_scale_float = 0.75
    before = post_load.cache_scales(model)
    assert before == {"attention._k_scale_float": 0.5, "attention.k_scale": [0.5, 0.25]}
    with torch.no_grad():
        model.attention.k_scale[1] = 0.125
    model.attention._q_scale_float = 1.0
    assert {name for name, one in post_load.cache_scales(model).items() if one != before[name]} == {"attention.k_scale"}
    assert post_load.cache_scales(loaded(weights(1))) == {}


def test_other_scales_of_the_kv_cache_where_graphs_read_the_tensors() -> None:
    model, new = numbered(), {**weights(2), "attention.k_scale": torch.tensor(0.25)}
    watch = post_load.of(model)
    assert watch is not None
    watch.graphs.holds = lambda layer, name: layer is not model.attention or name != "_k_scale_float"
    update(loader_of(model), new)
    assert float(model.attention.k_scale) == vars(model.attention)["_k_scale_float"] == 0.25


def numbered(seed: int = 1) -> Cached:
    model = Cached()
    model.attention.quant_method = Numbered()
    post_load.attach(model, templates=True)
    model.load_weights({**weights(seed), "attention.k_scale": torch.tensor(0.5)}.items())
    for layer in (model.one, model.two, model.attention):
        layer.quant_method.process_weights_after_loading(layer)
    return model


def test_the_kv_cache_that_the_engine_has_bound_since_stays() -> None:
    model = Cached.started({}, dummy=True)
    cache = torch.zeros(3)
    setattr(model.attention, "kv_cache", cache)  # noqa: B010  # vLLM sets it by name
    multipliers = {f"{layer}.multiplier": torch.ones(()) for layer in ("one", "two")}
    update(loader_of(model), weights(1) | multipliers)
    assert vars(model.attention)["kv_cache"] is cache


@pytest.mark.parametrize("dummy", [True, False])
def test_a_layer_that_no_checkpoint_fills_goes_back_to_the_state_of_a_first_load(dummy: bool) -> None:
    model = Cached.started({} if dummy else weights(1), dummy=dummy)
    address = model.attention.k_scale.data_ptr()
    model.attention.k_scale.data.fill_(torch.nan)
    watch: Any = post_load.of(model)
    before = state(model)
    # The multiplier lies in a layer with weights, whose step cannot run without them.
    assert reset(watch, {"attention.k_scale", "one.multiplier"}, graphs=True) == {"attention.k_scale"}
    assert float(model.attention.k_scale) == 1.0 and model.attention.k_scale.data_ptr() == address
    assert_equal(state(model), {**before, "attention.k_scale": torch.ones(())})
    model.attention.k_scale.data.fill_(0.5)
    assert not reset(watch, {"one.multiplier"}, graphs=True)
    assert float(model.attention.k_scale) == 0.5
    multipliers = {f"{layer}.multiplier": torch.ones(()) for layer in ("one", "two")}
    update(loader_of(model), weights(2) | multipliers)  # the steps still count as they did


def test_a_scale_of_the_kv_cache_that_the_checkpoint_had_must_come_again() -> None:
    loader = loader_of(Cached.started({**weights(1), "attention.k_scale": torch.tensor(0.5)}, dummy=False))
    with pytest.raises(ManifestError, match=r"attention\.k_scale"):
        update(loader, weights(1))


def test_scales_that_the_checkpoint_had_may_stay() -> None:
    """As in vLLM's own reload: a trainer has no scales of the KV cache."""
    model = Cached.started({**weights(1), "attention.k_scale": torch.tensor(0.5)}, dummy=False)
    loader = loader_of(model, graphs=False, reload={"scales_stay": True})
    for seed, new, expected in ((2, None, 0.5), (3, 0.25, 0.25), (1, None, 0.25)):
        update(loader, weights(seed) | ({} if new is None else {"attention.k_scale": torch.tensor(new)}))
        assert float(model.attention.k_scale) == expected
    assert torch.equal(model.norm, weights(1)["norm"])


class AbsorbsBoth(Model):
    absorbs_nothing = False

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        if self.absorbs_nothing:
            return
        self.absorbed.copy_(self.one.weight.sum(0) + self.two.weight.sum(0))


@pytest.mark.parametrize(("made", "times"), [(AbsorbsBoth, 2), (Model, 1)])
def test_a_plan_that_holds_several_layers_is_left_to_the_engine_s_reload(made: type[Model], times: int) -> None:
    model = loaded(weights(1), made)
    watch: Any = post_load.of(model)
    asked: list[bool] = []
    loader = loader_of(model, reload={"holds_layers": False})
    own = loader.reload

    def reload() -> Any:
        asked.append(watch.reload_holds_layers)
        return own()

    loader.reload = reload
    manifest = Manifest([spec_of(name, tensor) for name, tensor in weights(2).items()])
    loader.plan(manifest, loader.drop_outdated())
    assert asked == [False, True][:times]
    loader.reload = own
    update(loader, weights(2))  # by this reload, as there is no other here
    assert_equal(state(model), state(loaded(weights(2), made)))


def test_no_plan_outlives_the_reload_that_it_was_made_for() -> None:
    model = loaded(weights(1), AbsorbsBoth)
    watch: Any = post_load.of(model)
    loader = loader_of(model, reload={"holds_layers": False})
    norm, whole = (
        Manifest([spec_of(name, tensor) for name, tensor in weights(2).items() if name in names], partial=partial)
        for names, partial in ((["norm"], True), (weights(2), False))
    )
    model.absorbs_nothing = True
    first = loader.plan(norm, loader.drop_outdated())
    assert first is loader.plan(norm, loader.drop_outdated()) and not watch.reload_holds_layers
    model.absorbs_nothing = False
    loader.plan(whole, loader.drop_outdated())
    assert watch.reload_holds_layers and loader.plan(norm, loader.drop_outdated()) is not first


def test_a_layer_that_has_left_the_model_is_refused() -> None:
    model = loaded(weights(1))
    del model.two
    with pytest.raises(UnsupportedError, match="no longer part of the model"):
        loader_of(model).reload()
