"""The manager, the receiver and the agent of a rank, for both adapters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.engines import derived_tensors, post_load
from rl_memory_plugins.engines.communicators import stage_captures
from rl_memory_plugins.engines.saved_layers import SavedLayers
from rl_memory_plugins.errors import EngineFaultError
from rl_memory_plugins.memory.allocator import Allocator, Block
from rl_memory_plugins.memory.arena import PagedArena
from rl_memory_plugins.memory.manager import MemoryManager
from rl_memory_plugins.memory.shared_buffers import SharedBuffers
from rl_memory_plugins.rank import RankAgent
from rl_memory_plugins.tags import Tag
from rl_memory_plugins.weights.adapters import AdapterSlots, RankAdapters
from rl_memory_plugins.weights.casts import CastRule
from rl_memory_plugins.weights.checkpoint_files import EngineCheckpoint
from rl_memory_plugins.weights.drafted import DraftedLoader
from rl_memory_plugins.weights.loader_run import Loader
from rl_memory_plugins.weights.model_loader import ModelLoader, Reload, is_ignorable
from rl_memory_plugins.weights.names import NamedWeights
from rl_memory_plugins.weights.plan import LoadPlan
from rl_memory_plugins.weights.receiver import WeightReceiver
from rl_memory_plugins.weights.update_hosts import UpdateHosts

if TYPE_CHECKING:
    import torch


def resident_graphs(allocator: Allocator, *, custom_all_reduce: bool) -> str:
    """Why the CUDA graphs of a rank stay on the device; empty if they can be released.

    Args:
        custom_all_reduce: The ranks read each other's memory to reduce; from now on not the memory of graphs.
    """
    if not hasattr(allocator, "pool_id"):
        return f"the {allocator.name} allocator has no pool for graphs"
    if custom_all_reduce and not stage_captures():
        return (
            "custom all-reduce registers the memory of graphs with other ranks; start with --disable-custom-all-reduce"
        )
    return ""


def build_manager(
    config: RLMemoryConfig,
    rank: int,
    memory: tuple[Allocator, PagedArena],
    discardable: Callable[[str], Iterable[Block]],
    notes: Sequence[str] = (),
) -> MemoryManager:
    """The memory manager of a rank; see `MemoryManager`. `memory` is the result of `choose_allocator`."""
    allocator, arena = memory
    if config.share_host_backups:
        arena.shared = SharedBuffers(arena)
    return MemoryManager(
        rank,
        allocator,
        arena,
        discardable,
        poison=config.poison,
        # vLLM expects zeros in masked entries of the KV cache, SGLang in its table of requests and its padding rows.
        zero_on_wake=(Tag.KV_CACHE,),
        eager_backup=config.eager_backup,
        notes=notes,
    )


@dataclass(frozen=True)
class Draft:
    """How to reach the draft model of an engine.

    Attributes:
        model: Gives the draft model as it is now; `None` if the engine has none.
        load_weights: Its loader.
        reload: As for `ModelLoader`.
        model_config: Gives the configuration of the draft model.
        checkpoint: The files that the draft model was loaded from.
        one_checkpoint: Whether these are those of the target.
        derive: As for `ModelLoader`.
    """

    model: Callable[[], torch.nn.Module | None]
    load_weights: Loader
    reload: Callable[[], Reload | None]
    model_config: Callable[[], Any]
    checkpoint: EngineCheckpoint
    one_checkpoint: Callable[[], bool]
    derive: Callable[[LoadPlan], None] = lambda plan: None

    def existing(self) -> torch.nn.Module:
        model = self.model()
        if model is None:
            raise EngineFaultError("the engine has no draft model")
        return model


def build_agent(
    config: RLMemoryConfig,
    manager: MemoryManager,
    model: Callable[[], torch.nn.Module],
    *,
    load_weights: Loader,
    reload: Callable[[], Reload | None],
    model_config: Callable[[], Any],
    checkpoint: EngineCheckpoint,
    draft: Draft | None = None,
    adapters: Callable[[], AdapterSlots] | None = None,
    unfilled: Callable[[], Iterable[str]] = tuple,
    filled: Callable[[], Iterable[str]] = tuple,
    dummy: Callable[[torch.nn.Module], bool] = lambda model: False,
    derive: Callable[[LoadPlan], None] = lambda plan: None,
    calls: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
    **own: Any,
) -> RankAgent:
    """The agent of a rank, with a receiver of weights. Begins the preparations of its first sleep and update.

    Args:
        model: Gives the model as it is now.
        load_weights: The loader of the model.
        reload: See `ModelLoader`.
        model_config: Gives the configuration of the model, which says whether the output layer is the embedding.
        checkpoint: The files that the engine was started from.
        draft: How to reach the draft model of an engine that may have one.
        adapters: Gives the engine's adapters; `None` if it takes none.
        unfilled: As for `NamedWeights`.
        filled: Gives the names of parameters that the engine's first load is known to have filled.
        dummy: Whether the engine was started with dummy weights in this model; see `ModelLoader`.
        derive: See `ModelLoader`.
        calls: As for `RankAgent`.
        **own: Arguments of `RankAgent` that only one engine has.
    """

    def loader_of(
        model: Callable[[], torch.nn.Module],
        load: Loader,
        reload: Callable[[], Reload | None],
        config_of: Callable[[], Any],
        files: EngineCheckpoint,
        derive: Callable[[LoadPlan], None],
        absent: Collection[str],
    ) -> ModelLoader:
        return ModelLoader(
            load,
            lambda: {name: one for name, one in model().named_parameters() if name not in absent},
            buffers=lambda: dict(model().named_buffers()),
            reload=reload,
            transformed=lambda: post_load.transformed_in(model()),
            ignorable=lambda name: is_ignorable(name, tied=bool(getattr(config_of(), "tie_word_embeddings", False))),
            checkpoint=files.specs,
            dummy=lambda: dummy(model()),
            unchanged=lambda: SavedLayers(dict(model().named_modules())).restoring(),
            in_place=lambda: derived_tensors.in_place(model()),
            derive=derive,
            casts=CastRule(config.strict_dtypes, config.allow_cast, files.specs),
        )

    absent = _without_memory(model())
    loader = target = loader_of(model, load_weights, reload, model_config, checkpoint, derive, absent)
    if draft is not None:
        own_draft = draft.model()
        loader = DraftedLoader(
            loader,
            loader_of(
                draft.existing,
                draft.load_weights,
                draft.reload,
                draft.model_config,
                draft.checkpoint,
                draft.derive,
                () if own_draft is None else _without_memory(own_draft),
            ),
            exists=lambda: draft.model() is not None,
            one_checkpoint=draft.one_checkpoint,
            torn=lambda: manager.draft.torn,
        )
        if own_draft is not None:
            manager.draft.found()
    receiver = WeightReceiver(manager, loader, check_finite=config.check_finite, hosts=UpdateHosts(config.update_hosts))
    if adapters is not None:
        calls = {**calls, **RankAdapters(receiver, adapters).calls}
    names = NamedWeights(model, draft.model if draft else lambda: None, unfilled)
    manager.memory_of = names.memory
    manager.find_unfilled = lambda: (target.unfilled() - {*filled()}) | {*(() if dummy(model()) else unfilled())}
    agent = RankAgent(
        manager, receiver, names, calls=calls, cache_scales=lambda: post_load.cache_scales(model()), **own
    )
    if config.start_stale:
        manager.withhold()
    manager.warm_up()
    receiver.warm_up()
    return agent


def _without_memory(model: torch.nn.Module) -> frozenset[str]:
    """The parameters of a part that the engine does not run, such as a vision tower beside text: on the meta device."""
    return frozenset(name for name, one in model.named_parameters() if one.is_meta)
