"""A fleet of one SGLang engine. Needs an environment with SGLang and Ray."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from integration.engines.base import Launch
from integration.engines.sglang import Sglang
from integration.waiting import wait_until
from rl_memory_plugins.ray import EngineDescription, EngineFleet, status
from tests.ray.conftest import OPTIONS, SEED, in_engine, model_of
from tests.vllm.calls import PROMPT
from tests.vllm.conftest import greedy

ARGUMENTS = {
    "dtype": "float32",
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "skip_tokenizer_init": True,
    "max_total_tokens": 4096,
    "log_level": "warning",
}
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "logprobs": True}


def test_the_life_of_an_engine(cluster: None, folder: Path) -> None:
    variables = Sglang().environment(Launch(folder))
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], os.environ["PYTHONPATH"]])
    description = EngineDescription(
        "sglang", {**ARGUMENTS, "model_path": str(folder)}, OPTIONS, runtime_env={"env_vars": variables}
    )
    with EngineFleet.start(description, 1) as fleet:
        [engine] = fleet.engines
        assert in_engine(engine, lambda actor: actor._engine.api._drain_timeout_s) == OPTIONS["drain_timeout_s"]
        assert fleet.generate([PROMPT], GREEDY)[0].token_ids == greedy(model_of(folder, SEED))
        model = model_of(folder, 2)
        with fleet.handoff(model).training("two"):
            assert [(one.state, one.reason) for one in status(fleet)] == [("closed", "asleep")]
        [answer] = fleet.generate([PROMPT], GREEDY)
        assert (answer.token_ids, answer.weight_version) == (greedy(model), ("two", "two"))
        assert len(answer.logprobs) == 8 and max(answer.logprobs) < 0 and answer.finish_reason == "length"
        pid = engine.about().pid
        for child in psutil.Process(pid).children(recursive=True):  # the scheduler among them
            child.kill()
        wait_until(lambda: status(fleet)[0].state == "empty", "Ray restarts the actor")
        assert engine.about().pid != pid
        assert fleet.replace(model) == [0]
        assert fleet.generate([PROMPT], GREEDY)[0].token_ids == greedy(model)
