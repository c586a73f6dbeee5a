"""Sizes that no rule gives, and the record of `integration/results` that each was taken from.

`integration/report_plan.py` compares plans with these records and with all others; the tests hold the others to 10 %.
All sizes are of one process on one GPU.
"""

from __future__ import annotations

from typing import NamedTuple

MIB = 1 << 20


class EngineSizes(NamedTuple):
    """What an engine's process holds beside weights, KV cache and graphs. Bytes.

    Attributes:
        context: CUDA's context.
        workspace: Workspaces, and all else that stays during a sleep.
        layer: What stays during a sleep for each layer, beside the workspace.
        communicators: NCCL's memory and the buffers of all-reduces, with more than one rank.
        graph: Of the CUDA graph of one batch size in one layer.
        host: Resident host memory of the engine's processes, without copies of weights.
        host_rank: Resident host memory of each further rank's process.
    """

    context: int
    workspace: int
    layer: int
    communicators: int
    graph: int
    host: int
    host_rank: int


ENGINES = {
    "vllm": EngineSizes(
        # sleep-vllm-0.33.0-7b.json, gpu_left_mib 981: context 746, workspace 106, other 92, and 37 more; 28 layers.
        # sleep-vllm-0.33.0-32b.json, 1207: context 746, workspace 124, other 204, and 133 more; 64 layers.
        context=746 * MIB,
        workspace=59 * MIB,
        layer=int(6.28 * MIB),
        # ranks-vllm-0.33.0-7b-tp2-h200.json, left_mib_first 1789, less the above
        communicators=808 * MIB,
        # grpo-vllm-0.26.0-h200.json, "all of the GPU" 109892, less the rest of its plan with 1055 asleep: 67 batch
        # sizes, 28 layers
        graph=int(1.51 * MIB),
        # sleep-vllm-0.32.0-7b-third-host.json, host_held_mib 17418, less 14525 of weights and 465 of graphs
        host=2428 * MIB,
        host_rank=1500 * MIB,  # not measured
    ),
    "sglang": EngineSizes(
        # sleep-sglang-0.5.20-7b-third-host.json, gpu_left_mib 1068: context 680, workspace 270, other 80, and 38 more
        context=680 * MIB,
        workspace=388 * MIB,
        layer=0,  # sleep-sglang-0.5.23-32b.json: 32 MiB more with 36 layers more
        # ranks-sglang-0.5.23-7b-tp2-h200.json, left_mib_first 2582, less the above
        communicators=1514 * MIB,
        graph=int(1.51 * MIB),  # vLLM's
        # sleep-sglang-0.5.20-7b-third-host.json, host_held_mib 18732, less 14525 of weights and 465 of graphs
        host=3742 * MIB,
        host_rank=1500 * MIB,  # not measured
    ),
}

#: What a trainer's process leaves on its GPU while all tags sleep. step-vllm-0.33.0-3b.json, trainer_left_mib: CUDA's
#: context 680, memory outside of the tags 236 (workspaces of cuBLAS), and 132 more
TRAINER_PROCESS = 1048 * MIB
#: The same of each of several processes. step-vllm-0.33.0-7b-tp2.json, trainer_left_mib: context 964, NCCL 484, 84, 132
TRAINER_PROCESS_OF_SEVERAL = 1664 * MIB
#: step-vllm-0.33.0-3b.json at commit 09ac3b7, host_mib 37372 of `pausable_overlap`, less the copies of parameters and
#: states. Other processes ended during the run of the present record, and took 2 GiB from its count.
TRAINER_HOST = 2057 * MIB
