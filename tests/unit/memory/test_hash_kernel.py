"""The kernel that hashes GPU memory, run by Triton's interpreter (see conftest.py); tests/gpu runs it compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rl_memory_plugins.memory import hash_kernel as kernel
from rl_memory_plugins.memory.allocator import Block

CPU = torch.device("cpu")
PIECE = 1 << 20


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled there, for memory on the GPU alone")


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.randint(0, 256, (PIECE + 5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def of(*views: torch.Tensor) -> list[int]:
    return kernel.hash_pieces([Block(view.data_ptr(), view.numel()) for view in views], CPU).tolist()


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from rl_memory_plugins.memory.hash_kernel import _hash_pieces

signature = {"table": "*i64", "hashes": "*i64", "TILE": "constexpr"}
source = ASTSource(fn=_hash_pieces, signature=signature, constexprs={"TILE": 2048})
for capability in (80, 90, 100):
    assert compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8}).asm["cubin"]
"""


def test_it_compiles_for_gpus():
    """The interpreter takes more of Python than the compiler does, which needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_it_can_be_used():
    assert kernel.usable(CPU)


def test_without_a_compiler_it_cannot(monkeypatch, caplog):
    def fails(*arguments):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernel, "hash_pieces", fails)
    assert not kernel.usable.__wrapped__(CPU)
    assert "C compiler" in caplog.text


@pytest.mark.parametrize("start", [0, 1, 7, 8])
@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 4099, PIECE + 13])
@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_every_byte_counts(memory, start, nbytes, where):
    view = memory[start : start + nbytes]
    before = of(view)
    view[int((nbytes - 1) * where)] ^= 0x80
    assert of(view) != before
    view[int((nbytes - 1) * where)] ^= 0x80
    assert of(view) == before


@pytest.mark.parametrize("start", [0, 3])
def test_no_byte_outside_counts(memory, start):
    view = memory[start + 8 : start + 4107]
    before = of(view)
    memory[start : start + 8] ^= 0xFF
    memory[start + 4107 :] ^= 0xFF
    assert of(view) == before


def test_words_that_trade_places_change_it(memory):
    words = memory[: 8 << 10].view(torch.int64)
    before = of(memory)
    words[[3, 700]] = words[[700, 3]]
    assert of(memory) != before


@pytest.mark.parametrize("words", [1, 1000])
def test_words_that_become_their_complements_change_it(words):
    zeros = torch.zeros(1024, dtype=torch.int64)
    before = of(zeros.view(torch.uint8))
    zeros[7 : 7 + words] = -1
    assert of(zeros.view(torch.uint8)) != before


def test_it_may_be_asked_for_on_another_default_device():
    with torch.device("meta"):
        assert kernel.pieces([Block(3, 10)]).tolist() == [[3, 5], [8, 5]]


def test_too_little_memory_is_no_reason_to_give_it_up(monkeypatch):
    def fails(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernel, "hash_pieces", fails)
    with pytest.raises(torch.OutOfMemoryError):
        kernel.usable.__wrapped__(CPU)


def test_negating_every_double_changes_it():
    values = torch.rand(2048, dtype=torch.float64)
    assert of(values.view(torch.uint8)) != of((-values).view(torch.uint8))


def test_pieces_cover_the_ranges_and_words_begin_where_words_may():
    ranges = [Block(3, 10), Block(16, 2 * PIECE + 5), Block(9, 3), Block(8, 0)]
    found = kernel.pieces(ranges).tolist()
    covered = [byte for at, n in found for byte in (at, at + n)]
    assert covered == [3, 8, 8, 13, 16, 16 + PIECE, 16 + PIECE, 16 + 2 * PIECE, 16 + 2 * PIECE, 21 + 2 * PIECE, 9, 12]
    assert all(at % 8 == 0 or n < 8 for at, n in found)
    assert kernel.pieces([]).shape == (0, 2)
    assert of() == []
