"""Which layers count as transformed after loading, and what a second load must repeat."""

import contextlib

import pytest
import torch

from rl_memory_plugins.engines import post_load
from rl_memory_plugins.errors import UnsupportedError, WeightUpdateError


class Method:
    """A quantisation method whose step is given as a function of the layer."""

    def __init__(self, step):
        self._step = step

    def process_weights_after_loading(self, layer):
        self._step(layer)


class Layer(torch.nn.Module):
    def __init__(self, step):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))
        self.quant_method = Method(step)


class Attention(torch.nn.Module):
    """Like MLA: the step is the layer's own, and reads another layer's weights."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.absorbed = None

    def process_weights_after_loading(self, dtype):
        absorbed = self.linear.weight.t()
        if self.absorbed is None:
            self.absorbed = torch.nn.Parameter(absorbed, requires_grad=False)
        else:
            self.absorbed.copy_(absorbed)


def loaded(step):
    model = torch.nn.Sequential(Layer(step))
    post_load.attach(model)
    model[0].quant_method.process_weights_after_loading(model[0])
    return model


def set_weight(layer, tensor):
    layer.weight = torch.nn.Parameter(tensor, requires_grad=False)


def read_value(layer):
    layer.value = layer.weight.max().item()


def drop(layer):
    del layer.weight


TRANSFORMING = {
    "packed into new memory": lambda layer: set_weight(layer, layer.weight.t().contiguous()),
    "another view of the same memory": lambda layer: set_weight(layer, layer.weight.data.t()),
    "changed in place": lambda layer: layer.weight.mul_(2),
    "a number copied over it": lambda layer: layer.weight.copy_(1.0),
    "filled": lambda layer: layer.weight.zero_(),
    "other data of the same shape": lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
    "an attribute made of it": lambda layer: setattr(layer, "packed", layer.weight.to(torch.float64)),
    "a number made of it": read_value,
    "a buffer made of it": lambda layer: layer.scale.copy_(layer.weight.max()),
    "taken away": drop,
}


@pytest.mark.parametrize("step", TRANSFORMING.values(), ids=TRANSFORMING.keys())
def test_what_makes_something_of_weights_transforms_the_layer(step):
    assert post_load.of(loaded(step)).transformed() == {"0": "Method"}


HARMLESS = {
    "nothing": lambda layer: None,
    "the same memory as another parameter": lambda layer: set_weight(layer, layer.weight.data),
    "contiguous already": lambda layer: set_weight(layer, layer.weight.data.contiguous()),
    "a copy of itself over itself": lambda layer: layer.weight.data.copy_(layer.weight.data),
    "default scales": lambda layer: layer.scale.fill_(1.0),
    "memory of the same size": lambda layer: setattr(layer, "workspace", torch.zeros_like(layer.weight)),
}


@pytest.mark.parametrize("step", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_leaves_weights_alone_does_not(step):
    assert post_load.of(loaded(step)).transformed() == {}


class ModuleMethod(torch.nn.Module, Method):
    """As experts have it: the layer's child, without weights of its own."""

    def __init__(self, step):
        torch.nn.Module.__init__(self)
        Method.__init__(self, step)


def test_a_method_may_be_a_module():
    layer = Layer(pack)
    layer.quant_method = ModuleMethod(pack)
    model = torch.nn.Sequential(layer)
    post_load.attach(model)
    layer.quant_method.process_weights_after_loading(layer)
    assert post_load.of(model).transformed() == {"0": "ModuleMethod"}
    reload(model)


def test_a_step_of_a_layer_s_own_is_seen():
    model = torch.nn.Sequential(Layer(lambda layer: None))
    model.append(Attention(model[0]))
    post_load.attach(model)
    model[1].process_weights_after_loading(torch.float32)
    assert post_load.of(model).transformed() == {"1": "Attention"}
    with post_load.of(model).repeating(partial=False):
        model[1].process_weights_after_loading(torch.float32)
    with pytest.raises(WeightUpdateError), post_load.of(model).repeating(partial=False):
        pass


@pytest.mark.parametrize("make", [lambda w: w.t().contiguous(), lambda w: torch.zeros(2, 3).copy_(w)])
def test_what_only_a_closure_keeps_is_hidden(make):
    kept = []
    model = loaded(lambda layer: kept.append(make(layer.weight)))
    reload(model)  # what a reload makes is not what graphs were captured with
    kept.pop()
    assert post_load.of(model).hidden() == {"0": "Method"}
    kept.clear()
    assert post_load.of(model).hidden() == {}
    assert post_load.of(loaded(TRANSFORMING["an attribute made of it"])).hidden() == {}


@pytest.fixture
def handle():
    """An operator as kernels' libraries have it: it packs weights into memory of its own and returns a handle."""
    library = torch.library.Library("post_load_test", "DEF")
    library.define("pack(Tensor weight) -> int")
    library.impl("pack", lambda weight: 7, "CompositeImplicitAutograd")  # bypasses dispatch modes
    yield torch.ops.post_load_test.pack
    library._destroy()


def test_a_handle_in_place_of_a_tensor_is_known(handle):
    model = loaded(lambda layer: setattr(layer, "handle", handle(layer.weight)))
    assert post_load.of(model).transformed() == {"0": "Method"}
    assert post_load.of(model).kept_elsewhere() == {"0": "Method"}
    assert post_load.of(loaded(pack)).kept_elsewhere() == {}


def pack(layer):
    set_weight(layer, layer.weight.data.t().contiguous())


class Once:
    """As engines write it: the second call does nothing."""

    def __init__(self):
        self.done = False

    def __call__(self, layer):
        if not self.done:
            pack(layer)
        self.done = True


def reload(model, *, partial=False):
    with post_load.of(model).repeating(partial=partial):
        model[0].quant_method.process_weights_after_loading(model[0])


def test_a_step_that_is_repeated_is_right():
    model = loaded(pack)
    for _ in range(2):
        reload(model)
        reload(model, partial=True)


@pytest.mark.parametrize("partial", [False, True])
def test_a_step_that_does_less_the_second_time_is_an_error(partial):
    with pytest.raises(WeightUpdateError, match="Method") as error:
        reload(loaded(Once()), partial=partial)
    assert error.value.details["layer"] == "0"
    assert "other parameters" in error.value.details["skipped"]


class Moving:
    """A step that takes its layer's weights to another device, perhaps as another dtype."""

    def __init__(self, dtype=torch.float32, *, times=9):
        self.dtype = dtype
        self.times = times

    def __call__(self, layer):
        layer.weight.mul_(2)
        if self.times:
            layer.elsewhere = layer.weight.to("meta", self.dtype)
            self.times -= 1


def test_weights_that_a_reload_makes_where_the_step_wants_them_need_not_be_moved():
    model = loaded(Moving())
    set_weight(model[0], torch.zeros(2, 3, device="meta"))
    for partial in (False, True):
        reload(model, partial=partial)
    with pytest.raises(WeightUpdateError), post_load.of(model).repeating(partial=False):
        pass


def test_a_step_that_moves_weights_once_leaves_old_ones_there():
    with pytest.raises(WeightUpdateError) as error:
        reload(loaded(Moving(times=1)))
    assert error.value.details["skipped"] == ["a copy on meta"]


def test_weights_that_a_step_takes_to_another_device_as_another_dtype_are_transformed():
    model = loaded(Moving(torch.float16))
    set_weight(model[0], torch.zeros(2, 3, dtype=torch.float16, device="meta"))
    with pytest.raises(WeightUpdateError) as error:
        reload(model)
    assert error.value.details["skipped"] == ["aten._to_copy.default"]


def test_a_step_that_does_not_run_is_an_error_unless_the_layer_may_be_left_out():
    model = loaded(pack)
    with pytest.raises(WeightUpdateError), post_load.of(model).repeating(partial=False):
        pass
    with post_load.of(model).repeating(partial=True):
        pass


def test_a_method_that_was_exchanged_after_the_first_load_is_watched_too():
    model = loaded(pack)
    model[0].quant_method = Method(pack)
    reload(model)
    model[0].quant_method = Method(lambda layer: None)
    with pytest.raises(WeightUpdateError):
        reload(model)


class Seen:
    """Notes whether its operators are observed."""

    def __init__(self):
        self.observed = []

    def __call__(self, layer):
        self.observed.append(torch._C._len_torch_dispatch_stack() > 0)
        pack(layer)


def test_a_step_that_has_repeated_everything_is_no_longer_observed_until_a_load_fails():
    model = loaded(step := Seen())
    for _ in range(4):
        reload(model)
    assert step.observed == [True, True, True, False, False]
    with pytest.raises(ValueError, match="broken"), post_load.of(model).repeating(partial=False):
        raise ValueError("broken")
    reload(model)
    assert step.observed[5:] == [True]


def test_a_believed_step_must_still_run():
    model = loaded(pack)
    for _ in range(3):
        reload(model)
    with pytest.raises(WeightUpdateError, match="Method"), post_load.of(model).repeating(partial=False):
        pass


def test_what_one_load_does_besides_is_not_asked_of_the_next():
    model = loaded(pack)
    for _ in range(3):
        reload(model)
    with post_load.of(model).repeating(partial=False):
        model[0].quant_method.process_weights_after_loading(model[0])  # believed
        model[0].quant_method = Method(lambda layer: set_weight(layer, layer.weight.data.exp()))
        post_load.of(model).watch()
        model[0].quant_method.process_weights_after_loading(model[0])
    model[0].quant_method = Method(pack)
    reload(model)


def test_a_method_that_replaces_a_believed_one_is_observed():
    model = loaded(pack)
    for _ in range(3):
        reload(model)
    model[0].quant_method = Method(lambda layer: None)
    with pytest.raises(WeightUpdateError):
        reload(model)


@pytest.mark.parametrize(
    ("name", "mxfp8", "refused"),
    [
        ("ModelOptNvFp4LinearMethod", False, True),
        ("CompressedTensorsW4A4Fp4", False, True),
        ("ModelOptMxFp8LinearMethod", False, True),
        ("Fp8LinearMethod", True, True),
        ("Fp8LinearMethod", False, False),
        ("Mxfp4MoEMethod", False, False),
    ],
)
def test_formats_that_only_blackwell_runs_are_refused(name, mxfp8, refused):
    model = loaded(pack)
    model[0].quant_method = type(name, (), {"use_mxfp8": mxfp8})()
    with pytest.raises(UnsupportedError, match="Blackwell") if refused else contextlib.nullcontext():
        post_load.refuse_untried(model, {"0": name})
