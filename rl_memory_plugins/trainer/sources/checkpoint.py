"""A source for safetensors files on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.extras import needs
from rl_memory_plugins.trainer.sources.outgoing import Dtypes, Outgoing, Rename
from rl_memory_plugins.weights.checkpoint_files import safetensors_files
from rl_memory_plugins.weights.manifest import Mismatch, TensorSpec

if TYPE_CHECKING:
    import torch


class CheckpointSource:
    """The tensors of safetensors files. Each tensor is read just before it is sent.

    Args:
        path: A file, or a folder. From a folder, the files of its index are read, or else all `*.safetensors`.
        dtype, rename: See `Outgoing`.

    Raises:
        InvalidRequestError: a file is missing, or the index cannot be read; later, when its turn comes, a file is no
            whole safetensors file.
    """

    only_reads = True  # see `weights.source.ReadingSource`

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: Dtypes = None,
        rename: Rename | None = None,
    ) -> None:
        self._outgoing = Outgoing(dtype, rename)
        self._files = _files(Path(path))

    def specs(self) -> list[TensorSpec]:
        return [self._outgoing.spec(name, tensor.dtype, tensor.shape) for name, tensor in self._mapped()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._mapped():
            yield name, self._outgoing.cast(name, tensor)

    @property
    def negotiable(self) -> bool:
        """See `weights.source.NegotiableSource`."""
        return self._outgoing.negotiable

    def revise(self, mismatches: Sequence[Mismatch]) -> bool:
        return self._outgoing.revise(mismatches)

    def _mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as mappings of the files: no bytes are read before they are used."""
        for path in self._files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    if (sent := self._outgoing.name(name)) is not None:
                        yield sent, file.get_tensor(name)


def _opened(path: Path) -> Any:
    with needs("checkpoints"):
        from safetensors import SafetensorError, safe_open
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InvalidRequestError(f"{path} cannot be read as a safetensors file: {error}", file=str(path)) from None


def _files(path: Path) -> list[Path]:
    try:
        if path.is_file():
            return [path]
        files = safetensors_files(path)
        missing = [str(file) for file in files if not file.is_file()]
    except Exception as error:  # of the file system, or of an index that holds anything
        raise InvalidRequestError(f"the safetensors files at {path} cannot be listed: {error!r}") from None
    if missing or not files:
        raise InvalidRequestError(f"safetensors files are missing at {path}", missing=missing)
    return files
