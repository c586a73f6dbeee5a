"""The gauges of the state: one truth for each value, whatever the engines do."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fake_control import FakeControl, rank_status
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from rl_memory_plugins import admission
from rl_memory_plugins.records import EngineStatus, RankStatus, TagStatus
from rl_memory_plugins.server.state_metrics import OPERATIONS, StateCollector
from rl_memory_plugins.tags import PUBLIC_TAGS, Content, TagState

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(*engines: EngineStatus) -> Samples:
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: engines))
    samples = [sample for family in registry.collect() for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): float(sample.value) for sample in samples}
    assert len(found) == len(samples), "no sample comes twice"
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"rl_memory_{name}", frozenset(labels.items())]


def ones(samples: Samples, name: str, label: str, **others: str) -> list[str]:
    """The values of a label whose samples are 1."""
    return [
        dict(labels)[label]
        for (found, labels), number in samples.items()
        if found == f"rl_memory_{name}" and number == 1 and others.items() <= dict(labels).items()
    ]


tag_states = st.builds(
    TagStatus, state=st.sampled_from(TagState), bytes=st.integers(0, 1 << 40), host_bytes=st.integers(0, 1 << 40)
)


@st.composite
def ranks(draw: Any, number: int) -> RankStatus:
    return RankStatus(
        rank=number,
        device=f"cpu:{number}",
        allocator="fake",
        tags={tag.value: draw(tag_states) for tag in PUBLIC_TAGS},
        content=draw(st.sampled_from(Content)),
        content_epoch=1,
        device_free_bytes=draw(st.integers(0, 1 << 40)),
        device_total_bytes=1 << 40,
        host_arena_bytes=draw(st.integers(0, 1 << 40)),
        left=draw(st.dictionaries(st.sampled_from(["context", "nccl", "other"]), st.integers(1, 1 << 30))),
    )


@st.composite
def statuses(draw: Any) -> list[EngineStatus]:
    return [
        EngineStatus(
            [draw(ranks(rank)) for rank in range(draw(st.integers(1, 2)))],
            weight_version=draw(st.text(max_size=20)),
            paused=draw(st.booleans()),
            busy=draw(st.sampled_from(["", *OPERATIONS])),
            idle=draw(st.booleans()),
            engine_rank=engine,
        )
        for engine in range(draw(st.integers(1, 3)))
    ]


@given(sequence=st.lists(statuses(), min_size=1, max_size=4))
def test_each_scrape_shows_the_state_of_its_moment_and_nothing_of_former_ones(
    sequence: list[list[EngineStatus]],
) -> None:
    present: list[EngineStatus] = []
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: present))
    for engines in sequence:
        present[:] = engines
        samples = [sample for family in registry.collect() for sample in family.samples]
        assert samples == [sample for family in fresh(engines).collect() for sample in family.samples]
        check(scraped(*engines), engines)


def fresh(engines: list[EngineStatus]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: engines))
    return registry


def check(samples: Samples, engines: list[EngineStatus]) -> None:
    assert samples["rl_memory_state_known", frozenset()] == 1
    for status in engines:
        engine = str(status.engine_rank)
        refusal = admission.refusal(status)
        assert value(samples, "admitting", engine=engine) == (refusal is None)
        assert ones(samples, "refusal_reason", "reason", engine=engine) == (
            [] if refusal is None else [refusal.details["reason"]]
        )
        assert value(samples, "sleeping", engine=engine) == admission.is_sleeping([status])
        assert value(samples, "idle", engine=engine) == status.idle
        assert ones(samples, "under_way", "operation", engine=engine) == ([status.busy] if status.busy else [])
        assert ones(samples, "content_state", "state", engine=engine) == [status.content.value]
        assert ones(samples, "weights_info", "version", engine=engine) == [status.weight_version]
        for rank in status.ranks:
            place = {"engine": engine, "rank": str(rank.rank)}
            for name, tag in rank.tags.items():
                where = {**place, "tag": name}
                assert ones(samples, "tag_state", "state", **where) == [tag.state.value]
                assert value(samples, "tag_bytes", **where) == tag.bytes
                assert value(samples, "resident_bytes", **where) == tag.bytes * (tag.state is TagState.RESIDENT)
                assert value(samples, "host_bytes", **where) == tag.host_bytes
            for cause, held in rank.left.items():
                assert value(samples, "left_bytes", **place, cause=cause) == held
    names = Counter(name for name, _ in samples)
    assert names["rl_memory_weights_info"] == len(engines), "the former version leaves no series"
    assert names["rl_memory_left_bytes"] == sum(len(rank.left) for status in engines for rank in status.ranks)


def test_a_copy_that_ranks_share_counts_once() -> None:
    def sharing(rank: int, **copies: int) -> RankStatus:
        one = rank_status(rank)
        return RankStatus(**{name: getattr(one, name) for name in one.__struct_fields__} | {"host_shared": copies})

    engines = [
        EngineStatus([sharing(0, a=100), sharing(1, a=100, b=20)]),
        EngineStatus([sharing(0, a=100)], engine_rank=1),
    ]
    assert scraped(*engines)["rl_memory_host_shared_bytes", frozenset()] == 120


def test_of_an_unknown_state_nothing_is_shown_but_that() -> None:
    assert scraped() == {("rl_memory_state_known", frozenset()): 0}


def test_a_status_that_cannot_be_read_is_an_unknown_state() -> None:
    def broken() -> list[EngineStatus]:
        raise RuntimeError("the writer died in the middle of a write")

    registry = CollectorRegistry()
    registry.register(StateCollector(broken))
    assert registry.get_sample_value("rl_memory_state_known") == 0


def test_what_the_collector_describes_is_what_it_collects() -> None:
    """`name[]` of a scrape chooses among the described metrics."""
    collector = StateCollector(lambda: FakeControl().status_now())
    described = {(metric.name, metric.type, metric.documentation) for metric in collector.describe()}
    assert described == {(metric.name, metric.type, metric.documentation) for metric in collector.collect()}
    assert all(name.startswith("rl_memory_") for name, _, _ in described)
