"""The file that says which models are served."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.extras import needs

with needs("serve"):
    import yaml
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

DEFAULTS = {"take_turns_s": 5.0, "wake_on_request_s": 600.0}
"""Options of this package that every engine has, if the file says nothing else. A request waits as long as OpenAI's own
client does."""

PORTS_APART = 250
"""SGLang listens on ports up to 240 above its server's."""

_VLLM_KEY = "VLLM_API_KEY"

_GIVEN = ("--served-model-name", "--host", "--port", "--api-key", "--admin-api-key", "--rl-memory")
"""Arguments that `rl-memory serve` sets itself."""


def _text(value: object) -> object:
    """A number of YAML as the command line has it."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_text)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelEntry(_Strict):
    name: Annotated[str, Field(min_length=1)]
    """What requests call the model."""

    engine: Literal["vllm", "sglang"]

    model: Annotated[str, Field(min_length=1)]
    """A folder, or a name that the engine downloads."""

    args: list[Text] = []
    """More arguments of the engine's server."""

    python: str = sys.executable
    """The interpreter of the environment that has the engine and this package."""

    env: dict[str, Text] = {}
    """Variables of the engine's environment, beside those of `rl-memory serve`."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Where the engine's own server listens, on 127.0.0.1."""

    rl_memory: dict[str, Any] = {}
    """Options of this package, for this engine."""

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"{name!r}: a name has no `=`, and neither it nor its value a NUL")
        if _VLLM_KEY in env:
            raise ValueError(f"{_VLLM_KEY}: rl-memory serve sets this itself: give it --api-key")
        return env

    @field_validator("args")
    @classmethod
    def _not_given(cls, args: list[str]) -> list[str]:
        taken = {arg.split("=", 1)[0].replace("_", "-") for arg in args}.intersection(_GIVEN)
        if taken:
            raise ValueError(f"{', '.join(sorted(taken))}: rl-memory serve sets this itself")
        return args


class ServeFile(_Strict):
    models: Annotated[list[ModelEntry], Field(min_length=1)]

    rl_memory: dict[str, Any] = {}
    """Options of this package, for all engines."""

    def options(self, entry: ModelEntry) -> dict[str, Any]:
        """The options of one engine."""
        return {**DEFAULTS, **self.rl_memory, **entry.rl_memory}

    def ports(self, front: int) -> list[int]:
        """The ports of the engines' servers, in the order of the models.

        Args:
            front: The port of `rl-memory serve` itself.
        """
        return [entry.port or front + 1 + PORTS_APART * index for index, entry in enumerate(self.models)]


def read(path: Path, front: int) -> ServeFile:
    """Read and check a file.

    Args:
        front: As for `ServeFile.ports`.

    Raises:
        InvalidRequestError: the file cannot be read, or is not such a file; the message names each bad entry.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise InvalidRequestError(f"{path} is not YAML: {error}") from None
    try:
        found = ServeFile.model_validate(content)
    except ValidationError as error:
        problems = {".".join(map(str, one["loc"])) or "the file": one["msg"] for one in error.errors()}
        listed = "; ".join(f"{where}: {what}" for where, what in problems.items())
        raise InvalidRequestError(f"{path}: {listed}", problems=problems) from None
    _check_names_and_ports(path, found, front)
    for entry in found.models:
        try:
            config = RLMemoryConfig.parse(found.options(entry))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{path}: model {entry.name!r}: {error.message}", **error.details) from None
        if config.take_turns_s is None:
            raise InvalidRequestError(f"{path}: model {entry.name!r}: take_turns_s must be a number of seconds")
    return found


def _check_names_and_ports(path: Path, found: ServeFile, front: int) -> None:
    names = [entry.name for entry in found.models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidRequestError(f"{path}: two models are called {', '.join(map(repr, twice))}", names=twice)
    ports = [front, *found.ports(front)]
    for name, port in zip(names, ports[1:], strict=True):
        if port > 65535:
            raise InvalidRequestError(f"{path}: model {name!r} would have the port {port}: give it a `port`", port=port)
        if ports.count(port) > 1:
            raise InvalidRequestError(f"{path}: the port {port} of model {name!r} is taken twice", port=port)
