"""That the patched places really call the plugins: first with the functions alone, then inside the real engine.

The engine's own processes need torch, a CUDA driver and matching versions of much else. So there are two
levels. The first executes each patched function of every release by itself and needs nothing. The tests marked
`slow` import the real, patched modules of one release per diff, once, and call them in forks; they need an interpreter
that has SGLang's dependencies (those of a later release do), given by `RL_MEMORY_SGLANG_PYTHON`, and only the kernels'
package `sgl_kernel` is a stand-in, because it does not load without a CUDA driver. No model is run.
"""

import ast
import json
import logging
import os
import runpy
import subprocess
import sys
import types
from importlib.util import find_spec

import pytest

from rl_memory_plugins import loader, patching
from tests.patches.interpreter import Interpreter
from tests.patches.releases import PATCHES, VERSIONS

FUNCTIONS = [
    ("sglang/cli/serve.py", "serve"),
    ("sglang/srt/entrypoints/engine.py", "__init__"),
    ("sglang/srt/entrypoints/engine.py", "_launch_subprocesses"),
    ("sglang/srt/managers/data_parallel_controller.py", "run_data_parallel_controller_process"),
    ("sglang/srt/managers/scheduler.py", "run_scheduler_process"),
]


class Reached(BaseException):
    """Raised by the plugin, so that nothing after the call is executed."""


def reach():
    raise Reached


def install_plugin(site, **entry_points):
    """A distribution in `site` whose entry points have these names and values."""
    metadata = site / "probe-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: probe\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{loader.GROUP}]", *lines]) + "\n")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process that has loaded no plugins, and only the test's own plugins to load."""
    monkeypatch.setattr(loader, "_loaded", False)
    monkeypatch.setenv("SGLANG_PLUGINS", "probe,other")


@pytest.fixture
def reaching(tmp_path, monkeypatch):
    install_plugin(tmp_path / "plugin", probe=f"{__name__}:reach")
    monkeypatch.syspath_prepend(str(tmp_path / "plugin"))


def patched_sources(version, site):
    root = site(version)
    report = patching.apply(patching.find_installation("sglang", root))
    return {path: (root / path).read_text() for path in report.files}


def alone(source, name):
    """The patched function `name` of `source` by itself: no decorators, any arguments, no module around it."""
    wanted = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == name and "load_sglang_plugins" in ast.unparse(node)
    ]
    assert len(wanted) == 1
    body = "\n".join(ast.unparse(statement) for statement in wanted[0].body)
    namespace = {}
    exec(f"def {name}(*args, **kwargs):\n" + "\n".join(f"    {line}" for line in body.splitlines()), namespace)
    return namespace[name]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_place_calls_the_plugins_before_anything_else(version, site, reaching):
    sources = patched_sources(version, site)
    for path, name in FUNCTIONS:
        loader._loaded = False
        with pytest.raises(Reached):
            alone(sources[path], name)()
    calls = sum(source.count("load_sglang_plugins()") for source in sources.values())
    assert calls == len(FUNCTIONS) + 1, "and __main__ of launch_server"


@pytest.mark.parametrize("version", VERSIONS)
def test_launch_server_calls_the_plugins_before_it_parses_arguments(version, site, reaching, monkeypatch):
    def stand_in(name):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__getattr__ = lambda attribute: lambda *args: None
        monkeypatch.setitem(sys.modules, name, module)
        return module

    for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.utils.common"):
        stand_in(name)
    parsed = []
    stand_in("sglang.srt.server_args").prepare_server_args = parsed.append
    root = site(version)
    patching.apply(patching.find_installation("sglang", root))
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    with pytest.raises(Reached):
        runpy.run_path(str(root / "sglang/launch_server.py"), run_name="__main__")
    assert parsed == []


@pytest.mark.parametrize("version", ["0.5.5", "0.5.9", "0.5.10.post1"])
def test_a_patched_engine_goes_on_when_the_package_is_not_installed(version, site, monkeypatch):
    sources = patched_sources(version, site)
    monkeypatch.setitem(sys.modules, "rl_memory_plugins.loader", None)  # importing it raises ModuleNotFoundError
    for path, name in FUNCTIONS:
        with pytest.raises((NameError, IndexError)):  # of the function's next statements, which lack their module
            alone(sources[path], name)()


CALLED = []


def record():
    CALLED.append("probe")


def fail():
    raise RuntimeError("no hook target")


@pytest.fixture
def called():
    CALLED.clear()
    return CALLED


def test_plugins_are_called_once_per_process(tmp_path, monkeypatch, called):
    install_plugin(tmp_path, probe=f"{__name__}:record")
    monkeypatch.syspath_prepend(str(tmp_path))
    loader.load_sglang_plugins()
    loader.load_sglang_plugins()
    assert called == ["probe"]


def test_a_plugin_that_fails_is_logged_and_the_next_one_loads(tmp_path, monkeypatch, called, caplog):
    install_plugin(tmp_path, other=f"{__name__}:fail", probe=f"{__name__}:record")
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.ERROR):
        loader.load_sglang_plugins()
    assert called == ["probe"]
    assert "other" in caplog.text and "no hook target" in caplog.text


def test_the_engines_list_of_plugins_is_obeyed(tmp_path, monkeypatch, called):
    install_plugin(tmp_path, probe=f"{__name__}:record")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    loader.load_sglang_plugins()
    assert called == []


# -- inside the real engine -------------------------------------------------------------------------

PLUGIN = """
import os
class Reached(BaseException): pass
def register():
    from sglang.srt.server_args import ServerArgs
    if os.environ["PROBE"] == "raise":
        raise Reached
    add = ServerArgs.add_cli_args
    def add_cli_args(parser):
        add(parser)
        parser.add_argument("--probe-flag")
    ServerArgs.add_cli_args = staticmethod(add_cli_args)
"""

KERNELS = """
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
class Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.__getattr__ = __getattr__
sys.meta_path.insert(0, Finder())
__version__ = "99.0"
"""

CALLS = """
from inspect import signature
import sglang
from probe_plugin import Reached
from rl_memory_plugins import loader
from sglang.srt.entrypoints import engine
from sglang.srt.managers import data_parallel_controller, scheduler
launch = getattr(engine, "_launch_subprocesses", None) or engine.Engine._launch_subprocesses
functions = [
    engine.Engine, launch, scheduler.run_scheduler_process,
    data_parallel_controller.run_data_parallel_controller_process,
]
for function in functions:
    parameters = signature(function).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    loader._loaded = False
    try:
        function(*[None] * len(required))
    except Reached:
        print("REACHED", function.__name__, sglang.__file__)
"""


MODULES = [
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.data_parallel_controller",
]


@pytest.fixture(scope="module")
def extra(tmp_path_factory):
    """What an interpreter imports beside a release: two plugins and the stand-in for the kernels."""
    folder = tmp_path_factory.mktemp("extra")
    (folder / "probe_plugin.py").write_text(PLUGIN)
    (folder / "sgl_kernel.py").write_text(KERNELS + "__path__ = []\n")
    install_plugin(folder, probe="probe_plugin:register", own="rl_memory_plugins.engines.sglang:register")
    return folder


@pytest.fixture(scope="module")
def python():
    found = os.environ.get("RL_MEMORY_SGLANG_PYTHON") or (sys.executable if find_spec("sglang") else "")
    if not found:
        pytest.skip("needs an interpreter with SGLang's dependencies: set RL_MEMORY_SGLANG_PYTHON")
    return found


def environment_of(root, extra):
    paths = os.pathsep.join(map(str, (root, extra, PATCHES.parent)))
    return {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "SGLANG_PLUGINS": "probe"}


ONE_PER_DIFF = ["0.5.5", "0.5.9", "0.5.10.post1"]


@pytest.fixture(scope="module", params=ONE_PER_DIFF)
def version(request):
    return request.param


@pytest.fixture(scope="module")
def real(version, python, patched, extra):
    """The interpreter that has imported the patched release."""
    with Interpreter(python, environment_of(patched(version), extra), *MODULES) as interpreter:
        yield interpreter


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "import runpy, sys; sys.argv[1:] = ['--help']; runpy.run_module('sglang.launch_server', run_name='__main__')",
        "from sglang.cli.serve import serve; serve(None, ['--help'])",
    ],
    ids=["launch_server", "serve"],
)
def test_a_plugin_adds_a_flag_to_the_real_command_line(real, tmp_path, command):
    done = real.run(command, tmp_path, PROBE="flag")
    assert "--probe-flag" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_plugin_adds_a_flag_in_a_process_of_its_own(patched, python, extra, tmp_path):
    """As users start it; the tests above are forks of an interpreter that has imported the release before."""
    done = subprocess.run(
        [python, "-m", "sglang.launch_server", "--help"],
        env={**environment_of(patched(ONE_PER_DIFF[-1]), extra), "PROBE": "flag"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert "--probe-flag" in done.stdout, done.stderr


@pytest.mark.slow
def test_the_real_functions_of_a_patched_release_call_the_plugin(real, version, patched, tmp_path):
    done = real.run(CALLS, tmp_path, PROBE="raise")
    reached = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("REACHED")]
    names = ("Engine", "_launch_subprocesses", "run_scheduler_process", "run_data_parallel_controller_process")
    file = str(patched(version) / "sglang/__init__.py")
    assert reached == [[name, file] for name in names], done.stderr


# -- this package's own plugin in a patched release --------------------------------------------------

OWN = """
import json, os, pathlib
pathlib.Path("model").mkdir()
pathlib.Path("model/config.json").write_text('{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}')
from rl_memory_plugins import loader
loader.load_sglang_plugins()
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.server_args import prepare_server_args
from rl_memory_plugins.engines.sglang import hooks, options, register

def error_of(call):
    try:
        call()
    except BaseException as error:
        return [type(error).__name__, str(error), getattr(error, "details", None)]

ARGUMENTS = ["--model-path", "model", "--device", "cpu"]
plain = prepare_server_args(ARGUMENTS)
found = {
    "hooks": sorted(hooks.hooks.table),
    "disabled": [options.config_of(plain), plain.enable_memory_saver, options.launching()],
    "flag": error_of(lambda: prepare_server_args([*ARGUMENTS, "--rl-memory"])),
    "keyword": error_of(lambda: Engine(model_path="model", device="cpu", rl_memory=True)),
}
os.environ["RL_MEMORY"] = "1"
found["variable"] = error_of(register)
print("FOUND", json.dumps(found))
"""
#: What none of the patched releases has. The adapter was written for the code that these stand for.
LACKING = {
    "sglang.srt.managers.io_struct:hook_custom_types",
    "sglang.srt.managers.scheduler_components.weight_updater",
}


@pytest.mark.slow
def test_a_patched_release_starts_without_the_plugin_and_is_refused_with_all_that_it_lacks(real, version, tmp_path):
    """Enabled on code it was not written for, it would end in the first scheduler that misses a symbol, or go on."""
    done = real.run(OWN, tmp_path, SGLANG_PLUGINS="own")
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stderr
    found = json.loads(lines[0].removeprefix("FOUND"))
    arguments = "sglang.srt.server_args:ServerArgs"
    assert set(found["hooks"]) - {f"{arguments}.__init__"} == {
        f"{arguments}.add_cli_args",
        f"{arguments}.from_cli_args",
    }
    assert found["disabled"] == [None, False, False]
    for way in ("flag", "keyword"):
        kind, message, details = found[way]
        assert kind == "UnsupportedError"
        assert set(details["symbols"]) >= LACKING
        assert details["engine"] == f"sglang {version}"
        assert all(part in message for part in (*details["symbols"], details["engine"]))
    kind, message, _ = found["variable"]
    assert (kind, message) == ("SystemExit", f"rl_memory: {found['flag'][1]}")
