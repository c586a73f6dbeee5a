"""One update of a target and of its draft model: a smaller model beside it, and MTP layers of the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from integration.kinds.checkpoints import tensors_of, with_nextn_layer
from integration.kinds.table import KINDS
from integration.models import new_model
from rl_memory_plugins import ManifestError
from rl_memory_plugins.weights.checksums import tensor_checksum
from tests.vllm.calls import generate, push, refused
from tests.vllm.child import Child
from tests.vllm.conftest import OTHER_SEED, SEED, engine_options, environment

TOKENS = 24


class Guesses(NamedTuple):
    """An answer, and what the draft has guessed meanwhile."""

    tokens: list[int]
    made: int
    accepted: int


def answer(llm: Any) -> Guesses:
    before = _guesses(llm)
    tokens = generate(llm, TOKENS)
    made, accepted = (now - then for now, then in zip(_guesses(llm), before, strict=True))
    return Guesses(tokens, made, accepted)


def _guesses(llm: Any) -> tuple[int, int]:
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    names = ("draft_tokens", "accepted_tokens")
    made, accepted = (int(counts.get(f"vllm:spec_decode_num_{name}", 0)) for name in names)
    return made, accepted


def of_draft(llm: Any) -> dict[str, str]:
    """The checksum of each parameter of the draft model."""
    return dict(llm.collective_rpc(_sums)[0])


def _sums(worker: Any) -> dict[str, str]:
    draft = worker.model_runner.get_draft_model()
    return {name: tensor_checksum(tensor) for name, tensor in draft.named_parameters()}


def state_of_draft(llm: Any) -> str:
    (engine,) = llm.memory_status()
    return str(engine.ranks[0].draft)


def start(make: Any, folder: Path, *arguments: Any) -> Child:
    # In one process, so that functions of this module can be run on the worker.
    return Child(make, folder, *arguments, environment=environment(folder, VLLM_ENABLE_V1_MULTIPROCESSING="0"))


# -- a smaller model ----------------------------------------------------------------------------------------------


def make_with_model(folder: Path, draft: Path) -> Any:
    from rl_memory_plugins.vllm import LLM

    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    options = engine_options(folder, speculative_config=speculative, disable_log_stats=False)
    return LLM(**options, rl_memory={"poison": True})


@pytest.fixture(scope="module")
def fresh(other_folder: Path) -> Guesses:
    """What an engine answers that was started with the other weights in both models."""
    child = start(make_with_model, other_folder, other_folder)
    try:
        return child(answer)  # type: ignore[no-any-return]
    finally:
        child.stop()


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[Child]:
    child = start(make_with_model, model_folder, model_folder)
    try:
        yield child
    finally:
        child.stop()


def update_both(llm: Any, folder: str, level: int) -> tuple[dict[str, Any], Guesses, str]:
    model = new_model(Path(folder), OTHER_SEED)
    if level:
        llm.sleep(level)
        llm.wake_up(["weights"])
    report = push(llm, model, draft=model)
    llm.wake_up()
    return report["engine"].details["ranks"][0], answer(llm), state_of_draft(llm)


def update_target(llm: Any, folder: str, level: int) -> tuple[Guesses, str]:
    if level:
        llm.sleep(level)
        llm.wake_up(["weights"])
    push(llm, new_model(Path(folder), OTHER_SEED))
    llm.wake_up()
    return answer(llm), state_of_draft(llm)


def restore(llm: Any, folder: str) -> tuple[Guesses, str]:
    model = new_model(Path(folder), SEED)
    push(llm, model, draft=model)
    return answer(llm), state_of_draft(llm)


@pytest.mark.parametrize("level", [0, 2])
def test_an_update_of_both_leaves_the_acceptance_of_a_fresh_engine(
    llm: Child, fresh: Guesses, model_folder: Path, level: int
) -> None:
    first, state = llm(restore, str(model_folder))
    assert (first.made, state) == (first.accepted, "in_step") and first.made > 0
    rank, found, state = llm(update_both, str(model_folder), level)
    assert found == fresh and found.accepted == found.made
    assert state == "in_step"
    assert rank["draft"] == rank["tensors"] / 2 > 0


@pytest.mark.parametrize("level", [0, 2])
def test_a_draft_without_new_weights_stays_and_is_said_to_be_out_of_step(
    llm: Child, fresh: Guesses, model_folder: Path, level: int
) -> None:
    llm(restore, str(model_folder))
    before = llm(of_draft)
    found, state = llm(update_target, str(model_folder), level)
    assert found.tokens == fresh.tokens
    assert found.accepted < found.made / 4
    assert state == "out_of_step"
    assert llm(of_draft) == before
    assert llm(restore, str(model_folder))[1] == "in_step"


def wrong_draft(llm: Any, folder: str) -> list[tuple[str, str]]:
    model = new_model(Path(folder), OTHER_SEED)
    draft = dict(model.state_dict())
    draft["model.unheard_of.weight"] = draft.pop("model.norm.weight")
    with pytest.raises(ManifestError) as error:
        push(llm, model, draft=draft)
    return [(mismatch["kind"], mismatch["name"]) for mismatch in error.value.details["mismatches"]]


def test_a_draft_that_does_not_fit_changes_neither_model(llm: Child, model_folder: Path) -> None:
    before = llm(restore, str(model_folder))[0], llm(of_draft)
    found = llm(wrong_draft, str(model_folder))
    assert ("unknown", "draft.model.unheard_of.weight") in found or ("missing", "draft.model.norm.weight") in found
    assert (llm(answer), llm(of_draft)) == before


def break_off(llm: Any, folder: str) -> tuple[str, str]:
    model = new_model(Path(folder), OTHER_SEED)

    class Breaking:
        def specs(self) -> Any:
            from rl_memory_plugins.trainer import ModelSource

            return ModelSource(model).specs()

        def tensors(self) -> Any:
            raise RuntimeError("the trainer broke")

    with pytest.raises(Exception, match="the trainer broke"):
        push(llm, model, draft=Breaking())
    return refused(lambda: generate(llm)), state_of_draft(llm)


def test_a_draft_that_breaks_off_takes_the_target_with_it(llm: Child, fresh: Guesses, model_folder: Path) -> None:
    llm(restore, str(model_folder))
    assert llm(break_off, str(model_folder)) == ("failed", "failed")
    found, state = llm(update_target, str(model_folder), 0)
    assert (found.tokens, state) == (fresh.tokens, "failed")
    _, found, state = llm(update_both, str(model_folder), 0)
    assert (found, state) == (fresh, "in_step")


def checksums(llm: Any, folder: str) -> Any:
    model = new_model(Path(folder), OTHER_SEED)
    push(llm, model, draft=model)
    found = llm.weight_checksums().tensors
    return {name: found.get(f"draft.{name}") == checksum for name, checksum in found.items() if "draft." not in name}


def test_checksums_name_the_draft(llm: Child, model_folder: Path) -> None:
    found = llm(checksums, str(model_folder))
    assert found and all(found.values())


# -- layers for multi-token prediction ------------------------------------------------------------------------------


def make_with_mtp(folder: Path) -> Any:
    from rl_memory_plugins.vllm import LLM

    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    options = engine_options(folder, speculative_config=speculative, disable_log_stats=False, max_model_len=512)
    return LLM(**options, rl_memory={"poison": True})


def renew_mtp(llm: Any, folder: str, level: int, whole: bool) -> tuple[Guesses, dict[str, str], str]:
    tensors = tensors_of(Path(folder))
    if level:
        llm.sleep(level)
        llm.wake_up(["weights"])
    push(llm, {name: tensor for name, tensor in tensors.items() if whole or ".layers.2." not in name})
    llm.wake_up()
    return answer(llm), of_draft(llm), state_of_draft(llm)


@pytest.mark.long
def test_mtp_layers_come_with_the_checkpoint_of_the_target(tmp_path: Path) -> None:
    """Their experts are packed after loading, and the embedding and the output layer are the target's."""
    write = with_nextn_layer(KINDS["GLM-4-MoE"].write)
    first, other = (write(tmp_path / str(seed), seed, "float32") for seed in (SEED, OTHER_SEED))
    child = start(make_with_mtp, other)
    try:
        wanted, wanted_draft = child(answer), child(of_draft)
    finally:
        child.stop()
    child = start(make_with_mtp, first)
    try:
        former = child(answer), child(of_draft)
        assert former[0].tokens != wanted.tokens
        for level in (0, 2):
            for folder, tokens, draft in ((other, wanted, wanted_draft), (first, *former)):
                found, own, state = child(renew_mtp, str(folder), level, True)
                assert (found.tokens, own, state) == (tokens.tokens, draft, "in_step")
                assert found == tokens
        found, own, state = child(renew_mtp, str(other), 2, False)
        assert (found.tokens, state) == (wanted.tokens, "out_of_step")
        kept = {name for name, checksum in own.items() if checksum == former[1][name]}
        assert {name for name in own if ".mtp_block." in name} <= kept
    finally:
        child.stop()
