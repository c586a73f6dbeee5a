"""A trainer of two processes that sends its shards from where they lie to a real engine, and gathers nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integration.engines.base import Server
from integration.waiting import wait_until
from tests.conformance.conftest import OTHER_SEED, PROMPT, SEED, Weights, greedy
from tests.conformance.trainers import BUCKET_BYTES
from tests.sharded_trainer import ShardedTrainer

PATIENCE_S = 60.0  # the processes may have just started, on a busy machine
SHARDS = {"shards": True, "bucket_bytes": BUCKET_BYTES}


@pytest.fixture(scope="module")
def trainer(running_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedTrainer]:
    started = ShardedTrainer(running_server, tmp_path_factory.mktemp("trainer"))
    yield started
    started.stop()


@pytest.mark.parametrize("transport", [pytest.param("gloo", marks=pytest.mark.long), "tcp"])
def test_the_processes_of_a_trainer_send_their_shards(
    server: Server, weights: Weights, trainer: ShardedTrainer, transport: str
) -> None:
    options = {**SHARDS, "transport": transport, "timeout_s": PATIENCE_S}
    for seed, model in ((OTHER_SEED, weights.other), (SEED, weights.first), (OTHER_SEED, weights.other)):
        zero, one = trainer.update(seed, **options, weight_version=str(seed))
        assert zero["collectives"] == one["collectives"] == []
        assert zero["gathered"] == one["gathered"] == 0
        received = sum(rank["bytes"] for rank in zero["receivers"])
        assert zero["sent_from_shards"] + one["sent_from_shards"] == received
        assert min(zero["sent_from_shards"], one["sent_from_shards"]) > received / 3
        assert {rank["transport"] for rank in zero["receivers"]} == {transport}
        assert server.control.weight_version() == str(seed)
        assert server.control.checksums()["tensors"] == weights.checksums(model)
        assert server.generate(PROMPT) == greedy(model, PROMPT)


@pytest.mark.parametrize(
    ("rank", "fault", "contents"),
    [
        (1, ["Link", "before", "SIGKILL"], {"valid"}),
        (1, ["Bucket", "after", "SIGKILL"], {"valid", "failed"}),  # a rank may have had a bucket of rank 0 alone
        (1, ["Bucket", "before", "SIGSTOP"], {"valid", "failed"}),
        (0, ["Commit", "before", "SIGKILL"], {"failed"}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else None,
)
def test_a_process_that_dies_or_stalls(
    server: Server, weights: Weights, trainer: ShardedTrainer, rank: int, fault: list[str], contents: set[str]
) -> None:
    if server.launch.ranks_of_engine < 2:
        pytest.skip("with two ranks: each start of the trainer takes seconds")
    options = {**SHARDS, "transport": "tcp", "timeout_s": 20.0}
    for one in range(2):
        trainer.ask(one, OTHER_SEED, fault if one == rank else None, **options)
    try:
        wait_until(lambda: trainer.is_faulty(rank), "the process has died or stopped", 60)
        if rank == 1 and fault[2] == "SIGKILL":  # one that is stopped holds the other up in their agreements
            answer = trainer.answer(0)
            assert answer is not None and answer["error"]["error"] == "WeightUpdateError"
        wait_until(lambda: server.control.memory()["reason"] != "updating", "the engine has given the update up", 60)
        content = server.control.memory()["content"]
        assert content in contents
        if content == "failed":
            assert server.post(PROMPT).status_code == 503
        else:
            assert server.generate(PROMPT) == greedy(weights.first, PROMPT)
    finally:
        trainer.restart()
    trainer.update(OTHER_SEED, **{**options, "timeout_s": PATIENCE_S})
    assert server.generate(PROMPT) == greedy(weights.other, PROMPT)
