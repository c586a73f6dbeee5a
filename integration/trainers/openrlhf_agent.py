"""OpenRLHF's agent of `integration.trainers.openrlhf_ppo`: the task of `integration.grpo`, and a record of its engine.

OpenRLHF imports this file in the process of each engine. Each line of the file `OPENRLHF_WATCH.PID` is a JSON object
with one key: `version`, the version of the weights before an answer, or `sleep`, the level of a sleep.
"""

from __future__ import annotations

import json
import os
import string
from pathlib import Path
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor

from integration import grpo

FIRST = 2  # the tokens 0 and 1 are special
SIGNS = (string.ascii_letters + string.digits)[: grpo.VOCABULARY - FIRST]
"""The tokenizer's tokens from `FIRST` on, each a sign."""


class AgentExecutor(SingleTurnAgentExecutor):  # type: ignore[misc]
    _watched = False

    async def execute(self, *args: Any, llm_engine: Any, **kwargs: Any) -> dict[str, Any]:
        engine = llm_engine.llm
        if not self._watched:
            self._watched = True
            sleep = engine.sleep

            async def watched(level: int) -> None:
                write("sleep", level)
                await sleep(level=level)

            engine.sleep = watched
        write("version", await engine.weight_version())
        output: dict[str, Any] = await super().execute(*args, llm_engine=llm_engine, **kwargs)
        [(start, end)] = output["action_ranges"]
        tokens = output["observation_tokens"]
        reward = grpo.reward(tokens[:start], tokens[start:end])
        return {**output, "reward": reward, "scores": reward}


def write(key: str, value: Any) -> None:
    with Path(f"{os.environ['OPENRLHF_WATCH']}.{os.getpid()}").open("a") as file:
        file.write(json.dumps({key: value}) + "\n")
