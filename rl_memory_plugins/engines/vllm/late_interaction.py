"""Scores by late interaction, as those of ColBERT models.

vLLM's server has one request compute the vectors of a query, which the workers keep. Then further requests score one
document each against them. A reset drops these vectors, and a document without them would end the engine core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_memory_plugins.engines.vllm.core_hooks import end_requests


class EncodedQueries:
    """The queries that came since the last reset, so that the workers have their vectors or will compute them."""

    def __init__(self) -> None:
        self._documents: dict[str, int] = {}  # by query: how many are still to come

    def admits(self, request: Any) -> bool:
        """Note a new request. Returns: whether the workers can compute it."""
        params = _params(request)
        if params is None:
            return True
        if params.mode == "cache_query":
            self._documents[params.query_key] = max(1, params.query_uses or 1)  # as the workers count
        elif params.mode == "score_doc":
            left = self._documents.pop(params.query_key, 0)
            if left > 1:
                self._documents[params.query_key] = left - 1
            return left > 0
        return True

    def note_call(self, method: Any, args: Sequence[Any] | None) -> None:
        """Note a call to the workers: vLLM's server has them drop the vectors of scores that end before all of their
        documents came."""
        if method == "release_late_interaction_query_cache" and args:
            for key in args[0]:
                self._documents.pop(key, None)

    def forget(self, core: Any) -> None:
        """Forget all queries, as the workers are about to do, and end the requests of the scores under way."""
        self._documents.clear()  # with what requests have left that ended before all of their documents came
        end_requests(core, [number for number, one in core.scheduler.requests.items() if _params(one) is not None])


def _params(request: Any) -> Any:
    return getattr(request.pooling_params, "late_interaction_params", None)  # not in every version
