"""What a trainer holds on each of its GPUs.

    fsdp1, fsdp2  parameters, gradients and states are shared by all processes; the layer that computes, the next one
                  and what is outside the layers exist whole, in the dtype of the computation, and so do their gradients
    ddp           each process has all; its gradients exist a second time in buckets
    megatron      tensor-parallel as the engine: parameters in bfloat16, gradients in float32; masters in float32 and
                  states are shared by all processes (the distributed optimiser)
    plain         one process has all

With `mixed`, `plain` and `ddp` compute under autocast, which keeps a bfloat16 copy of every matrix that it multiplies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_memory_plugins.plan import activations
from rl_memory_plugins.plan.measured import MIB, TRAINER_PROCESS, TRAINER_PROCESS_OF_SEVERAL
from rl_memory_plugins.plan.model import WIDTHS, Model
from rl_memory_plugins.plan.options import Options
from rl_memory_plugins.weights.manifest import MIN_STAGED_BUCKET_BYTES, SLOTS


@dataclass(frozen=True)
class TrainerPlan:
    """Bytes on one GPU.

    Attributes:
        process: CUDA's context, and NCCL's memory with several processes: what stays during a rollout.
        parameters, optimizer: What an update reads; and the states, with masters that are no parameters.
        gradients: From the backward pass to the optimiser's step.
        copies: Whole layers, or copies in another dtype, while a step computes.
        activations: Between forward and backward.
        buckets: The slots of an update, and what is gathered or quantised for them. An update of the trainer's own
            tensors (`cuda_direct`) takes none.
    """

    process: int = 0
    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    copies: int = 0
    activations: int = 0
    buckets: int = 0


def plan_trainer(model: Model, options: Options) -> TrainerPlan:
    if options.trainer == "none":
        return TrainerPlan()
    sharded = options.trainer in ("fsdp1", "fsdp2")
    megatron = options.trainer == "megatron"
    count, ranks = model.parameters, options.ranks
    width = 2 if options.precision == "bf16" else 4
    compute: activations.Compute = "fp32" if options.precision == "fp32" else "bf16"
    if options.precision == "mixed" and not (sharded or megatron):
        compute = "autocast"
    computing = 4 if compute == "fp32" else 2
    parts = ranks if sharded else options.tp if megatron else 1
    held = computing if megatron else width
    parameters = _share(count * held, parts)
    gradients = _share(count * (4 if megatron else width), parts) * (2 if options.trainer == "ddp" else 1)
    optimizer = _share(_state_bytes(model, options.optimizer, 4 if megatron else width), ranks if megatron else parts)
    if megatron and held < 4:
        optimizer += _share(count * 4, ranks)
    if sharded:
        layers = (count - model.outer) // model.sizes.layers
        whole = (model.outer + 2 * layers) * computing
        copies = whole + (model.outer + layers) * computing  # the gradients of the same, until they are cut
    else:
        copies = model.matrices * 2 if compute == "autocast" else 0
    return TrainerPlan(
        process=TRAINER_PROCESS_OF_SEVERAL if ranks > 1 else TRAINER_PROCESS,
        parameters=parameters,
        optimizer=optimizer,
        gradients=gradients,
        copies=copies,
        activations=activations.training_bytes(
            model.sizes,
            options.micro_tokens,
            compute,
            checkpointing=options.checkpointing,
            shards=options.tp if megatron else 1,
        ),
        buckets=bucket_bytes(model, options)
        + (model.largest * max(held, WIDTHS[options.dtype]) if parts > 1 else 0)
        + (_quantised_bytes(model) if model.quantised else 0),
    )


def _quantised_bytes(model: Model) -> int:
    """A weight of one byte a value. The others are made in the slots; one that lies in two buckets is made first."""
    return min(model.largest_matrix, model.matrices)


def bucket_bytes(model: Model, options: Options) -> int:
    """The slots of an update: each holds a quarter of the weights, and at most a bucket."""
    total = model.parameters * WIDTHS[options.dtype]
    wanted = max(-(-total // (2 * SLOTS)), MIN_STAGED_BUCKET_BYTES)
    return SLOTS * min(wanted, -(-total // SLOTS), options.bucket_mib * MIB)


def _state_bytes(model: Model, optimizer: str, width: int) -> int:
    """The optimiser's state for the whole model."""
    count = model.parameters
    if optimizer == "adamw":
        return 2 * width * count
    if optimizer == "adamw8bit":  # one byte each, and a scale in float32 for each block of 256
        return 2 * (count + math.ceil(count / 256) * 4)
    if optimizer == "momentum":
        return width * count
    if optimizer == "adafactor":  # one number for each row and each column; vectors whole
        return sum(4 * tensor.copies * _factored(tensor.shape) for tensor in model.trained)
    return 0


def _factored(shape: tuple[int, ...]) -> int:
    return math.prod(shape) if len(shape) < 2 else math.prod(shape[:-2]) * (shape[-2] + shape[-1])


def _share(nbytes: int, parts: int) -> int:
    return -(-nbytes // parts)
