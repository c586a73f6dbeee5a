"""Hooks and methods that act on enabled engines only, for both adapters."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from rl_memory_plugins.errors import RLMemoryError, UnsupportedError

logger = logging.getLogger(__name__)

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes the replacement of an engine's own function; see `Hooks.wrap`."""


def require_or_stay_out(error: RLMemoryError, *, explicit: bool) -> None:
    """An engine cannot be served. A job sets `RL_MEMORY` for all its engines, also for those that need no sleep.

    Args:
        explicit: A flag or an argument enables the plugin for this engine, not the environment alone.

    Raises:
        RLMemoryError: `error`, if `explicit`. Else a warning is logged, and the engine runs without the plugin.
    """
    if explicit:
        raise error
    logger.warning("rl_memory: RL_MEMORY is set, but this engine runs without the plugin: %s", error.message)


def state_of(owner: Any) -> Any:
    """What this package has added to an object of an enabled engine, `owner.rl_memory`; else `None`."""
    return getattr(owner, "rl_memory", None)


def on_enabled(state: Callable[[Any], Any] = state_of) -> Callable[[Callable[..., Any]], Make]:
    """Decorate a function `act(state, original, owner, *args)` that replaces a method of enabled engines.

    Args:
        state: Gives the first argument of `act` for the owner of the method. If it gives `None`, the engine is not
            enabled, and the engine's own method runs.
    """

    def decorate(act: Callable[..., Any]) -> Make:
        @functools.wraps(act)
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def hook(owner: Any, *args: Any, **kwargs: Any) -> Any:
                found = state(owner)
                if found is None:
                    return original(owner, *args, **kwargs)
                return act(found, original, owner, *args, **kwargs)

            async def coroutine_hook(owner: Any, *args: Any, **kwargs: Any) -> Any:
                return await hook(owner, *args, **kwargs)

            # Frameworks ask which methods are coroutine functions, e.g. Ray for its actors.
            return coroutine_hook if inspect.iscoroutinefunction(original) else hook

        return make

    return decorate


def engine_method(
    operation: str,
    api: type,
    api_of: Callable[[Any], Any],
    run: Callable[[Any, Any, Any], Any] = lambda owner, api, operation: api.run(operation),
) -> Callable[..., Any]:
    """A method for an engine's class that runs an operation of the engine's API.

    Args:
        operation: The name of the operation. The method gets its docstring.
        api: The class of the API.
        api_of: Gives the API of the method's owner; `None` if the engine is not enabled.
        run: Runs the operation; called with the owner, the API and the operation.

    Raises:
        UnsupportedError: the method is called on an engine that is not enabled.
    """

    @functools.wraps(getattr(api, operation), ("__name__", "__doc__"), ())
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = api_of(self)
        if found is None:
            raise UnsupportedError("this engine was started without rl_memory")
        return run(self, found, getattr(found, operation)(*args, **kwargs))

    return method
