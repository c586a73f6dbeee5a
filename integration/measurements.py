"""The measurements of the documentation's records, in the order of their worth. `integration.measure` runs them."""

from __future__ import annotations

from typing import NamedTuple


class Measurement(NamedTuple):
    """One command.

    Attributes:
        name: Of the log, and of the file with the records.
        engine: Whose Python runs it.
        gpus: How many GPUs it needs.
        seconds: The most that it takes, with imports from a cold disk.
        words: A module and its arguments. `{out}` is the file of the records, `{folder}` their folder, `{sources}` the
            folder of the engines' sources.
        alone: Whether other work on the host would disturb it.
    """

    name: str
    engine: str
    gpus: int
    seconds: int
    words: tuple[str, ...]
    alone: bool = False


def _measurement(name: str, engine: str, gpus: int, seconds: int, command: str, *only: str) -> Measurement:
    """`only` are kinds, whose names have blanks."""
    module, *words = command.split()
    more = ("--only", *only) if only else ()
    return Measurement(f"{name}-{engine}", engine, gpus, seconds, (module, *words, "--out", "{out}", *more))


def _step(model: str, gpus: int, kv_gib: int) -> Measurement:
    command = (
        f"integration.bench_step --engine vllm --model {model} --gpus {gpus} --kv-gib {kv_gib} --timeout 240 "
        "--pictures {folder}/pictures --subject pausable_overlap native pausable offloader"
    )
    return _measurement(f"step-{model}", "vllm", gpus, 900, command)


def _remote(engine: str, model: str, seconds: int) -> Measurement:
    command = f"integration.bench_remote --engine {engine} --model {model} --repeats 5 --timeout {seconds}"
    return _measurement(f"remote-{model}", engine, 2, 3 * seconds, command)


def _weights(engine: str, model: str, kind: str = "") -> Measurement:
    """`kind` is empty, or `fp8`."""
    command = f"integration.bench_weights --engine {engine} --model {model} --timeout 200" + (kind and f" --{kind}")
    return _measurement("-".join(filter(None, ["weights", model, kind])), engine, 1, 420, command)


def _upstream(engine: str, name: str, gpus: int, seconds: int, parts: str, *, older: bool = False) -> Measurement:
    """Parts of the paths of the engine's own tests. An older version has a Python and sources of its own. A file of
    SGLang's starts an engine for nearly each test."""
    python = f"{engine}-older" if older else engine
    command = (
        f"integration.upstream {engine} --source {{sources}}/{python} --folder {{folder}}/{name} "
        f"--file-seconds {seconds // 2} --only {parts}"
    )
    return _measurement(f"upstream-{name}", python, gpus, seconds, command)


def _kinds(engine: str, name: str, gpus: int, seconds: int, *only: str) -> Measurement:
    command = f"integration.kinds {engine} --start-timeout 400"
    return _measurement(f"kinds-{name}", engine, gpus, seconds, command, *only)


def _sleep(engine: str, model: str, more: str, *, gpus: int = 1) -> Measurement:
    command = f"integration.bench_gpu --engine {engine} --model {model} --tp {gpus} --native-cycles 1 {more}"
    return _measurement(f"sleep-{model}", engine, gpus, 600, command)


def _shards(engine: str, model: str) -> Measurement:
    """An FSDP2 trainer on two GPUs, two tensor-parallel ranks on two others."""
    command = (
        f"integration.fsdp_handoff --engine {engine} --device cuda --shape {model} --kv-gib 10 "
        "--apart --shards --transport nccl"
    )
    return _measurement(f"shards-{model}", engine, 4, 400, command)


MEASUREMENTS = (
    _step("3b", 1, 10)._replace(alone=True),
    _remote("vllm", "7b", 200),
    _remote("sglang", "7b", 200),
    *(_weights(engine, "7b", kind) for engine in ("sglang", "vllm") for kind in ("fp8", "")),
    _step("7b", 2, 6),
    _remote("vllm", "30b-a3b", 300),
    _remote("sglang", "30b-a3b", 300),
    *(_weights(engine, "moe", kind) for engine in ("sglang", "vllm") for kind in ("fp8", "")),
    _upstream("sglang", "updates", 1, 1400, "weights_from_disk.py weight_checker"),
    _upstream("sglang", "states", 1, 900, "weights_from_tensor lora_load fp32_lm_head pause_generation"),
    _upstream("sglang", "release", 2, 1000, "test_release_memory_occupation.py"),
    _upstream("sglang", "distributed", 2, 900, "weights_from_distributed patch_torch"),
    _upstream("sglang", "instances", 4, 400, "multi_instance"),
    _upstream("sglang", "older", 2, 1200, "rl/test_release weights_from lora_load fp32_lm_head pause_gen", older=True),
    _upstream("vllm", "transfers", 2, 600, "distributed/test_weight sharded_rdt"),
    _upstream("vllm", "worker", 1, 1000, "v1/ tensor_ownership arg_utils launch_cli"),
    _kinds("vllm", "two", 2, 400, "dense, two ranks, padded vocabulary", "Qwen3-MoE, two ranks"),
    *(_kinds(engine, "offloaded", 1, 400, "dense, layers in host memory") for engine in ("vllm", "sglang")),
    _kinds("sglang", "one", 1, 600, "reward (sequence classification)", "int4 WNA16, experts"),
    Measurement("gpu-tests", "vllm", 2, 900, ("pytest", "-q", "--timeout", "300", "tests/gpu", "--report", "{out}")),
    _measurement(
        "ranks-7b-suspend",
        "sglang",
        2,
        600,
        "integration.bench_ranks --engine sglang --model 7b --subject plugin --options nccl_suspend --timeout 560",
    ),
    *(_shards(engine, "3b") for engine in ("vllm", "sglang")),
    *(_sleep(engine, "7b", "--levels 2", gpus=2) for engine in ("vllm", "sglang")),
    _sleep("vllm", "32b", "--memory 0.9"),
    _sleep("sglang", "32b", "--memory 0.9"),
    _sleep("vllm", "72b", "--memory 0.9 --levels 2 --timeout 280", gpus=2),
    *(
        _measurement(f"{name}-7b", engine, 1, 400, f"integration.bench_{name} --engine {engine} --model 7b")
        for name in ("freeze", "turns")
        for engine in ("vllm", "sglang")
    ),
)
