"""A rank of an engine on the CPU, with a model in host memory that sleeps release."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines.rank_builder import build_agent, build_manager
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.host import HostAllocator
from rl_memory_plugins.rank import RankAgent
from rl_memory_plugins.tags import Level, Tag
from rl_memory_plugins.weights.checkpoint_files import EngineCheckpoint
from rl_memory_plugins.weights.engine_updates import EngineUpdates
from rl_memory_plugins.weights.names import parameter_blocks

Model = TypeVar("Model", bound=torch.nn.Module)


class Rank(Generic[Model]):
    """Its memory, its agent, and its updates by the engine's own calls.

    Args:
        made: Makes the model, in the region of the weights.
        start: What the engine does with it before the rank is built.
        checkpoint: The folder that the engine was started from.
        reset: As for `EngineUpdates`.
        **options: Arguments of `build_agent`.
    """

    def __init__(
        self,
        made: Callable[[], Model],
        start: Callable[[Any], Any],
        checkpoint: Path | str,
        reset: Callable[[Set[str]], Iterable[str]] = lambda kept: (),
        **options: Any,
    ) -> None:
        allocator = HostAllocator()
        with allocator.region(Tag.WEIGHTS):
            model = self.model = made()
        start(model)
        config = RLMemoryConfig(poison=True)
        self.manager = build_manager(config, 0, (allocator, PagedArena(1 << 20)), lambda tag: parameter_blocks(model))
        self.agent: RankAgent = build_agent(
            config,
            self.manager,
            lambda: model,
            load_weights=model.load_weights,
            reload=lambda: None,
            model_config=lambda: None,
            checkpoint=EngineCheckpoint(lambda: (str(checkpoint), None)),
            **options,
        )
        self.updates = EngineUpdates(self.manager, model.named_parameters, reset=reset)

    def sleep(self, level: Level) -> None:
        self.agent.prepare_sleep(int(level), ["weights"])
        self.agent.commit_sleep()

    def wake(self) -> None:
        self.agent.prepare_wake(["weights"])
        self.agent.commit_wake()
