import contextlib
import gc
import os
import socket
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_memory_plugins.errors import InvalidRequestError, ManifestError, UnsupportedError, WeightUpdateError
from rl_memory_plugins.weights import buffers, wire
from rl_memory_plugins.weights.manifest import ALIGNMENT, BucketEntry, Manifest, TensorSpec
from rl_memory_plugins.weights.sender import WeightSender


@pytest.fixture
def pair():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ends = wire.Connection(left, "the left"), wire.Connection(right, "the right", rank=3)
    yield ends
    for end in ends:
        end.close()


def test_messages_and_descriptors_arrive(pair):
    left, right = pair
    read, write = os.pipe()
    left.send(wire.Ack(1), 1.0, [write])
    left.send(wire.Bucket(0, []), 1.0)
    message, fds = right.receive_with_fds(wire.Ack, timeout_s=1.0)
    assert message == wire.Ack(1) and len(fds) == 1
    assert right.receive(wire.Bucket, timeout_s=1.0) == wire.Bucket(0, [])
    os.write(fds[0], b"x")
    assert os.read(read, 1) == b"x"
    assert not os.get_inheritable(fds[0])
    wire.close_fds([read, write, *fds])


def test_the_error_of_a_peer_ends_with_its_handling(pair):
    """It holds the frames that it passed, and those the caller's tensors."""
    left, right = pair
    left.fail(UnsupportedError("not that"))
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(UnsupportedError):
            right.receive(wire.Ack, timeout_s=1.0)
        assert not [held for held in gc.get_objects() if type(held) is UnsupportedError]
    finally:
        gc.enable()


def test_descriptors_that_nobody_asked_for_are_closed(pair):
    left, right = pair
    read, write = os.pipe()
    left.send(wire.Ack(1), 1.0, [write])
    os.close(write)
    with pytest.raises(WeightUpdateError, match="unexpected file descriptors"):
        right.receive(wire.Ack, timeout_s=1.0)
    assert os.read(read, 1) == b""  # no copy of the other end is open
    os.close(read)


@pytest.mark.parametrize("sent", [b"", b"\x00\x00", b"\x00\x00\x00\x09abc"])
def test_a_peer_that_stalls_is_named_at_the_deadline(pair, sent):
    left, right = pair
    left._sock.sendall(sent)
    start = time.monotonic()
    with pytest.raises(WeightUpdateError, match="the right stalled: it did not send Ack") as error:
        right.receive(wire.Ack, timeout_s=0.2)
    assert 0.15 < time.monotonic() - start < 20
    assert error.value.details == {"reason": "stalled", "timeout_s": 0.2, "rank": 3}


def test_a_peer_that_does_not_read_is_named_at_the_deadline(pair):
    left, _ = pair
    with pytest.raises(WeightUpdateError, match="stalled: it did not read Accept"):
        left.send(wire.Accept(["x" * 1000] * 5000), 0.2)


@pytest.mark.parametrize("sent", [b"", b"\x00\x00", b"\x00\x00\x00\x09abc"])
def test_a_peer_that_goes_is_named(pair, sent):
    left, right = pair
    left._sock.sendall(sent)
    left.close()
    with pytest.raises(WeightUpdateError, match="closed the connection") as error:
        right.receive(wire.Ack, timeout_s=1.0)
    assert error.value.to_record()["error"] == "WeightUpdateError"


def test_what_a_peer_said_before_it_went_is_raised_on_sending(pair):
    left, right = pair
    left.send(wire.Ack(0), 1.0)
    left.fail(ManifestError("no", mismatches=[1]))
    left.close()
    with pytest.raises(ManifestError, match="no") as error:
        right.send(wire.Ack(0), 1.0)
    assert error.value.details == {"mismatches": [1], "rank": 3}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"\xff\xff\xff\xff", "announced a message of 4294967295 bytes"),
        (b"\x00\x00\x00\x01\xc1", "invalid message"),
        (b"\x00\x00\x00\x02\x80\x03", "invalid message"),
        (b"GET / HTTP/1.1\r\n", "announced"),
    ],
)
def test_noise_is_refused(pair, sent, message):
    left, right = pair
    left._sock.sendall(sent)
    with pytest.raises(WeightUpdateError, match=message):
        right.receive(wire.Ack, timeout_s=1.0)


def test_a_message_out_of_turn_is_refused(pair):
    left, right = pair
    left.send(wire.Commit(), 1.0)
    with pytest.raises(WeightUpdateError, match="Commit instead of Ack"):
        right.receive(wire.Ack, timeout_s=1.0)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=30), st.integers(1, 2000), st.booleans())
def test_buckets_hold_all_rows_once_in_order_without_overlap(shapes, bucket_bytes, split):
    manifest = Manifest([TensorSpec(str(i), "uint8", shape) for i, shape in enumerate(shapes)], bucket_bytes)
    buckets = manifest.buckets(split=split)
    capacity = manifest.slot_bytes()
    came = [0] * len(shapes)
    order = []
    for bucket in buckets:
        end = 0
        for entry in bucket:
            spec = manifest.tensors[entry.index]
            assert entry.offset >= end and entry.offset % ALIGNMENT == 0
            end = entry.offset + entry.nbytes
            assert entry.start == came[entry.index]
            assert entry.nbytes == spec.nbytes or (split and entry.nbytes % spec.row_nbytes == 0)
            came[entry.index] += entry.nbytes
            order.append(entry.index)
        assert bucket
        assert end <= bucket_bytes or (len(bucket) == 1 and (not split or entry.nbytes == spec.row_nbytes))
        assert not split or end <= capacity
    assert came == [spec.nbytes for spec in manifest.tensors]
    assert order == sorted(order) and set(order) == set(range(len(shapes)))


def test_a_tensor_is_not_cut_for_the_sake_of_a_few_rows():
    kib = 1 << 10
    manifest = Manifest([TensorSpec("a", "uint8", (7 * kib, kib)), TensorSpec("b", "uint8", (9 * kib, kib))], 8 << 20)
    assert [[(entry.index, entry.nbytes >> 20) for entry in bucket] for bucket in manifest.buckets()] == [
        [(0, 7), (1, 1)],
        [(1, 8)],
    ]
    less = Manifest([TensorSpec("a", "uint8", (7 * kib + 1, kib)), manifest.tensors[1]], 8 << 20)
    assert [[entry.index for entry in bucket] for bucket in less.buckets()] == [[0], [1], [1]]


def test_the_digest_depends_on_the_tensors_only():
    tensors = [TensorSpec("a", "bfloat16", (2, 3))]
    digest = Manifest(tensors).digest()
    assert Manifest(tensors, bucket_bytes=1, slots=3).digest() == digest
    assert Manifest(tensors, partial=True).digest() != digest
    assert Manifest([TensorSpec("a", "bfloat16", (3, 2))]).digest() != digest


def test_thousands_of_tensors_set_off_no_collection_of_garbage():
    """One of all generations takes tenths of a second in a trainer."""
    assert not gc.is_tracked(TensorSpec("name", "float32", (2, 3)))
    assert not gc.is_tracked(BucketEntry(0, 0, 24))


def test_shared_memory_is_shared_and_its_description_is_checked():
    staging = buffers.ShmStaging(4096, 2)
    description, fds = staging.export()
    attached = buffers.attach(description, fds)
    staging._slots[1].fill_(5)
    assert int(attached._slots[1].sum()) == 5 * 4096 and int(attached._slots[0].sum()) == 0
    with pytest.raises(WeightUpdateError, match="description"):
        buffers.attach(description | {"slots": 3}, fds)
    with pytest.raises(UnsupportedError):
        buffers.attach({"kind": "pigeon"}, fds)
    with pytest.raises(OSError):
        os.ftruncate(fds[0], 1)
    unsealed = os.memfd_create("x")
    os.ftruncate(unsealed, 2 * 4096)
    with pytest.raises(WeightUpdateError, match="seal"):
        buffers.attach(description, [unsealed])
    os.close(unsealed)
    kept = attached._slots[1]
    attached.close()
    staging.close()
    assert int(kept[0]) == 5  # a tensor that outlives the buffer keeps its memory


def test_a_directory_whose_path_is_too_long_is_refused(tmp_path):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with pytest.raises(InvalidRequestError, match="socket"):
        WeightSender(1, directory=deep)
    assert not list(deep.iterdir())


def test_the_wire_needs_no_torch():
    code = "import sys, rl_memory_plugins.weights.wire; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
