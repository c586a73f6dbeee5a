"""The plugin that SGLang's own tests are run with: updates of older tests get a session where SGLang needs one."""

import importlib.util
import types

import msgspec
import pytest

from integration.upstream.environment import DEFAULTS


@pytest.fixture
def update():
    spec = importlib.util.spec_from_file_location("sglang_defaults", DEFAULTS / "sglang_defaults.py")
    aid = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(aid)
    io_struct = types.SimpleNamespace(
        BeginWeightUpdateReqInput=lambda selector: selector, EndWeightUpdateReqInput=lambda: "end"
    )
    return aid._in_session(lambda updater, request: updater.calls.append("update") or Output(True), io_struct)


class Output(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


class Updater:
    def __init__(self, session, ended):
        self._session, self.calls, self._ended = session, [], ended

    def begin_weight_update(self, selector):
        self.calls.append(("begin", selector))

    def end_weight_update(self, request):
        self.calls.append(request)
        return self._ended


def test_an_update_outside_of_a_session_gets_one(update):
    updater = Updater(None, Output(True))
    assert update(updater, types.SimpleNamespace(selector="target")) == Output(True)
    assert updater.calls == [("begin", "target"), "update", "end"]


def test_an_update_within_a_session_stays_in_it(update):
    updater = Updater("open", Output(True))
    assert update(updater, types.SimpleNamespace(selector="all")) == Output(True)
    assert updater.calls == ["update"]


def test_a_session_that_does_not_end_well_is_an_update_that_failed(update):
    updater = Updater(None, Output(False, "no"))
    assert update(updater, types.SimpleNamespace(selector="all")) == Output(False, "no")
