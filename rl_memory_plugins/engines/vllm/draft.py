"""The draft model of a worker (speculative decoding): MTP layers, an EAGLE head, or a smaller model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.engines.rank_builder import Draft
from rl_memory_plugins.engines.vllm import reload
from rl_memory_plugins.engines.vllm.attention import AttentionSteps
from rl_memory_plugins.weights.checkpoint_files import EngineCheckpoint

if TYPE_CHECKING:
    import torch


def model_of(worker: Any) -> torch.nn.Module | None:
    """The draft model; `None` if the worker has none."""
    return getattr(worker.model_runner, "get_draft_model", lambda: None)()


def attention_of(worker: Any) -> AttentionSteps | None:
    """The attention of the draft model; `None` if the worker has none."""
    model = model_of(worker)
    return None if model is None else AttentionSteps(model, _config(worker))


def of(worker: Any, region: Callable[[], AbstractContextManager[None]], attention: AttentionSteps | None) -> Draft:
    """How an update reaches the draft model of a worker.

    Args:
        region: Gives the region for the tensors that a load makes.
        attention: The attention of the draft model.
    """

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(_config(worker)):
            draft.existing().load_weights(weights)

    draft = Draft(
        model=lambda: model_of(worker),
        load_weights=load_weights,
        reload=lambda: reload.reload_of(
            draft.existing(), _config(worker), load_weights, region, shared={*worker.model_runner.get_model().modules()}
        ),
        model_config=lambda: _speculative(worker).draft_model_config.hf_config,
        checkpoint=EngineCheckpoint(lambda: _checkpoint(worker)),
        one_checkpoint=lambda: _has_one_checkpoint(worker),
        derive=(lambda plan: None) if attention is None else attention.repeat,
    )
    return draft


def _speculative(worker: Any) -> Any:
    return worker.vllm_config.speculative_config


def _has_one_checkpoint(worker: Any) -> bool:
    speculative = _speculative(worker)
    own: str = speculative.draft_model_config.model
    return bool(speculative.method == "mtp" and own == worker.vllm_config.model_config.model)


def _checkpoint(worker: Any) -> tuple[str, str | None]:
    config = _speculative(worker).draft_model_config
    return str(config.model), config.revision


def _config(worker: Any) -> Any:
    """vLLM's configuration with the draft model in the place of the target."""
    config = copy.copy(worker.vllm_config)
    config.model_config = _speculative(worker).draft_model_config
    return config
