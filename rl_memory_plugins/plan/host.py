"""What engine and trainer hold in the memory of their host."""

from __future__ import annotations

from rl_memory_plugins.plan.engine import EnginePlan
from rl_memory_plugins.plan.measured import ENGINES, TRAINER_HOST
from rl_memory_plugins.plan.options import Options
from rl_memory_plugins.plan.trainer import TrainerPlan


def plan_host(engine: EnginePlan, trainer: TrainerPlan, options: Options) -> dict[str, int]:
    """Bytes of the host by part, when both have put down all that they put down.

    A level-1 sleep copies weights and graphs of every rank, a level-2 sleep only the graphs. The copies of equal
    engines may be shared. What of the trainer leaves its GPUs is copied, but for the gradients.
    """
    own = ENGINES[options.engine]
    copied = engine.weights if options.level == 1 else 0
    copies = options.tp if options.share_host_backups else options.ranks
    parts = {
        "engine processes": options.engines * (own.host + (options.tp - 1) * own.host_rank),
        "engine weights": copied * copies,
        "CUDA graphs": engine.graphs * options.ranks,
    }
    if options.trainer != "none":
        parts |= {
            "trainer processes": TRAINER_HOST * options.ranks,
            "parameters": trainer.parameters * options.ranks if options.offload == "all" else 0,
            "optimizer": trainer.optimizer * options.ranks if options.offload != "none" else 0,
        }
    return {part: nbytes for part, nbytes in parts.items() if nbytes}
