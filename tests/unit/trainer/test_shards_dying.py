"""A process of a trainer that dies or stops while all send their shards: before, during and after the first bucket."""

import contextlib
import signal
import threading
from datetime import timedelta

import pytest
from dying import process, signal_at
from models import Tree
from toy_engine import ToyEngine
from toys import checkpoint, loaded

from rl_memory_plugins.errors import RLMemoryError, WeightUpdateError, from_record
from rl_memory_plugins.tags import Content
from rl_memory_plugins.trainer import ModelSource, Peers, push_from_all

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
ANSWER_S = 60.0


class FarEngine:
    """The handle of rank 0: the engine is in the process of the test."""

    def __init__(self, pipe):
        self._pipe = pipe

    def sleep(self, level=1, tags=None, mode="abort"): ...

    def wake_up(self, tags=None): ...

    def devices(self):
        return ["fake:0", "fake:1"]

    def post_update(self, body):
        self._pipe.send(("update", body))
        answer = self._pipe.recv()
        if "error" in answer:
            raise from_record(answer)
        return answer


def trainer(pipe, rank, store, options):
    """Updates the engine with a sharded checkpoint whenever it is told a seed, and a fault or none."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mesh, peers = init_device_mesh("cpu", (2,)), Peers()
    engines = [FarEngine(pipe)] if rank == 0 else []
    while True:
        seed, fault = pipe.recv()
        model = Tree(checkpoint(seed))
        for child in model.children():
            fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if fault is not None:
            signal_at(*fault)
        try:
            report = push_from_all(engines, ModelSource(model), peers, shards=True, bucket_bytes=512, **options)
            pipe.send(("done", {"sent": report["sent_from_shards"]}))
        except RLMemoryError as error:
            pipe.send(("done", error.to_record()))


class Trainer:
    """Both processes, and the calls of rank 0 to the engine."""

    def __init__(self, pipes, engine):
        self._pipes = pipes
        self._engine = engine

    def update(self, seed, faulty=None, fault=None):
        """The error of the engine, and the answers of both processes; `None` of one that has gone."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((seed, fault if rank == faulty else None))
        caught, answers = [], [None, None]

        def serve(rank):
            with contextlib.suppress(EOFError, ConnectionError):
                while self._pipes[rank].poll(ANSWER_S):
                    kind, value = self._pipes[rank].recv()
                    if kind == "done":
                        answers[rank] = value
                        return
                    answer = {}
                    try:
                        self._engine.post_update(value)
                    except RLMemoryError as error:
                        caught.append(error)
                        answer = error.to_record()
                    self._pipes[rank].send(answer)
                    if faulty is not None and fault[2] == STOP:
                        return  # the other process waits for the one that is stopped

        threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in (0, 1)]
        for rank, thread in enumerate(threads):
            if not (faulty is not None and fault[2] == STOP and rank == 1):
                thread.start()
        for thread in threads:
            if thread.ident is not None:
                thread.join(2 * ANSWER_S)
                assert not thread.is_alive()
        return caught, answers


@contextlib.contextmanager
def started(engine, folder, **options):
    store = folder / f"store-{len(list(folder.iterdir()))}"
    store.touch()
    with process(trainer, 0, store, options) as zero, process(trainer, 1, store, options) as one:
        yield Trainer([zero, one], engine)


def holds(engine, seed):
    for rank, one in enumerate(engine.ranks):
        one.model.assert_unchanged(loaded(checkpoint(seed), rank, 2))
    return True


# the rank, its fault, and what the engine has afterwards: its `former` weights, or `none` that are valid
FAULTS = [
    ("tcp", 1, ("Link", "before", KILL), "former"),
    ("tcp", 1, ("Bucket", "before", KILL, 6), "none"),
    ("gloo", 1, ("Bucket", "after", KILL, 6), "none"),
    ("tcp", 1, ("Commit", "before", KILL), "none"),
    ("gloo", 0, ("Divide", "after", KILL), "former"),  # to one rank of two
    ("gloo", 0, ("Bucket", "before", KILL, 10), "none"),
    ("tcp", 0, ("Commit", "before", KILL), "none"),
    ("gloo", 1, ("Bucket", "after", STOP), "former"),
    ("gloo", 0, ("Bucket", "before", STOP, 10), "none"),
]
MORE = [
    ("gloo", 1, ("Link", "after", KILL), "former"),
    ("tcp", 1, ("Bucket", "after", KILL), "former"),  # without its bytes
    ("gloo", 1, ("Commit", "after", KILL), "none"),  # to one rank of two
    ("tcp", 0, ("Bucket", "after", KILL), "former"),
    ("tcp", 1, ("Link", "before", STOP), "former"),
    ("tcp", 1, ("Commit", "before", STOP), "none"),
    ("tcp", 0, ("Divide", "before", STOP), "former"),
]


@pytest.mark.parametrize(
    ("transport", "rank", "fault", "left"),
    [*FAULTS, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE)],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_a_process_that_dies_or_stops(tmp_path, transport, rank, fault, left):
    engine = ToyEngine(2)
    options = {"transport": transport, "timeout_s": 15.0}  # two ends of Gloo must be joined within a third of it
    with started(engine, tmp_path, **options) as both:
        assert both.update(1)[0] == [] and holds(engine, 1)
        caught, answers = both.update(2, rank, fault)
    [error] = caught
    assert isinstance(error, WeightUpdateError)
    if fault[:2] != ("Divide", "after"):  # there one rank loses its process, and the other waits for the rest in vain
        assert error.details["reason"] == ("lost" if fault[2] == KILL else "stalled")
    contents = {one.manager.content for one in engine.ranks}
    if left == "former":
        assert contents == {Content.VALID} and holds(engine, 1)
    else:
        assert Content.FAILED in contents
    if rank == 1 and fault[2] == KILL:
        assert answers[0]["error"] == "WeightUpdateError"
    with started(engine, tmp_path, **options) as both:
        caught, answers = both.update(3)
        assert caught == [] and all(answer["sent"] > 0 for answer in answers)
    assert holds(engine, 3) and {one.manager.content for one in engine.ranks} == {Content.VALID}
