"""What switches the plugin on and off, without an engine."""

from __future__ import annotations

import contextlib
import os
import pickle
import types
from pathlib import Path
from typing import Any

import pytest

from integration.models import SHAPES, write_model
from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.vllm import modes, options, switch
from rl_memory_plugins.errors import UnsupportedError


@pytest.mark.parametrize(
    ("variable", "additional", "asked_for"),
    [
        ("", None, None),
        ("0", None, None),
        ("no", {"other": 1}, None),
        ("Off", None, None),
        ("yes", None, RLMemoryConfig()),
        ("poison=true", None, RLMemoryConfig(poison=True)),
        ("1", {"rl_memory": False}, None),  # what is asked for in Python wins
        ("0", {"rl_memory": None}, {}),  # named, with nothing behind it, as YAML has it
        ("0", {"rl_memory": {"poison": True}}, {"poison": True}),
    ],
)
def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch, variable: str, additional: Any, asked_for: Any) -> None:
    monkeypatch.setenv("RL_MEMORY", variable)
    assert options.requested(types.SimpleNamespace(additional_config=additional)) == asked_for


def parsed(*flags: str) -> Any:
    """What an engine gets from a command line; its configuration is made elsewhere."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    commands = parser.add_subparsers(dest="subparser")  # as of `vllm serve`
    AsyncEngineArgs.add_cli_args(commands.add_parser("run"))
    args = pickle.loads(pickle.dumps(parser.parse_args(["run", *flags])))  # as a child gets it
    engine_args = AsyncEngineArgs.from_cli_args(args)
    assert options.may_serve(args) is (options.requested(engine_args) is not None)
    return options.requested(engine_args)


def test_a_flag_holds_for_its_own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RL_MEMORY", raising=False)
    monkeypatch.setattr(options, "_made_here", False)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert parsed("--rl-memory", "poison=true") == "poison=true"
    assert parsed() is None
    assert "RL_MEMORY" not in os.environ
    assert parsed("--rl-memory", "--additional-config", '{"mine": 1}') == "1"
    assert parsed("--additional-config", '{"rl_memory": false}', "--rl-memory") is None
    monkeypatch.setenv("RL_MEMORY", "poison=true")
    assert parsed("--rl-memory", "allocator=host") == "allocator=host", "the flag wins"
    assert parsed() == RLMemoryConfig(poison=True)


@pytest.mark.parametrize(
    ("rl_memory", "named"),
    [
        (True, {"allocator": "tms"}),
        (None, {"allocator": "tms"}),
        ({"poison": True}, {"poison": True}),
        (False, False),
    ],
)
def test_what_is_named_natively_is_not_lost(rl_memory: Any, named: Any) -> None:
    from rl_memory_plugins.vllm import _with_config

    given = {"additional_config": {"rl_memory": {"allocator": "tms"}, "other": 1}}
    assert _with_config(rl_memory, given) == {"additional_config": {"rl_memory": named, "other": 1}}


@pytest.mark.parametrize(
    ("mode", "arguments"),
    [
        ("--enable-eplb", {"enable_eplb": True}),
        ("--kv-transfer-config", {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}),
        ("--kv-offloading-size", {"kv_offloading_size": 1.0}),
        ("--ec-transfer-config", {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}}),
        ("--load-format ipc_cache", {"load_format": "ipc_cache"}),
        ("--offload-group-size", {"offload_group_size": 2}),
        ("--offload-group-size", {"offload_backend": "prefetch", "offload_group_size": 2}),
        ("VLLM_USE_RUST_FRONTEND", {}),
    ],
)
def test_modes_that_break_a_promise_are_refused(
    monkeypatch: pytest.MonkeyPatch, mode: str, arguments: dict[str, Any]
) -> None:
    from vllm import EngineArgs

    monkeypatch.setattr(switch, "_install", lambda: None)
    if mode == "VLLM_USE_RUST_FRONTEND":
        monkeypatch.setenv(mode, "1")
    started = []
    create = switch._create_engine_config(started.append)
    asked = EngineArgs(model="none", **arguments, additional_config={"rl_memory": {}})
    with pytest.raises(UnsupportedError, match=f"{mode}: ") as caught:
        create(asked)
    assert caught.value.details["mode"] == mode
    assert started == []
    plain = EngineArgs(model="none", **arguments)
    create(plain)
    assert started == [plain]


def test_another_backend_of_vllms_sleep_is_refused() -> None:
    from vllm import EngineArgs

    asked = EngineArgs(model="none")
    asked.sleep_mode_backend = "cuda_checkpoint"  # an argument since 0.33
    with pytest.raises(UnsupportedError, match="--sleep-mode-backend: "):
        modes.refuse_arguments(asked)


@pytest.mark.parametrize(
    ("mode", "load_format", "quantization"),
    [
        ("load_format ipc_cache in draft_load_config", "ipc_cache", None),
        ("draft_lm_head_quantization", "auto", "fp8"),  # a field since 0.33
        ("", "auto", None),
        ("", None, None),
    ],
)
def test_weights_of_a_draft_that_no_update_reaches_or_that_others_read_are_refused(
    mode: str, load_format: str | None, quantization: str | None
) -> None:
    from vllm.config import LoadConfig

    load = None if load_format is None else LoadConfig(load_format=load_format)
    draft = types.SimpleNamespace(draft_load_config=load, draft_lm_head_quantization=quantization)
    config = configuration(speculative_config=draft)
    with (
        pytest.raises(UnsupportedError, match=f"{mode} of --speculative-config: ") if mode else contextlib.nullcontext()
    ):
        modes.refuse_configuration(config)


@pytest.mark.parametrize(
    ("layers", "engines", "asked", "is_refused"),
    [
        ("engram_layer_ids", 2, None, True),  # vLLM's default
        ("engram_layer_ids", 2, True, True),
        ("engram_layer_ids", 2, False, False),
        ("engram_layer_ids", 1, None, False),
        ("ple_layer_ids", 2, None, False),  # of Qwen4, whose engines share no tables
    ],
)
def test_tables_that_engines_share_are_refused(layers: str, engines: int, asked: bool | None, is_refused: bool) -> None:
    """One engine writes them, and each load of a table is a barrier of all engines."""
    engram = pytest.importorskip("vllm.config.engram").EngramConfig(dp_shared_memory=asked)
    config = configuration(engram_config=engram, data_parallel_size=engines, hf_text_config={layers: [1, 14]})
    engram.resolve_dp_shared_memory(config.parallel_config)
    with pytest.raises(UnsupportedError, match="--engram-config") if is_refused else contextlib.nullcontext():
        modes.refuse_configuration(config)


def configuration(
    data_parallel_size: int = 1, hf_text_config: dict[str, Any] | None = None, **parts: Any
) -> types.SimpleNamespace:
    """vLLM's configuration of a model without experts, as far as the plugin looks at it."""
    text = types.SimpleNamespace(**(hf_text_config or {}))
    return types.SimpleNamespace(
        additional_config={},
        model_config=types.SimpleNamespace(is_moe=False, hf_text_config=text),
        parallel_config=types.SimpleNamespace(data_parallel_size=data_parallel_size, enable_elastic_ep=False),
        **parts,
    )


@pytest.mark.parametrize(
    ("experts", "arguments", "variables"),
    [
        (True, {"data_parallel_rank": 1}, {}),
        (True, {"data_parallel_rank": 0, "data_parallel_external_lb": True}, {}),
        (True, {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True}, {}),
        (True, {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 2}, {}),
        (True, {"data_parallel_size_local": 1, "data_parallel_start_rank": 0}, {}),
        (True, {"nnodes": 2, "node_rank": 1, "data_parallel_external_lb": True}, {}),
        (True, {"data_parallel_size": 1}, {"VLLM_DP_SIZE": "2", "VLLM_DP_RANK": "1"}),
        (True, {}, None),  # one server for all engines
        (True, {"data_parallel_size": 4, "data_parallel_size_local": 2}, None),  # the same, on two hosts
        (False, {}, None),
    ],
)
def test_experts_whose_engines_no_one_client_reaches_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    experts: bool,
    arguments: dict[str, Any],
    variables: dict[str, str] | None,
) -> None:
    """A wake of one engine waits in vLLM's all-reduce until the others wake, whoever serves them."""
    from vllm import EngineArgs

    folder = write_model(tmp_path / "model", SHAPES["tiny-moe" if experts else "tiny"])
    monkeypatch.setattr(switch, "_install", lambda: None)
    monkeypatch.setattr(options, "_made_here", False)
    for left in (options.CHILD_VARIABLE, "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"):  # put back after the test
        monkeypatch.setenv(left, "")
    for name, value in (variables or {}).items():
        monkeypatch.setenv(name, value)
    create = switch._create_engine_config(EngineArgs.create_engine_config)
    asked = EngineArgs(model=str(folder), **{"data_parallel_size": 2, **arguments}, additional_config={"rl_memory": {}})
    if variables is None:
        assert create(asked).parallel_config.data_parallel_size > 1
    else:
        with pytest.raises(UnsupportedError, match="step together"):
            create(asked)


@pytest.mark.parametrize("enabled", [True, False])
def test_vllm_s_own_sleep_mode_is_accepted_and_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, enabled: bool
) -> None:
    """Trainers ask for it. vLLM refuses it on CPUs, before an engine exists."""
    from vllm import EngineArgs

    folder = write_model(tmp_path / "model", SHAPES["tiny"])
    monkeypatch.delenv("RL_MEMORY", raising=False)
    monkeypatch.setattr(switch, "_install", lambda: None)
    monkeypatch.setattr(options, "_made_here", False)
    for left in (options.CHILD_VARIABLE, "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"):  # put back after the test
        monkeypatch.setenv(left, "")
    create = switch._create_engine_config(EngineArgs.create_engine_config)
    asked = EngineArgs(
        model=str(folder), enable_sleep_mode=True, additional_config={"rl_memory": {}} if enabled else {}
    )
    if enabled:
        assert create(asked).model_config.enable_sleep_mode is False
    else:
        with pytest.raises(ValueError, match="Sleep mode is not supported"):
            create(asked)


@pytest.mark.parametrize(("asked", "given", "found"), [(True, None, "0"), (True, "1", "1"), (False, None, None)])
def test_nccl_registers_no_buffers_of_graphs_that_a_sleep_releases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: bool, given: str | None, found: str | None
) -> None:
    """vLLM sets the variable where it reads its flag, and workers of any executor inherit it."""
    from vllm import EngineArgs

    if not hasattr(EngineArgs, "sleep_mode_offload_cudagraph"):
        pytest.skip("this version of vLLM has no such flag")
    folder = write_model(tmp_path / "model", SHAPES["tiny"])
    monkeypatch.setattr(switch, "_install", lambda: None)
    monkeypatch.setattr(options, "_made_here", False)
    for left in (options.CHILD_VARIABLE, "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"):  # put back after the test
        monkeypatch.setenv(left, "")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    flags = {"enable_sleep_mode": True, "sleep_mode_offload_cudagraph": asked}
    create = switch._create_engine_config(EngineArgs.create_engine_config)
    create(EngineArgs(model=str(folder), **flags, additional_config={"rl_memory": {}}))
    assert os.environ.get("NCCL_GRAPH_REGISTER") == found


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize(
    ("shape", "arguments", "why"),
    [
        ("tiny", {"kv_offloading_size": 1.0}, "--kv-offloading-size"),  # shows in the arguments
        ("tiny-moe", {"data_parallel_size": 2, "data_parallel_rank": 1}, "step together"),  # in the configuration
        ("tiny-moe", {"data_parallel_size": 2, "enable_nccl_comm_suspend": True}, "connect the engines"),
    ],
)
def test_enabled_by_the_environment_alone_it_stays_out_of_engines_that_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    shape: str,
    arguments: dict[str, Any],
    why: str,
    explicit: bool,
) -> None:
    """A job's variable reaches all its engines, also those that need no sleep."""
    from vllm import EngineArgs

    folder = write_model(tmp_path / "model", SHAPES[shape])
    monkeypatch.setenv("RL_MEMORY", "1")
    monkeypatch.setattr(switch, "_install", lambda: None)
    monkeypatch.setattr(options, "_made_here", False)
    for left in (options.CHILD_VARIABLE, "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"):  # put back after the test
        monkeypatch.setenv(left, "")
    native: list[Any] = []

    def original(args: Any) -> Any:
        native.append((dict(args.additional_config or {}), args.enable_sleep_mode))
        return EngineArgs.create_engine_config(args) if shape == "tiny-moe" and len(native) == 1 else "without"

    create = switch._create_engine_config(original)
    additional = {"other": 1, **({"rl_memory": {}} if explicit else {})}
    asked = EngineArgs(model=str(folder), **arguments, additional_config=additional)
    if explicit:
        with pytest.raises(UnsupportedError, match=why):
            create(asked)
        return
    with caplog.at_level("WARNING"):
        assert create(asked) == "without"
    assert native[-1] == ({"other": 1}, False)
    assert not os.environ.get(options.CHILD_VARIABLE) and not options._made_here
    [warning] = [one.getMessage() for one in caplog.records if "runs without the plugin" in one.getMessage()]
    assert why in warning


def test_workers_of_vllm_s_ray_executor_put_in_the_hooks_too(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    """vLLM copies only some variables to them, and refuses this executor on CPUs."""
    from vllm import EngineArgs
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setattr(options, "_made_here", False)
    monkeypatch.setenv(options.CHILD_VARIABLE, "")
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "MINE")
    options.enable(EngineArgs(model=str(model_folder)), {})
    assert {options.CHILD_VARIABLE, "MINE"} <= get_env_vars_to_copy()

    installed = []
    monkeypatch.setattr(switch, "_install", lambda: installed.append(True))
    monkeypatch.setattr(switch.hooks, "wrap", lambda *arguments: None)
    switch.register()  # as the plugin loader does in each worker
    assert installed
