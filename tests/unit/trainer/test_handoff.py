"""The order of the steps, their times, and what a failure in each of them leaves behind."""

import asyncio
import threading
import time

import pytest
import torch
from toy_engine import ToyEngine
from toys import checkpoint, loaded

from rl_memory_plugins.errors import (
    DeviceMemoryError,
    HostMemoryError,
    InvalidRequestError,
    RLMemoryError,
    StateConflictError,
    UnsupportedError,
    WeightUpdateError,
)
from rl_memory_plugins.trainer import (
    Adapter,
    AsyncRolloutHandoff,
    EngineObject,
    ModelSource,
    Moved,
    PausableMemory,
    RolloutHandoff,
    handoff,
    parts,
    push_from_all,
)
from rl_memory_plugins.trainer.cache import CacheClearing
from rl_memory_plugins.trainer.handoff_report import STEPS


class Part:
    """A part of the trainer that only says what is done with it."""

    def __init__(self, name, log, here=False):
        self.name, self.log, self.here = name, log, here
        self.fail = {}

    def load(self):
        return self._move("load", not self.here)

    def offload(self):
        return self._move("offload", self.here)

    def _move(self, what, needed):
        if not needed:
            return Moved()
        self.log.append((what, self.name))
        error = self.fail.pop(what, None)
        if error is not None:
            raise error
        self.here = not self.here
        return Moved(1000, 0.25)


class Setup:
    def __init__(self, tp=1, engines=1, make=RolloutHandoff, source=None, **options):
        self.log = []
        self.engines = [ToyEngine(tp, 10 * i, self.log) for i in range(engines)]
        self.engine = self.engines[0]
        self.model, self.optimizer = Part("model", self.log), Part("optimizer", self.log)
        self.tensors = checkpoint(5)
        self.handoff = make(
            self.engines if engines != 1 else self.engine,
            self.tensors if source is None else source,
            weights=[self.model],
            others=[self.optimizer],
            bucket_bytes=256,
            timeout_s=30.0,
            **options,
        )

    def assert_updated(self):
        for engine in self.engines:
            assert engine.open
            for i, rank in enumerate(engine.ranks):
                rank.model.assert_unchanged(loaded(self.tensors, i, len(engine.ranks)))


TO_TRAINER = [("sleep", 2, "abort"), ("load", "model"), ("load", "optimizer")]
TO_ENGINE = [
    ("offload", "optimizer"),
    ("wake_up", ["weights"]),
    ("post_update", "7"),
    ("offload", "model"),
    ("wake_up", None),
]


def test_the_steps_come_in_order():
    setup = Setup()
    with setup.handoff.training("7"):
        assert setup.log == TO_TRAINER
        assert not setup.engine.open
        assert setup.model.here and setup.optimizer.here
    assert setup.log == TO_TRAINER + TO_ENGINE
    setup.assert_updated()
    assert not setup.model.here and not setup.optimizer.here


def test_the_report_times_what_ran():
    setup = Setup()
    with setup.handoff.training() as report:
        assert report.seconds["load"] == 0.5
        assert [step for step in STEPS if report.seconds[step] == 0.0] == list(STEPS[2:])
    assert list(report.seconds) == list(STEPS)
    assert all(report.seconds[step] > 0 for step in STEPS)
    assert 0.25 <= report.seconds["offload"] < 5 and 0.25 <= report.seconds["offload_others"] < 5
    assert report.moved_bytes == {"load": 2000, "offload_others": 1000, "offload": 1000}
    assert report.update["tensors"] == len(setup.tensors)
    assert len(report.update["engines"][0]["ranks"]) == 1


@pytest.mark.parametrize("in_halves", [False, True])
def test_the_report_says_when_its_steps_ran(in_halves):
    setup = Setup()
    if in_halves:
        report = setup.handoff.release()
        setup.handoff.sync("7", report)
    else:
        with setup.handoff.training("7") as report:
            assert [step.name for step in report.steps] == ["sleep", "load"]
    names = [step.name for step in report.steps]
    assert [name for name in names if name != "load"] == [
        *("sleep", "training", "offload_others", "wake_weights", "sync", "offload", "wake_kv_cache")
    ]
    assert names.index("load") < names.index("training")
    ends = 0
    for step in report.steps:
        assert ends <= step.start_ns + 1_000_000 and step.error is None
        ends = step.start_ns + step.duration_ns
    assert ends <= time.time_ns() + 1_000_000


def test_the_trainers_bytes_are_counted_once_between_two_moves():
    setup = Setup()
    counts = []
    setup.model.resident_bytes = lambda device: counts.append(1) or 0
    setup.handoff.sync(report=setup.handoff.release())
    moves = ["load", "offload_others", "load", "offload"]
    assert len(counts) == len(moves) + 3  # and before each half, because other code has run; and for torch's cache


def test_a_step_that_failed_is_in_the_report():
    setup = Setup()
    with pytest.raises(RLMemoryError):
        with setup.handoff.training() as report:
            setup.optimizer.offload = lambda: 1 / 0
    assert [(step.name, step.error) for step in report.steps][-1] == ("offload_others", "RLMemoryError")


def test_the_bytes_of_the_trainer_follow_its_parts():
    setup = Setup()
    setup.model.resident_bytes = lambda device: 100 * setup.model.here
    setup.optimizer.resident_bytes = lambda device: 7 * setup.optimizer.here
    with setup.handoff.training("7") as report:
        pass
    held = {step.name: (step.trainer_bytes_before, step.trainer_bytes_after) for step in report.steps}
    assert held["sleep"] == (0, 0)
    assert held["training"] == (107, 107)
    assert held["offload_others"] == (107, 100)
    assert held["sync"] == (100, 100) and held["offload"] == (100, 0) and held["wake_kv_cache"] == (0, 0)


def test_what_did_not_move_took_no_time():
    setup = Setup()
    setup.model.here = True
    report = setup.handoff.sync()
    assert report.seconds["sleep"] == report.seconds["load"] == report.seconds["offload_others"] == 0.0
    assert report.seconds["offload"] > 0
    setup.assert_updated()


def test_sync_alone_loads_what_it_needs():
    setup = Setup()
    report = setup.handoff.sync("7")
    assert setup.log == [("load", "model"), *TO_ENGINE[1:]]
    assert report.seconds["load"] == 0.25
    setup.assert_updated()
    assert setup.engine.version == "7"


def test_from_host_the_weights_go_before_the_engines_come():
    setup = Setup(from_host=True)
    with setup.handoff.training("7"):
        pass
    order = [("offload", "optimizer"), ("offload", "model"), ("wake_up", ["weights"]), ("post_update", "7")]
    assert setup.log == [*TO_TRAINER, *order, ("wake_up", None)]
    setup.assert_updated()


def test_from_host_a_real_model_is_sent_from_its_offloaded_copy():
    from models import Tree

    from rl_memory_plugins.trainer import Offloader

    model = Tree(checkpoint(6))
    engine = ToyEngine()
    offloader = Offloader(model, moves=lambda tensor: True)
    handoff = RolloutHandoff(engine, ModelSource(model), weights=[offloader], from_host=True, bucket_bytes=256)
    for _ in range(2):
        with handoff.training() as report:
            with torch.no_grad():
                model.norm.weight += 1
            expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        assert report.moved_bytes["offload"] == offloader.offloaded_bytes > 0
        engine.ranks[0].model.assert_unchanged(loaded(expected))


def test_the_trainer_is_limited_while_it_has_the_devices(monkeypatch):
    setup = Setup(memory_fraction=0.9)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share: setup.log.append(("limit", share)))
    monkeypatch.setattr(parts, "aggressive_empty_cache", lambda **options: CacheClearing())
    monkeypatch.setattr(handoff, "push_from_all", lambda *args, **options: {})
    with setup.handoff.training("7"):
        pass
    limits = [entry for entry in setup.log if entry[0] == "limit"]
    assert limits == [("limit", 0.9), ("limit", 1.0)]
    assert setup.log.index(limits[0]) < setup.log.index(("load", "model"))
    assert setup.log.index(("offload", "model")) < setup.log.index(limits[1]) < setup.log.index(("wake_up", None))


@pytest.mark.parametrize("moving", [True, False])
def test_the_cache_is_emptied_before_each_wake_and_garbage_collected_once(monkeypatch, moving):
    setup = Setup()
    if not moving:
        setup.handoff._parts.weights, setup.handoff._parts.others = [], []

    def clear(max_rounds=3, threshold_bytes=0, in_use_bytes=None):
        setup.log.append(("clear", max_rounds))
        return CacheClearing(seconds=0.125)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(parts, "aggressive_empty_cache", clear)
    monkeypatch.setattr(handoff, "push_from_all", lambda *args, **options: {})
    with setup.handoff.training() as report:
        pass
    calls = [call for call in setup.log if call[0] in ("clear", "wake_up")]
    assert calls == [("clear", 3), ("wake_up", ["weights"]), ("clear", 0), ("wake_up", None)]
    assert report.seconds["offload"] == report.seconds["offload_others"] == 0.125 + 0.25 * moving


def test_the_weights_are_known_to_be_in_use(monkeypatch):
    from models import Tree

    from rl_memory_plugins.trainer import Offloader

    monkeypatch.setitem(Offloader.__init__.__kwdefaults__, "moves", lambda tensor: True)
    model, reference, known = Tree(checkpoint(6)), Tree(checkpoint(7)), []

    def clear(max_rounds=3, threshold_bytes=0, in_use_bytes=None):
        known.append(in_use_bytes)
        return CacheClearing()

    monkeypatch.setattr(parts, "aggressive_empty_cache", clear)
    with RolloutHandoff(ToyEngine(), ModelSource(model), weights=[model], others=[reference]).training():
        pass
    assert known[0] == sum(parameter.nbytes for parameter in model.parameters())


def test_garbage_is_not_collected_again_for_what_a_collection_has_left(monkeypatch):
    setup, known, reserved = Setup(), [], [900, 900, 950, 300, 900]
    setup.model.resident_bytes = lambda device: 100

    def clear(max_rounds=3, threshold_bytes=0, in_use_bytes=None):
        if max_rounds:
            known.append(in_use_bytes)
        return CacheClearing(freed_bytes=[0] if max_rounds and reserved[0] - in_use_bytes >= 600 else [])

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved[0])
    monkeypatch.setattr(parts, "aggressive_empty_cache", clear)
    monkeypatch.setattr(handoff, "push_from_all", lambda *args, **options: {})
    while reserved:
        with setup.handoff.training():
            pass
        del reserved[0]
    # 800 stay after the first collection, of which 600 go later; then a collection runs again
    assert known == [100, 900, 900, 900, 300]


def test_gradients_leave_before_the_engines_weights_come(monkeypatch):
    from models import Tree

    from rl_memory_plugins.trainer import Offloader

    monkeypatch.setitem(Offloader.__init__.__kwdefaults__, "moves", lambda tensor: True)
    model, engine = Tree(checkpoint(6)), ToyEngine()
    for parameter in model.parameters():
        parameter.requires_grad_().grad = torch.ones_like(parameter)
    wake, seen = engine.wake_up, []

    def wake_up(tags=None):
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        seen.extend(sum(one.untyped_storage().nbytes() for one in some) for some in (parameters, gradients))
        wake(tags)

    engine.wake_up = wake_up
    handoff = RolloutHandoff(engine, ModelSource(model), weights=[model], bucket_bytes=256)
    with handoff.training():
        pass
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert seen == [nbytes, 0, 0, 0]
    handoff.release()
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())


def test_without_a_fraction_the_trainers_own_limit_stays(monkeypatch):
    setup = Setup()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share: pytest.fail("a limit was set"))
    monkeypatch.setattr(parts, "aggressive_empty_cache", lambda **options: CacheClearing())
    monkeypatch.setattr(handoff, "push_from_all", lambda *args, **options: {})
    with setup.handoff.training("7"):
        pass
    assert setup.engine.awake == {"weights", "kv_cache"}


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5])
def test_a_fraction_is_a_share(fraction):
    with pytest.raises(InvalidRequestError) as caught:
        Setup(memory_fraction=fraction)
    assert caught.value.details == {"field": "memory_fraction", "got": fraction}


def test_one_part_may_be_given_by_itself():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    made = RolloutHandoff([], {}, weights=model, others=optimizer)._parts
    assert [part._targets for part in made.weights] == [(model,)]
    assert [part._targets for part in made.others] == [(optimizer,), (model,)]


@pytest.mark.parametrize("field", ["weights", "others"])
@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        (7, "not int"),
        (None, "not NoneType"),
        (PausableMemory, "memory.part"),
        ([PausableMemory], "memory.part"),
        (["model"], "cannot be moved"),
    ],
)
def test_what_is_no_part_is_found_before_anything_sleeps(field, part, remedy):
    memory = PausableMemory(torch.nn.Linear(8, 8))
    given = memory if part is PausableMemory else [memory] if part == [PausableMemory] else part
    with pytest.raises(InvalidRequestError, match=remedy):
        RolloutHandoff([], {}, **{field: given})


@pytest.mark.parametrize("option", [{"bucket_byte": 1 << 20}, {"transport": "cuda"}, {"slots": 0}, {"peers": None}])
def test_an_option_that_no_update_has_is_found_before_anything_sleeps(option):
    with pytest.raises(InvalidRequestError):
        Setup(**option)


def test_level_and_mode_are_the_callers():
    setup = Setup(level=1, mode="keep")
    setup.handoff.release()
    assert setup.log[0] == ("sleep", 1, "keep")


def test_weights_that_stay_are_the_callers():
    setup = Setup(keep=["*.embed.*"])
    setup.handoff.release()
    assert setup.log[0] == ("sleep", 2, "abort", ["*.embed.*"])


def test_frozen_requests_keep_the_kv_cache_from_the_sleep_to_the_update(monkeypatch):
    updates = []
    monkeypatch.setattr(handoff, "push_from_all", lambda *args, **options: updates.append(options["mode"]) or {})
    setup = Setup(mode="freeze")
    setup.handoff.release()
    assert setup.log[0] == ("sleep", 2, "freeze")
    assert "kv_cache" in setup.engine.awake and "weights" not in setup.engine.awake
    setup.handoff.sync()
    assert updates == ["freeze"]


def test_a_body_that_fails_leaves_the_engine_asleep():
    setup = Setup()
    with pytest.raises(ZeroDivisionError), setup.handoff.training():
        _ = 1 / 0
    assert setup.log == TO_TRAINER and not setup.engine.open
    with setup.handoff.training("7"):
        pass
    setup.assert_updated()


class BrokenOnce:
    """A source that breaks off in its first update."""

    def __init__(self, tensors):
        self.inner = ModelSource(tensors)
        self.broken = False

    def specs(self):
        return self.inner.specs()

    def tensors(self):
        for number, item in enumerate(self.inner.tensors()):
            if number == 5 and not self.broken:
                self.broken = True
                raise ValueError("the disk is gone")
            yield item


FAILURES = {
    "sleep": lambda s: s.engine.fail.update(sleep=StateConflictError("busy")),
    "load": lambda s: s.optimizer.fail.update(load=DeviceMemoryError("full")),
    "offload_others": lambda s: s.optimizer.fail.update(offload=HostMemoryError("full")),
    "sync": lambda s: s.engine.fail.update(post_update=StateConflictError("busy")),
    "offload": lambda s: s.model.fail.update(offload=ValueError("not one of ours")),
}


@pytest.mark.parametrize("step", FAILURES)
def test_a_failing_step_is_the_last_and_a_retry_recovers(step):
    setup = Setup()
    FAILURES[step](setup)
    with pytest.raises(RLMemoryError) as caught, setup.handoff.training("7"):
        pass
    assert caught.value.details["step"] == step
    assert_closed_after(setup, step)
    with setup.handoff.training("7"):
        pass
    setup.assert_updated()
    assert not setup.model.here and not setup.optimizer.here


@pytest.mark.parametrize("step", ["wake_weights", "wake_kv_cache"])
def test_a_failing_wake_leaves_the_engine_closed(step):
    setup = Setup()
    wake = setup.engine.wake_up

    def wake_up(tags=None):
        if (tags is None) == (step == "wake_kv_cache"):
            setup.engine.wake_up = wake
            raise DeviceMemoryError("full", needed_bytes=5)
        wake(tags)

    setup.engine.wake_up = wake_up
    with pytest.raises(DeviceMemoryError) as caught, setup.handoff.training():
        pass
    assert caught.value.details == {"step": step, "needed_bytes": 5}
    assert not setup.engine.open
    setup.handoff.sync()
    setup.assert_updated()


def assert_closed_after(setup, step):
    if step != "sleep":
        assert not setup.engine.open
    later = {name for name in STEPS[STEPS.index(step) + 1 :]}
    calls = {
        "load": ("load", "model"),
        "offload_others": ("offload", "optimizer"),
        "wake_weights": ("wake_up", ["weights"]),
        "sync": ("post_update", "7"),
        "offload": ("offload", "model"),
        "wake_kv_cache": ("wake_up", None),
    }
    assert not {str(call) for name, call in calls.items() if name in later} & set(map(str, setup.log))


def test_an_update_that_breaks_off_leaves_the_engine_closed():
    tensors = checkpoint(5)
    setup = Setup(tp=2, source=BrokenOnce(tensors))
    with pytest.raises(WeightUpdateError, match="the disk is gone") as caught, setup.handoff.training():
        pass
    assert caught.value.details["step"] == "sync"
    assert not setup.engine.open and ("wake_up", None) not in setup.log
    assert setup.model.here  # offload did not run
    setup.handoff.sync()
    setup.assert_updated()


def test_many_engines_share_one_pass_over_the_source():
    passes = []

    class Counting(ModelSource):
        def tensors(self):
            passes.append(1)
            return super().tensors()

    setup = Setup(engines=3, tp=2, source=Counting(checkpoint(5)))
    with setup.handoff.training("7") as report:
        pass
    setup.assert_updated()
    assert len(passes) == 1
    assert [engine.version for engine in setup.engines] == ["7"] * 3
    assert len(report.update["engines"]) == 3 and len(report.update["receivers"]) == 6
    phases = [call[0] for call in setup.log if call[0] in ("sleep", "wake_up", "post_update")]
    assert phases == ["sleep"] * 3 + ["wake_up"] * 3 + ["post_update"] * 3 + ["wake_up"] * 3


@pytest.mark.parametrize("step", ["sleep", "post_update"])
def test_one_of_many_engines_fails_and_none_goes_on(step):
    setup = Setup(engines=2)
    setup.engines[1].fail[step] = StateConflictError("busy")
    start = time.monotonic()
    with pytest.raises(StateConflictError), setup.handoff.training():
        pass
    assert time.monotonic() - start < 25  # the sender does not wait for ranks that will not come
    assert ("wake_up", None) not in setup.log
    assert not setup.engines[0].open
    with setup.handoff.training():
        pass
    setup.assert_updated()


def test_an_engine_that_controls_nothing_here_is_no_error():
    log = []
    handoff = RolloutHandoff([], checkpoint(), weights=[Part("model", log)])
    with handoff.training() as report:
        pass
    assert log == [("load", "model"), ("offload", "model")]
    assert report.update["engines"] == []


# -- two processes ---------------------------------------------------------------------------------------------


def two_of(rank, make=RolloutHandoff):
    """One process's part of a handoff to an engine that rank 0 controls, and what to check that engine with."""
    setup = Setup()
    engines = [setup.engine] if rank == 0 else []
    parts = {"weights": [setup.model], "others": [setup.optimizer]}
    return make(engines, setup.tensors, **parts, bucket_bytes=256, timeout_s=30.0), setup


def assert_goes_on(rank, setup):
    if rank == 0:
        setup.assert_updated()
    assert not setup.model.here and not setup.optimizer.here


def in_training(handoff, body):
    """`training` with a body, in whichever kind of handoff."""
    if isinstance(handoff, RolloutHandoff):
        with handoff.training("7"):
            body()
        return

    async def main():
        async with handoff.training("7"):
            body()

    asyncio.run(main())


def told(caught):
    return type(caught).__name__, str(caught), getattr(caught, "details", None)


def body_fails_on_rank_zero(rank, make, kind):
    """What each rank gets, how long after its body began, and whether a second round succeeds."""
    handoff, setup = two_of(rank, make)

    began = []

    def body():
        began.append(time.monotonic())
        if rank == 0:
            raise kind("only here")
        time.sleep(3.0)

    caught = None
    try:
        in_training(handoff, body)
    except BaseException as error:
        caught = error
    seconds = time.monotonic() - began[0]
    assert setup.log == TO_TRAINER[0 if rank == 0 else 1 :] and setup.model.here
    in_training(handoff, lambda: None)
    assert_goes_on(rank, setup)
    return told(caught), seconds


@pytest.mark.parametrize("kind", [ZeroDivisionError, StateConflictError, KeyboardInterrupt])
@pytest.mark.parametrize("make", [RolloutHandoff, AsyncRolloutHandoff])
def test_a_body_that_fails_on_one_process_fails_on_all(pair, make, kind):
    (zero, seconds), (one, _) = pair.run(body_fails_on_rank_zero, make, kind)
    own = {} if kind is StateConflictError else None
    assert zero == (kind.__name__, "only here", own) and seconds < 2.7  # it waits for nobody
    if kind is StateConflictError:
        assert one == (kind.__name__, "only here", {"trainer_rank": 0, "step": "training"})
    else:
        details = {"type": kind.__name__, "trainer_rank": 0, "step": "training"}
        assert one == ("RLMemoryError", f"{kind.__name__}: only here", details)


def both_bodies_fail(rank):
    handoff, setup = two_of(rank)
    for number in range(3):
        with pytest.raises(ValueError, match=f"{rank} {number}"), handoff.training():
            raise ValueError(f"{rank} {number}")
    with handoff.training("7"):
        pass
    assert_goes_on(rank, setup)
    return True


def test_bodies_that_fail_everywhere_keep_their_errors(pair):
    assert pair.run(both_bodies_fail) == [True, True]


def different_steps(rank):
    handoff, setup = two_of(rank)
    try:
        if rank == 0:
            handoff.release()
        else:
            handoff.sync()
    except StateConflictError as error:
        caught = error
    with handoff.training("7"):
        pass
    assert_goes_on(rank, setup)
    return caught.details


def test_processes_at_different_steps_do_not_go_on(pair):
    zero, one = pair.run(different_steps)
    steps = ["sleep", "offload_others"]
    assert (zero, one) == ({"steps": steps, "step": "sleep"}, {"steps": steps, "step": "offload_others"})


# -- engine objects, and event loops ---------------------------------------------------------------------------


class SyncObject:
    """The methods of `LLM` with this package enabled."""

    def __init__(self, engine):
        self.engine = engine

    def sleep(self, level=1, mode="abort", tags=None):
        self.engine.sleep(level, tags, mode)

    def wake_up(self, tags=None):
        self.engine.wake_up(tags)
        return True

    def memory_status(self):
        return [type("Status", (), {"ranks": [rank.manager.status() for rank in self.engine.ranks]})]

    def update_weights_from_ipc(self, endpoints, token, weight_version=None, mode="keep", timeout_s=60.0):
        return self.engine.post_update(
            {
                "endpoints": endpoints,
                "token": token,
                "weight_version": weight_version,
                "mode": mode,
                "timeout_s": timeout_s,
            }
        )


class AsyncObject:
    """The same as coroutines, which must run on the loop that made them."""

    def __init__(self, engine):
        self.inner = SyncObject(engine)
        self.loops = set()

    def __getattr__(self, name):
        getattr(self.inner, name)  # no more methods than that

        async def method(*args, **kwargs):
            self.loops.add(asyncio.get_running_loop())
            return await asyncio.to_thread(getattr(self.inner, name), *args, **kwargs)

        return method


def test_an_engine_object_in_this_process():
    engine, tensors = ToyEngine(tp=2), checkpoint(8)
    handoff = RolloutHandoff(SyncObject(engine), tensors, bucket_bytes=256)
    assert isinstance(handoff.engines[0], EngineObject)
    with handoff.training("9"):
        assert not engine.open
    assert engine.open and engine.version == "9"
    engine.ranks[1].model.assert_unchanged(loaded(tensors, 1, 2))


def test_an_asynchronous_handoff_leaves_the_loop_free():
    setup = Setup(make=AsyncRolloutHandoff)
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    async def main():
        ticking = asyncio.create_task(tick())
        async with setup.handoff.training("7") as report:
            assert setup.log == TO_TRAINER
        ticking.cancel()
        return report

    report = asyncio.run(main())
    assert setup.log == TO_TRAINER + TO_ENGINE
    assert all(report.seconds[step] > 0 for step in STEPS)
    assert ticks > 2
    setup.assert_updated()


def test_an_asynchronous_engine_object():
    engine, tensors = ToyEngine(), checkpoint(8)
    target = AsyncObject(engine)

    async def main():
        handoff = AsyncRolloutHandoff(target, tensors, bucket_bytes=256)
        async with handoff.training():
            assert not engine.open
        return await handoff.sync("2")

    asyncio.run(main())
    assert engine.open and engine.version == "2" and len(target.loops) == 1


def test_an_asynchronous_engine_object_needs_a_loop():
    handoff = RolloutHandoff(AsyncObject(ToyEngine()), checkpoint())
    with pytest.raises(InvalidRequestError, match="AsyncRolloutHandoff"):
        handoff.release()


def test_an_asynchronous_failure_names_its_step_and_a_retry_recovers():
    setup = Setup(make=AsyncRolloutHandoff)
    setup.engine.fail["post_update"] = StateConflictError("busy")

    async def main():
        with pytest.raises(StateConflictError) as caught:
            async with setup.handoff.training():
                pass
        assert caught.value.details["step"] == "sync"
        assert not setup.engine.open
        await setup.handoff.sync()

    asyncio.run(main())
    setup.assert_updated()


def test_a_cancelled_task_does_not_let_two_handoffs_mix():
    setup = Setup(make=AsyncRolloutHandoff)
    sleep, begun = setup.engine.sleep, threading.Event()

    def slow_sleep(*args, **kwargs):
        begun.set()
        time.sleep(0.2)
        sleep(*args, **kwargs)

    setup.engine.sleep = slow_sleep

    async def main():
        task = asyncio.create_task(setup.handoff.release())
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await setup.handoff.sync("7")

    asyncio.run(main())
    assert setup.log == TO_TRAINER + TO_ENGINE
    setup.assert_updated()


class LoraLayer(torch.nn.Module):
    """As PEFT wraps a linear layer."""

    def __init__(self):
        super().__init__()
        self.base_layer = torch.nn.Linear(4, 6)
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 6, bias=False)})


def test_an_adapter_alone_is_handed_over():
    model = LoraLayer()
    model.peft_config = {"default": {"r": 2, "target_modules": {"layer"}}}
    engine = ToyEngine(tp=2)
    before = [rank.model.snapshot() for rank in engine.ranks]
    handoff = RolloutHandoff(engine, model, adapter="policy")
    with handoff.training("41") as report:
        assert engine.log == [("sleep", 1, "abort")]
        with torch.no_grad():
            model.lora_B["default"].weight.fill_(3)
    assert engine.log[1:] == [("wake_up", ["weights"]), ("post_adapter", "41"), ("wake_up", None)]
    version, config, tensors = engine.adapters["policy"]
    assert version == "41" and config == {"r": 2, "target_modules": ["layer"]}
    for mine in tensors:
        assert mine.keys() == {"lora_A.weight", "lora_B.weight"}
        assert torch.equal(mine["lora_B.weight"], torch.full((6, 2), 3.0))
    assert report.update["tensors"] == 2 and report.update["bytes"] == (2 * 4 + 6 * 2) * 4
    for rank, former in zip(engine.ranks, before, strict=True):
        rank.model.assert_unchanged(former)
    assert engine.open and engine.version is None


def test_an_adapter_is_updated_by_its_name_without_a_handoff():
    model = LoraLayer()
    model.peft_config = {"default": {"r": 2}}
    engine = ToyEngine()
    push_from_all(engine, model, adapter="policy", weight_version="3")
    version, config, _ = engine.adapters["policy"]
    assert (version, config) == ("3", {"r": 2})


@pytest.mark.parametrize("adapter", ["", 7, {"r": 2}, Adapter("")])
def test_what_is_no_adapter_is_refused_at_once(adapter):
    engine = ToyEngine()
    with pytest.raises(InvalidRequestError, match="name of an adapter"):
        RolloutHandoff(engine, LoraLayer(), adapter=adapter)
    with pytest.raises(InvalidRequestError, match="name of an adapter"):
        push_from_all(engine, LoraLayer(), adapter=adapter)
    assert not engine.log


def test_an_adapter_needs_base_weights_that_stay():
    with pytest.raises(InvalidRequestError, match="level=1"):
        RolloutHandoff(ToyEngine(), LoraLayer(), adapter="policy", level=2)


def test_an_adapter_without_a_configuration_fails_before_the_engine_is_asked():
    engine = ToyEngine()
    with pytest.raises(InvalidRequestError, match="no configuration"):
        RolloutHandoff(engine, LoraLayer(), adapter=Adapter("policy")).sync()
    assert [call for call, *_ in engine.log] == ["wake_up"]


def test_a_handle_that_sends_no_adapters_says_so():
    class Handle:
        def __init__(self, engine):
            self.sleep, self.wake_up, self.devices = engine.sleep, engine.wake_up, engine.devices
            self.post_update = engine.post_update

    with pytest.raises(UnsupportedError, match="post_adapter"):
        RolloutHandoff(Handle(ToyEngine()), LoraLayer(), adapter=Adapter("policy", {"r": 2})).sync()
