"""A stand-in for Mooncake's `TransferEngine`: one-sided reads and writes of the memory of other processes of this host.

The owner of the memory runs no code meanwhile, as with RDMA. A transfer touches registered memory only. The folder
`MOONCAKE_STAND_IN` holds a file for each engine: its process and its registered ranges.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


class TransferEngine:
    """The methods that SGLang calls. Results are 0, or negative after an error."""

    def __init__(self):
        self._ranges = {}
        self._port = 20000 + os.getpid() % 40000
        _register_each_parameter()

    def initialize(self, host, metadata_server, protocol, device):
        self._publish()
        return 0

    def get_rpc_port(self):
        return self._port

    def register_memory(self, address, nbytes):
        if address in self._ranges:
            return -1
        self._ranges[address] = nbytes
        self._publish()
        return 0

    def unregister_memory(self, address):
        if address not in self._ranges:
            return -1
        del self._ranges[address]
        self._publish()
        return 0

    def batch_transfer_sync_read(self, session, ours, theirs, lengths):
        return self._transfer(_libc.process_vm_readv, session, ours, theirs, lengths)

    def batch_transfer_sync_write(self, session, ours, theirs, lengths):
        return self._transfer(_libc.process_vm_writev, session, ours, theirs, lengths)

    def _transfer(self, function, session, ours, theirs, lengths):
        peer = json.loads(_file(int(session.rpartition(":")[2])).read_text())
        for our, their, nbytes in zip(ours, theirs, lengths, strict=True):
            if not any(start <= their and their + nbytes <= start + size for start, size in peer["ranges"]):
                return -1
            done = function(
                peer["pid"], ctypes.byref(_Range(our, nbytes)), 1, ctypes.byref(_Range(their, nbytes)), 1, 0
            )
            if done != nbytes:
                return -1
        return 0

    def _publish(self):
        file = _file(self._port)
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"pid": os.getpid(), "ranges": list(self._ranges.items())}))
        new.rename(file)


def _file(port):
    return Path(os.environ["MOONCAKE_STAND_IN"]) / f"{port}.json"


def _register_each_parameter():
    """SGLang looks for the blocks of torch's CUDA allocator, which a CPU has not."""
    utils = sys.modules.get("sglang.srt.model_loader.remote_instance_weight_loader_utils")
    if utils is not None:
        utils.register_memory_region_v2 = utils.register_memory_region_v1
