import itertools
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
import torch
from toys import ToyModel, checkpoint, loaded

from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.weights.manifest import Manifest, TensorSpec
from rl_memory_plugins.weights.plan import Batch, signature, trace


def manifest_of(tensors, **options):
    return Manifest(ModelSource(tensors).specs(), **options)


def plan_for(model, tensors, **options):
    return trace(model.load_weights, manifest_of(tensors), expected=dict(model.named_parameters()), **options)


def mismatches(error):
    return {(m["kind"], m["name"]) for m in error.value.details["mismatches"]}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("inference", [False, True])
def test_replaying_the_plan_gives_what_the_loader_gives(tp, inference):
    tensors = checkpoint()
    for rank in range(tp):
        with torch.inference_mode(inference):
            model = ToyModel(rank, tp)
            before = model.snapshot()
            plan = plan_for(model, tensors)
        model.assert_unchanged(before)
        assert plan.opaque.keys() == {"packed.weight", "scale"}
        assert plan.unused == ["lm_head.weight"]
        for name, tensor in tensors.items():
            if name in plan.opaque:
                with torch.inference_mode(inference):
                    model.load_weights([(name, tensor)])
            else:
                padded = torch.cat([torch.zeros(5, dtype=tensor.dtype), tensor.flatten()])
                plan.apply(name, padded[5:].view(tensor.shape))  # a source that does not start its storage
        model.assert_unchanged(loaded(tensors, rank, tp))


def test_every_mismatch_is_listed_and_nothing_is_touched():
    tensors = checkpoint()
    tensors["q.weight"] = torch.zeros(3, 8, dtype=torch.bfloat16)  # shape
    tensors["norm.weight"] = tensors["norm.weight"].double()  # dtype
    tensors["bogus.weight"] = torch.zeros(2)  # unknown
    tensors["ignored.weight"] = torch.zeros(2)  # silently skipped
    tensors["o.weight"] = torch.zeros(2, 2, dtype=torch.bfloat16)  # shape, after the first failure
    del tensors["experts.1.weight"]  # missing
    model = ToyModel()
    before = model.snapshot()
    with pytest.raises(ManifestError) as error:
        plan_for(model, tensors, ignorable=lambda name: name == "lm_head.weight")
    assert mismatches(error) >= {
        ("shape", "q.weight"),
        ("dtype", "norm.weight"),
        ("unknown", "bogus.weight"),
        ("shape", "o.weight"),
        ("missing", "experts"),
    }
    assert error.value.details["unused"] == ["ignored.weight"]
    message = next(m["message"] for m in error.value.details["mismatches"] if m["name"] == "experts")
    assert "66.7%" in message
    model.assert_unchanged(before)


def test_duplicates_and_unknown_dtypes_are_listed():
    manifest = Manifest(
        [TensorSpec("a", "bfloat16", (1,)), TensorSpec("a", "bfloat16", (1,)), TensorSpec("b", "int3", (1,))]
    )
    with pytest.raises(ManifestError) as error:
        trace(lambda weights: list(weights), manifest)
    assert mismatches(error) == {("duplicate", "a"), ("dtype", "b")}


@pytest.mark.parametrize("shape", [(1 << 80,), (1 << 40, 1 << 40), (-1, 1 << 60)])
def test_a_shape_that_no_memory_holds_is_a_mismatch(shape):
    manifest = Manifest([TensorSpec("a", "bfloat16", shape), TensorSpec("b", "bfloat16", (0, 1 << 60))])
    assert [(found.kind, found.name) for found in manifest.mismatches()] == [("shape", "a")]


def test_a_partial_manifest_may_leave_parameters_out():
    tensors = {"q.weight": checkpoint()["q.weight"]}
    model = ToyModel()
    plan = trace(model.load_weights, manifest_of(tensors, partial=True), expected=dict(model.named_parameters()))
    assert list(plan.steps) == ["q.weight"]
    with pytest.raises(ManifestError, match="missing"):
        plan_for(model, tensors)


class Odd(torch.nn.Module):
    """A parameter and a loader given as a function of both."""

    def __init__(self, load, shape=(4, 4)):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full(shape, 7.0), requires_grad=False)
        self.other = torch.nn.Parameter(torch.full(shape, 7.0), requires_grad=False)
        self._load = load

    def load_weights(self, weights):
        self._load(self, weights)


def each(action):
    def load(model, weights):
        for _, weight in weights:
            action(model.weight.data, weight, model)

    return load


def scratch(parameter, weight, model):
    buffer = torch.empty(4, 4)
    buffer.copy_(weight)
    parameter.copy_(buffer)


def change_source(parameter, weight, model):
    weight.mul_(2)
    parameter.copy_(weight)


def rebind(parameter, weight, model):
    model.weight.data = torch.zeros(4, 4)


OPAQUE = {
    "cast": lambda p, w, m: p.copy_(w.to(torch.float16)),
    "cat": lambda p, w, m: p.copy_(torch.cat([w[2:], w[:2]])),
    "arithmetic": lambda p, w, m: p.copy_(w + 1),
    "add in place": lambda p, w, m: p.add_(w),
    "index_put": lambda p, w, m: p.__setitem__(torch.tensor([0, 1, 2, 3]), w),
    "value": lambda p, w, m: p.fill_(w[0, 0].item()),
    "real scratch memory": scratch,
    "source changed in place": change_source,
    "memory exchanged": rebind,
    "derived from what was loaded": lambda p, w, m: (p.copy_(w), m.other.data.copy_(p * 2)),
    "out=": lambda p, w, m: torch.add(w, 1, out=p),
    "numpy": lambda p, w, m: p.copy_(torch.from_numpy(w.numpy())),
}


@pytest.mark.parametrize("action", OPAQUE.values(), ids=OPAQUE.keys())
def test_what_is_not_a_copy_of_a_view_is_opaque_and_not_executed(action):
    model = Odd(each(action))
    before, memory = (
        model.snapshot() if hasattr(model, "snapshot") else model.weight.clone(),
        model.weight.data_ptr(),
    )
    plan = trace(model.load_weights, Manifest([TensorSpec("w", "float32", (4, 4))]))
    assert plan.opaque.keys() == {"w"} and not plan.steps
    assert torch.equal(model.weight, before) and model.weight.data_ptr() == memory
    assert torch.equal(model.other, torch.full((4, 4), 7.0))


VIEWS = {
    "transposed": (lambda p, w, m: p.copy_(w.t()), lambda w: w.t()),
    "into a transposed view": (lambda p, w, m: p.t().copy_(w), lambda w: w.t()),
    "moved to the device": (lambda p, w, m: p.copy_(w.to("cpu")), lambda w: w),
    "contiguous already": (lambda p, w, m: p.copy_(w.contiguous().clone()), lambda w: w),
    "foreach": (lambda p, w, m: torch._foreach_copy_([p[:2], p[2:]], [w[:2], w[2:]]), lambda w: w),
    "setitem": (lambda p, w, m: p.__setitem__(slice(None), w), lambda w: w),
    "zeroed first": (lambda p, w, m: (p.zero_(), p[:2].copy_(w[2:])), lambda w: torch.cat([w[2:], w[2:] * 0])),
    "permutation into new memory": (lambda p, w, m: p.copy_(w.t().contiguous()), lambda w: w.t()),
    "reshaped": (lambda p, w, m: p.view(2, 8).copy_(w.view(2, 8)), lambda w: w),
}


@pytest.mark.parametrize(("action", "expected"), VIEWS.values(), ids=VIEWS.keys())
def test_copies_of_views_are_replayed(action, expected):
    model = Odd(each(action))
    plan = trace(model.load_weights, Manifest([TensorSpec("w", "float32", (4, 4))]), expected={"weight": model.weight})
    assert not plan.opaque
    assert torch.equal(model.weight, torch.full((4, 4), 7.0))
    weight = torch.arange(16.0).view(4, 4)
    plan.apply("w", weight)
    assert torch.equal(model.weight, expected(weight))


def test_two_names_that_are_joined_are_both_opaque():
    def load(model, weights):
        parts = dict(weights)
        model.weight.data.copy_(torch.cat([parts["a"], parts["b"]]))

    specs = [TensorSpec(name, "float32", (2, 4)) for name in "ab"]
    assert trace(Odd(load).load_weights, Manifest(specs)).opaque.keys() == {"a", "b"}


def test_a_loader_that_collects_first_blames_the_right_name():
    def load(model, weights):
        for name, weight in dict(weights).items():
            {"a": model.weight, "b": model.other}[name].data.copy_(weight)

    specs = [TensorSpec("bogus", "float32", (4, 4)), *(TensorSpec(name, "float32", (4, 4)) for name in "ab")]
    with pytest.raises(ManifestError) as error:
        trace(Odd(load).load_weights, Manifest(specs))
    assert mismatches(error) == {("unknown", "bogus")}


def test_what_a_loader_says_is_cut_short_before_the_nearest_known_name():
    def load(model, weights):
        for name, weight in weights:
            if name != "layers.0.weight":
                raise ValueError(f"there is no parameter named {name!r} among {' '.join(map(str, range(9999)))}")
            model.weight.data.copy_(weight)

    specs = [TensorSpec(name, "float32", (4, 4)) for name in ("layers.0.weight", "layer.0.weight")]
    with pytest.raises(ManifestError) as error:
        trace(Odd(load).load_weights, Manifest(specs))
    [mismatch] = error.value.details["mismatches"]
    assert mismatch["kind"] == "unknown" and "no parameter named 'layer.0.weight'" in mismatch["message"]
    assert mismatch["message"].endswith("; the nearest known name is layers.0.weight")
    assert len(mismatch["message"]) < 600


def test_a_fill_after_a_copy_that_failed_is_no_failure_of_its_own():
    def load(model, weights):
        for name, weight in weights:
            if name == "a":
                model.weight.data.copy_(weight)
                raise KeyError(name)
            model.weight.data.fill_(3)

    specs = [TensorSpec(name, "float32", (4, 4)) for name in "ab"]
    with pytest.raises(ManifestError) as error:
        trace(Odd(load).load_weights, Manifest(specs))
    assert mismatches(error) == {("unknown", "a")}


def test_an_implicit_broadcast_is_a_wrong_shape():
    with pytest.raises(ManifestError) as error:
        trace(Odd(each(lambda p, w, m: p.copy_(w))).load_weights, Manifest([TensorSpec("w", "float32", (1, 4))]))
    assert mismatches(error) == {("shape", "w")}


def test_the_signature_changes_with_the_memory():
    model = ToyModel()
    before = signature(dict(model.named_parameters()))
    assert signature(dict(model.named_parameters())) == before
    model.norm.data = model.norm.data.clone()
    assert signature(dict(model.named_parameters())) != before


def processor_seconds_of_a_plan(count):
    """The seconds of processors that the plan of `count` small tensors takes."""
    experts = torch.nn.Parameter(torch.zeros(count, 2, 2), requires_grad=False)

    def load(weights):
        for name, weight in weights:
            experts.data[int(name)].copy_(weight)

    manifest = Manifest([TensorSpec(str(i), "float32", (2, 2)) for i in range(count)])
    start = time.process_time()
    plan = trace(load, manifest, expected={"experts": experts})
    assert len(manifest.buckets()) == 1
    took = time.process_time() - start
    assert len(plan.steps) == count
    return took


def test_ten_times_the_names_take_about_ten_times_as_long():
    """A search through all names for each name would take a hundred times as long."""
    few, many = processor_seconds_of_a_plan(2_000), processor_seconds_of_a_plan(20_000)
    assert many < 35 * few


def _strided(loader):
    """What a loader of one tensor of 12 x 6 makes of it, with a parameter of its own."""
    parameter = torch.nn.Parameter(torch.full((12, 12), -1.0), requires_grad=False)
    return parameter, lambda weights: [loader(parameter.data, tensor) for _, tensor in weights]


@pytest.mark.parametrize("cuts", [(0, 12), (0, 5, 6, 12), tuple(range(13))])
@pytest.mark.parametrize(
    ("by_rows", "loader"),
    [
        (True, lambda parameter, source: parameter[:, :6].copy_(source)),
        (True, lambda parameter, source: parameter[:3, :6].copy_(source[4:7])),
        (True, lambda parameter, source: parameter[:, 2:4].copy_(source[:, 3:5])),
        (True, lambda parameter, source: parameter[:6].copy_(source.t())),
        (True, lambda parameter, source: parameter[4:8, :3].copy_(source[2:10:1, ::2][:4])),
        (True, lambda parameter, source: parameter[0, :6].copy_(source[7])),
        (True, lambda parameter, source: [parameter[:6, :6].copy_(source[:6]), parameter[6:, 6:].copy_(source[6:])]),
        (True, lambda parameter, source: [parameter[:6, :6].copy_(source[6:]), parameter[6:].fill_(3)]),
        (False, lambda parameter, source: [parameter[:, :6].copy_(source), parameter[0].fill_(3)]),
        (False, lambda parameter, source: parameter.view(-1)[:72].copy_(source.view(-1))),
        (False, lambda parameter, source: parameter.view(2, 6, 12)[:, :, :6].copy_(source.view(2, 6, 6))),
        (False, lambda parameter, source: parameter[:6, :6].copy_(source[::2])),
    ],
)
def test_rows_loaded_one_part_at_a_time_are_what_the_whole_is(cuts, by_rows, loader):
    source = torch.arange(72, dtype=torch.float32).view(12, 6)
    expected, load = _strided(loader)
    load([("a", source)])
    parameter, load = _strided(loader)
    plan = trace(load, Manifest([TensorSpec("a", "float32", (12, 6))], partial=True))
    assert not plan.opaque
    for first, last in itertools.pairwise(cuts):
        memory = torch.full(((last - first) * 6 + 3,), -2.0)
        memory[3:] = source[first:last].flatten()
        writes = plan.row_writes("a", memory, 3, first, last)
        assert (writes is not None) == by_rows
        if writes is not None:
            plan.run(writes)
    if not by_rows:
        plan.apply("a", source)
    assert torch.equal(parameter, expected)


def test_a_loader_that_computes_of_the_model_s_own_memory_loads_everything_itself():
    """As models do that absorb one matrix into another at the end of `load_weights`: a replay would leave that out."""

    def load(model, weights):
        for name, weight in weights:
            getattr(model, name).data.copy_(weight)
        model.absorbed = model.weight.data @ model.other.data

    model = Odd(load)
    plan = plan_for(model, {"weight": torch.zeros(4, 4), "other": torch.zeros(4, 4)})
    assert plan.opaque.keys() == {"weight", "other"} and not plan.steps
    assert "on the model's memory" in plan.opaque["weight"]


def test_memory_of_a_parameter_s_shape_is_nothing_computed_of_it():
    def load(model, weights):
        for name, weight in weights:
            torch.empty_like(model.weight)
            getattr(model, name).data.copy_(weight)

    assert not plan_for(Odd(load), {"weight": torch.zeros(4, 4), "other": torch.zeros(4, 4)}).opaque


def by_a_pool(model, weights):
    with ThreadPoolExecutor() as pool:
        copies = [pool.submit(model.get_parameter(name).data.copy_, weight) for name, weight in weights]
        for copy in as_completed(copies):
            copy.result()


def test_a_loader_with_a_thread_pool_is_watched():
    model = Odd(by_a_pool)
    specs = [TensorSpec(name, "float32", (4, 4)) for name in ("weight", "other")]
    plan = trace(model.load_weights, Manifest(specs), expected=dict(model.named_parameters()))
    assert plan.steps.keys() == {"weight", "other"} and not plan.opaque and not plan.unused
    assert model.weight.unique().tolist() == [7.0]
    with pytest.raises(ManifestError) as error:
        trace(model.load_weights, Manifest([specs[0], TensorSpec("other", "float32", (4, 5))]))
    assert mismatches(error) == {("shape", "other")}


def put_rows(rows):
    def load(model, weights):
        for name, weight in weights:
            model.get_parameter(name).data[torch.tensor(rows)] = weight[: len(rows)]

    return load


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0, 2]])
def test_what_an_indexed_write_covers_is_for_the_real_load_to_show(rows):
    model = Odd(put_rows(rows))
    specs = [TensorSpec(name, "float32", (4, 4)) for name in ("weight", "other")]
    plan = trace(model.load_weights, Manifest(specs), expected=dict(model.named_parameters()))
    assert plan.opaque.keys() == plan.unproven.keys() == {"weight", "other"}


def test_names_that_all_have_a_wrong_prefix_cost_few_calls_of_the_loader():
    experts = torch.nn.Parameter(torch.zeros(1000, 2, 2), requires_grad=False)
    calls = []

    def load(weights):
        calls.append(len(calls))
        for name, weight in weights:
            {str(i): experts for i in range(1000)}[name].data[int(name)].copy_(weight)

    manifest = Manifest([TensorSpec(f"model.{i}", "float32", (2, 2)) for i in range(1000)])
    with pytest.raises(ManifestError) as error:
        trace(load, manifest, expected={"experts": experts})
    assert len(calls) < 200
    assert ("unknown", "model.0") in mismatches(error) and ("missing", "experts") in mismatches(error)
    assert any("nor 935 more" in mismatch["message"] for mismatch in error.value.details["mismatches"])
    assert error.value.details["unused"] == []


def test_failures_here_and_there_are_all_found():
    experts = torch.nn.Parameter(torch.zeros(400, 2, 2), requires_grad=False)

    def load(weights):
        for name, weight in weights:
            experts.data[int(name)].copy_(weight)

    names = [f"model.{i}" if i % 2 else str(i) for i in range(400)]
    with pytest.raises(ManifestError) as error:
        trace(load, Manifest([TensorSpec(name, "float32", (2, 2)) for name in names]))
    assert len(error.value.details["mismatches"]) == 200


class OnGpu(torch.Tensor):
    """A host tensor that says it lies on a GPU."""

    is_cuda = True


def test_copies_that_one_kernel_cannot_do_are_done_one_by_one(monkeypatch):
    """Those of dtypes that it lacks, and casts, for which it takes the first destination's dtype."""
    together, foreach_copy = [], torch._foreach_copy_

    def kernel(targets, tensors, **options):
        together.extend(tensors)
        foreach_copy(targets, tensors, **options)

    monkeypatch.setattr(torch, "_foreach_copy_", kernel)
    dtypes = {"float8_e8m0fnu", "uint16", "uint32", "uint64", "bfloat16", "float8_e4m3fn"}
    sources = [torch.ones(4).to(getattr(torch, name)).as_subclass(OnGpu) for name in sorted(dtypes)]
    sources.append(torch.ones(4, dtype=torch.bfloat16).as_subclass(OnGpu))
    targets = [torch.zeros(4).to(source.dtype) for source in sources[:-1]] + [torch.zeros(4)]
    Batch(zip(targets, sources, strict=True), group=True).run()
    assert {source.dtype for source in together} == {torch.bfloat16, torch.float8_e4m3fn} and len(together) == 2
    assert all(torch.equal(target.float(), torch.ones(4)) for target in targets)


def test_a_complete_manifest_may_leave_out_what_is_kept_but_no_half_of_it():
    tensors = checkpoint(opaque=False)
    del tensors["norm.weight"], tensors["q.weight"], tensors["k.weight"], tensors["v.weight"]
    model = ToyModel(opaque=False)
    plan = plan_for(model, tensors, kept=frozenset({"norm", "qkv", "o"}))
    assert plan.omitted == {"norm", "qkv"}
    with pytest.raises(ManifestError) as error:
        plan_for(model, tensors, kept=frozenset({"norm"}))
    assert mismatches(error) == {("missing", "qkv")}
    tensors["q.weight"] = checkpoint()["q.weight"]
    with pytest.raises(ManifestError) as error:
        plan_for(model, tensors, kept=frozenset({"norm", "qkv"}))
    assert mismatches(error) == {("missing", "qkv")}
