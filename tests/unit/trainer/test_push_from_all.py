"""Two-rank trainers pushing through real senders and sockets to toy engines."""

import itertools
import socket
import threading
import time
import weakref
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
from helpers import no_collection
from models import Tree
from process_pair import ProcessPair
from toy_engine import ToyEngine
from toys import Tracked, checkpoint, loaded

from rl_memory_plugins.errors import (
    InvalidRequestError,
    ManifestError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import (
    Adapter,
    ModelSource,
    Offloader,
    Peers,
    RolloutHandoff,
    push_from_all,
    push_weights,
    sites,
)
from rl_memory_plugins.trainer.push import EngineCall
from rl_memory_plugins.weights import wire

OPTIONS = {"bucket_bytes": 256, "timeout_s": 30.0}


def sharded(seed):
    """A checkpoint's tensors as the parameters of an FSDP2 model, and the checkpoint."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    tensors = checkpoint(seed)
    model = Tree(tensors)
    mesh = init_device_mesh("cpu", (2,))
    for child in model.children():
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, tensors


def engine_of(rank, tp=2):
    """Rank 0 controls the engine."""
    return [ToyEngine(tp)] if rank == 0 else []


def on_engines_gpus(rank):
    """Have this trainer rank share a device with the engine's rank of that number."""
    sites.own_gpu = lambda: f"fake:{rank}"


def assert_loaded(engines, tensors):
    for engine in engines:
        for i, one in enumerate(engine.ranks):
            one.model.assert_unchanged(loaded(tensors, i, len(engine.ranks)))


def controller_sends(rank):
    model, tensors = sharded(1)
    engines = engine_of(rank)
    report = push_from_all(engines, ModelSource(model), weight_version="4", **OPTIONS)
    assert_loaded(engines, tensors)
    assert all(engine.version == "4" for engine in engines)
    return len(report["receivers"]), len(report["engines"])


def each_serves_its_own_gpu(rank):
    on_engines_gpus(rank)
    try:
        model, tensors = sharded(2)
        engines = engine_of(rank)
        report = push_from_all(engines, ModelSource(model), **OPTIONS)
        assert_loaded(engines, tensors)
        return len(report["receivers"]), len(report["engines"])
    finally:
        del sites.own_gpu
        from rl_memory_plugins.trainer.gpu import own_gpu

        sites.own_gpu = own_gpu


def each_controls_its_own_engine(rank):
    model, tensors = sharded(3)
    engines = [ToyEngine(1, first_device=rank)]
    report = push_from_all(engines, ModelSource(model), **OPTIONS)
    assert_loaded(engines, tensors)
    return len(report["receivers"]), len(report["engines"])


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (controller_sends, [(2, 1), (0, 0)]),
        (each_serves_its_own_gpu, [(1, 1), (1, 0)]),
        (each_controls_its_own_engine, [(1, 1), (1, 1)]),
    ],
)
def test_a_sharded_trainer_updates_an_engine(pair: ProcessPair, job, expected):
    assert pair.run(job) == expected


def sends_what_the_source_holds_now(rank):
    """Also where a process that sends nothing listed what its source held before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, cut = init_device_mesh("cpu", (2,)), {}
    source = ModelSource(cut)
    for seed in (5, 6):
        cut.update({name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in checkpoint(seed).items()})
        if seed == 5:
            source.specs()
    engines = engine_of(rank)
    push_from_all(engines, source, **OPTIONS)
    assert_loaded(engines, checkpoint(6))
    return True


def test_every_process_sends_what_the_source_holds_now(pair):
    assert pair.run(sends_what_the_source_holds_now) == [True, True]


def sends_alone(rank):
    model, _ = sharded(7)
    [engine] = [ToyEngine(1)]
    with pytest.raises(InvalidRequestError, match="call push_from_all in all of them") as caught:
        push_weights(engine.post_update, model, timeout_s=10)
    return caught.value.details["name"], engine.ranks[0].manager.content is Content.VALID


def test_a_process_that_sends_alone_refuses_what_is_sharded_over_several(pair):
    names = {name for name, valid in pair.run(sends_alone) if valid}
    assert names == {next(iter(dict(Tree(checkpoint(7)).named_parameters())))}


def whole_handoff(rank):
    """Rank 0's engine, FSDP2 on both ranks, with the model offloaded before the engine wakes or after."""
    outcomes = []
    for from_host in (False, True):
        model, _ = sharded(4)
        engines = engine_of(rank)
        offloader = Offloader(model, moves=lambda tensor: True)
        handoff = RolloutHandoff(engines, ModelSource(model), weights=[offloader], from_host=from_host, **OPTIONS)
        for _ in range(2):
            with handoff.training() as report:
                assert offloader.offloaded_bytes == 0 and not any(engine.open for engine in engines)
                with torch.no_grad():
                    model.norm.weight.mul_(1.5)
                expected = {name: p.full_tensor() for name, p in model.named_parameters()}
            assert offloader.offloaded_bytes > 0 and all(engine.open for engine in engines)
            assert_loaded(engines, expected)
            outcomes.append(report.moved_bytes["offload"] > 0)
    return outcomes


def test_a_whole_handoff_of_a_sharded_trainer(pair):
    assert pair.run(whole_handoff) == [[True] * 4, [True] * 4]


# -- failures: the same error on both ranks, at once, and the next update works -------------------------------


class Unaware(ModelSource):
    """A source whose model has something that the engine does not know."""

    def specs(self):
        specs = super().specs()
        return [*specs, type(specs[0])("bogus.weight", "float32", (2,))]


def recovers_from(rank, scenario, own_gpus):
    from rl_memory_plugins.trainer.gpu import own_gpu

    if own_gpus:
        on_engines_gpus(rank)
    try:
        model, tensors = sharded(5)
        engines = engine_of(rank)
        peers = Peers()
        source = ModelSource(model)
        if scenario == "engine refuses" and engines:
            engines[0].fail["post_update"] = StateConflictError("busy")
        if scenario == "unknown name":
            source = Unaware(model)
        if scenario == "receiver breaks" and engines:
            break_once(engines[0].ranks[1].receiver)
        if scenario == "no devices" and engines:
            engines[0].devices = fail_once(engines[0].devices, StateConflictError("starting"))
        start = time.monotonic()
        try:
            push_from_all(engines, source, peers, **OPTIONS)
        except RLMemoryError as error:
            caught = error
        seconds = time.monotonic() - start
        if engines and scenario == "receiver breaks":
            assert not engines[0].open
        push_from_all(engines, ModelSource(model), peers, **OPTIONS)
        assert_loaded(engines, tensors)
        return type(caught).__name__, seconds < 25, caught.message
    finally:
        sites.own_gpu = own_gpu


def fail_once(method, error):
    errors = [error]

    def call(*args, **kwargs):
        if errors:
            raise errors.pop()
        return method(*args, **kwargs)

    return call


def break_once(receiver):
    """The loader raises once this rank has got a tensor: without one, the weights would still be valid."""
    model = receiver._model
    write, broken = model.load_weights, []

    def load(weights):
        weights = iter(weights)
        first = next(weights)
        if not (first[1].is_meta or broken):  # no trace
            broken.append(1)
            raise WeightUpdateError("the worker broke")
        write(itertools.chain([first], weights))

    model.load_weights = load


@pytest.mark.parametrize("own_gpus", [False, True], ids=["one sender", "two senders"])
@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        ("engine refuses", StateConflictError),
        ("unknown name", ManifestError),
        ("receiver breaks", WeightUpdateError),
        ("no devices", StateConflictError),
    ],
)
def test_all_ranks_get_the_error_at_once_and_recover(pair, scenario, kind, own_gpus):
    answers = pair.run(recovers_from, scenario, own_gpus)
    assert [answer[:2] for answer in answers] == [(kind.__name__, True)] * 2
    assert answers[0][2] == answers[1][2]


def stages_share_names(rank):
    """A name that only one sender's receivers use is known; each serves one stage of a pipeline."""
    from toys import Rank, ToyModel

    from rl_memory_plugins.trainer.gpu import own_gpu

    class Stage(ToyModel):
        def __init__(self, mine):
            super().__init__(opaque=False)
            self.mine = mine

        def load_weights(self, weights):
            super().load_weights((name, weight) for name, weight in weights if self.mine(name))

    on_engines_gpus(rank)
    try:
        tensors = checkpoint(opaque=False)
        engines = engine_of(rank)
        for engine in engines:
            first, second = Stage(lambda name: name != "norm.weight"), Stage(lambda name: name == "norm.weight")
            del first.norm
            for name in ("embed", "qkv", "o", "experts"):
                delattr(second, name)
            engine.ranks = [Rank(first, 0), Rank(second, 1)]
        push_from_all(engines, tensors, **OPTIONS)
        for engine in engines:
            assert torch.equal(engine.ranks[1].model.norm, tensors["norm.weight"])
        try:
            push_from_all(engines, {**tensors, "ignored.weight": torch.zeros(2)}, **OPTIONS)
        except ManifestError as error:
            return [mismatch["name"] for mismatch in error.details["mismatches"]]
    finally:
        sites.own_gpu = own_gpu


def test_senders_agree_on_which_names_nobody_uses(pair):
    assert pair.run(stages_share_names) == [["ignored.weight"]] * 2


@pytest.mark.parametrize("tls", [False, True])
def test_one_trainer_updates_several_engines_over_tcp(tls):
    engines, tensors = [ToyEngine(2), ToyEngine(1, first_device=2)], checkpoint(3)
    report = push_from_all(engines, tensors, transport="tcp", advertise=["127.0.0.2", "::1"], tls=tls, **OPTIONS)
    assert_loaded(engines, tensors)
    assert {received["transport"] for received in report["receivers"]} == {"tcp"}


def test_an_engine_that_refuses_is_named_at_once_over_tcp():
    """The refusal reaches the sender over the same socket as the ranks of the engine would."""
    engines = [ToyEngine(), ToyEngine(first_device=1)]
    engines[1].fail["post_update"] = StateConflictError("asleep")
    start = time.monotonic()
    with pytest.raises(StateConflictError, match="asleep"):
        push_from_all(engines, checkpoint(), transport="tcp", tls=True, **OPTIONS)
    assert time.monotonic() - start < 20 < OPTIONS["timeout_s"]
    assert engines[0].ranks[0].manager.content is Content.VALID


def test_one_process_alone_needs_no_process_group():
    engine, tensors = ToyEngine(tp=2), checkpoint(9)
    report = push_from_all([engine], tensors, **OPTIONS)
    assert report["tensors"] == len(tensors) and len(report["receivers"]) == 2
    assert_loaded([engine], tensors)


@pytest.mark.parametrize("scenario", ["receiver breaks", "engine refuses", "no devices"])
def test_one_process_that_fails_leaves_its_source_and_its_error_at_once(scenario):
    engine, source = ToyEngine(), Tracked(checkpoint(9))
    if scenario == "engine refuses":
        engine.fail["post_update"] = StateConflictError("busy")
    elif scenario == "no devices":
        engine.devices = fail_once(engine.devices, StateConflictError("starting"))
    else:
        break_once(engine.ranks[0].receiver)
    with no_collection():
        try:
            push_from_all([engine], source, **OPTIONS)
        except RLMemoryError as error:
            assert source.open == source.alive() == 0
            assert bool(source.given) == (scenario == "receiver breaks")
            gone = weakref.ref(error)
        assert gone() is None
    push_from_all([engine], checkpoint(9), **OPTIONS)
    assert_loaded([engine], checkpoint(9))


def has_no_thread(rank):
    """The process that controls the engine cannot call it: the other one learns that at once."""
    engines = engine_of(rank)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(threading.Thread, "start", refuse)
        start = time.monotonic()
        with pytest.raises(WeightUpdateError, match="can't start new thread"):
            push_from_all(engines, checkpoint(9), Peers(), **OPTIONS)
        took = time.monotonic() - start
    push_from_all(engines, checkpoint(9), Peers(), **OPTIONS)
    assert_loaded(engines, checkpoint(9))
    return took < OPTIONS["timeout_s"] / 2


def test_a_process_that_has_no_thread_keeps_no_other_waiting(pair):
    assert pair.run(has_no_thread) == [True, True]


def has_an_engine_without_adapters(rank):
    """The process that controls the engine fails before it asks the engine: the other one learns that."""
    engines = engine_of(rank)
    for engine in engines:
        engine.post_adapter = None
    caught = []
    for on_failure in ("abort", "continue"):
        with pytest.raises(UnsupportedError, match="no method post_adapter"):
            push_from_all(
                engines, checkpoint(9), Peers(), adapter=Adapter("one", {"r": 4}), on_failure=on_failure, **OPTIONS
            )
        caught.append(on_failure)
    return caught


def test_an_engine_that_takes_no_adapters_keeps_no_process_waiting(pair):
    assert pair.run(has_an_engine_without_adapters) == [["abort", "continue"]] * 2


def leaves_its_sources(rank):
    """Both ranks go through all of the source, though its receivers break off, and leave it then."""
    engines, source, tensors = engine_of(rank), Tracked(checkpoint(9)), checkpoint(9)
    for engine in engines:
        break_once(engine.ranks[1].receiver)
    with no_collection():
        try:
            push_from_all(engines, source, **OPTIONS)
        except RLMemoryError as error:
            left = source.open, source.alive(), source.given == len(tensors)
            gone = weakref.ref(error)
        return left, gone() is None


def test_all_processes_drain_and_leave_a_source_whose_update_failed(pair):
    assert pair.run(leaves_its_sources) == [((0, 0, True), True)] * 2


def test_a_step_that_fails_on_one_rank_fails_on_all(pair):
    assert pair.run(rank_one_fails) == [("ValueError: only here", 1), ("ValueError", None)]


def rank_one_fails(rank):
    def run():
        if rank == 1:
            raise ValueError("only here")
        return rank

    peers = Peers()
    try:
        peers.agree(run)
    except RLMemoryError as error:
        return error.message, error.details["trainer_rank"]
    except ValueError as error:
        return type(error).__name__, None


def groups_of_many_updates(rank):
    import torch.distributed as dist

    model, _ = sharded(6)
    engines = engine_of(rank)
    push_from_all(engines, ModelSource(model), **OPTIONS)
    before = dist.get_pg_count()
    for _ in range(3):
        push_from_all(engines, ModelSource(model), **OPTIONS)
    return dist.get_pg_count() - before, Peers()._group is Peers(dist.group.WORLD)._group is not dist.group.WORLD


def test_agreements_have_one_group_of_their_own(pair):
    assert pair.run(groups_of_many_updates) == [(0, True)] * 2


def fails_between_its_gathers(rank):
    """A source that fails on rank 1; rank 0 goes on to its gather, which no agreement on the group may answer."""
    import torch.distributed as dist

    class Broken(ModelSource):
        def tensors(self):
            for number, item in enumerate(super().tensors()):
                if number == 2 and rank == 1:
                    raise ValueError("only here")
                yield item

    tensors = checkpoint(7)
    engines = engine_of(rank)
    group = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=5))
    source = Broken(tensors)
    gather = source.tensors

    def tensors_in_step():
        for name, tensor in gather():
            parts = [torch.empty(1) for _ in range(2)]
            dist.all_gather(parts, torch.ones(1), group=group)
            yield name, tensor

    source.tensors = tensors_in_step
    try:
        push_from_all(engines, source, Peers(group), **OPTIONS)
    except RLMemoryError as error:
        return error.message


def test_a_source_that_fails_on_one_rank_ends_in_the_timeout_of_its_group(pair):
    answers = pair.run(fails_between_its_gathers)
    assert answers[0] == answers[1] and "Error" in answers[0], answers


class Unsendable:
    def __reduce__(self):
        raise AssertionError("pickled")


def answers_that_cannot_be_sent(rank):
    engines = engine_of(rank)
    for engine in engines:
        engine.sleep = lambda *args, **options: Unsendable()
    RolloutHandoff(engines, checkpoint()).release()
    peers, caught = Peers(), []
    for value, error in [(Unsendable(), None), (None, StateConflictError("busy", cause=Unsendable()))]:
        try:
            peers.share(*((value, error) if rank == 1 else (rank,)))
        except Exception as failure:
            caught.append(f"{type(failure).__name__}: {failure}")
    return caught


def test_what_cannot_be_sent_is_an_error_everywhere(pair):
    zero, one = pair.run(answers_that_cannot_be_sent)
    refused = "TypeError: Encoding objects of type Unsendable is unsupported"
    assert zero == [f"RLMemoryError: {refused}", "RLMemoryError: StateConflictError: busy"]
    assert one == [refused, "StateConflictError: busy"]


class Part(NamedTuple):
    rank: int
    shape: tuple[int, ...]


def agrees_without_a_pickle(rank):
    """What `pickle` would run on the other rank is never run, and values come back as what they were."""
    import pickle

    def refuse(*args, **options):
        raise AssertionError("pickled")

    former = pickle.Pickler, pickle.Unpickler, pickle.dumps, pickle.loads
    pickle.Pickler = pickle.Unpickler = pickle.dumps = pickle.loads = refuse
    try:
        peers = Peers()
        large = "x" * (1 + 100_000 * rank)  # of other lengths on other ranks
        parts = peers.agree(lambda: [Part(rank, (rank, 2))], as_type=list[Part])
        return parts == [[Part(0, (0, 2))], [Part(1, (1, 2))]], [len(one) for one in peers.share(large)]
    finally:
        pickle.Pickler, pickle.Unpickler, pickle.dumps, pickle.loads = former


def test_agreements_carry_no_pickle(pair):
    assert pair.run(agrees_without_a_pickle) == [(True, [1, 100_001])] * 2


def test_engines_that_say_nothing_share_one_deadline():
    answers = threading.Event()
    calls = [EngineCall(lambda body: answers.wait(), {}, lambda error: None) for _ in range(3)]
    over = wire.Deadline(0)
    errors = [call.finish(3600, over) for call in calls]
    answers.set()
    assert [(error.details["reason"], "within 3600 s" in error.message) for error in errors] == [("stalled", True)] * 3


@pytest.mark.parametrize("entry", ["127.0.0.1:{}", "[::1]:{}"])
def test_a_handoff_takes_a_port_that_is_in_use_while_it_is_made(entry):
    """By another process of the trainer, which has the same options, or by an update."""
    host = "::1" if "::" in entry else "127.0.0.1"
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        options = {"advertise": entry.format(taken.getsockname()[1])}
        RolloutHandoff([], {}, **options)
        for wrong in ("127.0.0.1:70000", "nowhere:1"):
            with pytest.raises(InvalidRequestError, match="advertise"):
                RolloutHandoff([], {}, advertise=wrong)
