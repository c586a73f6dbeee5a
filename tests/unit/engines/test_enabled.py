"""A hook acts on enabled engines only, and stays the kind of function that it replaces."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest

from rl_memory_plugins.engines.enabled import engine_method, on_enabled
from rl_memory_plugins.errors import UnsupportedError

ENABLED = SimpleNamespace(rl_memory="ours")


@on_enabled()
def doubled(state, original, owner, value):
    return [state, original(owner, value), value]


def test_a_hook_leaves_other_engines_alone():
    hook = doubled(lambda owner, value: value)
    assert hook(SimpleNamespace(), value=1) == 1
    assert hook(ENABLED, 1) == ["ours", 1, 1]


def test_the_hook_of_a_coroutine_function_is_one():
    async def original(owner, value):
        return value

    @on_enabled()
    async def added(state, original, owner, value):
        return state, await original(owner, value)

    hook = added(original)
    assert inspect.iscoroutinefunction(hook)
    assert asyncio.run(hook(SimpleNamespace(), 1)) == 1
    assert asyncio.run(hook(ENABLED, 1)) == ("ours", 1)


def test_a_method_runs_the_operation_or_refuses():
    class Api:
        def status(self, what):
            """The status."""
            return f"status of {what}"

        def run(self, operation):
            return operation.upper()

    method = engine_method("status", Api, lambda engine: engine.api)
    assert (method.__name__, method.__doc__) == ("status", "The status.")
    assert method(SimpleNamespace(api=Api()), what="it") == "STATUS OF IT"
    with pytest.raises(UnsupportedError, match="without rl_memory"):
        method(SimpleNamespace(api=None), what="it")
