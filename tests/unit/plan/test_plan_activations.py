"""The rule for activations, against what torch saves for the backward pass."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from integration.models import Shape, config, new_model, write_model  # noqa: E402
from rl_memory_plugins.plan.activations import layer_bytes, training_bytes  # noqa: E402
from rl_memory_plugins.plan.architectures import Sizes  # noqa: E402

DENSE = Shape(256, 768, 2, 4, 2, 64, True)
EXPERTS = Shape(256, 512, 2, 4, 2, 64, True, experts=16, expert_intermediate=192, head=64)
TOKENS = (4, 128)


def saved_bytes(folder, shape, dtype, autocast):
    """Bytes that a forward pass of 512 tokens saves, without parameters, and without their casts."""
    model = new_model(write_model(folder, shape), 0, dtype).train()
    parameters = list(model.parameters())
    skipped = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    casts = {tuple(parameter.shape) for parameter in parameters} | {tuple(p.shape[::-1]) for p in parameters}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skipped and not (autocast and tuple(tensor.shape) in casts):
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor keeps its address
        return tensor

    ids = torch.randint(2, 60, TOKENS)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        logits = model(ids, use_cache=False).logits
    del logits
    return sum(nbytes for nbytes, _ in found.values())


@pytest.mark.parametrize(
    ("shape", "dtype", "compute"),
    [
        (DENSE, "float32", "fp32"),
        (DENSE, "bfloat16", "bf16"),
        (DENSE, "float32", "autocast"),
        (EXPERTS, "float32", "fp32"),
        (EXPERTS, "bfloat16", "bf16"),
    ],
)
def test_a_layer_leaves_what_the_rule_says(shape, dtype, compute, tmp_path):
    two, three = (
        saved_bytes(tmp_path / str(layers), shape._replace(layers=layers), dtype, compute == "autocast")
        for layers in (2, 3)
    )
    measured = (three - two) / (TOKENS[0] * TOKENS[1])
    assert layer_bytes(Sizes(config(shape, dtype)), compute) == pytest.approx(measured, rel=0.02)


def test_checkpointing_keeps_an_input_for_each_layer_and_one_whole_layer():
    sizes = Sizes(config(DENSE, "float32"))
    head = 14 * sizes.vocabulary
    each = training_bytes(sizes, 1, "bf16", checkpointing=True) - head
    assert each == 2 * sizes.layers * sizes.hidden + layer_bytes(sizes, "bf16")
    assert training_bytes(sizes, 1, "bf16", checkpointing=False) - head == sizes.layers * layer_bytes(sizes, "bf16")
