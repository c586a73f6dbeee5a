"""What holds for every plan, whatever the model and the options."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_models import KINDS, configured, written

from rl_memory_plugins.errors import RLMemoryError
from rl_memory_plugins.plan import Options
from rl_memory_plugins.plan.advice import lacking, with_advice
from rl_memory_plugins.plan.gpus import GPUS
from rl_memory_plugins.plan.making import make_plan
from rl_memory_plugins.plan.model import read_model
from rl_memory_plugins.plan.options import CHOICES
from rl_memory_plugins.plan.phases import ALONE, PARTS, PHASES
from rl_memory_plugins.plan.trainer import plan_trainer

#: Large enough that its parts matter beside the processes'.
LARGE = {"hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32}
LARGE |= {"num_key_value_heads": 8, "vocab_size": 65536, "moe_intermediate_size": 1024, "head_dim": 128}


@functools.cache
def model(kind):
    with tempfile.TemporaryDirectory() as folder:
        return read_model(written(Path(folder), configured(kind, **LARGE)))


unhurried = settings(deadline=None)
models = st.sampled_from(sorted(KINDS)).map(model)


@st.composite
def options(draw):
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    gpus = tp * draw(st.sampled_from([1, 2]))
    chosen = {name: draw(st.sampled_from(allowed)) for name, allowed in CHOICES.items()}
    if gpus > 1 and chosen["trainer"] == "plain":
        chosen["trainer"] = "fsdp2"
    return Options(
        gpu=draw(st.one_of(st.sampled_from(sorted(GPUS)), st.floats(1, 400).map(lambda gib: f"{gib:.2f}"))),
        tp=tp,
        gpus=gpus,
        fraction=draw(st.one_of(st.none(), st.floats(0.01, 1))),
        kv_gib=draw(st.sampled_from([0, 0, 1, 20])),
        max_running=draw(st.integers(1, 1024)),
        level=draw(st.sampled_from([1, 2])),
        from_host=draw(st.booleans()),
        share_host_backups=draw(st.booleans()),
        micro_tokens=draw(st.integers(1, 1 << 16)),
        checkpointing=draw(st.booleans()),
        bucket_mib=draw(st.integers(1, 4096)),
        host_gib=draw(st.sampled_from([0, 64, 1024])),
        **chosen,
    )


@unhurried
@given(models, options())
def test_the_parts_of_a_phase_sum_to_what_is_in_use_and_none_is_negative(model, options):
    made = make_plan(model, options)
    names = ALONE if options.trainer == "none" else PHASES
    assert tuple(phase.name for phase in made.phases) == names
    for phase in made.phases:
        assert set(phase.parts) <= set(PARTS)
        assert all(isinstance(nbytes, int) and nbytes > 0 for nbytes in phase.parts.values())
        assert sum(phase.parts.values()) == phase.total == phase.engine + phase.trainer
        assert phase.total + phase.free == made.gpu_total
    assert all(nbytes > 0 for nbytes in made.host.values())
    assert sum(made.host.values()) == made.host_total
    json.dumps(made.to_record(), allow_nan=False)


@unhurried
@given(models, options())
def test_a_plan_fits_exactly_if_nothing_lacks(model, options):
    made = make_plan(model, options)
    too_large = any(phase.free < 0 for phase in made.phases)
    assert made.fits == (not made.problems) == (lacking(made) == 0)
    assert made.fits <= (not too_large) and made.fits <= (made.engine.kv_tokens > 0)


@unhurried
@given(models, options())
def test_more_ranks_never_need_more_weights_or_keys_on_each(model, options):
    one, two = (make_plan(model, dataclasses.replace(options, tp=tp, gpus=0, trainer="none")) for tp in (1, 2))
    assert two.engine.weights <= one.engine.weights <= 2 * two.engine.weights
    assert model.kv_bytes_per_token(2, 2) <= model.kv_bytes_per_token(1, 2)


@unhurried
@given(models, options(), st.sampled_from(["fsdp1", "fsdp2", "megatron"]))
def test_more_processes_never_hold_more_of_the_trainers_state_on_each(model, options, trainer):
    few, many = (plan_trainer(model, dataclasses.replace(options, trainer=trainer, tp=2, gpus=n)) for n in (2, 8))
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(many, part) <= getattr(few, part)


@unhurried
@given(models, options())
def test_ddp_takes_as_much_on_each_gpu_however_many_there_are(model, options):
    few, many = (plan_trainer(model, dataclasses.replace(options, trainer="ddp", tp=1, gpus=n)) for n in (2, 8))
    assert few == many


@unhurried
@given(models, options())
def test_a_larger_fraction_is_a_larger_kv_cache_and_never_frees_anything(model, options):
    small, large = (make_plan(model, dataclasses.replace(options, fraction=share, kv_gib=0)) for share in (0.5, 0.9))
    assert small.engine.kv_cache <= large.engine.kv_cache
    assert small.phase("rollout").total <= large.phase("rollout").total


@unhurried
@given(models, options())
def test_vllms_engine_takes_its_fraction(model, options):
    made = make_plan(model, dataclasses.replace(options, engine="vllm", kv_gib=0))
    if made.engine.kv_cache:
        took = made.phase("rollout").engine
        assert 0 <= int(made.options.share * made.gpu_total) - took < 16


@unhurried
@given(models, options())
def test_sending_from_the_host_never_needs_more(model, options):
    near, far = (make_plan(model, dataclasses.replace(options, from_host=value)) for value in (False, True))
    assert all(there.total <= here.total for here, there in zip(near.phases, far.phases, strict=True))


@unhurried
@given(models, options())
def test_checkpointing_never_needs_more_than_all_layers_and_one(model, options):
    kept, again = (
        plan_trainer(model, dataclasses.replace(options, trainer="fsdp2", checkpointing=value))
        for value in (False, True)
    )
    assert again.activations <= kept.activations


@unhurried
@given(models, options())
def test_level_1_needs_the_hosts_memory_for_the_weights_of_all_ranks(model, options):
    one, two = (make_plan(model, dataclasses.replace(options, level=level)) for level in (1, 2))
    copies = options.tp if options.share_host_backups else options.ranks
    assert one.host_total - two.host_total == one.engine.weights * copies
    assert [phase.total for phase in one.phases] == [phase.total for phase in two.phases]


@settings(unhurried, max_examples=25)
@given(models, options())
def test_each_advice_does_what_it_says(model, options):
    made = with_advice(model, make_plan(model, options))
    assert not (made.fits and made.advice)
    for advice in made.advice:
        changed = make_plan(model, dataclasses.replace(options, **advice.change))
        assert changed.fits == advice.fits
        assert lacking(changed) == advice.lacking < lacking(made)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 40), 1 << 40),
    st.floats(),
    st.text(max_size=3),
    st.just([]),
    st.just({}),
)
fields = sorted({*LARGE, *(name for kind in KINDS for name in configured(kind))} - {"model_type"})
changes = st.dictionaries(st.sampled_from([*fields, "layer_types", "quantization_config", "text_config"]), values)


@unhurried
@given(st.sampled_from(sorted(KINDS)), changes, options())
def test_a_configuration_gives_a_plan_or_a_typed_error(kind, changed, options):
    with tempfile.TemporaryDirectory() as folder:
        written(Path(folder), configured(kind, **{**LARGE, **changed}))
        try:
            made = make_plan(read_model(folder), options)
        except RLMemoryError:
            return
    assert made.parameters > 0
    assert all(nbytes > 0 for phase in made.phases for nbytes in phase.parts.values())
