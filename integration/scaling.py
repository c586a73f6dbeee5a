"""A model on paper of one update of a model with 1T parameters: bytes by link and seconds, from stated assumptions.

    python -m integration.scaling

Prints the tables of docs/scaling.md, and with `--write` puts them there. Nothing here runs an update. The rate of a
rank's load is the one of `integration/results/`; all other rates are line rates times a stated share.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from integration.report import Place
from rl_memory_plugins.weights.bucket_sizes import NCCL_PART_BUCKET_BYTES, STREAMED_BUCKET_BYTES

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
GB = 1e9


class Cluster(NamedTuple):
    """Hosts of one kind, as many for the trainer as for the engines. Rates are bytes per second, in one direction.

    Attributes:
        nic: Of the network card that each GPU has for itself.
        nvlink: Of a GPU to the other GPUs of its host.
        share: The share of a line rate that a transfer is taken to reach.
        load: How fast a rank takes what was staged on its GPU; measured.
        gpu_memory: Bytes of a GPU.
    """

    hosts: int
    gpus: int
    nic: float
    nvlink: float
    share: float
    load: float
    gpu_memory: float


class Format(NamedTuple):
    """The dtype in which the weights travel and in which the engine keeps them. Scales are left out.

    Attributes:
        bytes_each: Of a parameter.
        hosts: The hosts of an engine: the fewest on whose GPUs the weights fit.
    """

    name: str
    bytes_each: int
    hosts: int


FORMATS = (Format("bf16", 2, 2), Format("FP8", 1, 1))
COUNTS = {1: "one host", 2: "two hosts"}
PARAMETERS = 1e12
BUCKET = 1 << 30


class Way(NamedTuple):
    """How the weights travel from the trainer to the engines. Bytes, of one update.

    Attributes:
        sent: Those that leave the trainer's hosts for engines, all together.
        host: Those of them that the busiest host of the trainer sends.
        card: Those that its busiest network card sends.
        engine_host: Those that arrive at each host of engines over the network.
        engine_card: Those that arrive at the busiest network card there.
        rank: Those that arrive at a rank.
        passed: Those that the busiest GPU of a host of engines passes on to the others, over NVLink.
        hops: Hosts behind the first through which a bucket is passed on.
        gathers: Whether the trainer gathers the weights first.
        turns: How many cards of the trainer send one after the other, where others wait for them.
    """

    name: str
    sent: float
    host: float
    card: float
    engine_host: float
    engine_card: float
    rank: float
    passed: float = 0
    hops: int = 0
    gathers: bool = True
    turns: float = 1


class Gather(NamedTuple):
    """Bytes of a gather of all weights on all GPUs of the trainer.

    Attributes:
        host: Those that each host sends over the network, and receives.
        card: Those of each network card.
        nvlink: Those that arrive at each GPU from the others of its host.
    """

    host: float
    card: float
    nvlink: float


def cluster() -> Cluster:
    """Eight hosts of eight H200s for the trainer, and as many for the engines."""
    return Cluster(8, 8, 50 * GB, 450 * GB, 0.8, staged_rate("weights-vllm-0.32.0-moe.json"), 141 * GB)


def staged_rate(file: str) -> float:
    """Bytes per second of a whole staged update on one GPU, as measured."""
    records = json.loads((RESULTS / file).read_text())
    for record in records if isinstance(records, list) else ():
        if record["metric"] == "update_staged_s" and record["subject"] == "plugin":
            return float(record["bytes"] / record["median"])
    raise LookupError(f"{file} has no update_staged_s")


def ways(size: float, c: Cluster, hosts: int = 1) -> list[Way]:
    """Engines of `size` bytes, each on `hosts` hosts, with tensor parallelism over all GPUs of these.

    A trainer process sends to all ranks of one engine; the processes of several engines are on different hosts. A relay
    receives what the ranks of its host need, and passes it on to them and to the same host of the next engine. With
    `shards=True` each process sends each rank what its shard has of the rank's slices.
    """
    engines, ranks, processes = c.hosts // hosts, hosts * c.gpus, c.hosts * c.gpus
    part, of_host = size / ranks, size / hosts
    sent, others = engines * size, of_host - part
    hops, turns = engines - 1, processes / at_a_time(processes, processes)
    of_shards = sent, sent / c.hosts, sent / processes
    into = of_host, part, part
    return [
        Way("whole tensors to each rank", ranks * sent, ranks * size, ranks * size, c.gpus * size, size, size),
        Way("slices to each rank", sent, size, size, *into),
        Way("slices, each rank from a card of its own", sent, of_host, part, *into),
        Way("relay from host to host, over one card", size, size, size, of_host, of_host, part, others, hops),
        Way("relay from host to host, over all cards", size, of_host, part, *into, hops=hops),
        Way("engines on the trainer's GPUs (CUDA IPC)", 0, 0, 0, 0, 0, part),
        Way("`shards=True`, tensors within a bucket", *of_shards, *into, gathers=False),
        Way(f"`shards=True`, tensors of {processes} buckets or more", *of_shards, *into, gathers=False, turns=turns),
    ]


def gathered(size: float, c: Cluster) -> Gather:
    """What a gather takes.

    All GPUs take part, in rings over all cards: each host receives what it lacks once, every card as much. A GPU gets
    over NVLink what the other GPUs of its host hold, and what has arrived over their cards.
    """
    host = size * (c.hosts - 1) / c.hosts
    return Gather(host, host / c.gpus, size * (c.gpus - 1) / c.gpus)


def at_a_time(buckets: float, processes: int) -> float:
    """How many processes send at a time with `shards=True`, of a tensor of which each holds as many rows.

    A bucket has whole rows of it, one after the other: those of few processes, if the tensor takes many buckets.
    """
    return min(processes, max(processes / buckets, 1))


class Seconds(NamedTuple):
    """How long each link is busy. They work at the same time, so the slowest counts."""

    gather: float  # of the gathers, on a network card of the trainer
    card: float  # of gathers and sending together, on the busiest card
    engine_card: float  # on the busiest card of the engines' hosts
    nvlink: float
    load: float

    @property
    def slowest(self) -> float:
        return max(self)


def seconds(way: Way, size: float, c: Cluster) -> Seconds:
    """What one update takes. A card that gathers and sends does one after the other."""
    card, nvlink = c.nic * c.share, c.nvlink * c.share
    gather = gathered(size, c) if way.gathers else Gather(0, 0, 0)
    last = way.hops * BUCKET / card  # a chain begins to deliver at its end after a bucket for each hop
    return Seconds(
        gather.card / card,
        (gather.card + way.card * way.turns) / card + last,
        way.engine_card / card,
        max(gather.nvlink, way.passed) / nvlink,
        way.rank / c.load,
    )


class Division(NamedTuple):
    """What `shards=True` takes besides bytes on links, if every process has a part of every bucket of every rank.

    Attributes:
        buckets: Of one update.
        messages: To each rank: one from each process for each bucket.
        message: The bytes of each.
        slots: Bytes of the slots of a rank, at most: for each process as much as a bucket, and two buckets.
    """

    buckets: int
    messages: int
    message: float
    slots: int


def division(size: float, c: Cluster, hosts: int, bucket: int) -> Division:
    """See `ways`. `bucket`: its bytes, of whole tensors."""
    processes = c.hosts * c.gpus
    buckets = math.ceil(size / bucket)
    messages = buckets * processes
    return Division(buckets, messages, size / (hosts * c.gpus) / messages, (processes + 2) * bucket)


def assumptions(c: Cluster) -> list[str]:
    rows = [
        ("parameters", f"{PARAMETERS / 1e12:g} T; 2 bytes each in bf16, 1 in FP8, without scales"),
        ("trainer", f"{c.hosts} hosts of {c.gpus} GPUs; every GPU holds 1/{c.hosts * c.gpus} of the weights"),
        ("engines", f"on {c.hosts} other hosts of {c.gpus} GPUs, with tensor parallelism over all GPUs of an engine"),
        *((f"engines in {one.name}", f"{c.hosts // one.hosts}, each on {COUNTS[one.hosts]}") for one in FORMATS),
        ("network", f"a card of {c.nic * 8 / GB:g} Gbit/s = {c.nic / GB:g} GB/s for each GPU, in each direction"),
        ("NVLink", f"{c.nvlink / GB:g} GB/s for each GPU, in each direction"),
        ("share of a line rate that transfers reach", f"{c.share:.0%}, of the cards and of NVLink"),
        ("load by a rank, from the slot into its parameters", f"{c.load / GB:.0f} GB/s, measured"),
        ("gather", "by NCCL, over all GPUs of the trainer in rings over all cards; each GPU gets all tensors"),
        ("slices of the ranks of an engine", "together no more than the weights: no rank needs what another needs"),
        ("a rank", "receives by the card of its own GPU"),
        ("`shards=True`", f"every process holds 1/{c.hosts * c.gpus} of every tensor, and no tensor is gathered"),
        ("links", "work at the same time; the slowest counts"),
        ("not counted", "copies within a GPU, checksums, messages, and waits of ranks for each other"),
    ]
    return table(("", "assumed"), rows)


def in_both_formats(c: Cluster) -> Iterator[tuple[str, float, Way]]:
    """Each way in each format: the format's name, the bytes of the weights, and the way."""
    for one in FORMATS:
        size = PARAMETERS * one.bytes_each
        for way in ways(size, c, one.hosts):
            yield one.name, size, way


def links(c: Cluster) -> list[str]:
    """The bytes on each link, of each way in both formats."""
    rows = []
    for name, size, way in in_both_formats(c):
        gather = gathered(size, c) if way.gathers else Gather(0, 0, 0)
        nbytes = (*gather, way.sent, way.host, way.card, way.engine_host, way.engine_card, way.passed)
        rows.append((name, way.name, *(f"{number / 1e12:.4g}" for number in nbytes)))
    head = (
        "",
        "way",
        "gather: out of each trainer host",
        "gather: each card",
        "gather: NVLink, into each GPU",
        "sent by all trainer hosts",
        "sent by the busiest trainer host",
        "sent by its busiest card",
        "into each host of engines",
        "into its busiest card",
        "NVLink of engines: out of the busiest GPU",
    )
    return table(head, rows, text=2)


def transfers(c: Cluster) -> list[str]:
    """How long each link is busy, of each way in both formats."""
    rows = []
    for name, size, way in in_both_formats(c):
        took = seconds(way, size, c)
        rows.append((name, way.name, *(f"{number:.1f}" for number in (*took, took.slowest))))
    head = (
        "",
        "way",
        "gather, each card",
        "gather and send, busiest card",
        "busiest card of the engines",
        "NVLink",
        "load of a rank",
        "slowest",
    )
    return table(head, rows, text=2)


def divisions(c: Cluster) -> list[str]:
    """What `shards=True` takes besides bytes on links, and how fast its messages must be."""
    rows = []
    for one in FORMATS:
        size = PARAMETERS * one.bytes_each
        by_name = {way.name: seconds(way, size, c) for way in ways(size, c, one.hosts)}
        limits = by_name["`shards=True`, tensors within a bucket"], by_name["slices to each rank"]
        for name, bucket in (("NCCL", NCCL_PART_BUCKET_BYTES), ("TCP or Gloo", STREAMED_BUCKET_BYTES)):
            found = division(size, c, one.hosts, bucket)
            each = (f"{took.slowest / found.messages * 1e6:.1f}" for took in limits)
            counts = f"{bucket >> 20} MiB", f"{found.buckets:,}", f"{found.messages:,}", f"{found.message / 1e3:.0f}"
            rows.append((one.name, name, *counts, *each, f"{found.slots / GB:.1f}"))
    head = (
        "",
        "transport",
        "bucket",
        "buckets",
        "messages to each rank",
        "KB each",
        "µs each, to end with the cards",
        "µs each, to end with gather and slices",
        "GB of slots of a rank, at most",
    )
    return table(head, rows, text=2)


def memory(c: Cluster) -> list[str]:
    """What the weights take of the memory of a GPU."""
    rows = []
    for one in FORMATS:
        size = PARAMETERS * one.bytes_each
        for name, gpus in (("one host", c.gpus), ("two hosts", 2 * c.gpus), ("all hosts", c.hosts * c.gpus)):
            each = size / gpus
            fits = "yes" if each < c.gpu_memory else "no"
            rows.append((one.name, name, str(gpus), f"{each / GB:.0f}", fits))
    head = ("", "an engine on", "GPUs", "GB of weights on each", f"below {c.gpu_memory / GB:.0f} GB")
    return table(head, rows, text=2)


def replicas(c: Cluster) -> list[str]:
    """A model of which each GPU has a whole engine: 30 G parameters in bf16."""
    size = 30e9 * 2
    engines = c.hosts * c.gpus
    rows = []
    for name, sent, card in [
        ("to each engine", engines * size, c.gpus * size),
        ("relay within each host", c.hosts * size, size),
        ("relay within each host, and from host to host", size, size),
    ]:
        rows.append((name, f"{sent / 1e12:g}", f"{card / GB:g}", f"{card / (c.nic * c.share):.1f}"))
    return table(("way", "TB leave the trainer", "GB into each host of engines", "s on one card of a host"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> list[str]:
    """Lines of Markdown. The first `text` columns are left-aligned, as are those of tables with two columns."""
    left = len(head) if len(head) == 2 else text
    rule = "|" + "|".join("---" if number < left else "---:" for number in range(len(head))) + "|"
    return [f"| {' | '.join(cells)} |" for cells in (head,)] + [rule, *(f"| {' | '.join(cells)} |" for cells in rows)]


def tables() -> dict[str, list[str]]:
    """The tables of the page, by their markers."""
    c = cluster()
    return {
        "assumptions": assumptions(c),
        "memory": memory(c),
        "links": links(c),
        "transfers": transfers(c),
        "shards": divisions(c),
        "replicas": replicas(c),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the tables of docs/scaling.md.")
    parser.add_argument("--write", action="store_true", help="put them into the page")
    text = PAGE.read_text()
    for name, lines in tables().items():
        print("", *lines, sep="\n")
        text = Place(PAGE, name).replaced(text, lines)
    if parser.parse_args().write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
