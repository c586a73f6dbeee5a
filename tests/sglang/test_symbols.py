"""The symbols that the adapter replaces or uses are there: in the installed SGLang, and as trainers patch it."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import pytest

from rl_memory_plugins.engines.sglang.native_calls import POST_PROCESS, _post_processing
from rl_memory_plugins.tags import Content, Tag
from tests.sglang.symbols import NEEDS, UPDATER
from tests.sglang.test_sessions import Updater, broken


def test_the_installed_engine_has_every_symbol() -> None:
    assert NEEDS.missing(NEEDS.installed()) == []


def test_a_missing_symbol_is_found(tmp_path) -> None:
    module = tmp_path / "srt" / "managers" / "scheduler.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "class Base:\n    def pause_generation(self, recv_req): ...\n    def abort_request(self): ...\n"
        "class Scheduler(Base): ...\n"
    )
    missing = NEEDS.missing(tmp_path)
    scheduler = "sglang.srt.managers.scheduler:Scheduler"
    assert f"{scheduler}.pause_generation" not in missing  # inherited
    assert f"{scheduler}.abort_request" in missing  # without its parameter
    assert f"{scheduler}.continue_generation" in missing
    assert "sglang.srt.distributed.bootstrap:_check_tp_memory_balance" in missing


@pytest.fixture(scope="module")
def found(forked_python: Callable[..., str]) -> dict[str, Any]:
    """What the hooks ask for, on an SGLang that has slime's additional handler."""
    output = forked_python(f"""
        import json
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
        from tests.symbols import asked_of_hooks

        asked = asked_of_hooks()

        def post_process_weights(self, recv_req): ...
        SchedulerWeightUpdaterManager.{POST_PROCESS} = post_process_weights

        from rl_memory_plugins.engines.sglang import register
        from rl_memory_plugins.engines.sglang.hooks import hooks
        from rl_memory_plugins.engines.sglang.install import install
        register()
        install()
        print(json.dumps({{"asked": sorted(asked), "replaced": sorted(hooks.table)}}))
    """)
    return json.loads(output.splitlines()[-1])


def test_the_list_of_symbols_is_what_the_adapter_asks_for(found: dict[str, Any]) -> None:
    assert "sglang.srt.managers.scheduler:Scheduler.flush_cache" in found["asked"]
    assert {path for path in found["asked"] if path.startswith("sglang.")} <= NEEDS.known()


# -- slime's patch for 0.5.15.post1 removes no symbol. It adds a handler that writes weights. -----------------


@pytest.fixture
def slimes_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import io_struct

    monkeypatch.setattr(io_struct, "PostProcessWeightsReqOutput", types.SimpleNamespace, raising=False)


def test_the_handler_that_slime_adds_is_guarded(found: dict[str, Any]) -> None:
    assert f"{UPDATER}.{POST_PROCESS}" in found["replaced"]


def post_process(updater: Any, handler: Callable[..., Any]) -> Any:
    updater.scheduler.rl_memory.ranks.barrier = lambda: None
    return _post_processing()(handler)(updater, types.SimpleNamespace())


def test_weights_are_packed_while_they_are_awake(slimes_answer: None) -> None:
    updater = Updater(None)
    assert post_process(updater, lambda *_: types.SimpleNamespace(success=True, message="Success")).success
    assert updater.content is Content.VALID


def test_weights_that_sleep_are_not_packed(slimes_answer: None) -> None:
    """slime alone: the kernels read released memory, and the process dies."""
    updater = Updater(None)
    updater.scheduler.rl_memory.controller.status.asleep_tags = lambda: [Tag.WEIGHTS.value]
    output = post_process(updater, broken)
    assert not output.success and "asleep" in output.message
    assert updater.content is Content.VALID


def test_weights_that_are_packed_in_part_are_not_valid(slimes_answer: None) -> None:
    updater = Updater(None)
    output = post_process(updater, broken)
    assert not output.success and "half restored" in output.message
    assert updater.content is Content.FAILED
    assert updater.noted == 1
