"""Two-rank trainers whose processes send their shards to the ranks of toy engines."""

import functools

import pytest
import torch
import torch.distributed as dist
from models import Tree, same
from toy_engine import ToyEngine
from toys import checkpoint, loaded

from rl_memory_plugins.errors import InvalidRequestError, WeightUpdateError
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import (
    Adapter,
    FusedQKV,
    MegatronSource,
    ModelSource,
    Peers,
    Replicated,
    RolloutHandoff,
    Split,
    push_from_all,
    update,
)
from rl_memory_plugins.weights.routes import Routes
from rl_memory_plugins.weights.sender import WeightSender
from tests.collectives import counted

OPTIONS = {"shards": True, "bucket_bytes": 256, "timeout_s": 30.0}


def sharded(seed, dtype=None):
    """A checkpoint's tensors as the parameters of an FSDP2 model, in another dtype, and the checkpoint."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    tensors = checkpoint(seed)
    model = Tree({name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()})
    mesh = init_device_mesh("cpu", (2,))
    for child in model.children():
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, tensors


def assert_loaded(engines, tensors):
    for engine in engines:
        for i, one in enumerate(engine.ranks):
            one.model.assert_unchanged(loaded(tensors, i, len(engine.ranks)))


def sends_from_shards(rank, transport, tp, options):
    peers = Peers()
    engines = [ToyEngine(tp)] if rank == 0 else []
    reports = []
    for seed in (1, 2, 3):
        model, tensors = sharded(seed)
        source = ModelSource(model)
        with counted(peers) as collectives:
            report = push_from_all(
                engines, source, peers, transport=transport, weight_version=str(seed), **{**OPTIONS, **options}
            )
        assert collectives == []
        assert_loaded(engines, tensors)
        reports.append((report["sent_from_shards"], report["gathered"], len(report["receivers"])))
        received = sum(one["bytes"] for one in report["receivers"])
        assert {one["transport"] for one in report["receivers"]} <= {transport}
    return reports, received


@pytest.mark.parametrize(
    ("transport", "tp", "options"),
    [
        ("tcp", 2, {}),
        ("tcp", 1, {"bucket_bytes": 64, "tls": True}),
        ("tcp", 2, {"bucket_bytes": 1 << 20}),
        ("tcp", 2, {"slots": 1, "advertise": ["127.0.0.2", "::1"]}),
        ("gloo", 2, {}),
        ("gloo", 1, {"bucket_bytes": 1 << 20}),
        ("gloo", 2, {"slots": 3, "bucket_bytes": 100}),
    ],
    ids=str,
)
def test_each_process_sends_its_shards(pair, transport, tp, options):
    (zero, received), (one, _) = pair.run(sends_from_shards, transport, tp, options, timeout_s=120)  # imports
    assert [(gathered, count) for _, gathered, count in zero] == [(0, tp)] * 3
    assert [(gathered, count) for _, gathered, count in one] == [(0, 0)] * 3
    for (sent, _, _), (other, _, _) in zip(zero, one, strict=True):
        assert sent > 0 and other > 0 and sent + other == received


def engines_of_both(rank):
    """Each process controls an engine, so that each rank gets what has no layout from another process."""
    peers, engines = Peers(), [ToyEngine(1 + rank, first_device=2 * rank)]
    model, tensors = sharded(4)
    model.norm.weight = torch.nn.Parameter(tensors["norm.weight"])  # plain, as FSDP2's `ignored_params`
    with counted(peers) as collectives:
        report = push_from_all(engines, ModelSource(model), peers, transport="gloo", **OPTIONS)
    assert_loaded(engines, tensors)
    received = sum(one["bytes"] for one in report["receivers"])
    return collectives, received - report["sent_from_shards"], len(report["receivers"])


def test_each_process_serves_an_engine_and_sends_to_both(pair):
    zero, one = pair.run(engines_of_both)
    assert zero[0] == one[0] == []
    assert (zero[2], one[2]) == (1, 2)


def casts_and_sends(rank):
    """In the dtype of the engine, which the trainer learns, and out of host memory."""
    from rl_memory_plugins.trainer import Offloader

    peers, engines = Peers(), [ToyEngine(2)] if rank == 0 else []
    model, tensors = sharded(5, torch.float32)
    offloader = Offloader(model, moves=lambda tensor: True)
    offloader.offload()
    with counted(peers) as collectives:
        push_from_all(engines, ModelSource(model, dtype="engine"), peers, transport="tcp", **OPTIONS)
    assert_loaded(engines, tensors)
    return collectives


def test_shards_are_cast_where_they_lie_and_read_in_host_memory(pair):
    assert pair.run(casts_and_sends) == [[], []]


def mixed(mesh, tensors):
    """Some tensors that can be sent from shards, and some that cannot."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = {"norm.weight", "scale"}
    places = {"o.weight": Shard(1), "k.weight": Replicate()}
    return {
        name: tensor if name in whole else distribute_tensor(tensor, mesh, [places.get(name, Shard(0))])
        for name, tensor in tensors.items()
    }


def refusing(layout_of, shape, tensor):
    return None if tensor.shape == shape else layout_of(tensor)


def sends_what_it_can(rank):
    from torch.distributed.device_mesh import init_device_mesh

    from rl_memory_plugins.trainer.sources import placements

    peers, engines = Peers(), [ToyEngine(2)] if rank == 0 else []
    mesh, found = init_device_mesh("cpu", (2,)), []
    for seed, refused in ((1, ()), (2, (8, 8)), (3, ())):
        tensors = checkpoint(seed)
        source = ModelSource(mixed(mesh, tensors))
        with counted(peers) as collectives, pytest.MonkeyPatch.context() as patch:
            patch.setattr(placements, "_layout_of", functools.partial(refusing, placements._layout_of, refused))
            report = push_from_all(engines, source, peers, transport="gloo", **OPTIONS)
        assert_loaded(engines, tensors)
        found.append((collectives, report["gathered"], report["sent_from_shards"] > 0))
    return found


def test_only_what_cannot_be_sent_from_shards_is_gathered(pair):
    q_and_o = 2 * (8 * 8 * 2)
    for plain, refused, again in pair.run(sends_what_it_can):
        assert plain == again == ([], 0, True)  # a replica needs no collective
        assert len(refused[0]) == 2 and refused[1:] == (q_and_o, True)  # `Shard(0)`, and `Shard(1)`


def gathers(rank, scenario):
    with pytest.MonkeyPatch.context() as patches:
        return _gathers(patches, rank, scenario)


def _gathers(patches, rank, scenario):
    peers, engines = Peers(), [ToyEngine(2)] if rank == 0 else []
    model, tensors = sharded(6)
    source, options = ModelSource(model), {"transport": "tcp", **OPTIONS}
    opened = []
    if scenario == "not asked for":
        del options["shards"]
        patches.setattr(
            update, "WeightSender", lambda *args, **named: opened.append(args) or WeightSender(*args, **named)
        )
    elif scenario == "one process is not asked":
        options["shards"] = rank == 0
    elif scenario == "another host":
        patches.setattr(update, "host_id", lambda: f"host {rank}")
    elif scenario == "shared memory":
        options["transport"] = "auto"
    elif scenario == "advertised, and on this host":
        options |= {"transport": "auto", "advertise": "127.0.0.1"}
    elif scenario == "on_failure":
        options["on_failure"] = "continue"
    elif scenario == "one port":
        options["advertise"] = f"127.0.0.1:{PORT}"
    elif scenario == "another source":
        source = Wrapped(source)
    elif scenario == "an older rank" and engines:
        forbid(patches, engines[0].ranks[1])
    elif scenario == "other layouts" and rank == 1:
        source.layouts = lambda: None
    with counted(peers) as collectives:
        report = push_from_all(engines, source, peers, **options)
    assert_loaded(engines, tensors)
    assert len(opened) <= len(engines)  # a process without engines need not be reachable
    return bool(collectives), report["sent_from_shards"], report["gathered"]


PORT = 29771


class Wrapped:
    def __init__(self, source):
        self.specs, self.tensors = source.specs, source.tensors


def forbid(patches, rank):
    """As a rank that takes whole buckets only."""
    import msgspec

    from rl_memory_plugins.weights import session, wire

    send = session.Session._validate

    def validate(self, connection, *arguments, **options):
        if self.manager is not rank.manager:
            return send(self, connection, *arguments, **options)

        class Quiet:
            def send(_, message, timeout_s):
                if isinstance(message, wire.Accept):
                    message = msgspec.structs.replace(message, divisible=False)
                connection.send(message, timeout_s)

        return send(self, Quiet(), *arguments, **options)

    patches.setattr(session.Session, "_validate", validate)


@pytest.mark.parametrize(
    "scenario",
    [
        "not asked for",
        "one process is not asked",
        "another host",
        "shared memory",
        "advertised, and on this host",
        "on_failure",
        "one port",
        "another source",
        "an older rank",
        "other layouts",
    ],
)
def test_the_update_gathers_where_shards_cannot_be_sent(pair, scenario):
    for collectives, sent, gathered in pair.run(gathers, scenario):
        assert collectives and sent == 0
        assert gathered is None if scenario == "another source" else gathered > 0


def sends_an_adapter(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    peers, engines = Peers(), [ToyEngine(2)] if rank == 0 else []
    mesh = init_device_mesh("cpu", (2,))
    expected = {f"layers.0.q_proj.lora_{part}.weight": torch.randn(6, 4) for part in "AB"}
    for tensor in expected.values():
        dist.broadcast(tensor, 0)
    cut = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in expected.items()}
    adapter = Adapter("one", {"r": 6})
    with counted(peers) as collectives:
        push_from_all(engines, ModelSource(cut), peers, adapter=adapter, transport="tcp", **OPTIONS)
    for engine in engines:
        for tensors in engine.adapters["one"][2]:
            same(tensors, expected)
    return collectives


def test_an_adapter_too(pair):
    assert pair.run(sends_an_adapter) == [[], []]


def cuts_differently(rank, field):
    peers, engines = Peers(), [ToyEngine(2)] if rank == 0 else []
    before, _ = sharded(7)
    push_from_all(engines, ModelSource(before), peers, transport="tcp", **OPTIONS)
    model, _ = sharded(8)
    given = {"bucket_bytes": 256 << rank} if field == "bucket_bytes" else {"slots": 2 + rank}
    with counted(peers) as collectives, pytest.raises(InvalidRequestError, match=f"need the same {field}") as raised:
        push_from_all(engines, ModelSource(model), peers, transport="tcp", **{**OPTIONS, **given})
    assert_loaded(engines, checkpoint(7))
    assert all(one.manager.content is Content.VALID for engine in engines for one in engine.ranks)
    return collectives, raised.value.details["got"]


@pytest.mark.parametrize(("field", "got"), [("bucket_bytes", [256, 512]), ("slots", [2, 3])])
def test_processes_that_cut_buckets_differently_are_refused_before_anything_is_written(pair, field, got):
    assert pair.run(cuts_differently, field) == [([], got)] * 2


def fails_before_it_links(rank):
    peers, engines = Peers(), [ToyEngine(2)] if rank == 0 else []
    model, tensors = sharded(12)

    def fail(self, transports):
        raise RuntimeError("the GPU is lost")

    with pytest.MonkeyPatch.context() as patches:
        if rank == 1:
            patches.setattr(Routes, "divide", fail)
        with pytest.raises(WeightUpdateError, match="the GPU is lost"):
            push_from_all(engines, ModelSource(model), peers, transport="gloo", **{**OPTIONS, "timeout_s": 3.0})
    report = push_from_all(engines, ModelSource(model), peers, transport="gloo", **OPTIONS)
    assert_loaded(engines, tensors)
    return report["sent_from_shards"] > 0


def test_a_process_that_fails_once_all_have_decided_fails_all_of_them(pair):
    assert pair.run(fails_before_it_links) == [True, True]


class OneMore(ModelSource):
    """Says nothing of how its tensors lie."""

    def tensors(self):
        return ((name, tensor + 1) for name, tensor in super().tensors())


class Renamed(ModelSource):
    def specs(self):
        return super().specs()


def sends_a_subclass(rank, kind):
    peers, engines = Peers(), [ToyEngine(2)] if rank == 0 else []
    model, tensors = sharded(9)
    report = push_from_all(engines, kind(model), peers, transport="tcp", **OPTIONS)
    assert_loaded(engines, {name: tensor + 1 if kind is OneMore else tensor for name, tensor in tensors.items()})
    return report["sent_from_shards"], report["gathered"]


@pytest.mark.parametrize("kind", [OneMore, Renamed])
def test_a_subclass_with_tensors_or_specs_of_its_own_gathers(pair, kind):
    assert pair.run(sends_a_subclass, kind) == [(0, None)] * 2


class Hooked(torch.nn.Module):
    """Its `state_dict` makes the DTensors, which nothing else holds."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def state_dict(self, **options):
        from torch.distributed.tensor import DTensor

        return {
            name: DTensor.from_local(
                tensor.to_local(), tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
            )
            for name, tensor in self.model.state_dict(**options).items()
        }


def sends_what_a_hook_makes(rank):
    peers, engines = Peers(), [ToyEngine(2)] if rank == 0 else []
    model, tensors = sharded(10)
    source = ModelSource(Hooked(model))
    with counted(peers) as collectives:
        report = push_from_all(engines, source, peers, transport="tcp", **OPTIONS)
    assert_loaded(engines, tensors)
    assert not source._parts  # let go after the update
    assert source.gathered == report["gathered"] == 0
    return collectives, report["sent_from_shards"] > 0


def test_dtensors_that_a_hook_makes_live_as_long_as_the_update(pair):
    assert pair.run(sends_what_a_hook_makes) == [([], True)] * 2


def hands_off(rank):
    engines = [ToyEngine(2)] if rank == 0 else []
    model, tensors = sharded(11)
    with RolloutHandoff(engines, ModelSource(model), transport="tcp", **OPTIONS).training() as report:
        pass
    assert_loaded(engines, tensors)
    return report.update["sent_from_shards"] > 0, report.update["gathered"]


def test_a_handoff_takes_the_option(pair):
    assert pair.run(hands_off) == [(True, 0)] * 2


# -- Megatron's shards --------------------------------------------------------------------------------------------


def of_megatron(rank, kind):
    """A toy checkpoint over two tensor-parallel ranks, or two stages; `k` and `v` are fused with nothing."""
    peers, engines = Peers(), [ToyEngine(2)] if rank == 0 else []
    found = []
    for seed in (1, 2):
        tensors = checkpoint(seed)
        dims = {}
        if kind == "tensor parallel":
            dims = {"embed.weight": 0, "q.weight": 0, "o.weight": 1, "lm_head.weight": 0}
            own = {
                name: torch.cat([tensor, torch.full((2, 8), 9.0, dtype=tensor.dtype)]).chunk(2)[rank]  # padded
                if name == "embed.weight"
                else tensor.chunk(2, dims[name])[rank].clone()
                if name in dims
                else tensor
                for name, tensor in tensors.items()
            }
            groups = {"tp_group": dist.group.WORLD}
        else:
            groups = {"pp_group": dist.group.WORLD}
            own = dict(list(tensors.items())[rank::2])
        layouts = {name: Split(dim, 10 if name == "embed.weight" else None) for name, dim in dims.items()}
        names = {name: ([name], layouts.get(name, Replicated())) for name in tensors}
        source = MegatronSource(own, names.get, **groups)
        with counted(peers) as collectives:
            report = push_from_all(engines, source, peers, transport="gloo", **OPTIONS)
        assert_loaded(engines, tensors)
        found.append((collectives, report["gathered"], report["sent_from_shards"] > 0))
    return found


@pytest.mark.parametrize("kind", ["tensor parallel", "pipeline stages"])
def test_megatrons_shards_are_sent_from_where_they_lie(pair, kind):
    for found in pair.run(of_megatron, kind):
        assert found == [([], 0, True)] * 2


class PlusOne(Replicated):
    """A zero-centred norm, which the checkpoint has around one."""

    def merge(self, shards):
        return [shard + 1 for shard in shards]


class Halves(Split):
    """Both of its methods know that the parameter is twice the tensor."""

    def merge(self, shards):
        return [whole / 2 for whole in super().merge(shards)]

    def parts(self, shard, ranks):
        return [part / 2 for part in super().parts(shard, ranks)]


def merges_of_subclasses(rank):
    peers, engines = Peers(), [ToyEngine(2)] if rank == 0 else []
    tensors = checkpoint(3)
    own = dict(list(tensors.items())[rank::2])
    own |= {name: tensor * 2 for name, tensor in own.items() if name == "q.weight"}
    own |= {name: tensor - 1 for name, tensor in own.items() if name == "norm.weight"}
    layouts = {"norm.weight": PlusOne(), "q.weight": Halves(0)}
    names = {name: ([name], layouts.get(name, Replicated())) for name in tensors}
    source = MegatronSource(own, names.get, pp_group=dist.group.WORLD)
    report = push_from_all(engines, source, peers, transport="tcp", **OPTIONS)
    expected = {**tensors, "norm.weight": tensors["norm.weight"] - 1 + 1}
    assert_loaded(engines, expected)
    return report["gathered"], report["sent_from_shards"] > 0


def test_a_layout_with_a_merge_of_its_own_is_gathered_and_one_with_parts_too_is_not(pair):
    assert pair.run(merges_of_subclasses) == [(8 * 4, True)] * 2  # the norm


class Fused:
    """Makes no parts: whoever asks for them fails."""

    sharded, dim = True, 0

    def merge(self, shards):
        return [torch.cat(shards)]

    def parts(self, shard, ranks):
        raise AssertionError("asked for parts")


def few_heads(rank):
    """A key-value head lies on both tensor-parallel ranks."""
    q, k, v = torch.randn(8, 4), torch.randn(2, 4), torch.randn(2, 4)
    for tensor in (q, k, v):
        dist.broadcast(tensor, 0)
    own = {"qkv": torch.cat([q, k, v]).chunk(2)[rank].clone(), "o": torch.full((2, 3), float(rank))}
    mapped = {"qkv": (["q", "k", "v"], FusedQKV(4, 1, 2)), "o": (["o"], Split(0))}
    source = MegatronSource(own, mapped.get, tp_group=dist.group.WORLD)
    assert [layout is not None for layout in source.layouts()] == [False] * 3 + [True]
    same(
        dict(source.tensors()),
        {"q": q, "k": k, "v": v, "o": torch.arange(2.0).repeat_interleave(2)[:, None].expand(4, 3)},
    )
    alone = MegatronSource({"o": own["o"]}, {"o": (["o"], Fused())}.get, tp_group=dist.group.WORLD)
    same(dict(alone.tensors()), {"o": dict(source.tensors())["o"]})
    return True


def test_megatrons_parts_are_made_for_shards_only_and_not_of_heads_on_several_ranks(pair):
    assert pair.run(few_heads) == [True, True]


class OneTooMany(Split):
    def parts(self, shard, ranks):
        return [shard, shard]


def too_many_parts(rank):
    source = MegatronSource({"o": torch.zeros(2, 2)}, {"o": (["o"], OneTooMany(0))}.get, tp_group=dist.group.WORLD)
    with pytest.raises(InvalidRequestError, match="makes 2 parts of 1"):
        source.layouts()
    return True


def test_a_layout_that_makes_other_parts_than_tensors_is_refused(pair):
    assert pair.run(too_many_parts) == [True, True]


class CountsNames(torch.nn.Module):
    def __init__(self, tensors):
        super().__init__()
        self.calls, self.tensors = 0, tensors

    def named_parameters(self, *args, **named):
        self.calls += 1
        return iter(self.tensors.items())


def lists_parameters(rank, count):
    own = CountsNames({f"{number}": torch.full((2, 2), float(rank)) for number in range(count)})
    source = MegatronSource(own, lambda name: ([name], Split(0)), tp_group=dist.group.WORLD)
    specs, layouts = source.specs(), source.layouts()
    source.leave_out([spec.name for spec in specs])
    assert all(layouts) and all(torch.equal(source.held(spec.name), own.tensors[spec.name]) for spec in specs)
    assert list(source.tensors()) == []
    source.leave_out(())
    assert not source._current and source._parts is None  # let go after the update
    return own.calls


def test_megatrons_parameters_are_listed_once_for_an_update(pair):
    assert pair.run(lists_parameters, 3) == pair.run(lists_parameters, 30)
