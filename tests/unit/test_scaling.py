"""The model of large updates on paper: its arithmetic, and that the page shows what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration import scaling
from integration.report import Place

PAGE = Path(scaling.__file__).parents[1] / "docs" / "scaling.md"


@pytest.fixture
def small() -> scaling.Cluster:
    """Two hosts of two GPUs, and rates at which seconds are easy to see."""
    return scaling.Cluster(hosts=2, gpus=2, nic=10.0, nvlink=100.0, share=0.5, load=20.0, gpu_memory=50.0)


def test_the_page_shows_what_the_model_prints() -> None:
    text = PAGE.read_text()
    for name, lines in scaling.tables().items():
        assert Place(PAGE, name).replaced(text, lines) == text, f"run integration.scaling --write: {name}"


def test_bytes_of_each_way(small: scaling.Cluster) -> None:
    found = [(way.sent, way.busiest, way.rank) for way in scaling.ways(80.0, small)]
    assert found == [
        (4 * 80, 2 * 80, 80),
        (2 * 80, 80, 40),
        (2 * 80, 40, 40),
        (80, 80, 40),
        (80, 40, 40),
        (0, 0, 40),
    ]


def test_an_engine_on_two_hosts_needs_its_bytes_once(small: scaling.Cluster) -> None:
    found = {way.name: (way.sent, way.busiest, way.rank, way.hops) for way in scaling.ways(80.0, small, 2)}
    assert found["whole tensors to each rank"] == (4 * 80, 4 * 80, 80, 0)
    assert found["slices to each rank"] == (80, 80, 20, 0)
    assert found["slices, each rank from a card of its own"] == (80, 20, 20, 0)
    assert found["relay from host to host, over all cards"] == (80, 20, 20, 0)


def test_the_weights_fit_on_the_hosts_of_an_engine_and_on_no_fewer() -> None:
    c = scaling.cluster()
    for one in scaling.FORMATS:
        size = scaling.PARAMETERS * one.bytes_each
        assert size / (one.hosts * c.gpus) < c.gpu_memory
        assert one.hosts == 1 or size / ((one.hosts - 1) * c.gpus) >= c.gpu_memory


def test_seconds_of_each_link(small: scaling.Cluster) -> None:
    way = scaling.ways(80.0, small)[1]
    took = scaling.seconds(way, 80.0, small)
    assert took == (80 / 2 / 2 / 5, 80 / 2 / 2 / 5 + 80 / 5, 80 / 50, 40 / 20)
    assert took.slowest == took.card


def test_a_chain_ends_a_bucket_later_for_each_hop(small: scaling.Cluster) -> None:
    relay = scaling.ways(80.0, small)[3]
    slices = scaling.ways(80.0, small)[1]
    later = scaling.seconds(relay, 80.0, small).card - scaling.seconds(slices, 80.0, small).card
    assert later == pytest.approx(scaling.BUCKET / 5)


def test_the_rate_of_the_load_is_a_measured_one() -> None:
    assert 50e9 < scaling.staged_rate("weights-vllm-0.32.0-moe.json") < 1e12
    with pytest.raises(LookupError):
        scaling.staged_rate("gpu-vllm-0.32.0-h200.json")
