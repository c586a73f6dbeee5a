"""Which requests `bench_preparation` records, with a subject that has no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integration import bench_gpu, bench_preparation, records


class Subject:
    """Its host memory grows with each call until `settle`."""

    def __init__(self) -> None:
        self.settled = False
        self.served = 0

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        self.served += not self.settled
        return [[1] * tokens for _ in prompts]

    def settle(self) -> None:
        self.settled = True


def test_requests_are_recorded_while_host_memory_is_prepared_and_afterwards(tmp_path: Path, monkeypatch: Any) -> None:
    subject = Subject()
    monkeypatch.setattr(bench_preparation, "host_held_mib", lambda: 8.0 * subject.served)
    bench_preparation.measure(subject, records.Records(tmp_path / "out.json", {"round": 1}))
    found = {record["metric"]: record for record in records.read(tmp_path / "out.json")}
    assert found["request_start_s"]["prepared_mib"] == 8 * bench_gpu.REQUESTS
    assert found["request_s"]["prepared_mib"] == 0
    assert len(found["request_s"]["deciles"]) == 9
    assert found["decode_start_tok_s"]["n"] == found["decode_tok_s"]["n"] == bench_preparation.BATCHES
    assert {record["round"] for record in found.values()} == {1}
