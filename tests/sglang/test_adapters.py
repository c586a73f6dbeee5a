"""Adapters of SGLang's engine in Python, beside the common suite."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from integration.engines.base import REPOSITORY, Launch
from integration.engines.sglang import Sglang

PYTHON = """
import torch
torch.multiprocessing.set_sharing_strategy("file_system")
from integration.models import new_model
from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.sglang import Engine
from rl_memory_plugins.trainer import Adapter, RolloutHandoff, push_adapter
from tests import lora
from tests.vllm.conftest import greedy

engine = Engine(
    model_path=FOLDER, dtype="float32", device="cpu", attention_backend="torch_native",
    sampling_backend="pytorch", grammar_backend="none", disable_overlap_schedule=True,
    skip_tokenizer_init=True, max_total_tokens=4096, log_level="warning", rl_memory=True,
    enable_lora=True, lora_backend="torch_native", max_lora_rank=8, lora_target_modules=list(lora.TARGETS),
)
model = new_model(FOLDER, 1)

def ask(name):
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return engine.generate(input_ids=[5, 6, 7, 8], sampling_params=sampling, lora_path=name)["output_ids"]

def push(name, adapter, config):
    push_adapter(lambda body: engine.update_adapter_from_ipc(**body), name, adapter, config, timeout_s=20)

def expected(adapter):
    return greedy(lora.merged(new_model(FOLDER, 1), adapter), [5, 6, 7, 8])

first, second = lora.tensors(model, 1), lora.tensors(model, 2)
push("policy", first, lora.config())
assert ask("policy") == expected(first)
with RolloutHandoff(engine, second, adapter=Adapter("policy", lora.config())).training("two"):
    assert engine.is_sleeping()
assert ask("policy") == expected(second) != expected(first)
assert [adapter.version for adapter in engine.memory_status()[0].adapters] == ["two"]
engine.remove_adapter("policy")
for refused in (
    lambda: engine.remove_adapter("policy"),
    lambda: push("policy", first, {**lora.config(), "use_rslora": True}),
    lambda: push("policy", first, lora.config(targets=("lm_head",))),
):
    try:
        refused()
    except InvalidRequestError as error:
        print(error.message)
    else:
        raise AssertionError("it was not refused")
assert ask(None) == greedy(model, [5, 6, 7, 8])
engine.shutdown()
print("done")
"""


def test_adapters_of_an_engine_in_python(python: Callable[..., str]) -> None:
    path = Sglang().environment(Launch(Path(), adapter_rank=8))["PYTHONPATH"]
    *_, twice, rslora, layer, done = python(PYTHON, PYTHONPATH=os.pathsep.join((path, str(REPOSITORY)))).splitlines()
    assert "no adapter" in twice and "use_rslora" in rslora and "lm_head" in layer
    assert done == "done"
