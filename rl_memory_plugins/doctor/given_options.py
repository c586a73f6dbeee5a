"""The options that the environment gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_memory_plugins.doctor.finding import Finding, failure, not_applicable
from rl_memory_plugins.doctor.machine import installed_engines, is_importable
from rl_memory_plugins.errors import InvalidRequestError

if TYPE_CHECKING:
    from rl_memory_plugins.config import RLMemoryConfig


def given_options() -> RLMemoryConfig | Finding:
    """The options, or a finding that says why they are not known: a trainer's environment needs no pydantic."""
    if not is_importable("pydantic_settings"):
        if installed_engines():
            return failure(
                "pydantic-settings is not installed, so no engine starts with the plugin",
                "pip install 'rl_memory_plugins[server]'",
            )
        return not_applicable("pydantic-settings is not installed: a trainer needs no options of an engine")
    from rl_memory_plugins.config import RLMemoryConfig

    try:
        return RLMemoryConfig.from_environment() or RLMemoryConfig.parse()
    except InvalidRequestError as error:
        return failure(error.message, "correct the variable; no engine starts with it")
