"""How the plugin is asked for on SGLang, what is refused before anything starts, and what is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

SWITCHES = [
    "sglang.srt.server_args:ServerArgs.add_cli_args",
    "sglang.srt.server_args:ServerArgs.from_cli_args",
]


@pytest.fixture(scope="module")
def found(python: Callable[..., str]) -> dict[str, Any]:
    """What one process sees on the way of `sglang serve`: plugins, then the command line, then the launch."""
    output = python("""
        import importlib, json, os, sys
        import rl_memory_plugins, rl_memory_plugins.engines.sglang as plugin
        early = [name for name in ("torch", "sglang", "fastapi", "pydantic") if name in sys.modules]

        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import ServerArgs, prepare_server_args
        plugin.register()
        plugin.register()
        from rl_memory_plugins.engines.sglang.hooks import hooks
        from rl_memory_plugins.engines.sglang.options import ATTRIBUTE, CHILD_VARIABLE, config_of, launching

        WATCHED = (
            "sglang.srt.managers.scheduler:Scheduler",
            "sglang.srt.managers.tokenizer_manager:TokenizerManager",
            "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager",
            "sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter",
            "sglang.srt.entrypoints.engine:Engine",
            "sglang.srt.entrypoints.http_server:",
            "sglang.srt.distributed.bootstrap:",
            "sglang.srt.server_args:ServerArgs",
        )

        def ours():
            # Everything on the watched objects that this package made, whatever it is called.
            names = []
            for path in WATCHED:
                module, _, name = path.partition(":")
                owner = importlib.import_module(module)
                owner = getattr(owner, name) if name else owner
                for key, value in vars(owner).items():
                    code = getattr(getattr(value, "__func__", value), "__code__", None)
                    if code is not None and "rl_memory_plugins" in code.co_filename:
                        names.append(f"{path}.{key}")
            return sorted(names)

        ARGV = ["--model-path", FOLDER, "--device", "cpu", "--skip-tokenizer-init", "--dtype", "float32",
                "--attention-backend", "torch_native"]
        KEYWORDS = dict(model_path=FOLDER, device="cpu", skip_tokenizer_init=True, dtype="float32",
                        attention_backend="torch_native", log_level="error")

        def parsed(*flags):
            return prepare_server_args([*ARGV, *flags])

        def error_of(call):
            try:
                call()
            except BaseException as error:
                return [type(error).__name__, str(error)]
            return None

        plain = parsed()
        disabled = {"options": getattr(plain, ATTRIBUTE), "enabled": config_of(plain) is not None,
                    "saver": plain.enable_memory_saver, "ours": ours(), "hooks": sorted(hooks.table),
                    "child": CHILD_VARIABLE in os.environ}

        # A symbol that this engine does not have.
        from sglang.srt.managers.scheduler import Scheduler
        taken = Scheduler.continue_generation
        del Scheduler.continue_generation
        missing = error_of(lambda: parsed("--rl-memory"))
        os.environ["RL_MEMORY"] = "1"
        missing_in_plugin = error_of(plugin.register)
        del os.environ["RL_MEMORY"]
        Scheduler.continue_generation = taken

        bad = {flags: error_of(lambda: parsed("--rl-memory", flags))
               for flags in ("nonsense=1", "poison", '{"poison": "maybe"}', "{oops")}
        bad_keyword = error_of(lambda: Engine(**KEYWORDS, rl_memory={"nonsense": 1}))

        flags = {}
        for value in ("", "poison=true", '{"poison": true, "update_timeout_s": 5}'):
            arguments = parsed("--rl-memory", value) if value else parsed("--rl-memory")
            flags[value] = [getattr(arguments, ATTRIBUTE), arguments.enable_memory_saver]
        os.environ["RL_MEMORY"] = "poison=true"
        by_variable = getattr(parsed(), ATTRIBUTE)
        by_framework = config_of(ServerArgs(**KEYWORDS)).to_dict()
        over_variable = getattr(parsed("--rl-memory", "update_timeout_s=5"), ATTRIBUTE)
        keyword_no = getattr(Engine.server_args_class(**KEYWORDS, rl_memory=False), ATTRIBUTE)
        del os.environ["RL_MEMORY"]

        import inspect
        from rl_memory_plugins.engines.sglang import tp_memory_balance
        original = hooks.table[tp_memory_balance.CHECK]
        launched = []
        from rl_memory_plugins.engines.sglang import install, switch

        def refusal(variables=None, engine=Engine, **options):
            arguments = switch._enable(ServerArgs(**KEYWORDS), switch.RLMemoryConfig())
            for name, value in options.items():
                setattr(arguments, name, value)
            os.environ.update(variables or {})
            try:
                launch = install._launch_subprocesses(lambda *a, **k: launched.append(os.environ[CHILD_VARIABLE]))
                return error_of(lambda: launch(engine, arguments, run_scheduler_process_func=print))
            finally:
                for name in variables or {}:
                    del os.environ[name]

        refused = {
            "tokenizer": refusal(tokenizer_worker_num=2),
            "pipeline with a draft": refusal(pp_size=2, speculative_algorithm="EAGLE"),
            "pipeline with attention dp": refusal(pp_size=2, enable_dp_attention=True),
            "disaggregation": refusal(disaggregation_mode="prefill"),
            "ray": refusal(use_ray=True),
            "ray engine": refusal(engine=type("RayEngine", (), {})),
            "rust": refusal({"SGLANG_RUST_SERVER": "1"}),
            "cache": refusal(weight_cache_mode="auto"),
            "offloader": refusal(offload_group_size=2),
            "ktransformers": refusal(kt_weight_path="/experts"),
            "diffusion": refusal(dllm_algorithm="LowConfidence"),
            "eplb": refusal(enable_eplb=True),
            "elastic": refusal(elastic_ep_backend="mooncake"),
            "saver": refusal(device="cuda", enable_memory_saver=False),
            "device": refusal(device="npu"),
            "local control": refusal(enable_dp_attention_local_control_broadcast=True),
            "dwdp": refusal(dwdp_size=2),
            "pdmux": refusal(enable_pdmux=True),
            "modelexpress": refusal(
                load_format="remote_instance", remote_instance_weight_loader_backend="modelexpress"),
            "modelexpress of a draft": refusal(
                speculative_draft_load_format="remote_instance", remote_instance_weight_loader_backend="modelexpress"),
            "table in a file": refusal(ple_offload_backend="file"),
            "hicache storage": refusal(hicache_storage_backend="file"),
            "lmcache": refusal(enable_lmcache=True),
            "flexkv": refusal(enable_flexkv=True),
            "linker": refusal(enable_unified_cache_external_linker=True),
            "cache backend": refusal(radix_cache_backend="flexkv"),
            "slime's hicache": refusal(release_hicache=True),
            "grpc launched": refusal(smg_grpc_mode=True),
            "encoder": error_of(lambda: parsed("--rl-memory", "poison=true", "--encoder-only")),
            "smg grpc": error_of(lambda: parsed("--rl-memory", "poison=true", "--smg-grpc-mode")),
            "grpc": error_of(lambda: parsed("--rl-memory", "poison=true", "--grpc-mode")),
        }
        bare = switch._enable(ServerArgs(**KEYWORDS), switch.RLMemoryConfig())
        bare.enable_eplb = True
        refused["scheduler"] = error_of(lambda: Scheduler(bare))
        plain_grpc = error_of(lambda: parsed("--smg-grpc-mode"))
        before = list(launched)

        # Enabled by the environment alone, as a job's variable enables every engine of the job.
        import logging
        warned = []
        class Handler(logging.Handler):
            def emit(self, record):
                warned.append(record.getMessage())
        logging.getLogger("rl_memory_plugins").addHandler(Handler())
        os.environ["RL_MEMORY"] = "1"
        def left_alone(**options):
            arguments = ServerArgs(**KEYWORDS)
            for name, value in options.items():
                setattr(arguments, name, value)
            seen, warned[:] = [], []
            launch = install._launch_subprocesses(
                lambda *a, **k: seen.append([config_of(arguments) is None, "RL_MEMORY" in os.environ, launching()]))
            error = error_of(lambda: launch(Engine, arguments, run_scheduler_process_func=print))
            return [error, seen, list(warned)]
        stays_out = {
            "saver": left_alone(device="cuda", enable_memory_saver=False),
            "pipeline": left_alone(pp_size=2, speculative_algorithm="EAGLE"),
            "disaggregation": left_alone(disaggregation_mode="decode"),
            "device": left_alone(device="xpu"),
            "dwdp": left_alone(dwdp_size=2),
        }
        warned.clear()
        grpc = parsed("--smg-grpc-mode")
        stays_out["grpc"] = [None, [[config_of(grpc) is None, grpc.enable_memory_saver, False]], list(warned)]
        del os.environ["RL_MEMORY"]
        fine = refusal(enable_hierarchical_cache=True)
        real = error_of(lambda: Engine(**KEYWORDS, rl_memory=True, tokenizer_worker_num=2))
        print(json.dumps({
            "early": early, "disabled": disabled, "missing": missing, "missing_in_plugin": missing_in_plugin,
            "bad": bad, "bad_keyword": bad_keyword, "flags": flags, "by_variable": by_variable,
            "by_framework": by_framework, "over_variable": over_variable, "keyword_no": keyword_no,
            "balance_check": sorted(inspect.signature(original).parameters),
            "refused": refused, "before": before, "fine": fine, "launched": launched, "real": real,
            "plain_grpc": plain_grpc, "stays_out": stays_out,
            "child": CHILD_VARIABLE in os.environ, "enabled": ours(), "hooks": sorted(hooks.table),
        }))
    """)
    return json.loads(output.splitlines()[-1])


def test_importing_the_package_imports_no_engine(found: dict[str, Any]) -> None:
    assert found["early"] == []


def test_not_enabled_only_the_switches_are_in_sglang(found: dict[str, Any]) -> None:
    disabled = found["disabled"]
    assert disabled["options"] is None
    assert not disabled["enabled"] and not disabled["saver"] and not disabled["child"]
    assert disabled["hooks"] == SWITCHES
    # `Engine`'s keyword is assigned, not hooked.
    assert disabled["ours"] == sorted([*SWITCHES, "sglang.srt.entrypoints.engine:Engine.server_args_class"])


def test_enabled_the_same_look_finds_the_hooks(found: dict[str, Any]) -> None:
    expected = {
        "sglang.srt.managers.scheduler:Scheduler.continue_generation",
        "sglang.srt.managers.tokenizer_manager:TokenizerManager.release_memory_occupation",
        "sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter.create",
        "sglang.srt.entrypoints.engine:Engine.sleep",
        "sglang.srt.entrypoints.engine:Engine.generate",
        "sglang.srt.distributed.bootstrap:._check_tp_memory_balance",
    }
    assert expected <= set(found["enabled"])
    assert set(SWITCHES) < set(found["hooks"])


def test_the_flag_takes_nothing_pairs_or_json(found: dict[str, Any]) -> None:
    assert found["flags"] == {
        "": [{}, True],
        "poison=true": [{"poison": True}, True],
        '{"poison": true, "update_timeout_s": 5}': [{"poison": True, "update_timeout_s": 5.0}, True],
    }


def test_the_environment_enables_it_and_the_flag_wins(found: dict[str, Any]) -> None:
    assert found["by_variable"] == {"poison": True}
    assert found["by_framework"] == {"poison": True}  # a `ServerArgs` that a framework made
    assert found["over_variable"] == {"update_timeout_s": 5.0}
    assert found["keyword_no"] is None


def test_a_bad_option_is_refused_while_the_arguments_are_parsed(found: dict[str, Any]) -> None:
    """Stock: what a plugin raises is logged, and the server starts without it."""
    for flags, error in found["bad"].items():
        assert error is not None, flags
        name, message = error
        assert name == "InvalidRequestError", flags
        assert "bad rl_memory options" in message and "strict_tp_balance" in message
    assert found["bad_keyword"][0] == "InvalidRequestError"
    assert "nonsense" in found["bad_keyword"][1]


@pytest.mark.parametrize(
    ("mode", "named", "why"),
    [
        ("tokenizer", "--tokenizer-worker-num", "load no plugins"),
        ("pipeline with a draft", "--pp-size", "only the last stage"),
        ("pipeline with attention dp", "--pp-size", "requests of their own"),
        ("disaggregation", "--disaggregation-mode", "KV cache"),
        ("ray", "Ray", "load no plugins"),
        ("ray engine", "Ray", "load no plugins"),
        ("rust", "SGLANG_RUST_SERVER", "no Python server"),
        ("cache", "--weight-cache-mode", "shared"),
        ("offloader", "--offload-group-size", "no update reaches"),
        ("ktransformers", "--kt-weight-path", "no update reaches"),
        ("diffusion", "--dllm-algorithm", "do not empty"),
        ("eplb", "--enable-eplb", "change places"),
        ("elastic", "--elastic-ep-backend", "cannot agree"),
        ("saver", "enable_memory_saver", "pass True"),
        ("device", "--device npu", "no allocator"),
        ("local control", "local control broadcast", "cannot agree"),
        ("dwdp", "local control broadcast", "cannot agree"),
        ("pdmux", "--enable-pdmux", "ignores a pause"),
        ("modelexpress", "modelexpress", "could not end the registration"),
        ("modelexpress of a draft", "modelexpress", "could not end the registration"),
        ("table in a file", "--ple-offload-backend file", "map one file"),
        ("hicache storage", "--hicache-storage-backend", "would find them again"),
        ("lmcache", "--enable-lmcache", "would find them again"),
        ("flexkv", "--enable-flexkv", "would find them again"),
        ("linker", "--enable-unified-cache-external-linker", "would find them again"),
        ("cache backend", "--radix-cache-backend", "would find them again"),
        ("slime's hicache", "--release-hicache", "this package replaces"),
        ("grpc launched", "--smg-grpc-mode", "no plugin reaches"),
        ("encoder", "--encoder-only", "no plugin reaches"),
        ("smg grpc", "--smg-grpc-mode", "no plugin reaches"),
        ("grpc", "--grpc-mode", "no plugin reaches"),
        ("scheduler", "--enable-eplb", "change places"),
    ],
)
def test_a_mode_that_cannot_work_is_refused_with_the_reason(
    found: dict[str, Any], mode: str, named: str, why: str
) -> None:
    """Stock: with a weight cache a release is a `RuntimeError`, killed; elsewhere processes start unhooked."""
    assert found["refused"][mode] is not None
    name, message = found["refused"][mode]
    assert name == "UnsupportedError"
    assert named in message and why in message


def test_a_refused_engine_launches_nothing(found: dict[str, Any]) -> None:
    assert found["before"] == []
    assert found["fine"] is None  # host memory alone: what is stored there goes with a flush
    assert found["plain_grpc"] is None
    assert found["launched"] == ["{}"]  # the options, as the children read them
    assert found["child"] is False  # afterwards they are out of the environment again


@pytest.mark.parametrize(
    ("mode", "named"),
    [
        ("saver", "enable_memory_saver"),
        ("pipeline", "--pp-size"),
        ("disaggregation", "--disaggregation-mode"),
        ("device", "--device xpu"),
        ("dwdp", "local control broadcast"),
        ("grpc", "--smg-grpc-mode"),
    ],
)
def test_enabled_by_the_environment_alone_it_stays_out_of_engines_that_it_cannot_serve(
    found: dict[str, Any], mode: str, named: str
) -> None:
    """slime, miles and NeMo-RL start groups without memory saver, or of prefill and decode, in the same job."""
    error, seen, warnings = found["stays_out"][mode]
    assert error is None
    assert seen == [[True, False, False]]  # not enabled, neither here nor in the children
    [warning] = warnings
    assert named in warning and "runs without the plugin" in warning


def test_the_engine_itself_is_refused(found: dict[str, Any]) -> None:
    name, message = found["real"]
    assert name == "UnsupportedError"
    assert "--tokenizer-worker-num" in message


def test_a_missing_symbol_fails_the_start_by_name(found: dict[str, Any]) -> None:
    """Stock: a hook that cannot be put in is logged, and the server starts half hooked."""
    symbol = "sglang.srt.managers.scheduler:Scheduler.continue_generation"
    name, message = found["missing"]
    assert name == "UnsupportedError"
    assert symbol in message and "sglang 0." in message
    # Where SGLang catches what a plugin raises, only `SystemExit` gets through.
    name, message = found["missing_in_plugin"]
    assert name == "SystemExit"
    assert symbol in message


def test_the_balance_check_is_called_as_the_installed_engine_does(found: dict[str, Any]) -> None:
    assert found["balance_check"] == ["local_gpu_memory", "pre_model_load_memory"]
