"""Installed and not enabled, the package changes nothing of vLLM but the two functions it can be enabled by."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

SWITCHES = [
    "vllm.engine.arg_utils:EngineArgs.add_cli_args",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
]


@pytest.fixture(scope="module")
def found(python: Callable[..., str]) -> dict[str, Any]:
    """What one process sees on the way of `vllm serve`: plugins, then the command line, then the configuration;
    last of all, as a control, an enabled engine's configuration."""
    output = python("""
        import importlib, inspect, json, os, sys
        import rl_memory_plugins, rl_memory_plugins.engines.vllm
        early = [name for name in ("torch", "vllm", "fastapi", "pydantic") if name in sys.modules]

        from pathlib import Path
        import vllm.engine.arg_utils
        before = set(sys.modules)
        rl_memory_plugins.engines.vllm.register()
        rl_memory_plugins.engines.vllm.register()
        imported = {name.partition(".")[0] for name in set(sys.modules) - before}

        from rl_memory_plugins.engines.vllm.hooks import hooks
        from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
        from vllm.plugins import load_general_plugins
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from tests.vllm.conftest import engine_options

        WATCHED = [
            "vllm.v1.worker.worker_base:WorkerBase",
            "vllm.v1.worker.gpu_worker:Worker",
            "vllm.v1.worker.cpu_worker:CPUWorker",
            "vllm.v1.engine.core:EngineCore",
            "vllm.v1.engine.core:EngineCoreProc",
            "vllm.v1.engine.core:DPEngineCoreProc",
            "vllm.v1.engine.async_llm:AsyncLLM",
            "vllm.v1.engine.llm_engine:LLMEngine",
            "vllm.entrypoints.llm:LLM",
            "vllm.engine.arg_utils:EngineArgs",
            "vllm.engine.arg_utils:AsyncEngineArgs",
            "vllm.device_allocator.cumem:CuMemAllocator",
            "vllm.plugins:",
            "vllm.model_executor.layers.utils:",
            "vllm.model_executor.model_loader.reload.layerwise:",
        ]

        def ours():
            # Everything on the watched objects that this package made, whatever it is called.
            names = []
            for path in WATCHED:
                module, _, name = path.partition(":")
                owner = importlib.import_module(module)
                owner = getattr(owner, name) if name else owner
                for key, value in vars(owner).items():
                    function = getattr(value, "__func__", value)
                    code = getattr(function, "__code__", None)
                    if code is not None and "rl_memory_plugins" in code.co_filename:
                        names.append(f"{path}.{key}")
                for key, value in vars(owner).items():
                    if type(value).__module__.startswith("rl_memory_plugins"):
                        names.append(f"{path}.{key}")
            return sorted(names)

        options = engine_options(Path(FOLDER))
        plain = {}
        for value in (None, "", "0", "off", "false"):
            if value is None:
                os.environ.pop("RL_MEMORY", None)
            else:
                os.environ["RL_MEMORY"] = value
            load_general_plugins()
            parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
            flags = ["--model", FOLDER, "--dtype", "float32", "--max-model-len", "128", "--enforce-eager"]
            config = AsyncEngineArgs.from_cli_args(parser.parse_args(flags)).create_engine_config()
            plain[str(value)] = config.additional_config
        refused = EngineArgs(**options, additional_config={"rl_memory": False, "mine": 1}).create_engine_config()
        variables = [name for name in os.environ if name.startswith("RLMEM") or name == "VLLM_PLUGINS"]
        modules = [name for name in sys.modules if name.startswith("rl_memory_plugins.engines.vllm.")]
        disabled = {"ours": ours(), "hooks": sorted(hooks.table), "variables": variables, "modules": modules}

        os.environ["RL_MEMORY"] = "poison=true"
        from rl_memory_plugins.vllm import EngineArgs as OurEngineArgs
        against = OurEngineArgs(**options, rl_memory=False).create_engine_config().additional_config
        untouched = ours()
        by_variable = EngineArgs(**options).create_engine_config().additional_config
        print(json.dumps({
            "early": early, "imported": sorted(imported), "plain": plain, "refused": refused.additional_config,
            "disabled": disabled, "against": against, "untouched": untouched,
            "by_variable": by_variable, "enabled": ours(),
        }))
    """)
    return json.loads(output.splitlines()[-1])


def test_importing_the_package_imports_no_torch(found: dict[str, Any]) -> None:
    assert found["early"] == []


def test_registering_imports_nothing_heavy_that_vllm_had_not(found: dict[str, Any]) -> None:
    assert set(found["imported"]) & {"torch", "vllm", "fastapi", "triton", "transformers"} == set()


def test_only_the_two_switches_are_in_vllm(found: dict[str, Any]) -> None:
    assert found["disabled"]["ours"] == SWITCHES
    assert found["disabled"]["hooks"] == SWITCHES
    assert found["disabled"]["variables"] == []
    light = ("hooks", "modes", "options", "switch")
    assert set(found["disabled"]["modules"]) == {f"rl_memory_plugins.engines.vllm.{name}" for name in light}


def test_off_and_absent_are_alike(found: dict[str, Any]) -> None:
    assert found["plain"] == {value: {} for value in ("None", "", "0", "off", "false")}


def test_a_no_leaves_no_trace_in_the_configuration(found: dict[str, Any]) -> None:
    assert found["refused"] == {"mine": 1}


def test_a_no_in_python_wins_over_the_environment(found: dict[str, Any]) -> None:
    assert found["against"] == {}
    assert found["untouched"] == SWITCHES


def test_the_same_look_finds_the_hooks_of_an_enabled_engine(found: dict[str, Any]) -> None:
    assert found["by_variable"] == {"rl_memory": {"poison": True}}
    expected = {
        "vllm.v1.worker.worker_base:WorkerBase.__init__",
        "vllm.v1.worker.worker_base:WorkerBase.rl_memory_rank_call",
        "vllm.v1.engine.core:EngineCore.sleep",
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "vllm.plugins:.load_endpoint_plugins",
        "vllm.model_executor.layers.utils:.dispatch_cpu_unquantized_gemm",
        "vllm.entrypoints.llm:LLM.sleep",
    }
    assert expected <= set(found["enabled"])


def test_an_engine_beside_an_enabled_one_is_plain(forked_python: Callable[..., str]) -> None:
    """The hooks are in by then; each looks at its engine's own configuration."""
    output = forked_python(
        """
        import json
        from pathlib import Path
        from vllm import EngineArgs, LLM, SamplingParams
        from tests.vllm.conftest import engine_options
        EngineArgs(**engine_options(Path(FOLDER)), additional_config={"rl_memory": {}}).create_engine_config()
        llm = LLM(**engine_options(Path(FOLDER)))
        core = llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker
        down = worker.model_runner.model.model.layers[0].mlp.down_proj
        llm.sleep(0)
        llm.enqueue([{"prompt_token_ids": [5, 6, 7, 8]}], SamplingParams(max_tokens=2), use_tqdm=False)
        llm.wake_up(["scheduling"])
        answers = llm.wait_for_completion(use_tqdm=False)
        try:
            llm.memory_status()
            error = None
        except Exception as caught:
            error = type(caught).__name__
        replaced = ("_maybe_get_memory_pool_context", "sleep", "wake_up")
        print(json.dumps({
            "config": llm.llm_engine.vllm_config.additional_config,
            "added": [hasattr(owner, "rl_memory") for owner in (core, worker, llm.llm_engine)],
            "replaced": [name for name in replaced if name in vars(worker)],
            "loader": "load_weights" in vars(worker.model_runner.model),
            "packed": down.weight.numel() == 0,
            "answer": len(answers[0].outputs[0].token_ids),
            "error": error,
        }))
        """,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    assert json.loads(output.splitlines()[-1]) == {
        "config": {},
        "added": [False, False, False],
        "replaced": [],
        "loader": False,
        "packed": True,  # CPU weights as the plain engine has them
        "answer": 2,
        "error": "UnsupportedError",
    }
