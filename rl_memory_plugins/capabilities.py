"""The abilities of an engine. Its adapter declares them once, at the start, and every refusal reads them.

A rank knows its weights and its graphs; the engine knows its ranks, its peers and its scheduler. Both make the same
record, and the controller merges the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rl_memory_plugins.errors import StateConflictError, UnsupportedError
from rl_memory_plugins.tags import PauseMode, Tag

#: The most layers that a record names. A large model has thousands.
MOST_LAYERS = 20


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The abilities of one engine. With the defaults the engine can do everything.

    Attributes:
        ranks: The number of ranks that the controller reaches.
        hosts: The number of hosts that the ranks are on, where each host was started by itself (`--nnodes`).
        steps_with_peers: The data-parallel engines of a model with experts run every step together. An engine that
            resumes alone waits for the others.
        modes: The modes that the engine supports.
        no_freeze: The reason why the engine does not support the mode `freeze`; empty if it does.
        fixed_weights: The reason why no update can reach the weights; empty if updates can.
        fixed_layers: The layers that no update can reach, at most `MOST_LAYERS`: their names and quantisation methods.
        resident_graphs: The reason why CUDA graphs stay on the device; empty if they can be released.
        no_adapters: The reason why the engine takes no LoRA adapters; empty if it does.
    """

    ranks: int = 1
    hosts: int = 1
    steps_with_peers: bool = False
    modes: tuple[PauseMode, ...] = tuple(PauseMode)
    no_freeze: str = ""
    fixed_weights: str = ""
    fixed_layers: dict[str, str] = {}
    resident_graphs: str = ""
    no_adapters: str = ""

    def merged(self, ranks: Iterable[Capabilities]) -> Capabilities:
        """The engine's record, merged with those of its ranks. The first rank without an ability gives the reason."""
        merged = self
        for rank in ranks:
            merged = msgspec.structs.replace(
                merged,
                fixed_weights=merged.fixed_weights or rank.fixed_weights,
                fixed_layers=merged.fixed_layers or rank.fixed_layers,
                resident_graphs=merged.resident_graphs or rank.resident_graphs,
                no_adapters=merged.no_adapters or rank.no_adapters,
            )
        return merged

    def require_mode(self, mode: PauseMode, asleep: Sequence[str] = ()) -> None:
        """Check that the engine can freeze requests, if the mode asks for it.

        Args:
            asleep: The tags that are asleep.

        Raises:
            UnsupportedError: it cannot; `modes` in its details names the modes that the engine supports.
            StateConflictError: the KV cache is asleep.
        """
        if mode is not PauseMode.FREEZE:
            return
        if self.no_freeze:
            raise UnsupportedError(
                f"mode 'freeze' is refused: {self.no_freeze}. Use mode='keep'", modes=[one.value for one in self.modes]
            )
        if Tag.KV_CACHE.value in asleep:
            raise StateConflictError(
                "mode 'freeze' leaves running requests their KV cache, but the KV cache is asleep: use mode='keep'",
                asleep=list(asleep),
            )

    def require_adapters(self) -> None:
        """
        Raises:
            UnsupportedError: the engine takes no adapters.
        """
        if self.no_adapters:
            raise UnsupportedError(f"this engine takes no adapters: {self.no_adapters}")

    def require_updatable(self, operation: str) -> None:
        """Check that an update can bring the weights back.

        Args:
            operation: The call that needs the ability, for the message.

        Raises:
            UnsupportedError: no update can reach the weights; `layers` in its details names the layers.
        """
        if self.fixed_weights:
            raise UnsupportedError(
                f"{operation} is refused, because this engine's weights cannot be updated: {self.fixed_weights}",
                layers=self.fixed_layers,
            )


EVERYTHING = Capabilities()
"""Of an engine that can do everything."""


def fixed_by(error: UnsupportedError) -> Capabilities:
    """The record of a rank, from the error that an update of its weights would raise."""
    layers = list(error.details.get("layers", {}).items())
    return Capabilities(fixed_weights=error.message, fixed_layers=dict(layers[:MOST_LAYERS]))
