"""What a model takes, from its local folder or its configuration file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.plan.architectures import KNOWN, Sizes, tensors_of
from rl_memory_plugins.plan.headers import tensors_in
from rl_memory_plugins.plan.meta_model import tensors_by_transformers
from rl_memory_plugins.plan.quantisation import scheme_of
from rl_memory_plugins.plan.tensors import Tensor

#: Bytes of an element of the dtypes that engines compute in.
WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Model:
    """A model's tensors.

    Attributes:
        name: The folder's or the file's name.
        sizes: Layers, heads and so on.
        trained: The parameters, as a trainer has them.
        stored: The engine's tensors; other ones where the checkpoint is quantised.
        counted_by: Where the tensors come from: `configuration`, `safetensors` or `transformers`.
        quantised: Whether the engine's weights are.
    """

    name: str
    sizes: Sizes
    trained: Sequence[Tensor]
    stored: Sequence[Tensor]
    counted_by: str
    quantised: bool

    @property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.trained)

    @property
    def matrices(self) -> int:
        """Parameters that matrix products read: all but norms, biases, and embeddings that the head does not share."""
        tied = sum(tensor.elements for tensor in self.trained if tensor.is_embedding and self.sizes.tied)
        return tied + sum(tensor.elements for tensor in self.trained if tensor.is_matrix)

    @property
    def outer(self) -> int:
        """Parameters outside the layers: embeddings, head and the last norm."""
        return sum(tensor.elements for tensor in self.trained if ".layers." not in tensor.name)

    @property
    def largest(self) -> int:
        """Elements of the largest single tensor."""
        return max(tensor.elements // tensor.copies for tensor in self.trained)

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest matrix in a layer."""
        inner = (one for one in self.trained if one.is_matrix and ".layers." in one.name)
        return max((tensor.elements // tensor.copies for tensor in inner), default=0)

    def weight_bytes(self, ranks: int, width: int) -> int:
        """The engine's weights on each tensor-parallel rank, if it computes in `width` bytes."""
        kv_heads = self.sizes.kv_heads
        return sum(-(-tensor.nbytes(width) // tensor.parts(ranks, kv_heads)) for tensor in self.stored)

    def kv_bytes_per_token(self, ranks: int, width: int) -> int:
        """Keys and values of one token on each rank, in elements of `width` bytes."""
        sizes = self.sizes
        if sizes.kv_rank:  # the ranks share one small vector
            return sizes.attention_layers * (sizes.kv_rank + sizes.rope_head) * width
        return 2 * sizes.attention_layers * max(-(-sizes.kv_heads // ranks), 1) * sizes.head * width


def read_model(path: str | Path) -> Model:
    """A model from its folder, or from a configuration file.

    Weights are counted from the headers of the folder's safetensors files, or else by the rule of the model's kind, or
    else by `transformers`.

    Raises:
        InvalidRequestError: there is no readable configuration, or it lacks a size.
        UnsupportedError: nothing knows this kind of model, or its quantisation.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    config = _configuration(file)
    inner = config.get("text_config")
    text = {**inner, "quantization_config": config.get("quantization_config")} if isinstance(inner, dict) else config
    kind = str(text.get("model_type", ""))
    with _described(file):
        sizes = Sizes(text)
        known = kind in KNOWN and text is config
        trained = tensors_of(text) if known else []
    quantised = bool(text.get("quantization_config"))
    stored = tensors_in(path, sizes.layers, quantised=quantised) if path.is_dir() else []
    counted_by = "safetensors" if stored else "configuration"
    if not known:
        if stored and not quantised:
            trained = stored
        else:
            trained, counted_by = tensors_by_transformers(file, kind, KNOWN), "transformers"
    _require_positive(sizes, trained, file)
    if not stored:
        scheme = scheme_of(text)
        stored = trained if scheme is None else [scheme.stored(tensor) for tensor in trained]
    return Model(path.resolve().name, sizes, trained, stored, counted_by, quantised)


@contextmanager
def _described(file: Path) -> Iterator[None]:
    """Turn what a broken configuration raises into a typed error."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"{file} does not describe a language model: {type(error).__name__}: {error}", field="model", got=str(file)
        ) from None


def _configuration(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise InvalidRequestError(
            f"there is no {file}: give a model's local folder or its config.json; names of hubs are not looked up",
            field="model",
            got=str(file),
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{file} is no JSON: {error}", field="model", got=str(file)) from None
    if not isinstance(config, dict):
        raise InvalidRequestError(f"{file} is no JSON object", field="model", got=str(file))
    return config


def _require_positive(sizes: Sizes, trained: Sequence[Tensor], file: Path) -> None:
    above = ("hidden", "layers", "heads", "kv_heads", "head", "vocabulary", "intermediate", "attention_layers")
    wrong = [name for name in (*above, "expert_intermediate") if getattr(sizes, name) < 1]
    wrong += [name for name in ("experts", "active_experts", "kv_rank", "rope_head") if getattr(sizes, name) < 0]
    wrong += [tensor.name for tensor in trained if tensor.elements < 1]
    if wrong:
        raise InvalidRequestError(
            f"{file} does not describe a language model: {wrong[0]} is too small", field="model", got=str(file)
        )
