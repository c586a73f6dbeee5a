"""What the processes of a trainer decide on, of which some are on other hosts."""

import subprocess
import sys

import pytest

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.own_host import host_id
from rl_memory_plugins.weights.division import Need, Share, decide
from rl_memory_plugins.weights.shards import Layout, Layouts

LAYOUTS = Layouts.made_of([Layout((0, 1), (((0, 2),), ((2, 2),)))])
FAR = "tcp://192.0.2.1:5000"
V6 = "tls://[2001:db8::1]:5000#" + 64 * "0"


def shares(hosts, places, **fields):
    needs = [Need("tcp", [None], True)]
    return [
        Share("one", LAYOUTS, [] if number else needs, own, host, **{name: of[number] for name, of in fields.items()})
        for number, (host, own) in enumerate(zip(hosts, places, strict=True))
    ]


@pytest.mark.parametrize(
    ("hosts", "places", "told"),
    [
        ("aaa", [["/a"], ["/b"], ["/c"]], [["/a"], ["/b"], ["/c"]]),
        ("aba", [["/a"], ["/b"], ["/c"]], None),
        ("aba", [["/a", FAR], ["/b", "tcp://127.0.0.1:5"], ["/c"]], None),
        ("aba", [["/a", FAR], ["/b", "tcp://[::1]:5", V6], ["/c"]], [[FAR], [V6], []]),
        ("aba", [["/a"], ["/b", FAR], ["/c"]], None),  # ranks of the other host could not reach the first
        ("aab", [["/a"], ["/b"], ["/c"]], [["/a"], ["/b"], ["/c"]]),  # the last has nothing, and serves no rank
    ],
    ids=str,
)
def test_a_rank_is_sent_to_another_host_only_where_it_can_reach_it(hosts, places, told):
    for process in range(3):
        division = decide(shares(hosts, places), process)
        assert division is None if told is None else division.places == told


@pytest.mark.parametrize("field", ["bucket_bytes", "slots"])
def test_all_cut_buckets_alike(field):
    places = [["/a"], ["/b"], ["/c"]]
    assert decide(shares("aaa", places, **{field: [4, 4, 4]}), 0)
    with pytest.raises(InvalidRequestError, match=field) as raised:
        decide(shares("aaa", places, **{field: [4, 4, 2]}), 0)
    assert raised.value.details == {"field": field, "got": [4, 4, 2]}


def test_the_processes_of_a_host_have_one_identity():
    code = "from rl_memory_plugins.own_host import host_id; print(host_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == host_id() != ""
