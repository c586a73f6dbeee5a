"""An update that a relay passes on to a running engine."""

from __future__ import annotations

from integration.engines.base import Server
from rl_memory_plugins.trainer import push_from_all
from rl_memory_plugins.trainer.relay import Relay
from tests.conformance.conftest import PROMPT, Weights, greedy
from tests.conformance.trainers import BUCKET_BYTES


def test_weights_that_a_relay_passes_on_are_the_trainers(server: Server, weights: Weights) -> None:
    relay = Relay([server.control], bucket_bytes=BUCKET_BYTES)
    options = {"transport": "tcp", "bucket_bytes": BUCKET_BYTES}
    report = push_from_all(relay, weights.other, weight_version="relayed", **options)
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)
    assert server.control.weight_version() == "relayed"
    [received] = report["receivers"]
    assert received["transport"] == "tcp" and received["bytes"] == report["bytes"]
    assert len(received["relayed"]) == server.launch.ranks
