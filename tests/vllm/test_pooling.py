"""Servers of pooling models: their requests have no tokens to end with."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import httpx
import pytest

from integration.engines.base import Launch, Server
from integration.engines.vllm import Vllm
from integration.models import new_model
from integration.waiting import wait_until
from tests.vllm.conftest import OTHER_SEED, PROMPT, SEED

ROUNDS = 20


class Embedding(Vllm):
    options: tuple[str, ...] = ()

    def command(self, launch: Launch, port: int) -> list[str]:
        return [*super().command(launch, port), "--runner", "pooling", "--convert", "embed", *self.options]


class LateInteraction(Embedding):
    """Any model with a vector for each token scores as ColBERT does."""

    options = ("--pooler-config", '{"task": "token_embed"}')


@contextlib.contextmanager
def serve(kind: Vllm, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(kind, Launch(folder, kv_bytes=64 << 20, forked=True), log) as server:
        yield server


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(Embedding(), model_folder, tmp_path_factory) as server:
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


def with_letters(folder: Path, target: Path) -> Path:
    """The same model with tokens for texts, which scores need: transformers splits those of a Qwen2 into letters."""
    from tokenizers import Tokenizer, models

    words = {"<unk>": 0, **{letter: number for number, letter in enumerate(ascii_lowercase, 2)}}
    shutil.copytree(folder, target)
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(target / "tokenizer.json"))
    return target


def test_an_update_ends_the_scores_of_late_interaction_with_a_503(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The vectors of the query go with the former weights. A document without them would end the engine core."""
    folder = with_letters(model_folder, tmp_path_factory.mktemp("model") / "letters")
    models = {seed: new_model(model_folder, seed) for seed in (SEED, OTHER_SEED)}

    def score(server: Server, documents: list[str]) -> httpx.Response:
        body = {"model": "model", "text_1": "query", "text_2": documents}
        return server.http.post("/score", json=body, timeout=60)

    def short(server: Server) -> float:
        response = score(server, ["document"])
        assert response.status_code == 200, response.text
        return float(response.json()["data"][0]["score"])

    with serve(LateInteraction(), folder, tmp_path_factory) as server, ThreadPoolExecutor(1) as pool:
        for seed, mode in ((OTHER_SEED, "keep"), (SEED, "freeze")):
            before = short(server)
            running = pool.submit(score, server, [letter * 900 for letter in ascii_lowercase])
            wait_until(lambda: server.kind.requests_held(server.http) > 1, "the documents run")
            server.control.update_weights(models[seed], mode=mode)
            response = running.result()
            assert server.is_alive(), server.tail()
            assert response.status_code == 503, response.text
            assert response.json()["error"]["code"] == "EngineAsleepError"
            assert short(server) != before


LATE = """
    from vllm import PoolingParams
    from vllm.v1.pool.late_interaction import build_late_interaction_doc_params, build_late_interaction_query_params
    from rl_memory_plugins.vllm import LLM
    from tests.vllm.conftest import engine_options

    llm = LLM(**engine_options(FOLDER), runner="pooling", convert="embed", pooler_config={"task": "token_embed"},
              rl_memory=True)

    def ask(name, late_interaction_params):
        params = PoolingParams(task="token_embed", late_interaction_params=late_interaction_params)
        llm.llm_engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, params)
        outputs = []
        while llm.llm_engine.has_unfinished_requests():
            outputs += llm.llm_engine.step()
        return [output.request_id for output in outputs]

    assert ask("first", build_late_interaction_query_params("first", 1)) == ["first"]
    llm.collective_rpc("reload_weights")
    assert ask("late", build_late_interaction_doc_params("first")) == []
    assert ask("second", build_late_interaction_query_params("second", 1)) == ["second"]
    assert ask("document", build_late_interaction_doc_params("second")) == ["document"]
    print("done")
"""


def test_a_document_that_comes_after_the_reset_is_refused(forked_python: Callable[..., str]) -> None:
    """Its query was computed before, by another request of the same score."""
    assert forked_python(LATE).endswith("done\n")


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
