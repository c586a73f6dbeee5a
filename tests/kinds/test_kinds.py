"""Every way of updating every kind of weights, against fresh engines, and against the committed records.

`--kinds chosen` runs a third of the kinds, each on one engine at least, and `--kinds all` all of them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from integration.engines.base import REPOSITORY
from integration.kinds import table
from integration.kinds.run import run
from integration.kinds.ways import WAYS

RESULTS = REPOSITORY / "integration" / "results"
#: vLLM chooses the kernel by its own list, and not by what it was compiled with for the CPU.
MISSING_KERNEL = re.compile(
    r"'_OpNamespace' '_C' object has no attribute '(cpu_\w+)'|(FP8 KV cache) on CPU requires x86 with AVX-512"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    options = metafunc.config.option
    kinds = table.KINDS if options.kinds == "all" else table.CHOSEN[options.engine]
    metafunc.parametrize("kind", kinds)


@pytest.fixture(scope="session")
def recorded(request: pytest.FixtureRequest) -> dict[tuple[str, str], str]:
    """By kind and way the outcome in the committed records of this engine on the CPU."""
    engine = request.config.getoption("--engine")
    paths = RESULTS.glob(f"kinds-{engine}-*-cpu.json")
    records = [record for path in paths for record in json.loads(path.read_text())]
    return {(record["kind"], record["way"]): record["outcome"] for record in records}


def test_an_engine_is_a_fresh_one_of_the_weights_that_it_got(
    engine: str, kind: str, recorded: dict[tuple[str, str], str], tmp_path: Path
) -> None:
    found = {outcome.way: outcome for outcome in run(engine, kind, tmp_path, WAYS)}
    assert found
    missing = {MISSING_KERNEL.search(one.reason) for one in found.values() if one.outcome == "engine_cannot"}
    for kernel in filter(None, missing):  # found by an engine without the package
        pytest.skip(f"vLLM's build for this CPU has no {kernel[1] or kernel[2]}: it needs AVX-512")
    for way, (_, outcome, reason) in found.items():
        # A way without a record must pass, or be one that the engine does not have.
        wanted = {recorded[kind, way]} if (kind, way) in recorded else {"passed", "engine_cannot"}
        assert outcome in wanted, f"{way}: {outcome}: {reason}"
