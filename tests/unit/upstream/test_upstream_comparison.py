import json
from pathlib import Path

import pytest

from integration.upstream import comparison


@pytest.fixture(autouse=True)
def expected(monkeypatch):
    monkeypatch.setattr(comparison, "_expected", lambda engine: {"tests/a.py::test_*[x-*]": "the contract wants it"})


def compare(native, plugin):
    return comparison.compare(
        "vllm",
        {test: (outcome, "") for test, outcome in native.items()},
        {test: (outcome, "why") for test, outcome in plugin.items()},
    )


@pytest.mark.parametrize("outcome", ["failed", "error", "skipped"])
def test_what_passes_natively_and_not_with_the_package_is_worse(outcome):
    (test,) = compare({"t": "passed"}, {"t": outcome})

    assert comparison.is_unexpected(test)
    assert test["reason"] == "why"


def test_a_test_that_the_package_never_reached_is_worse():
    (test,) = compare({"t": "passed"}, {})

    assert test["plugin"] == "error"
    assert comparison.is_unexpected(test)


@pytest.mark.parametrize(("native", "plugin"), [("failed", "failed"), ("failed", "passed"), ("skipped", "skipped")])
def test_what_does_not_pass_natively_is_never_worse(native, plugin):
    (test,) = compare({"t": native}, {"t": plugin})

    assert not comparison.is_worse(test)


def test_a_record_says_why_a_test_does_not_pass_natively():
    reason = "def test():\n>   open(path)\nE   OSError: not found: /home/me/models/x\n\n/home/me/a.py:3: OSError"
    tests = comparison.compare("vllm", {"a": ("failed", reason), "b": ("skipped", "no GPU"), "c": ("passed", "")}, {})

    reasons = [test.get("native_reason") for test in tests]
    assert reasons == ["OSError: not found: x", "no GPU", None]


def test_an_expected_difference_carries_its_reason_and_names_match_as_patterns():
    found = compare(dict.fromkeys(["tests/a.py::test_b[x-1]", "tests/a.py::test_b[y-1]"], "passed"), {})

    assert [test["expected_difference"] for test in found] == ["the contract wants it", None]
    assert [comparison.is_unexpected(test) for test in found] == [False, True]
    assert comparison.score(found) == {
        "tests": 2,
        "passed_native": 2,
        "passed_plugin": 0,
        "better": 0,
        "expected_differences": 1,
        "unexpected_differences": 1,
    }


def test_an_expected_difference_of_a_test_that_passes_is_not_counted():
    (test,) = compare({"tests/a.py::test_b[x-1]": "passed"}, {"tests/a.py::test_b[x-1]": "passed"})

    assert test["expected_difference"] is None


def test_the_expected_differences_are_few_and_each_has_a_reason():
    text = (Path(comparison.__file__).parent / "expected.json").read_text()
    for engine, differences in json.loads(text).items():
        assert len(differences) <= 10, engine
        assert all(test.split("::")[0].endswith(".py") and reason for test, reason in differences.items())
