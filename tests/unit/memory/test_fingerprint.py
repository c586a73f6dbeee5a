from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_memory_plugins.memory import fingerprint as module
from rl_memory_plugins.memory.fingerprint import WIDTH, fingerprint, memory_view

ROW = WIDTH * 8


def of(data: bytes) -> int:
    return fingerprint([torch.frombuffer(bytearray(data), dtype=torch.uint8)] if data else [torch.empty(0)])


@settings(max_examples=50, deadline=None)
@given(data=st.binary(min_size=1, max_size=100), change=st.integers(1, 255), place=st.integers(0, 99))
def test_every_changed_byte_changes_it(data, change, place):
    changed = bytearray(data)
    changed[place % len(data)] ^= change
    assert of(data) != of(changed)
    assert of(data) == of(bytes(data))


@pytest.mark.parametrize("nbytes", [ROW - 1, ROW, ROW + 3, 3 * ROW, 3 * ROW + 8, 200 * ROW + 5])
@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_single_bits_of_large_ranges(nbytes, where):
    data = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    before = fingerprint([data])
    data[int((nbytes - 1) * where)] ^= 0x80
    assert fingerprint([data]) != before


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (0, 1),
        (0, WIDTH - 1),
        (5, 3 * WIDTH + 6),
        (7, 2 * WIDTH + 9),
        (1, 5 * WIDTH + 3),
        (3, WIDTH + 3),
        (2, 5 * WIDTH + 2),
    ],
)
def test_swapped_words_change_it(left, right):
    words = torch.arange(5 * WIDTH + 10) * 0x0101_0101_0101
    before = fingerprint([words.view(torch.uint8)])
    words[[left, right]] = words[[right, left]]
    assert fingerprint([words.view(torch.uint8)]) != before


def test_negating_every_double_changes_it():
    values = torch.rand(2 * WIDTH, dtype=torch.float64)
    assert fingerprint([values.view(torch.uint8)]) != fingerprint([(-values).view(torch.uint8)])


def test_order_division_and_length_count():
    a, b = torch.full((9,), 1, dtype=torch.uint8), torch.full((7,), 2, dtype=torch.uint8)
    zero = torch.zeros(8, dtype=torch.uint8)
    hashes = [fingerprint(v) for v in ([a, b], [b, a], [torch.cat([a, b])], [zero], [zero[:7]], [zero, zero], [])]
    assert len(set(hashes)) == len(hashes)


@pytest.mark.parametrize("nbytes", [13, ROW + 13, 70 * ROW + 13])
def test_it_depends_neither_on_address_nor_on_chunks(monkeypatch, nbytes):
    data = (torch.arange(nbytes + 8) % 251).to(torch.uint8)
    expected = fingerprint([data[:nbytes].clone()])
    for shift in (1, 4, 7):
        shifted = torch.empty(nbytes + 8, dtype=torch.uint8)[shift : shift + nbytes]
        shifted.copy_(data[:nbytes])
        assert fingerprint([shifted]) == expected
    monkeypatch.setitem(module._CHUNK_ROWS, "cpu", 3)
    assert fingerprint([data[:nbytes].clone()]) == expected


def test_memory_view_shares_the_memory():
    memory = ctypes.create_string_buffer(b"abc", 16)
    view = memory_view(ctypes.addressof(memory), 16)
    assert bytes(view[:3].tolist()) == b"abc"
    view[0] = ord("x")
    assert memory.raw[:3] == b"xbc"
    assert memory_view(0, 0).numel() == 0
