"""The options, in one model that the command-line flag, the environment and Python all fill.

An explicit value wins over the environment (`RL_MEMORY_<OPTION>`), the environment over the default. Whether
the plugin is enabled is not an option: it is enabled by the presence of a configuration.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.timing import LONGEST_S

__all__ = ["RLMemoryConfig"]

logger = logging.getLogger(__name__)

MiB = 1 << 20

ENV_PREFIX = "RL_MEMORY_"

#: Variables of the command line and the tests.
OTHER_VARIABLES = ("url", "api_key", "sglang_python", "test_wheels")

_ON = ("", "1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")
_parse_byte_string = TypeAdapter(ByteSize).validate_python


def _parse_bytes(value: object) -> object:
    """`"1GiB"` to 1073741824; anything that is not a string is left to pydantic."""
    if isinstance(value, bool):
        raise ValueError("expected a number of bytes, or a string like 512MiB or 1GiB")
    if isinstance(value, str):
        return int(_parse_byte_string(value.strip()))
    return value


Bytes = Annotated[int, BeforeValidator(_parse_bytes), Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)]


class RLMemoryConfig(BaseSettings):
    """All options. Byte options take numbers or strings such as `512MiB` and `1GiB`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    allocator: Literal["auto", "vmm", "tms", "host"] = "auto"
    """Where pausable memory comes from; `auto` takes `vmm` on CUDA, `tms` on ROCm and `host` on CPUs."""

    tms_hook_mode: Literal["auto", "torch", "preload"] = "auto"
    """How torch_memory_saver gets between torch and CUDA: `preload` needs its library in LD_PRELOAD, which
    `rl-memory serve` arranges; `auto` takes the mode that the process was started for."""

    poison: bool = False
    """Fill newly mapped pages with NaNs, so that a forgotten restore is loud. Slow, for tests. Released pages
    need no filling: reading them is a fault on a GPU, and gives nothing of what they held on a CPU."""

    eager_backup: bool = False
    """Copy the weights to host memory in the background, at the start and after each complete update, so that
    the next level-1 sleep only unmaps."""

    prepare_host_memory: Literal["auto", "start", "first_use"] = "auto"
    """When host memory for a copy of the weights is made. `auto`: in the background from the start on, as far as a
    quarter of the host's memory stays free; a level-2 sleep ends that, and what level-2 sleeps do not need is given
    back. `start`: in the background from the start on, and kept. `first_use`: at the first sleep that preserves."""

    host_arena_max_bytes: Bytes = 0
    """The most host memory that backups may take, for each process; 0: bounded by the free memory only."""

    host_memory_margin_bytes: Bytes = 256 * MiB
    """Host memory that backups leave free. Exhausted host memory is no error one can catch: the kernel ends a
    process, often not ours. The margin covers what the machine's other processes allocate while a backup is
    being made; it stays well below a backup's own size, so it refuses few sleeps that would have worked."""

    device_memory_margin_bytes: Bytes = 64 * MiB
    """Device memory that a wake leaves free, for kernels and communicators that allocate on first use."""

    update_timeout_s: Seconds = 60.0
    """How long the trainer may be silent during a weight update before the update is given up."""

    drain_timeout_s: Seconds = 600.0
    """How long a transition waits for running requests before it gives up and admission opens again."""

    allow_cast: bool = False
    """Accept a weight whose dtype differs from the parameter's, and convert it."""

    check_finite: bool = False
    """Refuse a weight update that holds a NaN or an infinity."""

    fault_dir: str | None = None
    """A directory whose files inject faults, for tests of error handling (`memory/faults.py`)."""

    strict_tp_balance: bool = False
    """SGLang: keep its start-up error when tensor-parallel ranks see different free memory."""

    implicit_update_session: bool = False
    """SGLang: open and close a weight-update session for callers of its own update routes that do not."""

    @classmethod
    def parse(cls, value: object = None) -> RLMemoryConfig:
        """Read what the flag or the Python argument holds; unnamed options come from the environment.

        Args:
            value: `True`, `None` or an empty string (nothing is named), a JSON object, `key=value,key=value`,
                a mapping, or a configuration, which is returned as it is.

        Raises:
            InvalidRequestError: an unknown option, a bad value, or a value of another form; the details list
                all options as `allowed` and what is wrong with which as `problems`.
        """
        if isinstance(value, RLMemoryConfig):
            return value
        _warn_of_unknown_variables()
        return cls._validated(_options(value))

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> RLMemoryConfig:
        """The inverse of `to_dict`, for the processes of an engine: the environment has no say in it again."""
        return cls._validated({**_defaults(), **options})

    @classmethod
    def from_environment(cls) -> RLMemoryConfig | None:
        """The configuration that `RL_MEMORY` holds, written as for the flag; `None` if it is unset or off.

        For frameworks that build an engine's arguments themselves and pass no flag on.
        """
        value = os.environ.get("RL_MEMORY", "").strip()
        return None if value.lower() in _OFF else cls.parse(value)

    def to_dict(self) -> dict[str, Any]:
        """The options that differ from their defaults, as JSON values in alphabetical order.

        vLLM hashes this into the key of its compile cache, so equal configurations give equal dicts.
        """
        defaults = _defaults()
        return {key: value for key, value in sorted(self.model_dump().items()) if value != defaults[key]}

    @classmethod
    def _validated(cls, options: dict[str, Any]) -> RLMemoryConfig:
        try:
            return cls(**options)
        except ValidationError as error:
            problems = {_name(found["loc"], options): found["msg"] for found in error.errors()}
        raise _invalid("; ".join(f"{name}: {why}" for name, why in problems.items()), problems=problems)


def _defaults() -> dict[str, Any]:
    return {key: field.default for key, field in RLMemoryConfig.model_fields.items()}


def _name(location: tuple[int | str, ...], options: Mapping[str, Any]) -> str:
    """How the user wrote the option: a key, or a variable of the environment."""
    key = str(location[0])
    return key if key in options else f"{ENV_PREFIX}{key.upper()}"


def _warn_of_unknown_variables() -> None:
    """One that is misspelt would be left out without a word; an engine need not end for it."""
    known = {ENV_PREFIX + name.upper() for name in (*RLMemoryConfig.model_fields, *OTHER_VARIABLES)}
    unknown = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)
    if unknown:
        logger.warning("not an option of rl_memory: %s", ", ".join(unknown))


def _options(value: object) -> dict[str, Any]:
    if value is None or value is True:
        return {}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if not isinstance(value, str):
        raise _invalid(f"expected a JSON object, key=value pairs or a mapping, not {value!r}")
    text = value.strip()
    if text.lower() in _ON:
        return {}
    return _json_object(text) if text.startswith("{") else _pairs(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        options: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"malformed JSON: {error}") from None
    return options


def _pairs(text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in text.split(","):
        key, equals, item = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise _invalid(f"{pair.strip()!r} is not key=value")
        if key in options:
            raise _invalid(f"{key} is given twice")
        options[key] = item
    return options


def _invalid(why: str, **details: Any) -> InvalidRequestError:
    allowed = sorted(RLMemoryConfig.model_fields)
    return InvalidRequestError(
        f"bad rl_memory options: {why} (the options are {', '.join(allowed)})", allowed=allowed, **details
    )
