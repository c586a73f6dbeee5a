import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_memory_plugins.weights.coverage import Coverage, canonical, row_major


@st.composite
def views(draw, base):
    """Any view that slicing and transposing make of a matrix."""
    view = base
    for dim in range(2):
        start, stop = sorted((draw(st.integers(0, base.shape[dim])), draw(st.integers(0, base.shape[dim]))))
        view = view.narrow(dim, start, stop - start)
        step = draw(st.integers(1, 3))
        view = view[::step] if dim == 0 else view[:, ::step]
    return view.t() if draw(st.booleans()) else view


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_coverage_counts_what_a_mask_counts(data):
    memory = torch.zeros(7, 9, dtype=torch.int16)
    coverage = Coverage()
    for _ in range(data.draw(st.integers(0, 4))):
        view = data.draw(views(memory))
        coverage.add(view)
        view.fill_(1)
    asked = data.draw(views(memory))
    expected = asked.float().mean().item() if asked.numel() else 1.0
    assert abs(coverage.fraction(asked) - expected) < 1e-6


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_canonical_form_has_the_same_elements(data):
    memory = torch.arange(63).view(7, 9)
    view = data.draw(views(memory).filter(lambda view: view.numel() > 0))
    size, stride = canonical(view.shape, view.stride())
    again = memory.as_strided(size, stride, view.storage_offset())
    assert sorted(again.flatten().tolist()) == sorted(view.flatten().tolist())
    if view.is_contiguous():
        assert len(size) <= 1


def test_row_major_strides():
    for shape in [(), (3,), (2, 3), (4, 2, 3)]:
        assert row_major(shape) == torch.empty(shape).stride()
