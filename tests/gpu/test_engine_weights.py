"""Updates of engines that quantise weights or run a draft model, against fresh engines of the same weights.

`pytest tests/gpu/test_engine_weights.py --engine sglang`. With CUDA graphs: they must read the new weights.
"""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from processes import together

from integration.engines.base import Launch, Server
from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.weights.checksums import tensor_checksum
from tests.conformance.trainers import push
from tests.weight_kinds import (
    TOKENS,
    State,
    Write,
    checkpoint,
    renew,
    started,
    state,
    write_block_fp8,
    write_dense,
    write_moe,
)

SEED, OTHER_SEED = 3, 7
GUESSES = 3
#: SGLang's draft never sees a prompt's first token. Where all are the same, that changes next to nothing.
DRAFTED_PROMPT = [5] * 64


class Setup:
    """Two checkpoints of one kind, and servers started on them."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine = engine
        self._folder = folder
        self._arguments: tuple[str, ...] = ()

    def write(self, write: Write, *arguments: str) -> None:
        """`arguments` are those of every start."""
        dtype = Launch(self._folder, device="cuda").dtype
        self.first = write(self._folder / "first", SEED, dtype)
        self.other = write(self._folder / "other", OTHER_SEED, dtype)
        self._arguments = arguments

    def start(self, folder: Path) -> AbstractContextManager[Server]:
        launch = Launch(folder, device="cuda", options={"poison": True}, compiled=False)
        # Both engines prefer kernels for blocks that are compiled at first use.
        return started(
            self.engine,
            launch,
            self._folder / f"{folder.name}.log",
            *self._arguments,
            SGLANG_ENABLE_JIT_DEEPGEMM="0",
            VLLM_USE_DEEP_GEMM="0",
        )

    def start_both(self) -> AbstractContextManager[list[Server]]:
        """On the first checkpoint and on the other."""
        return together(self.start(self.first), self.start(self.other))


@pytest.fixture
def setup(request, tmp_path) -> Setup:
    return Setup(request.config.getoption("--engine"), tmp_path)


def assert_updates_equal_fresh_engines(setup: Setup, server: Server, fresh: Server) -> None:
    first, other = state(server), state(fresh)
    assert first.tokens != other.tokens
    push(server, checkpoint(setup.other))
    assert_same(state(server), other, setup.other)
    renew(server, setup.first)
    assert_same(state(server), first, setup.first)
    server.control.sleep(1)
    server.control.wake_up()
    assert_same(state(server), first, setup.first)


def assert_same(found: State, fresh: State, folder: Path) -> None:
    """A replayed update's checksums go by the checkpoint's names, others and a fresh engine's by the engine's own."""
    assert found.tokens == fresh.tokens
    if found.layout == "checkpoint":
        assert found.checksums == {name: tensor_checksum(tensor) for name, tensor in checkpoint(folder).items()}
    else:
        assert found == fresh


def assert_updates_are_refused(setup: Setup, server: Server) -> None:
    first = state(server)
    with pytest.raises(UnsupportedError) as error:
        push(server, checkpoint(setup.other))
    assert error.value.details["layers"]
    assert server.control.memory()["content"] == "valid"
    server.control.sleep(1)
    server.control.wake_up()  # with empty caches: a cached prompt is rounded otherwise
    assert state(server) == first


def test_fp8_that_the_engine_makes_itself(setup: Setup) -> None:
    setup.write(write_dense, "--quantization", "fp8")
    if setup.engine == "vllm":
        with setup.start_both() as servers:
            assert_updates_equal_fresh_engines(setup, *servers)
    else:  # SGLang cannot quantise again into the same memory
        with setup.start(setup.first) as server:
            assert_updates_are_refused(setup, server)


@pytest.mark.parametrize("quantization", [(), ("--quantization", "fp8")], ids=["plain", "fp8"])
def test_experts(setup: Setup, quantization: tuple[str, ...]) -> None:
    if setup.engine == "sglang":
        pytest.skip("SGLang is started without this architecture; what it quantises is refused")
    setup.write(write_moe, "--moe-backend", "triton", *quantization)
    with setup.start_both() as servers:
        assert_updates_equal_fresh_engines(setup, *servers)


def test_an_fp8_checkpoint_in_blocks(setup: Setup) -> None:
    setup.write(write_block_fp8)
    with setup.start_both() as (server, fresh):
        if setup.engine == "sglang" and _refuses(server, setup.first):
            assert_updates_are_refused(setup, server)
        else:
            assert_updates_equal_fresh_engines(setup, server, fresh)


def _refuses(server: Server, folder: Path) -> bool:
    """Whether SGLang's kernel for this GPU wants other scales than the checkpoint's: that is for the version to say."""
    try:
        push(server, checkpoint(folder))
    except UnsupportedError:
        return True
    return False


def test_a_draft_model_is_preserved(setup: Setup, tmp_path: Path) -> None:
    """The draft holds what the target gets by the update: if a sleep lost it, its guesses would be wrong."""
    draft = write_dense(tmp_path / "draft", OTHER_SEED, Launch(tmp_path, device="cuda").dtype)
    if setup.engine == "vllm":
        config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": GUESSES}
        setup.write(write_dense, "--speculative-config", json.dumps(config))
    else:
        setup.write(
            write_dense,
            *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft)),
            *("--speculative-num-steps", str(GUESSES), "--speculative-num-draft-tokens", str(GUESSES + 1)),
            *("--speculative-eagle-topk", "1"),
        )
    with setup.start_both() as (server, fresh):
        tokens, accepted = answer(fresh)
        assert accepted > 0.8
        former, few = answer(server)
        assert former != tokens and few < accepted / 2
        renew(server, setup.other)
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
