"""The engines without the package, with their own sleep mode and their own updates from the trainer's GPU."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from integration import native_updates
from integration.engines.base import EngineKind, Launch
from integration.engines.sglang import Sglang
from integration.engines.vllm import Vllm


class NativeVllm(Vllm):
    """
    Args:
        flags: Of the features that the engine shall have.
    """

    def __init__(
        self,
        flags: Sequence[str] = ("--enable-sleep-mode", "--weight-transfer-config", json.dumps({"backend": "ipc"})),
    ) -> None:
        self._flags = flags

    def command(self, launch: Launch, port: int) -> list[str]:
        serve = {  # the command line of vLLM does not run with its CPU build
            "cpu": ("-m", "vllm.entrypoints.openai.api_server", "--model"),
            "cuda": ("-m", "vllm.entrypoints.cli.main", "serve"),
        }
        return [
            *(sys.executable, *serve[launch.device], str(launch.model), *self._flags),
            *("--served-model-name", "model", "--host", launch.host, "--port", str(port)),
            *("--dtype", launch.dtype, *self.arguments(launch)),
            *(("--load-format", "dummy") if launch.dummy_weights else ()),
        ]

    def environment(self, launch: Launch) -> dict[str, str]:
        # vLLM pickles IPC handles.
        return {**super().environment(launch), "RL_MEMORY": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


class NativeSglang(Sglang):
    """
    Args:
        flags: Of the features that the engine shall have.
    """

    def __init__(self, flags: Sequence[str] = ("--enable-memory-saver",)) -> None:
        self._flags = flags

    def command(self, launch: Launch, port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(launch.model)),
            *(*self._flags, "--served-model-name", "model", "--host", launch.host, "--port", str(port)),
            *("--dtype", launch.dtype, *self.arguments(launch)),
            *(("--load-format", "dummy") if launch.dummy_weights else ()),
        ]

    def environment(self, launch: Launch) -> dict[str, str]:
        return {**super().environment(launch), "RL_MEMORY": "0"}


NATIVE: dict[str, Callable[..., EngineKind]] = {"vllm": NativeVllm, "sglang": NativeSglang}


class NativeControl:
    """The control routes of one engine: sleep at level 2, wake the weights, update, wake the rest.

    Args:
        sent: Gives the tensors of an update by their names in the checkpoint.
        rank: The rank of this process in the trainer. All ranks call `connect` and `update` together; the other methods
            are for rank 0.
        gather: Collects a text from all ranks.
    """

    def __init__(
        self,
        engine: str,
        url: str,
        sent: native_updates.Sent,
        rank: int = 0,
        gather: Callable[[str], list[str]] = lambda text: [text],
    ) -> None:
        self._engine = engine
        self._http = httpx.Client(base_url=url, timeout=300, trust_env=False)
        self._sent = sent
        self._rank, self._gather = rank, gather
        self._send: Callable[[], Any] | None = None

    def connect(self) -> None:
        """Connect vLLM's half of the trainer with its engine."""
        self._send = self._sender()

    def sleep(self) -> None:
        if self._engine == "vllm":
            self._post("/sleep?level=2")
        else:
            self._post("/release_memory_occupation", {})

    def wake_weights(self) -> None:
        if self._engine == "vllm":
            self._post("/wake_up?tags=weights")
        else:
            self._post("/resume_memory_occupation", {"tags": ["weights"]})

    def update(self) -> None:
        """Send the weights to an engine that `connect` has connected."""
        assert self._send is not None, "connect comes first"
        self._send()

    def wake_rest(self) -> None:
        if self._engine == "vllm":
            self._post("/wake_up?tags=kv_cache")
            self._post("/reset_prefix_cache")  # vLLM's update leaves it
        else:
            self._post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})

    def _sender(self) -> Callable[[], Any]:
        if self._engine == "vllm":
            from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

            client = HTTPVLLMWeightSyncClient(str(self._http.base_url))
            return native_updates.vllm(client, self._sent, packed=True, rank=self._rank)

        def update(payload: bytes, load_format: str | None, last: bool) -> None:
            named = self._gather(base64.b64encode(payload).decode())  # one entry for each rank of the engine
            if self._rank == 0:
                body = {"serialized_named_tensors": named, "load_format": load_format, "flush_cache": last}
                self._post("/update_weights_from_tensor", body)
            self._gather("")  # the tensors of all ranks stay until the engine has read them

        from sglang.srt.managers import io_struct

        if not hasattr(io_struct, "BeginWeightUpdateReqInput"):  # sessions are new in 0.5.21, and needed since
            return native_updates.sglang(update, self._sent, packed=True)

        def session(path: str) -> Callable[[], None]:
            def call() -> None:
                if self._rank == 0:
                    self._post(path, {})
                self._gather("")

            return call

        begin, end = session("/begin_weight_update"), session("/end_weight_update")
        return native_updates.sglang(update, self._sent, packed=True, begin=begin, end=end)

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        self._http.post(path, json=body).raise_for_status()
