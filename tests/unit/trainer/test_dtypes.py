"""The dtypes in which sources send: one for all, by name, or those that the engine wants."""

import pytest
import torch
from models import Tree
from test_push_from_all import OPTIONS, engine_of, on_engines_gpus
from toy_engine import ToyEngine
from toys import Rank, checkpoint, update

from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.trainer import (
    EngineDtypes,
    MegatronSource,
    ModelSource,
    StreamSource,
    TensorSpec,
    push_from_all,
    sites,
)
from rl_memory_plugins.trainer.sources.megatron import Replicated
from rl_memory_plugins.weights.casts import CastRule


def masters(seed=3):
    """Float32 weights that bfloat16 rounds."""
    return {name: tensor.float() + 1e-4 for name, tensor in checkpoint(seed).items()}


def assert_rounded_once(engines, tensors):
    for engine in engines:
        for rank in engine.ranks:
            assert torch.equal(rank.model.norm, tensors["norm.weight"])  # the engine's float32
            assert torch.equal(rank.model.experts[1], tensors["experts.1.weight"].bfloat16())


def specs_of(source):
    return {spec.name: (spec.dtype, spec.chosen) for spec in source.specs()}


def test_the_engines_own_dtypes_round_each_tensor_once():
    rank, source = Rank(), ModelSource(masters(), dtype="engine")
    outcome, (thread,) = update([rank], source)
    assert thread.report["casts"] == []
    assert outcome["bytes"] < sum(tensor.nbytes for tensor in masters().values())
    assert_rounded_once([ToyEngineOf(rank)], masters())


class ToyEngineOf:
    def __init__(self, *ranks):
        self.ranks = ranks


def test_a_known_engine_is_not_asked_to_refuse_again():
    rank, source = Rank(), ModelSource(masters(), dtype="engine")
    update([rank], source)
    loads = rank.model.loads
    update([rank], source)
    assert rank.model.loads == loads + 1  # for opaque tensors: no trace


def test_sources_may_share_what_they_learn():
    rank, dtypes = Rank(), EngineDtypes()
    update([rank], ModelSource(masters(), dtype=dtypes))
    assert specs_of(ModelSource(masters(), dtype=dtypes))["o.weight"] == ("bfloat16", False)


def test_a_strict_engine_gets_its_own_wider_dtypes():
    rank = Rank(casts=CastRule(strict=True))
    sent = checkpoint(4)
    sent["norm.weight"] = sent["norm.weight"].bfloat16()
    outcome, _ = update([rank], ModelSource(sent, dtype="engine"))
    assert not isinstance(outcome, Exception)
    assert torch.equal(rank.model.norm, sent["norm.weight"].float())


def test_what_is_wrong_beside_the_dtypes_is_still_an_error():
    rank, sent = Rank(), masters()
    sent["norms.weight"] = sent.pop("norm.weight")
    before = rank.model.snapshot()
    outcome, (thread,) = update([rank], ModelSource(sent, dtype="engine"))
    found = {(m["kind"], m["name"]) for m in outcome.details["mismatches"]}
    assert found == {("unknown", "norms.weight"), ("missing", "norm")}
    assert isinstance(thread.error, ManifestError)
    rank.model.assert_unchanged(before)
    assert not isinstance(update([rank], ModelSource(masters(), dtype="engine"))[0], Exception)


def test_a_rule_by_name_is_the_first_glob_that_matches():
    rule = {"norm.*": torch.float32, "experts.[01].*": torch.float16, "*.weight": torch.bfloat16}
    source = ModelSource(masters(), dtype=rule)
    found = specs_of(source)
    assert found["norm.weight"] == ("float32", True)
    assert found["experts.1.weight"] == ("float16", True)
    assert found["o.weight"] == ("bfloat16", True)
    assert found["scale"] == ("float32", False)
    assert {name: str(t.dtype)[6:] for name, t in source.tensors()} == {
        name: dtype for name, (dtype, _) in found.items()
    }
    rank = Rank()
    assert not isinstance(update([rank], ModelSource(masters(), dtype=rule))[0], Exception)
    assert torch.equal(rank.model.norm, masters()["norm.weight"])


def test_eight_bit_tensors_keep_their_dtype():
    quantised = {"q": torch.zeros(2).to(torch.float8_e4m3fn), "i": torch.zeros(2, dtype=torch.int8)}
    assert set(specs_of(ModelSource(quantised, dtype=torch.bfloat16)).values()) == {
        ("float8_e4m3fn", False),
        ("int8", False),
    }


def whole_stream(dtype):
    tensors = masters()
    specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    return StreamSource(specs, tensors.items, dtype=dtype)


@pytest.mark.parametrize(
    "source",
    [
        lambda: whole_stream("engine"),
        lambda: MegatronSource(masters(), lambda name: ([name], Replicated()), dtype="engine"),
        lambda: ModelSource(Tree(masters()), dtype="engine"),
    ],
    ids=["stream", "megatron", "module"],
)
def test_every_source_takes_the_engines_dtypes(source):
    rank = Rank()
    assert not isinstance(update([rank], source())[0], Exception)
    assert_rounded_once([ToyEngineOf(rank)], masters())


def test_a_stream_is_read_once():
    made = []

    def make():
        made.append(1)
        yield from masters().items()

    specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in masters().items()]
    push_from_all([ToyEngine()], StreamSource(specs, make, dtype="engine"), **OPTIONS)
    assert made == [1]


def sharded_masters():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in masters().items()}


def all_learn(rank):
    """Also a process that sends nothing casts its shards as the engine wants them."""
    source = ModelSource(sharded_masters(), dtype="engine")
    engines = engine_of(rank)
    push_from_all(engines, source, **OPTIONS)
    assert_rounded_once(engines, masters())
    return specs_of(source)["o.weight"][0]


def each_sender_learns(rank):
    on_engines_gpus(rank)
    try:
        return all_learn(rank)
    finally:
        from rl_memory_plugins.trainer.gpu import own_gpu

        sites.own_gpu = own_gpu


def all_fail(rank):
    sent = sharded_masters()
    sent["unheard.of"] = sent.pop("norm.weight")
    engines = engine_of(rank)
    with pytest.raises(ManifestError) as error:
        push_from_all(engines, ModelSource(sent, dtype="engine"), **OPTIONS)
    push_from_all(engines, ModelSource(sharded_masters(), dtype="engine"), **OPTIONS)  # the processes are in step
    return sorted({m["kind"] for m in error.value.details["mismatches"]})


class Breaks(ModelSource):
    """On one process the listing of what the engine wants fails."""

    def __init__(self, tensors, at):
        super().__init__(tensors, dtype="engine")
        self._left = at

    def specs(self):
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("broken")
        return super().specs()


def one_breaks(rank):
    outcomes = []
    for breaking, at in ((0, 1), (1, 1), (0, 2), (1, 2)):
        source = Breaks(sharded_masters(), at if rank == breaking else 0)
        with pytest.raises(Exception, match="broken") as error:
            push_from_all(engine_of(rank), source, **OPTIONS)
        outcomes.append(type(error.value).__name__)
    push_from_all(engine_of(rank), ModelSource(sharded_masters(), dtype="engine"), **OPTIONS)
    return len(outcomes)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (all_learn, ["bfloat16"] * 2),
        (each_sender_learns, ["bfloat16"] * 2),
        (all_fail, [["missing", "unknown"]] * 2),
        (one_breaks, [4, 4]),
    ],
)
def test_all_processes_of_a_trainer_learn_in_step(pair, job, expected):
    assert pair.run(job) == expected
