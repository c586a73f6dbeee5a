"""A draft model of an engine with CUDA graphs, over a handoff that renews the target only, or both.

`pytest tests/gpu/test_engine_weights.py --engine sglang`. `python -m integration.kinds ENGINE` covers the rest on a
GPU: updates of every kind of weights, quantised ones too, against fresh engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from processes import together

from integration.engines.base import Launch, Server
from tests.weight_kinds import TOKENS, checkpoint, push, renew, started, write_dense

SEED, OTHER_SEED = 3, 7
GUESSES = 3
#: SGLang's draft never sees a prompt's first token. Where all are the same, that changes next to nothing.
DRAFTED_PROMPT = [5] * 64


def test_a_draft_model_is_preserved(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The draft holds what the target gets by the update: if a sleep lost it, its guesses would be wrong."""
    start = _starter(request, tmp_path)
    with together(start(SEED, OTHER_SEED), start(OTHER_SEED, OTHER_SEED)) as (server, fresh):
        tokens, accepted = answer(fresh)
        assert accepted > 0.8
        former, few = answer(server)
        assert former != tokens and few < accepted / 2
        renew(server, written(tmp_path, OTHER_SEED))
        assert answer(server) == (tokens, accepted)


def test_an_update_takes_target_and_draft(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A draft that kept its former weights, or got them half, would guess worse than that of a fresh engine."""
    start = _starter(request, tmp_path)
    with together(start(SEED, SEED), start(OTHER_SEED, OTHER_SEED)) as (server, fresh):
        tokens, accepted = answer(fresh)
        former, as_many = answer(server)
        assert former != tokens and min(accepted, as_many) > 0.8
        other = written(tmp_path, OTHER_SEED)
        push(server, checkpoint(other))
        renewed, few = answer(server)
        assert renewed == tokens and few < accepted / 2, "the draft decides how many guesses are right"
        push(server, checkpoint(other), draft=checkpoint(other))
        assert answer(server) == (tokens, accepted)
        first = written(tmp_path, SEED)
        renew(server, first, draft=checkpoint(first))
        assert answer(server) == (former, as_many)


def written(folder: Path, seed: int) -> Path:
    """A model with weights of this seed."""
    model = folder / f"seed-{seed}"
    return model if model.exists() else write_dense(model, seed, Launch(folder, device="cuda").dtype)


def _starter(request: pytest.FixtureRequest, folder: Path) -> Callable[[int, int], AbstractContextManager[Server]]:
    """A function that starts an engine, from the seeds of its target and of its draft."""
    engine = request.config.getoption("--engine")

    def start(target: int, draft: int) -> AbstractContextManager[Server]:
        model, drafted = written(folder, target), str(written(folder, draft))
        if engine == "vllm":
            config = {"method": "draft_model", "model": drafted, "num_speculative_tokens": GUESSES}
            arguments = ["--speculative-config", json.dumps(config)]
        else:
            arguments = [
                *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", drafted),
                *("--speculative-num-steps", str(GUESSES), "--speculative-num-draft-tokens", str(GUESSES + 1)),
                *("--speculative-eagle-topk", "1"),
            ]
        launch = Launch(model, device="cuda", options={"poison": True}, compiled=False)
        return started(engine, launch, folder / f"{target}-{draft}.log", *arguments)

    return start


def answer(server: Server) -> tuple[list[int], float]:
    """An answer's tokens, and the share of the draft's guesses that went into it."""
    before = _guesses(server)
    response = server.post(DRAFTED_PROMPT, TOKENS).json()
    if before is None:
        meta = response["meta_info"]
        return server.kind.tokens(response), (meta["completion_tokens"] / meta["spec_verify_ct"] - 1) / GUESSES
    accepted, made = (now - then for now, then in zip(_guesses(server), before, strict=True))
    return server.kind.tokens(response), accepted / made


def _guesses(server: Server) -> tuple[float, float] | None:
    """How many have been accepted and made since the start, where the engine counts them."""
    if server.kind.name == "sglang":
        return None
    metrics = server.http.get("/metrics").text
    counts = dict(re.findall(r"^vllm:spec_decode_num_(\w+)_tokens_total\{.*\} (\S+)$", metrics, re.M))
    return float(counts["accepted"]), float(counts["draft"])
