"""An engine in this process, with the calls that the matrix makes: the same on vLLM and on SGLang."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

from tests.run_report import gpus

PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [300, 20, 7])
TOKENS = 8
BUSY_TRIES = 200
#: The engines that share a GPU have a small part of it each. CUDA graphs must read the new weights.
VLLM = {
    "cpu": {"enforce_eager": True},
    "cuda": {
        "gpu_memory_utilization": 0.05,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
        "enable_flashinfer_autotune": False,
    },
}
SGLANG: dict[str, dict[str, Any]] = {
    "cpu": {"attention_backend": "torch_native", "disable_overlap_schedule": True},
    "cuda": {
        "attention_backend": "triton",
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": 4,
        "mem_fraction_static": 0.2,
        # The default for experts on several Hopper GPUs. FlashInfer compiles it at first use, which takes minutes.
        "enforce_disable_flashinfer_allreduce_fusion": True,
    },
}
SGLANG_LORA: dict[str, dict[str, Any]] = {"cpu": {"lora_backend": "torch_native"}, "cuda": {}}
DEVICE = "cuda" if gpus() else "cpu"


class Answer(NamedTuple):
    """What an engine says to `PROMPTS`: the tokens and their log-probabilities, or the values of the embeddings."""

    tokens: list[list[int]]
    values: list[list[float]]

    def difference(self, other: Answer, whose: str) -> str:
        """How this answer is not the other one, which is `whose`; empty if they are equal."""
        if self.tokens != other.tokens:
            return f"tokens differ from {whose}"
        pairs = [pair for rows in zip(self.values, other.values, strict=True) for pair in zip(*rows, strict=True)]
        if any(math.isnan(value) for pair in pairs for value in pair):
            return "values are not numbers"
        if self.values == other.values:
            return ""  # infinities too, which have no difference
        apart = max((abs(one - two) for one, two in pairs), default=0.0)
        return f"values differ from {whose} by up to {apart:.2g}"


class Subject(ABC):
    """An engine."""

    engine: Any

    @abstractmethod
    def answer(self) -> Answer:
        """One prompt after the other: prompts together meet in batches that differ from run to run, and so do sums in
        16 bits."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the prompts: a prefix that the engine has computed before is rounded otherwise."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """By the engine's own route from disk.

        Raises:
            RuntimeError: the engine did not load the weights.
        """

    @abstractmethod
    def shutdown(self) -> None: ...

    def sleep(self, level: int) -> None:
        self.engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.engine.wake_up(tags)

    def content(self) -> str:
        """The state of the weights."""
        return str(self.engine.memory_status()[0].content)

    def push(self, weights: Any, **options: Any) -> None:
        from rl_memory_plugins.trainer import push_weights

        def post(body: dict[str, Any]) -> Any:
            return self.engine.update_weights_from_ipc(**body)

        devices = [rank.device for status in self.engine.memory_status() for rank in status.ranks]
        push_weights(post, weights, receivers=devices, timeout_s=120, **options)


def _image() -> Any:
    import numpy
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (28, 28, 3), numpy.uint8))


class Vllm(Subject):
    def __init__(self, folder: Path, options: dict[str, Any], *, task: str, plugin: bool, adapter: str) -> None:
        from rl_memory_plugins.vllm import LLM

        self._task, self._adapter = task, adapter
        self.engine = LLM(
            str(folder),
            rl_memory={"poison": True} if plugin else False,
            **{
                "dtype": "float32",
                "max_model_len": 512,
                "max_num_seqs": 4,
                "kv_cache_memory_bytes": 64 << 20,
                "skip_tokenizer_init": task == "generate",
                **({"runner": "pooling"} if task in ("embed", "classify") else {}),
                **VLLM[DEVICE],
                **options,
            },
        )

    def answer(self) -> Answer:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        if self._task == "embed":
            found = [self.engine.embed([prompt], use_tqdm=False)[0] for prompt in prompts]
            return Answer([], [list(one.outputs.embedding) for one in found])
        if self._task == "classify":
            found = [self.engine.classify([prompt], use_tqdm=False)[0] for prompt in prompts]
            return Answer([], [list(one.outputs.probs) for one in found])
        from vllm import SamplingParams

        if self._task in ("image", "words"):
            data = {"multi_modal_data": {"image": _image()}} if self._task == "image" else {}
            prompts = [{"prompt": text, **data} for text in ("w9 w10", "w11")]
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
        request = {}
        if self._adapter:
            from vllm.lora.request import LoRARequest

            request["lora_request"] = LoRARequest("adapter", 1, self._adapter)
        found = [self.engine.generate([prompt], params, use_tqdm=False, **request)[0].outputs[0] for prompt in prompts]
        values = [[at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)] for one in found]
        return Answer([list(one.token_ids) for one in found], values)

    def forget(self) -> None:
        self.engine.reset_prefix_cache()

    def load(self, folder: Path) -> None:
        self.engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self.forget()

    def shutdown(self) -> None:
        self.engine.llm_engine.engine_core.shutdown()


class Sglang(Subject):
    def __init__(self, folder: Path, options: dict[str, Any], *, task: str, plugin: bool, adapter: str) -> None:
        from rl_memory_plugins.sglang import Engine

        self._task, self._adapter = task, adapter
        self.engine = Engine(
            model_path=str(folder),
            rl_memory={"poison": True} if plugin else False,
            **{
                "dtype": "float32",
                "device": DEVICE,
                "sampling_backend": "pytorch",
                "grammar_backend": "none",
                "skip_tokenizer_init": True,
                "max_total_tokens": 4096,
                "max_running_requests": 4,
                "context_length": 512,
                "log_level": "warning",
                **({"is_embedding": True} if task in ("embed", "classify") else {}),
                **({"lora_paths": [f"adapter={adapter}"], **SGLANG_LORA[DEVICE]} if adapter else {}),
                **SGLANG[DEVICE],
                **options,
            },
        )

    def answer(self) -> Answer:
        prompts = list(map(list, PROMPTS))
        if self._task in ("embed", "classify"):
            return Answer([], [list(self._encode(prompt)["embedding"]) for prompt in prompts])
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        request = {"lora_path": ["adapter"]} if self._adapter else {}
        found = [
            self.engine.generate(input_ids=[prompt], sampling_params=[sampling], return_logprob=True, **request)[0]
            for prompt in prompts
        ]
        values = [[value for value, *_ in one["meta_info"]["output_token_logprobs"]] for one in found]
        return Answer([list(one["output_ids"]) for one in found], values)

    def _encode(self, prompt: list[int]) -> Any:
        """`Engine.encode` of token ids, for which it has no argument."""
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        tokenizer = self.engine.tokenizer_manager
        request = tokenizer.generate_request(EmbeddingReqInput(input_ids=prompt), None)
        return self.engine.loop.run_until_complete(anext(request))

    def forget(self) -> None:
        for _ in range(BUSY_TRIES):
            if self.engine.flush_cache().success:
                return
            time.sleep(0.1)
        raise RuntimeError("SGLang did not flush its cache")

    def load(self, folder: Path) -> None:
        for _ in range(BUSY_TRIES):  # a request that is answered already may still be in SGLang's batch
            done, message, *_ = self.engine.update_weights_from_disk(str(folder))
            if done or "requests are running" not in message:
                break
            time.sleep(0.1)
        if not done:
            raise RuntimeError(message)

    def shutdown(self) -> None:
        self.engine.shutdown()


SUBJECTS = {"vllm": Vllm, "sglang": Sglang}
