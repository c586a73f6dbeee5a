"""A rank whose model has a parameter that its checkpoint on disk does not fill, over sleeps and loads."""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ranks
import torch
from safetensors.torch import save_file

from rl_memory_plugins.tags import Content, Level, Tag
from rl_memory_plugins.weights.manifest import Manifest
from rl_memory_plugins.weights.source import spec_of

WIDTH = 4 << 10


class Reward(torch.nn.Module):
    """The loader makes a tensor of its own each time, also in a trace."""

    more: ClassVar[dict[str, torch.Tensor]] = {}  # in the checkpoint

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.score = torch.nn.Linear(4, WIDTH).requires_grad_(False)
        self.score.bias.fill_(7)
        self.scratch = torch.zeros(1)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.scratch = torch.zeros(1)
            self.get_parameter(name).data.copy_(weight)


def checkpoint(value: float) -> dict[str, torch.Tensor]:
    return {"norm": torch.full((WIDTH,), value), "score.weight": torch.full((WIDTH, 4), value)}


class Rank(ranks.Rank[Any]):
    """It has loaded `checkpoint(0.0)` from its folder."""

    def __init__(self, folder: Path, made: type[Reward] = Reward, **options: Any) -> None:
        save_file({**checkpoint(0.0), **made.more}, folder / "model.safetensors")
        super().__init__(made, lambda model: model.load_weights(checkpoint(0.0).items()), folder, **options)

    def discard(self) -> None:
        self.sleep(Level.DISCARD)
        self.wake()

    def load(self, value: float, names: Iterable[str] = ("norm", "score.weight")) -> None:
        """By the engine's own route."""
        with self.updates.watch():
            self.model.load_weights((name, checkpoint(value)[name]) for name in names)


def test_the_engine_s_own_load_after_level_2_opens_the_engine(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    for value in (1.0, 2.0):
        rank.discard()
        assert rank.manager.content is Content.STALE
        assert rank.model.score.bias.eq(7).all()
        assert not rank.model.norm.eq(value - 1).all()
        rank.load(value, ["norm"])
        assert rank.manager.content is Content.STALE  # the checkpoint fills the weight of the head
        rank.load(value, ["score.weight"])
        assert rank.manager.content is Content.VALID
        assert rank.model.norm.eq(value).all()
        assert rank.model.score.weight.eq(value).all()
        assert rank.model.score.bias.eq(7).all()


def test_a_load_that_breaks_off_is_followed_by_one_that_opens_the_engine(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    with pytest.raises(KeyError):
        rank.load(1.0, ["norm", "no such file"])
    assert rank.manager.content is Content.FAILED
    rank.load(2.0)
    assert rank.manager.content is Content.VALID
    assert rank.model.score.bias.eq(7).all()


def test_a_load_leaves_a_value_that_nobody_saw_change(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.manager.mark_failed()  # before the rank has learnt what no load fills
    rank.load(1.0)
    assert rank.manager.content is Content.VALID
    assert rank.model.score.bias.eq(7).all()


def test_what_was_overwritten_after_a_warning_must_come_again(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.manager.give_up_content()
    for parameter in rank.model.parameters():
        parameter.zero_()
    rank.load(1.0)
    assert rank.manager.content is Content.FAILED
    with rank.updates.watch():
        rank.model.load_weights([("score.bias", torch.ones(WIDTH))])
    assert rank.manager.content is Content.VALID


class Scaled(Reward):
    """As SGLang's attention with an FP8 KV cache: the step after each load refuses a scale that is not positive."""

    more: ClassVar[dict[str, torch.Tensor]] = {"score.bias": torch.ones(WIDTH)}  # the trace finds it filled

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        assert self.score.bias.gt(0).all()


@pytest.mark.parametrize("dummy", [True, False])
def test_a_load_without_a_scale_leaves_it_or_gives_it_its_first_value(tmp_path: Path, dummy: bool) -> None:
    def reset(kept: Set[str]) -> set[str]:
        if "score.bias" not in kept:
            rank.model.score.bias.fill_(1)
        return {"score.bias"} - kept

    rank = Rank(tmp_path, Scaled, reset=reset, unfilled=lambda: ["score.bias"], dummy=lambda model: dummy)
    rank.manager.learn_unfilled()
    rank.manager.mark_failed()
    assert rank.manager.kept == (set() if dummy else {"score.bias"})
    rank.load(1.0)
    assert rank.manager.content is Content.VALID
    assert rank.model.score.bias.eq(1 if dummy else 7).all()
    rank.manager.begin_writing()
    rank.model.score.bias.fill_(3)
    rank.manager.finish_writing(complete=False)  # the update that brought the scale has broken off
    rank.load(2.0)
    assert rank.manager.content is Content.VALID
    assert rank.model.score.bias.eq(1).all()


@pytest.mark.parametrize("value", [7.0, 5.0])
def test_a_value_counts_where_it_lies_now(tmp_path: Path, value: float) -> None:
    rank = Rank(tmp_path)
    rank.manager.learn_unfilled()
    former = rank.model.score.bias  # whose memory is not free
    with rank.manager.allocator.region(Tag.WEIGHTS):
        rank.model.score.bias = torch.nn.Parameter(former.detach().clone(), requires_grad=False)
    rank.discard()
    assert rank.model.score.bias.eq(7).all()
    rank.load(1.0)
    assert rank.manager.content is Content.VALID
    rank.manager.begin_writing()
    rank.model.score.bias.fill_(value)
    rank.manager.finish_writing(complete=False)
    assert rank.manager.kept == ({"score.bias"} if value == 7 else set())


def test_to_learn_it_changes_nothing(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    scratch, before = rank.model.scratch, rank.agent.identity()
    assert rank.manager.learn_unfilled()
    assert rank.manager.kept == {"score.bias"}
    assert rank.model.scratch is scratch
    assert rank.agent.identity() == before


@pytest.mark.parametrize(
    "options", [{"dummy": lambda model: True}, {"filled": lambda: ["score.bias"]}], ids=["dummy", "filled at the start"]
)
def test_what_the_engine_may_have_filled_otherwise_is_discarded(tmp_path: Path, options: dict[str, Any]) -> None:
    rank = Rank(tmp_path, **options)
    rank.discard()
    assert not rank.model.score.bias.eq(7).all()
    rank.load(1.0)
    assert rank.manager.content is Content.STALE


class TextOnly(Reward):
    """As vLLM serves text of a vision model: the parameters of the vision part are on the meta device."""

    more: ClassVar[dict[str, torch.Tensor]] = {"query_tokens": torch.ones(4)}

    def __init__(self) -> None:
        super().__init__()
        self.query_tokens = torch.nn.Parameter(torch.zeros(4, device="meta"), requires_grad=False)


@pytest.mark.parametrize("sent", [{}, TextOnly.more])
def test_a_part_that_the_engine_does_not_run_is_not_asked_for(tmp_path: Path, sent: dict[str, torch.Tensor]) -> None:
    rank = Rank(tmp_path, TextOnly, filled=lambda: ["query_tokens"])
    rank.discard()
    loader: Any = rank.agent.receiver._model
    tensors = {**checkpoint(1.0), **sent}
    plan = loader.plan(
        Manifest([spec_of(name, tensor) for name, tensor in tensors.items()]),
        loader.drop_outdated(),
        rank.manager.kept,
    )
    assert plan.skipped == list(sent)
    rank.load(1.0)
    assert rank.manager.content is Content.VALID
    assert rank.agent.identity()


def test_a_part_without_memory_needs_no_proof_that_it_has_not_changed(tmp_path: Path) -> None:
    rank = Rank(tmp_path, TextOnly, filled=lambda: ["query_tokens"])
    rank.manager.learn_unfilled()
    rank.manager.begin_writing()
    rank.model.score.bias.zero_()
    rank.manager.finish_writing(complete=False)
    rank.load(1.0)
    assert rank.manager.content is Content.FAILED  # until the bias comes
    with rank.updates.watch():
        rank.model.load_weights([("score.bias", torch.ones(WIDTH))])
    assert rank.manager.content is Content.VALID
