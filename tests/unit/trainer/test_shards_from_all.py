"""Two-rank trainers whose processes send their shards to the ranks of toy engines."""

import functools

import pytest
import torch
import torch.distributed as dist
from models import Tree, same
from toy_engine import ToyEngine
from toys import checkpoint, loaded

from rl_memory_plugins.trainer import Adapter, ModelSource, Peers, push_from_all
from tests.collectives import counted

OPTIONS = {"bucket_bytes": 256, "timeout_s": 30.0}


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
    if scenario == "shared memory":
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


# -- Megatron's shards --------------------------------------------------------------------------------------------


def of_megatron(rank, kind):
    """A toy checkpoint over two tensor-parallel ranks, or two stages; `k` and `v` are fused with nothing."""
    from rl_memory_plugins.trainer import MegatronSource, Replicated, Split

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
