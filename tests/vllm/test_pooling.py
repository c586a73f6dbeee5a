"""Servers of pooling models: their requests have no tokens to end with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.engines.base import Launch, Server
from integration.engines.vllm import Vllm
from integration.waiting import wait_until
from tests.vllm.conftest import PROMPT

ROUNDS = 20


class Embedding(Vllm):
    def command(self, launch: Launch, port: int) -> list[str]:
        return [*super().command(launch, port), "--runner", "pooling", "--convert", "embed"]


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(Embedding(), Launch(model_folder, kv_bytes=64 << 20, forked=True), log) as server:
        yield server


def embed(server: Server, prompt: list[int]) -> httpx.Response:
    return server.http.post("/v1/embeddings", json={"model": "model", "input": prompt}, timeout=60)


def embedding(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()["data"][0]["embedding"]


def test_a_sleep_ends_running_requests_with_a_503(server: Server) -> None:
    """Stock vLLM: the server ends, for it takes an aborted request for one that has generated tokens."""
    prompts = [[5 + number % 7] * 900 for number in range(32)]
    expected = embedding(embed(server, PROMPT))
    unanswered = 0
    with ThreadPoolExecutor(len(prompts)) as pool:
        for number in range(ROUNDS):
            running = [pool.submit(embed, server, prompt) for prompt in prompts]
            last = running[-1]
            wait_until(lambda last=last: last.done() or server.kind.requests_held(server.http) > 0, "the requests run")
            time.sleep(0.02 * number)
            server.control.sleep(1)
            for response in (one.result() for one in running):
                assert response.status_code in (200, 503), response.text
                if response.status_code == 503:
                    error = response.json()["error"]
                    assert (error["code"], error["details"]["reason"]) == ("EngineAsleepError", "asleep")
                    unanswered += "had an answer" in error["message"]
            assert server.is_alive(), server.tail()
            server.control.wake_up()
            assert embedding(embed(server, PROMPT)) == expected
            if unanswered:
                break
    assert unanswered, "no sleep met a running request"


IN_PARTS = """
    import torch
    from safetensors.torch import load_file
    from vllm import PoolingParams
    from rl_memory_plugins.vllm import LLM
    from tests.vllm.conftest import engine_options

    llm = LLM(**engine_options(FOLDER), runner="pooling", convert="embed", pooler_config={"task": "token_embed"},
              max_num_batched_tokens=16, enable_chunked_prefill=True, rl_memory=True)
    engine = llm.llm_engine
    prompt = {"prompt_token_ids": [5 + number % 7 for number in range(40)]}

    def rows(between=lambda: None):
        engine.add_request("0", prompt, PoolingParams(task="token_embed"))
        assert not engine.step(), "the prompt is not computed in parts"
        between()
        while not (done := engine.step()):
            pass
        return done[0].outputs.data

    before = rows()
    weights = load_file(FOLDER + "/model.safetensors")
    new = [(name, torch.roll(weight, 1)) for name, weight in weights.items()]
    model = engine.model_executor.driver_worker.worker.model_runner.model
    during = rows(lambda: model.load_weights(new))
    after = rows()
    assert len(before) == len(after) == 40 and not torch.allclose(before, after, atol=1e-3)
    assert during.shape == after.shape, f"{len(during)} rows for 40 tokens"
    assert torch.allclose(during, after, atol=1e-5), "rows of the former weights"
    print("done")
"""


def test_a_prompt_that_is_computed_again_has_one_row_for_each_token(forked_python: Callable[..., str]) -> None:
    """vLLM's first model runner keeps the rows of the parts before the load, and would put them before the new ones."""
    assert forked_python(IN_PARTS, VLLM_ENABLE_V1_MULTIPROCESSING="0").endswith("done\n")
