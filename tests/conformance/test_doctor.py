"""`rl-memory doctor --against URL` on a real engine."""

from __future__ import annotations

from integration.engines.base import Server
from rl_memory_plugins.doctor import against
from rl_memory_plugins.doctor.finding import Finding, Status


def asked(server: Server) -> dict[str, Finding]:
    return {finding.name: finding for finding in against.ask(server.url, server.launch.api_key)}


def test_an_engine_that_serves_has_no_failure(server: Server) -> None:
    found = asked(server)
    assert set(found) == set(against.NAMES)
    assert {name: one for name, one in found.items() if one.status is Status.FAILURE} == {}
    for name in ("url", "auth", "versions", "active-hooks", "engine-boards", "same-place", "admission"):
        assert found[name].status is Status.OK, found[name]
    [hooks] = found["active-hooks"].details["hooks"].values()
    assert len(hooks) > 10
    assert len(found["engine-boards"].details["boards"]) == server.launch.dp


def test_what_sleeps_is_named_with_the_remedy(server: Server) -> None:
    server.control.sleep(level=2)
    found = asked(server)
    assert found["admission"].details["reason"] == "asleep"
    assert "weights discarded" in found["admission"].seen
    assert "wake_up()" in found["admission"].remedy
    assert found["updates"].status is Status.WARNING
    assert found["next-wake"].status is not Status.NOT_APPLICABLE
    server.control.wake_up()
    found = asked(server)
    assert found["admission"].details["reason"] == "stale"
    assert "complete update" in found["updates"].seen
