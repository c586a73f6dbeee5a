"""The plugin that SGLang's own tests are run with: updates of older tests get a session where SGLang needs one."""

import importlib.util
import types

import pytest

from integration.upstream.environment import DEFAULTS, environment


@pytest.fixture
def update():
    spec = importlib.util.spec_from_file_location("sglang_defaults", DEFAULTS / "sglang_defaults.py")
    aid = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(aid)
    io_struct = types.SimpleNamespace(
        BeginWeightUpdateReqInput=lambda selector: selector, EndWeightUpdateReqInput=lambda: "end"
    )
    return aid._in_session(lambda updater, request: updater.calls.append("update") or "output", io_struct)


class Updater:
    def __init__(self, session):
        self._session, self.calls = session, []

    def begin_weight_update(self, selector):
        self.calls.append(("begin", selector))

    def end_weight_update(self, request):
        self.calls.append(request)


def test_an_update_outside_of_a_session_gets_one(update):
    updater = Updater(None)
    assert update(updater, types.SimpleNamespace(selector="target")) == "output"
    assert updater.calls == [("begin", "target"), "update", "end"]


def test_an_update_within_a_session_stays_in_it(update):
    updater = Updater("open")
    assert update(updater, types.SimpleNamespace(selector="all")) == "output"
    assert updater.calls == ["update"]


def test_with_the_package_its_own_option_does_that(tmp_path):
    variables = environment("sglang", on_gpu=True, defaults={}, root=tmp_path)
    assert variables["RL_MEMORY_IMPLICIT_UPDATE_SESSION"] == "true"
    assert "RL_MEMORY_IMPLICIT_UPDATE_SESSION" not in environment("vllm", on_gpu=True, defaults={}, root=tmp_path)
