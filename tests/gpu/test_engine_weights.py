"""A draft model of an engine with CUDA graphs, over a handoff that renews the target only.

`pytest tests/gpu/test_engine_weights.py --engine sglang`. `python -m integration.kinds ENGINE` covers the rest on a
GPU: updates of every kind of weights, quantised ones too, against fresh engines.
"""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from processes import together

from integration.engines.base import Launch, Server
from tests.weight_kinds import TOKENS, renew, started, write_dense

SEED, OTHER_SEED = 3, 7
GUESSES = 3
#: SGLang's draft never sees a prompt's first token. Where all are the same, that changes next to nothing.
DRAFTED_PROMPT = [5] * 64


def test_a_draft_model_is_preserved(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The draft holds what the target gets by the update: if a sleep lost it, its guesses would be wrong."""
    engine, dtype = request.config.getoption("--engine"), Launch(tmp_path, device="cuda").dtype
    seeds = {"first": SEED, "other": OTHER_SEED, "draft": OTHER_SEED}
    first, other, draft = (write_dense(tmp_path / name, seed, dtype) for name, seed in seeds.items())
    if engine == "vllm":
        config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": GUESSES}
        arguments = ["--speculative-config", json.dumps(config)]
    else:
        arguments = [
            *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft)),
            *("--speculative-num-steps", str(GUESSES), "--speculative-num-draft-tokens", str(GUESSES + 1)),
            *("--speculative-eagle-topk", "1"),
        ]

    def start(folder: Path) -> AbstractContextManager[Server]:
        launch = Launch(folder, device="cuda", options={"poison": True}, compiled=False)
        return started(engine, launch, tmp_path / f"{folder.name}.log", *arguments)

    with together(start(first), start(other)) as (server, fresh):
        tokens, accepted = answer(fresh)
        assert accepted > 0.8
        former, few = answer(server)
        assert former != tokens and few < accepted / 2
        renew(server, other)
        assert answer(server) == (tokens, accepted)


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
