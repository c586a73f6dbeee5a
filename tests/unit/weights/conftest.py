import threading

import pytest
from fake_gpu import FakeGpu
from toys import Receiving

from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.weights import cuda_ipc, open_allocations, routes
from rl_memory_plugins.weights.buffers import staged
from rl_memory_plugins.weights.plan import warm_up
from rl_memory_plugins.weights.tls import _own_certificate


@pytest.fixture(scope="session", autouse=True)
def warm():
    """On a busy machine the first trace of a process takes longer than the updates of these tests may."""
    warm_up()


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, both seen by the trainer; its tensors count as lying on the first.

    Trainer and engine, which are threads, take each other for processes.
    """
    found = {f"GPU-{index}": FakeGpu(index) for index in range(2)}

    def local_gpu(name):
        if name not in found:
            raise UnsupportedError(f"{name} is not visible")
        return found[name]

    def process_id():
        return "engine" if isinstance(threading.current_thread(), Receiving) else "trainer"

    monkeypatch.setattr(cuda_ipc, "local_gpu", local_gpu)
    monkeypatch.setattr(cuda_ipc, "local_gpus", lambda initialise=False: {"GPU-0": 0, "GPU-1": 1})
    monkeypatch.setattr(cuda_ipc, "process_id", process_id)
    monkeypatch.setattr(staged, "_PAGE_BYTES", 1)
    monkeypatch.setattr(routes, "MIN_MEAN_ALLOCATION", 0)
    monkeypatch.setattr(routes, "gpu_of_all", lambda resident, local: "GPU-0" if resident else None)
    yield found
    open_allocations.release_mapped()


@pytest.fixture
def certificate_files(tmp_path):
    """The files of a certificate and its key."""
    paths = tmp_path / "certificate.pem", tmp_path / "key.pem"
    for path, content in zip(paths, _own_certificate(), strict=True):
        path.write_bytes(content)
    return paths
