"""A model on paper of one update of a model with 1T parameters: bytes by link and seconds, from stated assumptions.

    python -m integration.scaling

Prints the tables of docs/scaling.md, and with `--write` puts them there. Nothing here runs an update. The rate of a
rank's load is the one of `integration/results/`; all other rates are line rates times a stated share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from integration.report import Place

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
    """How the weights travel from the trainer to the engines, after they were gathered.

    Attributes:
        sent: Bytes that leave the trainer's hosts, all together.
        busiest: Bytes that the busiest network card of the trainer sends of them.
        rank: Bytes that arrive at a rank.
        hops: Hosts behind the first through which a bucket is passed on.
    """

    name: str
    sent: float
    busiest: float
    rank: float
    hops: int = 0


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
    receives what the ranks of its host need, and passes it on to them and to the same host of the next engine.
    """
    engines, ranks = c.hosts // hosts, hosts * c.gpus
    part = size / ranks
    return [
        Way("whole tensors to each rank", engines * ranks * size, ranks * size, size),
        Way("slices to each rank", engines * size, size, part),
        Way("slices, each rank from a card of its own", engines * size, part, part),
        Way("relay from host to host, over one card", size, size, part, engines - 1),
        Way("relay from host to host, over all cards", size, part, part, engines - 1),
        Way("engines on the trainer's GPUs (CUDA IPC)", 0, 0, part),
    ]


class Seconds(NamedTuple):
    """How long each link is busy. They work at the same time, so the slowest counts."""

    gather: float  # of the gathers, on a network card
    card: float  # of gathers and sending together, on the busiest card
    nvlink: float
    load: float

    @property
    def slowest(self) -> float:
        return max(self)


def seconds(way: Way, size: float, c: Cluster) -> Seconds:
    """What one update takes.

    All GPUs of the trainer gather, in rings over all cards: each host sends on what the next one lacks, once, and its
    GPUs pass it on to each other. A card that also sends to engines sends both, one after the other.
    """
    card = c.nic * c.share
    gather = size * (c.hosts - 1) / c.hosts / c.gpus / card
    last = way.hops * BUCKET / card  # a chain begins to deliver at its end after a bucket for each hop
    return Seconds(gather, gather + way.busiest / card + last, size / (c.nvlink * c.share), way.rank / c.load)


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
        ("links", "work at the same time; the slowest counts"),
    ]
    return table(("", "assumed"), rows)


def transfers(c: Cluster) -> list[str]:
    """The gathers and each path, in both formats."""
    rows = []
    for one in FORMATS:
        size = PARAMETERS * one.bytes_each
        for way in ways(size, c, one.hosts):
            took = seconds(way, size, c)
            sent = [f"{nbytes / 1e12:g}" for nbytes in (way.sent, way.busiest)]
            rows.append((one.name, way.name, *sent, *(f"{number:.1f}" for number in (*took, took.slowest))))
    head = (
        "",
        "way",
        "TB leave the trainer",
        "TB by its busiest card",
        "s: gather, each card",
        "s: gather and send, busiest card",
        "s: gather, NVLink",
        "s: load of a rank",
        "s: slowest",
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
        "transfers": transfers(c),
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
