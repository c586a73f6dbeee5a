"""A tiny tensor-parallel model whose loader does what real engines' loaders do, and a rank to run it on."""

import threading
import weakref

import torch

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.fake import FakeAllocator, FakeDevice
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.trainer import ModelSource
from rl_memory_plugins.trainer.sources.model import as_source
from rl_memory_plugins.weights.model_loader import ModelLoader
from rl_memory_plugins.weights.receiver import WeightReceiver
from rl_memory_plugins.weights.sender import WeightSender

HIDDEN, HEADS, HEAD_DIM, VOCAB, EXPERTS, PADDED = 8, 4, 2, 10, 3, 12


def checkpoint(seed=0, *, opaque=True):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {
        "embed.weight": random(VOCAB, HIDDEN),
        "q.weight": random(HEADS * HEAD_DIM, HIDDEN),
        "k.weight": random(HEAD_DIM, HIDDEN),
        "v.weight": random(HEAD_DIM, HIDDEN),
        "o.weight": random(HIDDEN, HEADS * HEAD_DIM),
        **{f"experts.{i}.weight": random(4, HIDDEN) for i in range(EXPERTS)},
        "norm.weight": random(HIDDEN, dtype=torch.float32),
        "lm_head.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16),
    }
    if opaque:
        tensors["packed.weight"] = random(4, HIDDEN)
        tensors["scale"] = random(1, dtype=torch.float32)
    return tensors


class ToyModel(torch.nn.Module):
    """One rank of `tp`: fused qkv with a replicated KV head, row-parallel o, padded vocabulary, fused experts.

    `packed` is stored permuted and doubled, `scale` is read as a value: both are opaque. It skips the tied
    `lm_head` and raises on names it does not know, as vLLM does.
    """

    def __init__(self, rank=0, tp=1, *, opaque=True):
        super().__init__()
        self.rank, self.tp = rank, tp
        self.loads = 0
        heads = HEADS // tp

        def parameter(*shape, dtype=torch.bfloat16):
            return torch.nn.Parameter(torch.full(shape, 7.0, dtype=dtype), requires_grad=False)

        self.embed = parameter(PADDED // tp, HIDDEN)
        self.qkv = parameter((heads + 2) * HEAD_DIM, HIDDEN)
        self.o = parameter(HIDDEN, heads * HEAD_DIM)
        self.experts = parameter(EXPERTS, 4, HIDDEN)
        self.norm = parameter(HIDDEN, dtype=torch.float32)
        if opaque:
            self.packed = parameter(HIDDEN, 4)
            self.scale = parameter(1, dtype=torch.float32)

    def load_weights(self, weights):
        self.loads += 1
        rank, heads = self.rank, HEADS // self.tp
        q_rows = heads * HEAD_DIM
        for name, weight in weights:
            if name == "embed.weight":
                assert weight.shape == (VOCAB, HIDDEN)
                rows = PADDED // self.tp
                part = weight[rank * rows : min((rank + 1) * rows, VOCAB)]
                self.embed[: len(part)].data.copy_(part)
                self.embed[len(part) :].data.fill_(0)
            elif name == "q.weight":
                self.qkv.data.narrow(0, 0, q_rows).copy_(weight.narrow(0, rank * q_rows, q_rows))
            elif name in ("k.weight", "v.weight"):
                start = q_rows + (0 if name[0] == "k" else HEAD_DIM)
                self.qkv.data.narrow(0, start, HEAD_DIM).copy_(weight)
            elif name == "o.weight":
                self.o.data.copy_(weight.narrow(1, rank * q_rows, q_rows))
            elif name.startswith("experts."):
                self.experts.data[int(name.split(".")[1])].copy_(weight)
            elif name == "norm.weight":
                self.norm.data.copy_(weight)
            elif name == "packed.weight":
                self.packed.data.copy_((weight.t() * 2).contiguous())
            elif name == "scale":
                self.scale.data.fill_(weight.item())
            elif name not in ("lm_head.weight", "ignored.weight"):
                raise ValueError(f"There is no module or parameter named {name!r}")

    def snapshot(self):
        return {name: parameter.clone() for name, parameter in self.named_parameters()}

    def assert_unchanged(self, snapshot):
        for name, parameter in self.named_parameters():
            assert torch.equal(parameter, snapshot[name]), name


def loaded(tensors, rank=0, tp=1, *, opaque=True):
    """The parameters that the loader itself makes of a checkpoint."""
    model = ToyModel(rank, tp, opaque=opaque)
    model.load_weights(tensors.items())
    return model.snapshot()


class Rank:
    """A manager and a receiver over a toy model."""

    def __init__(self, model=None, rank=0, **options):
        self.model = ToyModel() if model is None else model
        device = FakeDevice(f"fake:{rank}")
        self.manager = MemoryManager(rank, FakeAllocator(device), PagedArena(), list)
        options.setdefault("ignorable", lambda name: name == "lm_head.weight")
        check_finite, hosts = options.pop("check_finite", False), options.pop("hosts", None)
        self.loader = ModelLoader(self.model.load_weights, lambda: dict(self.model.named_parameters()), **options)
        self.receiver = WeightReceiver(self.manager, self.loader, check_finite=check_finite, hosts=hosts)


class Receiving(threading.Thread):
    """Runs `receive` as an engine would, finishes the update, and keeps the outcome."""

    def __init__(self, rank, sender, *, token=None, timeout_s=10.0):
        super().__init__(daemon=True)
        self.rank = rank
        self._arguments = (sender.endpoints, token or sender.token, timeout_s)
        self.report = self.error = None
        self.start()

    def run(self):
        try:
            self.report = self.rank.receiver.receive(*self._arguments)
        except RLMemoryError as error:
            self.error = error
        self.rank.manager.finish_writing(self.error is None)

    def join(self, timeout=60.0):
        super().join(timeout)
        assert not self.is_alive(), "the receiver hangs"
        return self


def update(ranks, source, *, partial=False, bucket_bytes=256, timeout_s=10.0):
    """Send `source` to all ranks: the sender's report or error, and the receivers' threads."""
    with WeightSender(len(ranks), bucket_bytes=bucket_bytes, timeout_s=timeout_s) as sender:
        threads = [Receiving(rank, sender, timeout_s=timeout_s) for rank in ranks]
        try:
            outcome = sender.send(as_source(source), partial=partial)
        except RLMemoryError as error:
            outcome = error
        return outcome, [thread.join() for thread in threads]


class Tracked:
    """A source that makes its tensors on the way; `open` is how many of its iterations are not over."""

    def __init__(self, tensors):
        self._source = ModelSource(tensors)
        self._made = []
        self.open = self.given = 0

    def specs(self):
        return self._source.specs()

    def tensors(self):
        self.open += 1
        try:
            for name, tensor in self._source.tensors():
                self.given += 1
                made = tensor.clone()
                self._made.append(weakref.ref(made))
                yield name, made
                del made
        finally:
            self.open -= 1

    def alive(self):
        """How many of the tensors that were made still exist."""
        return sum(made() is not None for made in self._made)
