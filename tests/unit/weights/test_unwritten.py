"""Marks show from the memory alone which parameters have been overwritten."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_memory_plugins.weights import unwritten
from rl_memory_plugins.weights.unwritten import UnwrittenMarks

COMPUTED = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OTHERS = [
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64),
]


def marks_in(*parameters: torch.Tensor) -> UnwrittenMarks:
    return UnwrittenMarks(lambda: parameters)


@pytest.mark.parametrize("dtype", [*COMPUTED, *OTHERS])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (3, 8), (5, 13)])
@pytest.mark.parametrize("value", [0, 1])
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...], value: int) -> None:
    parameter = torch.zeros(shape, dtype=torch.float32).to(dtype)
    new = torch.full(shape, value, dtype=torch.float32).to(dtype)
    marks = marks_in(parameter)
    assert not marks.are_gone
    parameter.copy_(new)
    assert marks.are_gone


@pytest.mark.parametrize("dtype", [*COMPUTED, *OTHERS[:5]])
@pytest.mark.parametrize("missing", [0, 1, 57, 99])
def test_one_element_of_a_float_that_is_missing(dtype: torch.dtype, missing: int) -> None:
    parameter = torch.zeros(100).to(dtype)
    marks = marks_in(torch.zeros(3), parameter, torch.zeros(3))
    new = torch.ones(100).to(dtype)
    for part in (slice(0, missing), slice(missing + 1, 100)):
        parameter[part] = new[part]
    assert not marks.are_gone
    assert not marks.are_gone


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_pieces(data: st.DataObject) -> None:
    """All marks are gone after the last piece, and not before."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]))
    rows = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    parameters = [torch.zeros(count, 16).to(dtype) for count in rows]
    marks = marks_in(*parameters)
    pieces = [(one, row) for one, count in enumerate(rows) for row in range(count)]
    for left, (one, row) in reversed(list(enumerate(data.draw(st.permutations(pieces))))):
        parameters[one][row] = torch.ones(16).to(dtype)
        assert marks.are_gone == (left == 0)


def test_large_tensors_are_searched_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwritten, "_CHUNK", 64)
    for dtype in (torch.float32, torch.uint8):
        parameter = torch.zeros(1000).to(dtype)
        marks = marks_in(parameter)
        for start in (960, 0, 896, 64, 128, 192):
            parameter[start : start + 64] = 1
            assert not marks.are_gone
        parameter[256:896] = 1
        assert marks.are_gone


def test_a_tensor_with_gaps() -> None:
    memory = torch.zeros(6, 10)
    marks = marks_in(memory[:, :4])
    assert not memory[:, 4:].any()
    memory[:5, :4] = 1
    assert not marks.are_gone
    memory[5, :4] = 1
    assert marks.are_gone


@pytest.mark.parametrize(
    "change",
    [
        lambda old: old.mul_(0),
        lambda old: old.add_(torch.ones(8)),
        lambda old: old.copy_(torch.where(torch.arange(8) > 1, torch.ones(8), old)),
        lambda old: old.copy_(torch.ones(8) - old),
    ],
)
def test_results_of_the_old_content_stay_marked(change: Callable[[torch.Tensor], object]) -> None:
    parameter = torch.zeros(8)
    marks = marks_in(parameter)
    change(parameter)
    assert not marks.are_gone


def test_a_parameter_that_is_replaced_counts_as_written() -> None:
    layer = torch.nn.Linear(4, 4)
    kept = layer.bias
    marks = UnwrittenMarks(layer.parameters)
    assert not marks.are_gone
    layer.weight = torch.nn.Parameter(torch.ones(4, 4))
    layer.bias = torch.nn.Parameter(torch.ones(4))
    gc.collect()
    assert any(marks.are_gone for _ in range(3))
    assert kept.isnan().all()


def test_the_only_parameter_is_replaced_while_somebody_keeps_it() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    kept = layer.weight
    marks = UnwrittenMarks(layer.parameters)
    assert not marks.are_gone
    layer.weight = torch.nn.Parameter(torch.ones(4, 4))
    assert marks.are_gone
    assert kept.isnan().all()


def test_a_parameter_on_the_meta_device_is_not_written() -> None:
    """As vLLM puts parameters aside during a reload."""
    layer = torch.nn.Linear(4, 4)
    bias = layer.bias
    marks = UnwrittenMarks(layer.parameters)
    layer.bias = torch.nn.Parameter(torch.ones(4, device="meta"))
    layer.weight.data.fill_(1)
    assert not marks.are_gone
    layer.bias = bias
    assert not marks.are_gone
    bias.data.fill_(1)
    assert marks.are_gone


def test_the_work_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.zeros(4) for _ in range(200)]
    marks = marks_in(*parameters)
    looked = 0
    real = unwritten._with_marks

    def counted(of: list[torch.Tensor]) -> object:
        nonlocal looked
        looked += len(of)
        return real(of)

    monkeypatch.setattr(unwritten, "_with_marks", counted)
    for number, parameter in enumerate(parameters):
        parameter.fill_(1)
        assert marks.are_gone == (number == 199)
    assert looked <= 2 * 200
