"""The weights of a rank by name: their memory, and the globs that callers match against the names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rl_memory_plugins.memory.allocator import Block
from rl_memory_plugins.weights.coverage import canonical

if TYPE_CHECKING:
    import torch

#: The prefix of a draft model's names, as in vLLM. Every sleep preserves a draft, so a glob with it keeps nothing more.
DRAFT = "draft."
#: The most names that an error lists as near to a glob.
NEAREST = 5
#: The most globs for which an error lists near names.
SOUGHT = 20


def parameter_blocks(model: torch.nn.Module) -> Iterator[Block]:
    """The memory of a model's parameters, which a complete update writes again.

    The block of a parameter is its whole storage, with padding. If the storage also holds a buffer, which no update
    writes, the block is the parameter's own bytes; a parameter with gaps then has no block.
    """
    with_buffers = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    for parameter in model.parameters():
        if parameter.untyped_storage().data_ptr() not in with_buffers:
            yield _storage(parameter)
        elif canonical(parameter.shape, parameter.stride())[1] in ((), (1,)):
            yield Block(parameter.data_ptr(), parameter.nbytes)


def _storage(parameter: torch.Tensor) -> Block:
    storage = parameter.untyped_storage()
    return Block(storage.data_ptr(), storage.nbytes())


class NamedWeights:
    """Matches globs against the engine's names of a rank's parameters and buffers, as `fnmatch` does.

    Args:
        model: Gives the model as it is now.
        draft: Gives its draft model, if it has one.
        unfilled: Gives the names of parameters that the engine's own load leaves as they are: no checkpoint has them,
            so no load would write them after a discarding sleep. Every choice has them.
    """

    def __init__(
        self,
        model: Callable[[], torch.nn.Module],
        draft: Callable[[], torch.nn.Module | None] = lambda: None,
        unfilled: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._model = model
        self._draft = draft
        self._unfilled = unfilled

    def chosen(self, globs: Sequence[str]) -> dict[str, Block]:
        """The parameters that match or that no load fills, by name, with their storage.

        A tied parameter has several names, and any of them matches. The result has the first.
        """
        unfilled = set(self._unfilled())
        if not globs and not unfilled:
            return {}
        parameters = dict(self._model().named_parameters(remove_duplicate=False))
        matching = {name for glob in globs for name in _matching(parameters, glob)} | unfilled
        return self.memory(matching)

    def memory(self, names: Iterable[str]) -> dict[str, Block]:
        """The storage of the parameters with these names. A tied parameter comes under its first name."""
        parameters = dict(self._model().named_parameters(remove_duplicate=False))
        tied = {id(parameters[name]) for name in names if name in parameters}
        return {name: _storage(one) for name, one in self._model().named_parameters() if id(one) in tied}

    def unmatched(self, globs: Sequence[str]) -> dict[str, list[str]]:
        """The globs that match no name, each with the nearest names; `*` in these stands for the number of a layer.

        Only the first `SOUGHT` have any: the engine stands still meanwhile.
        """
        names = dict.fromkeys(self._names())
        missed = [glob for glob in globs if glob != f"{DRAFT}*" and not _matching(names, glob)]
        if not missed:
            return {}
        short = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
        sought = {glob: difflib.get_close_matches(glob, short, NEAREST, cutoff=0.3) for glob in missed[:SOUGHT]}
        return {glob: sought.get(glob, []) for glob in missed}

    def _names(self) -> list[str]:
        model, draft = self._model(), self._draft()
        names = _all_names(model)
        return names if draft is None else [*names, *(DRAFT + name for name in _all_names(draft))]


def _matching(names: Collection[str], glob: str) -> list[str]:
    """The names that a glob matches. A name itself takes no search: callers list thousands of experts."""
    if not re.search(r"[*?[]", glob):
        return [glob] if glob in names else []
    return fnmatch.filter(names, glob)


def _all_names(model: torch.nn.Module) -> list[str]:
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [*parameters, *(name for name, _ in model.named_buffers(remove_duplicate=False))]
