"""The model of large updates on paper: its arithmetic, and that the page shows what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration import scaling
from integration.report import Place
from rl_memory_plugins.weights.manifest import Manifest, TensorSpec
from rl_memory_plugins.weights.shards import Layout, Layouts, Pieces
from rl_memory_plugins.weights.slices import Cut, Slice

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
    """Two engines of two ranks: sent by all, by a host, by a card; into a host, into a card, to a rank; passed on."""
    found = [tuple(way)[1:8] for way in scaling.ways(80.0, small)]
    assert found == [
        (4 * 80, 2 * 80, 2 * 80, 2 * 80, 80, 80, 0),
        (2 * 80, 80, 80, 80, 40, 40, 0),
        (2 * 80, 80, 40, 80, 40, 40, 0),
        (80, 80, 80, 80, 80, 40, 40),
        (80, 80, 40, 80, 40, 40, 0),
        (0, 0, 0, 0, 0, 40, 0),
        (2 * 80, 80, 40, 80, 40, 40, 0),
        (2 * 80, 80, 40, 80, 40, 40, 0),
    ]


def test_bytes_of_one_engine_on_two_hosts(small: scaling.Cluster) -> None:
    found = {way.name: tuple(way)[1:8] for way in scaling.ways(80.0, small, 2)}
    assert found["whole tensors to each rank"] == (4 * 80, 4 * 80, 4 * 80, 2 * 80, 80, 80, 0)
    assert found["slices to each rank"] == (80, 80, 80, 40, 20, 20, 0)
    assert found["slices, each rank from a card of its own"] == (80, 40, 20, 40, 20, 20, 0)
    assert found["relay from host to host, over one card"] == (80, 80, 80, 40, 40, 20, 20)
    assert found["relay from host to host, over all cards"] == (80, 40, 20, 40, 20, 20, 0)
    assert found["`shards=True`, tensors within a bucket"] == (80, 40, 20, 40, 20, 20, 0)


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_what_hosts_of_engines_receive_has_left_the_trainer(hosts: int) -> None:
    """Without a relay every byte crosses the network once, and none is passed on."""
    c = scaling.cluster()
    for way in scaling.ways(640.0, c, hosts):
        if way.hops == 0:
            assert way.engine_host * c.hosts == way.sent
            assert way.passed == 0
        if way.sent:
            assert way.rank * c.gpus == way.engine_host


def test_a_gather_brings_each_gpu_what_it_lacks() -> None:
    """Three hosts of two GPUs, of which each holds 10 bytes of 60."""
    c = scaling.Cluster(hosts=3, gpus=2, nic=10.0, nvlink=100.0, share=0.5, load=20.0, gpu_memory=50.0)
    gather = scaling.gathered(60.0, c)
    assert gather == (40, 20, 30)
    assert gather.card + gather.nvlink == 60 - 10


def test_shards_take_the_bytes_that_the_package_sends() -> None:
    """The package's own parts: 4 processes with rows of a tensor, and 2 ranks with columns of it."""
    spec = TensorSpec("weight", "bfloat16", (8, 10))
    layout = Layout((0, 1, 2, 3), tuple(((2 * process, 2), (0, 10)) for process in range(4)))
    sent = [0, 0, 0, 0]
    for rank in (0, 1):
        slices = [Slice(1, ((5 * rank, 5),))]
        pieces = Pieces([spec], slices, Layouts([layout], [0]))
        (bucket,) = Manifest([spec]).buckets()
        entries = list(Cut(Manifest([spec]), slices).left_of(bucket).values())
        for process in range(4):
            sent[process] += sum(piece.packed.nbytes for piece in pieces.of_bucket(entries, process, rest=False))
    c = scaling.Cluster(hosts=2, gpus=2, nic=10.0, nvlink=100.0, share=0.5, load=20.0, gpu_memory=50.0)
    way = {way.name: way for way in scaling.ways(spec.nbytes, c)}["`shards=True`, tensors within a bucket"]
    assert [2 * nbytes for nbytes in sent] == [way.card] * 4  # to two engines
    assert 2 * sum(sent) == way.sent


@pytest.mark.parametrize(("rows_of_a_bucket", "expected"), [(64, 64), (32, 32), (8, 8), (1, 1)])
def test_processes_that_send_at_a_time_are_those_whose_rows_a_bucket_has(rows_of_a_bucket: int, expected: int) -> None:
    """64 processes with a row each."""
    spec = TensorSpec("weight", "bfloat16", (64, 4096))
    layout = Layout(tuple(range(64)), tuple(((process, 1), (0, 4096)) for process in range(64)))
    manifest = Manifest([spec], bucket_bytes=rows_of_a_bucket * spec.row_nbytes)
    pieces = Pieces([spec], [None], Layouts([layout], [0]))
    for bucket in manifest.buckets():
        sending = [process for process in range(64) if pieces.of_bucket(bucket, process, rest=False)]
        assert len(sending) == expected == scaling.at_a_time(spec.nbytes / manifest.bucket_bytes, 64)


def test_shards_of_large_tensors_come_from_one_card_after_the_other(small: scaling.Cluster) -> None:
    fast, slow = (scaling.seconds(way, 80.0, small) for way in scaling.ways(80.0, small)[-2:])
    assert fast == (0, 40 / 5, 40 / 5, 0, 40 / 20)
    assert slow == (0, 2 * 80 / 5, 40 / 5, 0, 40 / 20)


def test_messages_of_shards(small: scaling.Cluster) -> None:
    """Engines of two ranks, each with 40 bytes of 80: in four buckets of 20, of which four processes send parts."""
    assert scaling.division(80.0, small, 1, 20) == (4, 16, 40 / 16, 6 * 20)
    assert scaling.division(80.0, small, 2, 30) == (3, 12, 20 / 12, 6 * 30)


def test_the_weights_fit_on_the_hosts_of_an_engine_and_on_no_fewer() -> None:
    c = scaling.cluster()
    for one in scaling.FORMATS:
        size = scaling.PARAMETERS * one.bytes_each
        assert size / (one.hosts * c.gpus) < c.gpu_memory
        assert one.hosts == 1 or size / ((one.hosts - 1) * c.gpus) >= c.gpu_memory


def test_seconds_of_each_link(small: scaling.Cluster) -> None:
    way = scaling.ways(80.0, small)[1]
    took = scaling.seconds(way, 80.0, small)
    assert took == (80 / 2 / 2 / 5, 80 / 2 / 2 / 5 + 80 / 5, 40 / 5, 40 / 50, 40 / 20)
    assert took.slowest == took.card


def test_nvlink_is_busy_with_the_gather_or_with_what_a_relay_passes_on() -> None:
    c = scaling.Cluster(hosts=1, gpus=4, nic=10.0, nvlink=100.0, share=0.5, load=20.0, gpu_memory=50.0)
    relay = scaling.ways(80.0, c)[3]
    assert relay.passed == 60
    assert scaling.seconds(relay, 80.0, c).nvlink == 60 / 50
    assert scaling.seconds(relay._replace(passed=70), 80.0, c).nvlink == 70 / 50


def test_a_chain_ends_a_bucket_later_for_each_hop(small: scaling.Cluster) -> None:
    relay = scaling.ways(80.0, small)[3]
    slices = scaling.ways(80.0, small)[1]
    later = scaling.seconds(relay, 80.0, small).card - scaling.seconds(slices, 80.0, small).card
    assert later == pytest.approx(scaling.BUCKET / 5)


def test_the_rate_of_the_load_is_a_measured_one() -> None:
    assert 50e9 < scaling.staged_rate("weights-vllm-0.32.0-moe.json") < 1e12
    with pytest.raises(LookupError):
        scaling.staged_rate("gpu-vllm-0.32.0-h200.json")
