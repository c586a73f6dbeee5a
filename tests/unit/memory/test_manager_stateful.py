"""Random histories of two ranks, with failures, against a model of the contract.

The model holds, for each rank, what the contract lets a caller rely on: each tag's state, the content state of
the weights, and the bytes of everything that must not be lost (`None` where the content may be anything).
"""

from __future__ import annotations

from helpers import FakeRank, LocalRanks
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rl_memory_plugins import admission
from rl_memory_plugins.coordination import abort, commit, prepare, raise_failures
from rl_memory_plugins.errors import EngineFaultError, RLMemoryError
from rl_memory_plugins.tags import PUBLIC_TAGS, Content, Level, Tag, TagState, preserves

RANKS = 2
LIES_IN = {"parameter": Tag.WEIGHTS, "buffer": Tag.WEIGHTS, "scales": Tag.KV_CACHE, "graph": Tag.CUDA_GRAPH}

tags = st.sets(st.sampled_from(PUBLIC_TAGS), min_size=1).map(lambda some: [tag for tag in PUBLIC_TAGS if tag in some])
operations = st.sampled_from(
    [
        "synchronize",
        "begin_copy_to_host",
        "end_copy_to_host",
        "begin_copy_from_host",
        "end_copy_from_host",
        "fill",
        "fingerprint",
        "reserve",
        "release",
        "map",
        "unmap",
    ]
)
failures = st.none() | st.tuples(st.integers(0, RANKS - 1), operations, st.integers(1, 5))


class Model:
    def __init__(self, contents: dict[str, bytes]) -> None:
        self.states = dict.fromkeys(PUBLIC_TAGS, TagState.RESIDENT)
        self.content = Content.VALID
        self.bytes: dict[str, bytes | None] = {name: contents[name] for name in LIES_IN}
        self.frozen: bytes | None = None  # of the half that the last discarding sleep has kept

    def sleep(self, level: Level, tags: list[Tag], keep: bool) -> None:
        for tag in tags if level is not Level.PAUSE else []:
            if self.states[tag] is TagState.RESIDENT:
                self.states[tag] = TagState.PRESERVED if preserves(level, tag) else TagState.DISCARDED
                if self.states[tag] is TagState.DISCARDED and tag is Tag.WEIGHTS:
                    self.discard_weights(keep)

    def wake(self, tags: list[Tag]) -> None:
        self.states.update(dict.fromkeys(tags, TagState.RESIDENT))

    def discard_weights(self, keep: bool) -> None:
        known = self.bytes["parameter"]
        if known is not None:
            self.frozen = known[: len(known) // 2]
        self.frozen = self.frozen if keep else None
        self.content, self.bytes["parameter"] = Content.STALE, None


class TwoRanks(RuleBasedStateMachine):
    eager_backup = False

    def __init__(self) -> None:
        super().__init__()
        self.ranks = [FakeRank(rank, poison=True, eager_backup=self.eager_backup) for rank in range(RANKS)]
        self.group = LocalRanks([rank.agent for rank in self.ranks])
        self.models = [Model(rank.contents()) for rank in self.ranks]
        self.version = 100

    def transition(self, operation, failure, succeed, **arguments):
        """Run it with a failure armed; advance the models of the ranks it succeeded on by `succeed`."""
        epochs = [rank.manager.epoch for rank in self.ranks]
        if failure is not None:
            rank, call, nth = failure
            self.ranks[rank].device.fail(call, nth)
        try:
            prepare(self.group, operation, **arguments)
            commit(self.group, operation)
        except RLMemoryError as error:
            assert failure is not None, "only an injected failure may fail"
            assert error.details["failed_ranks"] == [failure[0]]
            if "changed" not in error.details:  # while preparing: nothing changed anywhere
                return
            for number, model in enumerate(self.models):
                if number != failure[0]:
                    succeed(model)
            self.note_what_changed(self.models[failure[0]], error)
            if self.ranks[failure[0]].manager.epoch != epochs[failure[0]]:  # also of weights that were stale before
                self.models[failure[0]].discard_weights(bool(arguments.get("keep")))
        else:
            for model in self.models:
                succeed(model)
        finally:
            for rank in self.ranks:
                rank.device.clear_failures()

    def note_what_changed(self, model: Model, error: RLMemoryError) -> None:
        model.states.update({Tag(tag): TagState(state) for tag, state in error.details["changed"].items()})
        assert error.details["content"] in (Content.STALE, model.content)

    @rule(level=st.sampled_from(Level), tags=tags, failure=failures, keep=st.booleans())
    def sleep(self, level, tags, failure, keep):
        globs = ["model.frozen"] if keep else []
        self.transition(
            "sleep", failure, lambda model: model.sleep(level, tags, keep), level=int(level), tags=tags, keep=globs
        )

    @rule(tags=tags, failure=failures)
    def wake(self, tags, failure):
        self.transition("wake", failure, lambda model: model.wake(tags), tags=tags)

    @rule()
    def wake_everything(self):
        self.wake(list(PUBLIC_TAGS), None)

    @rule(level=st.sampled_from(Level), tags=tags)
    def prepare_and_abort(self, level, tags):
        prepare(self.group, "sleep", level=int(level), tags=tags)
        abort(self.group, "sleep")
        prepare(self.group, "wake", tags=tags)
        abort(self.group, "wake")

    @rule(broken=st.none() | st.integers(0, RANKS - 1))
    def update(self, broken):
        """An update of all ranks; the `broken` one's connection is lost after the first bytes."""
        self.version += 1
        data = bytes([self.version % 256]) * self.ranks[0].parameter.nbytes
        for rank in self.ranks:
            rank.receiver.script = self.writes(rank, data, breaks=rank.manager.rank == broken)
        replies = self.group.call("receive_weights", endpoints={}, token="", timeout_s=1.0)
        complete = all(reply.error is None for reply in replies)
        raise_failures(self.group.call("finish_update", complete=complete))
        assert complete == (broken is None and all(model.states[Tag.WEIGHTS] == "resident" for model in self.models))
        for model in self.models:
            if model.states[Tag.WEIGHTS] is TagState.RESIDENT:
                model.content = Content.VALID if complete else Content.FAILED
                model.bytes["parameter"] = data if complete else None
                model.frozen = None

    def writes(self, rank, data, breaks):
        def script(manager):
            manager.begin_writing()
            rank.allocator.write(rank.parameter, data[:100])
            assert admission.refusal(self.group.status()) is not None
            if breaks:
                raise EngineFaultError("connection lost")
            rank.allocator.write(rank.parameter, data)

        return script

    @rule(
        number=st.integers(0, RANKS - 1),
        name=st.sampled_from(list(LIES_IN)),
        byte=st.binary(min_size=1, max_size=1),
    )
    def write_behind_its_back(self, number, name, byte):
        rank, model = self.ranks[number], self.models[number]
        if model.states[LIES_IN[name]] is TagState.RESIDENT and model.bytes[name] is not None:
            rank.allocator.write(getattr(rank, name), byte)
            model.bytes[name] = byte + model.bytes[name][1:]

    @invariant()
    def states_are_the_models(self):
        for rank, model in zip(self.ranks, self.models, strict=True):
            rank.manager.check_integrity()
            assert {tag: rank.manager.state(tag) for tag in PUBLIC_TAGS} == model.states
            assert rank.manager.content == model.content

    @invariant()
    def bytes_accounted_are_bytes_mapped(self):
        for rank in self.ranks:
            assert rank.device.used == rank.mapped_bytes()

    @invariant()
    def what_is_resident_has_its_content(self):
        for rank, model in zip(self.ranks, self.models, strict=True):
            contents = rank.contents()
            for name, tag in LIES_IN.items():
                if model.states[tag] is TagState.RESIDENT and model.bytes[name] is not None:
                    assert contents[name] == model.bytes[name], name

    @invariant()
    def what_was_kept_has_its_content(self):
        for rank, model in zip(self.ranks, self.models, strict=True):
            if model.states[Tag.WEIGHTS] is TagState.RESIDENT:
                assert rank.manager.kept == ({"model.frozen"} if model.frozen is not None else set())
                assert model.frozen is None or rank.contents()["parameter"].startswith(model.frozen)

    @invariant()
    def requests_are_admitted_exactly_while_they_can_be_answered(self):
        answerable = all(
            set(model.states.values()) == {TagState.RESIDENT} and model.content is Content.VALID
            for model in self.models
        )
        assert (admission.refusal(self.group.status()) is None) == answerable
        assert not answerable or all(model.bytes["parameter"] is not None for model in self.models)

    def teardown(self):
        for rank in self.ranks:
            rank.arena.close()


class EagerTwoRanks(TwoRanks):
    """Weights are copied in advance. Each copy ends before the next rule, so that histories can be repeated."""

    eager_backup = True

    @rule()
    def start(self):
        for rank in self.ranks:
            if rank.manager.state(Tag.WEIGHTS) is TagState.RESIDENT:
                rank.manager.warm_up()

    @invariant()
    def no_copy_is_under_way(self):
        for rank in self.ranks:
            if rank.manager._eager is not None:
                rank.manager._eager.join()

    def teardown(self):
        self.no_copy_is_under_way()
        super().teardown()


TestTwoRanks = TwoRanks.TestCase
TestEagerTwoRanks = EagerTwoRanks.TestCase
TestTwoRanks.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestEagerTwoRanks.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
