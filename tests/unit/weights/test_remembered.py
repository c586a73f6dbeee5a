"""What a manifest remembers of the last updates: nothing that another list of tensors would not give."""

from __future__ import annotations

import pytest

from rl_memory_plugins.errors import ManifestError
from rl_memory_plugins.weights import manifest
from rl_memory_plugins.weights.manifest import Manifest, TensorSpec, remembered
from rl_memory_plugins.weights.recent import Recent


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(manifest, "_recent", Recent())


def listed(count=5, rows=4):
    return [TensorSpec(f"t{number}", "float32", (rows, 64)) for number in range(count)]


def test_the_same_tensors_are_cut_once():
    first, again = remembered(listed()), remembered(listed())
    assert first is again
    assert Manifest(first, 2048).buckets() is Manifest(again, 2048).buckets()


@pytest.mark.parametrize("bucket_bytes", [256, 1000, 2048, 1 << 20])
@pytest.mark.parametrize("split", [True, False])
def test_buckets_and_sizes_are_those_of_a_new_list(bucket_bytes, split):
    for tensors in (listed(), listed(7), listed(rows=9), listed()):
        for _ in range(2):
            known, new = Manifest(remembered(tensors), bucket_bytes), Manifest(tensors, bucket_bytes)
            assert known.buckets(split=split) == new.buckets(split=split)
            assert known.sizes() == new.sizes() == [spec.nbytes for spec in tensors]


def test_a_list_that_its_source_changes_later_is_another_one():
    tensors = listed()
    known = remembered(tensors)
    tensors.pop()
    assert len(known) == 5 and remembered(tensors) == listed(4) and remembered(listed()) is known


def test_what_cannot_be_sent_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(ManifestError, match="the name appears more than once"):
            remembered([*listed(), *listed(1)])
    assert len(manifest._recent) == 0


def test_only_the_last_lists_are_kept_and_others_still_work():
    old = remembered(listed(1))
    for count in range(2, 9):
        remembered(listed(count))
    assert (
        len(manifest._recent) == 4
        and remembered(listed(1)) is not old
        and Manifest(old).sizes() == [1024]
        and len(Manifest(old).buckets()) == 1
    )
