"""The draft model of a scheduler (speculative decoding): MTP layers, an EAGLE head, or a smaller model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.engines.rank_builder import Draft
from rl_memory_plugins.errors import UnsupportedError
from rl_memory_plugins.weights.checkpoint_files import EngineCheckpoint

if TYPE_CHECKING:
    import torch

    from rl_memory_plugins.weights.model_loader import Reload


def runners_of(scheduler: Any) -> list[Any]:
    """The model runners of the draft's weights; empty if the scheduler has no draft model, or one without weights."""
    worker = getattr(scheduler, "draft_worker", None)
    if worker is None:
        return []
    listed = getattr(worker, "weight_update_runners", None)
    if listed is not None:
        return [runner for _, runner in listed()]
    inner = getattr(worker, "draft_worker", worker)  # older releases
    runner = getattr(inner, "draft_runner", None) or getattr(inner, "model_runner", None)
    return [] if runner is None else [runner]


def has_copies(scheduler: Any) -> bool:
    """Whether the draft computes with copies of its weights that no load renews.

    DFlash and DSpark put the projections of all layers to keys and values together, DFlash at the start and DSpark in
    its first forward pass. CUDA graphs may read what they have made. With `--speculative-token-map` the output head of
    an EAGLE draft is a copy of the target's rows of frequent tokens. An EAGLE-3 draft has a map and a head of its own.
    """
    worker = getattr(scheduler, "draft_worker", None)
    if getattr(worker, "_fused_kv_helper", None) is not None:
        return True
    models = [runner.model for runner in runners_of(scheduler)]
    if getattr(getattr(worker, "draft_worker", worker), "hot_token_id", None) is not None:
        return any(getattr(model, "hot_token_id", None) is None for model in models)
    return any(hasattr(model, "_fused_kv_write_cache") for model in models)


def of(
    runners: Sequence[Any],
    reload: Callable[[torch.nn.Module], Reload | None],
    target: Callable[[], tuple[str, str | None]],
    copies: bool,
) -> Draft | None:
    """How an update reaches the draft model; `None` if there is none.

    Args:
        runners: The result of `runners_of`.
        reload: As for `ModelLoader`, of a model.
        target: Gives the target's folder or name, and its revision.
        copies: The result of `has_copies`.
    """
    if not runners:
        return None
    runner = runners[0]

    def reload_draft() -> Reload | None:
        if len(runners) > 1:
            raise UnsupportedError(
                f"this engine has a draft model for each of {len(runners)} steps, and an update takes one only"
            )
        if copies:
            raise UnsupportedError("this engine's draft model computes with copies of weights, which no update renews")
        return reload(runner.model)

    config = runner.model_config
    checkpoint = str(config.model_path), getattr(config, "revision", None)  # SGLang's own updates change these

    return Draft(
        model=lambda: runner.model,
        load_weights=lambda weights: runner.model.load_weights(weights),
        reload=reload_draft,
        model_config=lambda: getattr(runner.model, "config", None),
        checkpoint=EngineCheckpoint(lambda: checkpoint),
        one_checkpoint=lambda: checkpoint[0] == target()[0],
    )
