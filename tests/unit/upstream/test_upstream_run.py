import textwrap

import psutil

from integration.upstream.environment import environment
from integration.upstream.run import Setting, former, run
from integration.upstream.sources import OwnTests

TESTS = """
    import os, subprocess, sys
    import pytest

    def test_passes(): pass
    def test_fails(): assert not "a reason to read"
    @pytest.mark.skip(reason="not here")
    def test_is_skipped(): pass
    def test_sees_the_subject(): assert os.environ.get("RL_MEMORY") == "1"
    @pytest.fixture
    def broken():
        yield
        raise RuntimeError
    def test_breaks_afterwards(broken): pass
    def test_leaves_a_process():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open("child", "w").write(str(child.pid))
    def test_dies(): os._exit(1)
    def test_dies_too(): os._exit(0)
    def test_is_reached(): pass
"""


def outcomes(tmp_path, subject, text=TESTS, seconds=120):
    (tmp_path / "tests").mkdir(exist_ok=True)
    (tmp_path / "tests/test_some.py").write_text(textwrap.dedent(text))
    variables = environment("vllm", on_gpu=False, defaults={}, root=tmp_path)
    found = run(subject, OwnTests("tests/test_some.py", ""), Setting(tmp_path, tmp_path / "logs", variables, seconds))
    return {test.split("::")[-1]: outcome for test, (outcome, _reason) in found.items()}


def test_each_test_has_its_outcome_also_where_the_process_dies(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_MEMORY_LEVEL", "an option of whoever started the run")

    assert outcomes(tmp_path, "plugin") == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_is_skipped": "skipped",
        "test_sees_the_subject": "passed",
        "test_breaks_afterwards": "error",
        "test_leaves_a_process": "passed",
        "test_dies": "error",
        "test_dies_too": "error",
        "test_is_reached": "passed",
    }
    assert not _runs(int((tmp_path / "child").read_text()))


def test_the_outcomes_of_an_earlier_run_are_there(tmp_path):
    ran = outcomes(tmp_path, "native", "def test_passes(): pass")
    file = OwnTests("tests/test_some.py", "")
    setting = Setting(tmp_path, tmp_path / "logs", {}, 1)

    assert {test.split("::")[-1]: outcome for test, (outcome, _) in former("native", file, setting).items()} == ran
    assert former("plugin", file, setting) == {}


def test_natively_the_package_is_off(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_MEMORY", "1")

    assert outcomes(tmp_path, "native")["test_sees_the_subject"] == "failed"


def test_a_file_that_hangs_is_killed_and_its_test_is_an_error(tmp_path):
    found = outcomes(tmp_path, "native", "import time\ndef test_hangs(): time.sleep(600)\n", seconds=30)

    assert found == {"test_hangs": "error"}


def test_a_file_that_cannot_be_imported_is_an_error(tmp_path):
    assert outcomes(tmp_path, "native", "import no_such_module") == {"tests/test_some.py": "error"}


def _runs(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
