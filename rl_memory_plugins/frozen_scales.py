"""The scales of an FP8 KV cache over an update: the blocks of frozen requests are read with those that wrote them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rl_memory_plugins.errors import WeightUpdateError


class FrozenScales:
    """The scales at the time when the blocks of frozen requests were written.

    Args:
        scales: Gives the scales as they are now, by name.
    """

    def __init__(self, scales: Callable[[], Mapping[str, object]]) -> None:
        self._scales = scales
        self._former: Mapping[str, object] = {}

    def note(self) -> None:
        """Take the scales as they are, while the weights are valid: these have written the blocks."""
        self._former = self._scales()

    def require_unchanged(self) -> None:
        """Check that an update has brought no other scales.

        Raises:
            WeightUpdateError: it has.
        """
        now = self._scales()
        for name, former in self._former.items():
            if now.get(name) != former:
                raise WeightUpdateError(
                    f"the update changed {name}, a scale of the KV cache, from {former} to {now.get(name)}, but frozen "
                    "requests have KV blocks that were written with the former scale. Send the update again with "
                    "mode='keep', which computes these blocks again, or with mode='abort'",
                    name=name,
                )
