"""Models that the trainer's tests shard."""

import torch
from torch import nn


class Tree(nn.Module):
    """Parameters under given dotted names."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            *path, attribute = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            module.register_parameter(attribute, nn.Parameter(tensor.clone(), requires_grad=False))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x):
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Tied(nn.Module):
    """An embedding, some blocks, and a head that is the embedding."""

    def __init__(self, blocks=3, width=8, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def whole(model):
    """Names and clones of all tensors, tied ones once."""
    tensors = dict(model.named_parameters())
    tensors.update(model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(got, expected):
    assert list(sorted(got)) == list(sorted(expected))
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    return True


def collected(source):
    """All of a source's tensors, each checked against its spec."""
    got = {}
    specs = source.specs()
    for spec, (name, tensor) in zip(specs, source.tensors(), strict=True):
        assert (name, f"torch.{spec.dtype}", spec.shape) == (spec.name, str(tensor.dtype), tuple(tensor.shape))
        got[name] = tensor.clone()
    assert len(got) == len(specs)
    return got
