"""The two engines inside an actor: how each starts, answers a prompt, and shows that its processes have died."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from rl_memory_plugins.engine_api import AsyncioApi
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.records import weight_version

VLLM_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


class Generated(msgspec.Struct, frozen=True):
    """An answer to one prompt.

    Attributes:
        token_ids: The tokens.
        logprobs: The log-probability of each token, if the sampling parameters asked for it; else empty.
        finish_reason: The engine's word, e.g. `length` or `stop`; `abort` if a sleep or an update ended the request.
        weight_version: The version of the weights when the request began, and when it ended. They differ if an update
            ran meanwhile.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    weight_version: tuple[str, str]


class Engine(ABC):
    """An engine of this process. It is made in a thread; its coroutines run on the actor's event loop.

    Args:
        arguments: The arguments of the engine's own class.
        rl_memory: The argument `rl_memory` of that class.
    """

    api: AsyncioApi

    @abstractmethod
    def __init__(self, arguments: Mapping[str, Any], rl_memory: Any) -> None: ...

    @abstractmethod
    async def _generate(self, prompt: list[int], sampling: dict[str, Any]) -> tuple[list[int], list[float], str]:
        """The tokens, their log-probabilities, and the reason of the end."""

    @abstractmethod
    def lives(self) -> bool:
        """Whether all processes of the engine live."""

    async def generate(self, prompt: list[int], sampling: dict[str, Any]) -> Generated:
        """
        Args:
            prompt: Token ids.
            sampling: The engine's own sampling parameters. `logprobs=True` asks for log-probabilities, on both engines.

        Raises:
            EngineAsleepError: the engine admits no requests.
        """
        before = weight_version(self.api.status_now())
        tokens, logprobs, reason = await self._generate(prompt, dict(sampling))
        return Generated(tokens, logprobs, reason, (before, weight_version(self.api.status_now())))


class VllmEngine(Engine):
    """`AsyncLLM` of vLLM."""

    def __init__(self, arguments: Mapping[str, Any], rl_memory: Any) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        from rl_memory_plugins.engines.vllm.client import AsyncApi, api_of
        from rl_memory_plugins.vllm import AsyncEngineArgs

        if any(arguments.get(size, 1) > 1 for size in VLLM_SIZES):
            # vLLM in a placement group would make Ray actors of its ranks, in any bundle of the group.
            arguments = {"distributed_executor_backend": "mp", **arguments}
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, rl_memory=rl_memory))
        self.api = api_of(self._engine, AsyncApi)

    async def _generate(self, prompt: list[int], sampling: dict[str, Any]) -> tuple[list[int], list[float], str]:
        from vllm import SamplingParams

        wanted = 0 if sampling.pop("logprobs", False) else None  # 0: the generated token's alone
        parameters = SamplingParams(**sampling, logprobs=wanted, detokenize=False)
        outputs = self._engine.generate({"prompt_token_ids": prompt}, parameters, uuid.uuid4().hex)
        async for output in outputs:  # each has all tokens so far
            last = output
        answer = last.outputs[0]
        found = zip(answer.token_ids, answer.logprobs or (), strict=False)
        return list(answer.token_ids), [float(by[token].logprob) for token, by in found], str(answer.finish_reason)

    def lives(self) -> bool:
        return not self._engine.errored


class SglangEngine(Engine):
    """`Engine` of SGLang."""

    def __init__(self, arguments: Mapping[str, Any], rl_memory: Any) -> None:
        from rl_memory_plugins.engines.sglang.client import api_of
        from rl_memory_plugins.sglang import Engine as Stock

        self._engine = Stock(**arguments, rl_memory=rl_memory)
        self.api: Any = api_of(self._engine.tokenizer_manager)

    async def _generate(self, prompt: list[int], sampling: dict[str, Any]) -> tuple[list[int], list[float], str]:
        wanted = bool(sampling.pop("logprobs", False))
        answer = await self._engine.async_generate(input_ids=prompt, sampling_params=sampling, return_logprob=wanted)
        meta = answer["meta_info"]
        logprobs = [float(found[0]) for found in meta["output_token_logprobs"]] if wanted else []
        return list(answer["output_ids"]), logprobs, str((meta["finish_reason"] or {}).get("type"))

    def lives(self) -> bool:
        return bool(self.api.lives())


ENGINES: dict[str, type[Engine]] = {"vllm": VllmEngine, "sglang": SglangEngine}


def engine_class(name: str) -> type[Engine]:
    """
    Raises:
        InvalidRequestError: there is no engine of this name.
    """
    if name not in ENGINES:
        raise InvalidRequestError(f"no engine {name!r}", field="engine", got=name, allowed=sorted(ENGINES))
    return ENGINES[name]
