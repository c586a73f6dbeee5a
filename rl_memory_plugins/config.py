"""The options, in one model for the command-line flag, the environment and Python.

An explicit value wins over the environment (`RL_MEMORY_<OPTION>`), and the environment wins over the default. No option
enables the plugin: the presence of a configuration does.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.extras import needs
from rl_memory_plugins.timing import LONGEST_S
from rl_memory_plugins.weights.update_hosts import UpdateHosts

with needs("server"):
    from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, TypeAdapter, ValidationError, ValidationInfo
    from pydantic_settings import BaseSettings, SettingsConfigDict

logger = logging.getLogger(__name__)

MiB = 1 << 20

ENV_PREFIX = "RL_MEMORY_"

#: Variables of the command line.
OTHER_VARIABLES = ("url", "api_key", "engine_key")

_ON = ("", "1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")
_parse_byte_string = TypeAdapter(ByteSize).validate_python


def _parse_bytes(value: object) -> object:
    """Turn `"1GiB"` into 1073741824. Pydantic checks what is no string."""
    if isinstance(value, bool):
        raise ValueError("expected a number of bytes, or a string like 512MiB or 1GiB")
    if isinstance(value, str):
        return int(_parse_byte_string(value.strip()))
    return value


def _checked_hosts(networks: str) -> str:
    UpdateHosts(networks)
    return networks


def _with_wakes(turn_s: float | None, given: ValidationInfo) -> float | None:
    if turn_s is not None and given.data.get("wake_on_request_s") is None:
        raise ValueError("needs wake_on_request_s: nothing would wake the engine for its next turn")
    if turn_s is not None and given.data.get("start_stale"):
        raise ValueError(
            "not with start_stale: an engine that waits for an update would keep the GPUs in turns of others"
        )
    return turn_s


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
    """The allocator of pausable memory. `auto` means `vmm` on CUDA, `tms` on ROCm and `host` on CPUs."""

    tms_hook_mode: Literal["auto", "torch", "preload"] = "auto"
    """How torch_memory_saver intercepts torch's CUDA calls. `preload` needs its library in LD_PRELOAD, which
    `rl-memory serve` sets. `auto` takes the mode that the process was started for."""

    poison: bool = False
    """Fill newly mapped pages with NaNs, so that tests notice a missing restore. Slow. Released pages need no NaNs:
    reading them is a fault on a GPU, and on a CPU gives none of the former content."""

    eager_backup: bool = False
    """Copy the weights to host memory in the background, at the start and after each complete update. The next level-1
    sleep then only unmaps."""

    prepare_host_memory: Literal["auto", "start", "first_use"] = "auto"
    """When the engine obtains host memory for a copy of the weights. `auto`: in the background from the start on, while
    a quarter of the host's memory stays free; a level-2 sleep ends that and gives unneeded memory back. `start`: in the
    background from the start on, and the memory is kept. `first_use`: at the first sleep that preserves."""

    share_host_backups: bool = False
    """Keep one copy of equal weights in host memory for all processes of this user on this host, e.g. for data-parallel
    replicas."""

    host_arena_max_bytes: Bytes = 0
    """The most host memory that the backups of one process may take. With 0 only the free memory limits them."""

    host_memory_margin_bytes: Bytes = 256 * MiB
    """Host memory that backups leave free. No process can catch exhausted host memory: the kernel kills a process,
    often of another program. The margin covers allocations of other processes while the engine makes a backup. The
    margin is far smaller than a backup, and therefore refuses few sleeps that would have worked."""

    device_memory_margin_bytes: Bytes = 64 * MiB
    """Device memory that a wake leaves free, for kernels and communicators that allocate on first use."""

    nccl_suspend: bool = False
    """Release the memory of NCCL communicators while the engine sleeps. Needs NCCL 2.29.7. A sleep takes longer."""

    update_timeout_s: Seconds = 60.0
    """The longest silence of the trainer during a weight update. Then the update fails."""

    update_hosts: Annotated[str, AfterValidator(_checked_hosts)] = ""
    """Hosts besides the engine's own that a weight update may come from over TCP: addresses, and networks in CIDR
    notation, with spaces between them."""

    start_stale: bool = False
    """Start with weights that answer nothing: their content is `stale`, and the engine admits no requests before a
    complete update or load. For servers that a supervisor starts again while others serve newer weights."""

    drain_timeout_s: Seconds = 600.0
    """How long a transition waits for running requests. Then it fails, and admission opens again."""

    idle_sleep_s: Seconds | None = None
    """A server puts its engine to sleep, at level 1, when no request came for so long."""

    wake_on_request_s: Seconds | None = None
    """A server wakes an engine for a request if the engine sleeps because it was idle. The request waits for so long;
    then it is refused, as it is at once without this option."""

    take_turns_s: Annotated[Seconds | None, AfterValidator(_with_wakes)] = None
    """A server's engine is awake only in its turn on its GPUs, and other engines of this user with this option only in
    theirs. It keeps the GPUs for so long at least. Needs `wake_on_request_s`."""

    strict_dtypes: bool = False
    """Refuse a weight whose dtype differs from the parameter's. By default a cast that keeps every value is made, and a
    cast that rounds if the trainer has chosen the dtype that it sends."""

    allow_cast: bool = False
    """Make every cast that the engine's loader makes, also one that rounds a dtype that the trainer has not chosen."""

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
        """Read the value of the flag or of the Python argument. The environment gives all other options.

        Args:
            value: `True`, `None` or an empty string (no options), a JSON object, `key=value,key=value`, a mapping, or a
                configuration, which is returned as it is.

        Raises:
            InvalidRequestError: an unknown option, a bad value, or a value of another form. The details list all
                options as `allowed`, and the message for each bad option as `problems`.
        """
        if isinstance(value, RLMemoryConfig):
            return value
        _warn_of_unknown_variables()
        return cls._validated(_options(value))

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> RLMemoryConfig:
        """The inverse of `to_dict`, for the processes of an engine. Does not read the environment again."""
        defaults = {key: field.default for key, field in cls.model_fields.items()}
        return cls._validated({**defaults, **options})

    @classmethod
    def from_environment(cls) -> RLMemoryConfig | None:
        """The configuration in `RL_MEMORY`, written as for the flag; `None` if the variable is unset or off.

        For frameworks that build the arguments of an engine themselves and pass no flag on.
        """
        value = os.environ.get("RL_MEMORY", "").strip()
        return None if value.lower() in _OFF else cls.parse(value)

    def to_dict(self) -> dict[str, Any]:
        """The options that differ from their defaults, as JSON values in alphabetical order.

        Equal configurations give equal dicts, because vLLM hashes the dict into the key of its compile cache.
        """
        return dict(sorted(self.model_dump(exclude_defaults=True).items()))

    @classmethod
    def _validated(cls, options: dict[str, Any]) -> RLMemoryConfig:
        try:
            return cls(**options)
        except ValidationError as error:
            problems = {_name(found["loc"], options): found["msg"] for found in error.errors()}
        raise _invalid("; ".join(f"{name}: {why}" for name, why in problems.items()), problems=problems)


def _name(location: tuple[int | str, ...], options: Mapping[str, Any]) -> str:
    """The option's name as the user wrote it: a key, or a variable of the environment."""
    key = str(location[0])
    return key if key in options else f"{ENV_PREFIX}{key.upper()}"


def _warn_of_unknown_variables() -> None:
    """Warn of variables that may be misspelt options. They do not stop the start of an engine."""
    known = {ENV_PREFIX + name.upper() for name in (*RLMemoryConfig.model_fields, *OTHER_VARIABLES)}
    unknown = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)
    if unknown:
        logger.warning("not an option of rl_memory: %s", ", ".join(unknown))


def _options(value: object) -> dict[str, Any]:
    """The named options of a value that `RLMemoryConfig.parse` takes."""
    if value is None or value is True:
        return {}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if not isinstance(value, str):
        raise _invalid(f"expected a JSON object, key=value pairs or a mapping, not {value!r}")
    text = value.strip()
    if text.lower() in _ON:
        return {}
    options: dict[str, Any] = {}
    if text.startswith("{"):
        try:
            options = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _invalid(f"malformed JSON: {error}") from None
        return options
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
