"""Files that the engine's own process sends to its ranks."""

import errno
import socket

import pytest
import torch
from safetensors.torch import save_file
from toy_engine import ToyEngine
from toys import checkpoint

from rl_memory_plugins.errors import InvalidRequestError, ManifestError, StateConflictError, WeightUpdateError
from rl_memory_plugins.trainer.file_sender import FileSender


def write(folder, seed, **others):
    folder.mkdir(exist_ok=True)
    save_file({**checkpoint(seed), **others}, folder / "model.safetensors", {"format": "pt"})
    return folder


def update(engine, path, **options):
    with FileSender(path, engine.devices(), **options) as sender:
        body = {"endpoints": sender.endpoints, "token": sender.token, "weight_version": "v", "timeout_s": 20}
        return engine.post_update(body)


@pytest.mark.parametrize("tp", [1, 2])
def test_all_ranks_get_what_a_trainer_would_send(tmp_path, tp):
    engine, other = ToyEngine(tp), ToyEngine(tp)
    update(engine, write(tmp_path / "model", 3))
    update(other, write(tmp_path / "model", 3) / "model.safetensors")
    for one, two in zip(engine.ranks, other.ranks, strict=True):
        assert torch.equal(one.model.qkv, two.model.qkv)
        assert not torch.equal(one.model.qkv, torch.full_like(one.model.qkv, 7.0))


def test_the_error_names_all_ranks(tmp_path):
    engine = ToyEngine(2)
    with pytest.raises(ManifestError) as caught:
        update(engine, write(tmp_path / "model", 3, bogus=torch.zeros(2)))
    assert [(one["name"], one["ranks"]) for one in caught.value.details["mismatches"]] == [("bogus", [0, 1])]


def test_an_engine_that_refuses_ends_the_sender(tmp_path):
    engine = ToyEngine()
    engine.awake.clear()
    sender = FileSender(write(tmp_path / "model", 3), engine.devices(), timeout_s=600)
    with pytest.raises(StateConflictError), sender:
        engine.post_update({"endpoints": sender.endpoints, "token": sender.token, "weight_version": "v"})
    assert not sender._thread.is_alive()


def test_a_caller_that_gives_up_ends_the_sender(tmp_path):
    sender = FileSender(write(tmp_path / "model", 3), ["cpu:0"], timeout_s=600)
    with pytest.raises(KeyboardInterrupt), sender:
        raise KeyboardInterrupt
    assert not sender._thread.is_alive()


def test_a_file_whose_end_is_missing_is_named(tmp_path):
    file = write(tmp_path / "model", 3) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InvalidRequestError, match="model.safetensors cannot be read"):
        update(ToyEngine(), file)


@pytest.mark.parametrize(
    "index", ["", "{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 5, "b": "c"}}', "[" * 9999]
)
def test_an_index_that_is_none_is_named(tmp_path, index):
    folder = write(tmp_path / "model", 3)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidRequestError, match="cannot be listed"):
        update(ToyEngine(), folder)


@pytest.mark.parametrize("path", [None, "", 5, ["/models"], b"\xff", "/nonexistent", "nul\0", "x" * 5000])
def test_no_path(path):
    with pytest.raises(InvalidRequestError):
        FileSender(path, ["cpu:0"])


def test_a_process_that_can_open_no_more_files_says_so(tmp_path, monkeypatch):
    def none_left(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    folder = write(tmp_path / "model", 3)
    monkeypatch.setattr(socket, "socketpair", none_left)
    with pytest.raises(WeightUpdateError, match="Too many open files"):
        FileSender(folder, ["cpu:0"])


@pytest.mark.parametrize("options", [{"partial": "yes"}, {"partial": 1}, {"timeout_s": -1}, {"timeout_s": 1e9}])
def test_options_out_of_range(tmp_path, options):
    with pytest.raises(InvalidRequestError):
        FileSender(write(tmp_path / "model", 3), ["cpu:0"], **options)
