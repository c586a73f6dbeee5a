"""Attention data parallelism over two hosts: each rank has requests of its own, and both ranks are one engine."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from integration.engines.base import Launch
from integration.two_hosts import TwoHosts, namespaces_work
from rl_memory_plugins.weights.checksums import tensor_checksum
from tests.sglang.test_attention_dp import LONG, OTHER_SEED, PLUGIN, PROMPT, SEED, answers, asked
from tests.sglang.test_two_hosts import on_two_hosts
from tests.weight_kinds import checkpoint, install_plugin, write_moe


@pytest.mark.long
def test_ranks_of_both_hosts_sleep_wake_and_take_updates(tmp_path: Path) -> None:
    folders = [write_moe(tmp_path / name, seed, "float32") for name, seed in (("first", SEED), ("other", OTHER_SEED))]
    sites = [install_plugin(tmp_path / "site", "sglang.srt.plugins", PLUGIN)]
    hidden, log = tmp_path / "hidden", tmp_path / "log"
    hidden.mkdir()
    log.mkdir()
    with ExitStack() as stack:
        hosts = stack.enter_context(TwoHosts()) if namespaces_work() else None
        options = {"poison": True, "update_timeout_s": 30, "update_hosts": hosts.networks if hosts else ""}
        launch = Launch(folders[0], tp=2, options=options, forked=True)
        server = stack.enter_context(on_two_hosts(hosts, hidden, launch, log, "--attn-dp-size", "2", sites=sites))
        first = answers(server)
        (engine,) = server.control.memory()["engines"]
        assert [rank["rank"] for rank in engine["ranks"]] == [0, 1]
        for mode in ("abort", "keep"):
            with asked(server, LONG) as asking:
                server.control.sleep(1, mode=mode)
                assert server.post(PROMPT).status_code == 503
                server.control.wake_up()
                ended = [len(server.kind.tokens(answer.result(60))) == LONG for answer in asking]
            assert all(ended) if mode == "keep" else not any(ended)
            assert answers(server) == first
        given = {"advertise": hosts.addresses[0], "directory": hidden} if hosts else {}
        found = []
        for folder in (folders[1], folders[0]):
            weights = checkpoint(folder)
            report = server.control.update_weights(weights, **given)
            assert sorted(one["transport"] for one in report["receivers"]) == ["shm", "tcp" if hosts else "shm"]
            own = {name: tensor_checksum(tensor) for name, tensor in weights.items()}
            assert server.control.checksums()["tensors"] == own
            found.append(answers(server))
        assert found[1] == first != found[0]
