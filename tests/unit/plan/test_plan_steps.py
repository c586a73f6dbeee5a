"""Single rules of plans."""

from __future__ import annotations

import pytest
from plan_models import configured, written

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.plan import GPUS, Options, plan
from rl_memory_plugins.plan.engine import graph_batches
from rl_memory_plugins.plan.options import CHOICES

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def folder(tmp_path):
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 16}
    return written(tmp_path / "model", configured("llama", **sizes, vocab_size=32000, head_dim=128))


def parts(made, name):
    return set(made.phase(name).parts)


def test_the_trainers_weights_and_the_kv_cache_are_never_together(folder):
    made = plan(folder)
    assert not [phase for phase in made.phases if {"parameters", "KV cache"} <= set(phase.parts)]
    assert parts(made, "sync") >= {"parameters", "engine weights", "buckets"}
    assert "optimizer" not in parts(made, "offload_others")


def test_from_the_host_the_trainers_weights_never_meet_the_engines(folder):
    made = plan(folder, from_host=True)
    assert not [phase for phase in made.phases if {"parameters", "engine weights"} <= set(phase.parts)]


@pytest.mark.parametrize(
    ("offload", "stays"), [("all", set()), ("optimizer", {"parameters"}), ("none", {"parameters", "optimizer"})]
)
def test_what_is_not_offloaded_stays_beside_the_engine_and_off_the_host(folder, offload, stays):
    made = plan(folder, offload=offload)
    both = {"parameters", "optimizer"}
    assert parts(made, "rollout") & both == stays
    assert set(made.host) & both == both - stays
    assert "gradients" not in parts(made, "rollout")


def test_an_engine_alone_has_only_its_own_phases(folder):
    made = plan(folder, trainer="none")
    assert not {part for phase in made.phases for part in phase.parts} & {"trainer process", "parameters", "buckets"}
    assert "trainer processes" not in made.host


def test_adamw_has_two_states_in_float32_and_fewer_bits_with_others(folder):
    found = {name: plan(folder, optimizer=name).trainer.optimizer for name in CHOICES["optimizer"]}
    parameters = plan(folder).parameters
    assert found["adamw"] == 8 * parameters
    assert found["momentum"] == 4 * parameters
    assert found["sgd"] == 0
    assert 2 * parameters < found["adamw8bit"] < 2.1 * parameters
    assert 0 < found["adafactor"] < parameters / 100


def test_megatron_has_masters_and_states_on_all_and_weights_on_tensor_parallel_ranks(folder):
    made = plan(folder, trainer="megatron", tp=2, gpus=4)
    count = made.parameters
    assert made.trainer.parameters == count
    assert made.trainer.gradients == 2 * count
    assert made.trainer.optimizer == 3 * count  # two states and the masters in float32, on four processes


def test_ddp_has_its_gradients_twice_and_autocast_a_copy_of_the_matrices(folder):
    made = plan(folder, trainer="ddp", tp=1, gpus=2)
    assert made.trainer.gradients == 8 * made.parameters
    embeddings_and_norms = 32000 * 2048 + 49 * 2048
    assert made.trainer.copies == 2 * (made.parameters - embeddings_and_norms)
    assert plan(folder, trainer="ddp", precision="bf16").trainer.copies == 0


def test_sglangs_fraction_is_of_weights_and_cache_alone(folder):
    made = plan(folder, engine="sglang", fraction=0.5)
    assert made.engine.weights + made.engine.kv_cache == int(0.5 * (made.gpu_total - made.engine.process))


def test_a_kv_cache_in_fp8_holds_twice_the_tokens(folder):
    plain, fp8 = (plan(folder, kv_gib=4, kv_dtype=dtype) for dtype in ("auto", "fp8"))
    assert plain.engine.kv_cache == fp8.engine.kv_cache == 4 * GIB
    assert fp8.engine.kv_tokens // 2 == plain.engine.kv_tokens


def test_the_states_leave_beside_the_update_only_if_there_is_room(folder):
    assert plan(folder, gpu="h100-80").overlaps
    made = plan(folder, gpu="rtx4090-24")
    needed = made.phase("wake_weights").total + made.trainer.optimizer + 4 * GIB
    assert plan(folder, gpu=(needed + MIB) / GIB).overlaps
    assert not plan(folder, gpu=(needed - MIB) / GIB).overlaps
    assert not plan(folder, gpu="h100-80", from_host=True).overlaps


def test_the_engine_opens_beside_the_trainer_only_if_there_is_room_for_all(folder):
    made = plan(folder, gpu="h100-80", kv_gib=1)
    wakes = made.phase("wake_kv_cache").engine - made.phase("sleep").engine
    needed = made.phase("training").total + wakes
    assert made.beside == needed
    assert plan(folder, gpu=(needed + 16 * GIB + MIB) / GIB, kv_gib=1).beside == needed
    without = made.phase("load").total + wakes  # torch's cache goes first
    assert plan(folder, gpu=(needed + 16 * GIB - MIB) / GIB, kv_gib=1).beside == without
    assert not plan(folder, gpu=(without + 16 * GIB - MIB) / GIB, kv_gib=1).beside
    assert not plan(folder, gpu="h100-80").beside  # the cache takes the rest
    for options in ({"from_host": True}, {"offload": "optimizer"}, {"offload": "none"}, {"trainer": "none"}):
        assert not plan(folder, gpu="h100-80", kv_gib=1, **options).beside


def test_torchs_cache_goes_first_where_it_holds_more_than_what_leaves(folder):
    options = {"kv_gib": 1, "micro_tokens": 1 << 22, "checkpointing": False, "max_running": 4}
    made = plan(folder, gpu="b200-180", **options)
    wakes = made.phase("wake_kv_cache").engine - made.phase("sleep").engine
    without = made.phase("load").total + wakes
    assert made.phase("training").total > made.phase("load").total + 16 * GIB
    assert plan(folder, gpu=(without + 16 * GIB + MIB) / GIB, **options).beside == without


def test_quantised_weights_cost_the_update_more(tmp_path):
    given = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = written(tmp_path, configured("llama", quantization_config=given))
    by_engine = {name: plan(folder, engine=name, trainer="plain") for name in ("vllm", "sglang")}
    assert by_engine["vllm"].engine.update == 2 * (2 * 320 * 64 + 64)  # embeddings, head and the last norm
    assert by_engine["sglang"].engine.update == 0
    assert parts(by_engine["vllm"], "sync") >= {"engine update"}


def test_batch_sizes_of_graphs():
    assert [graph_batches(most) for most in (1, 2, 4, 8, 16, 512, 4096)] == [1, 2, 3, 4, 5, 67, 67]


def test_a_fraction_without_room_for_a_cache_does_not_fit(folder):
    made = plan(folder, fraction=0.02)
    assert not made.fits and made.engine.kv_cache == 0
    assert "leaves no room for a KV cache" in made.problems[0]
    assert {"fraction"} in [set(one.change) for one in made.advice if one.fits]


def test_a_host_that_is_too_small_does_not_fit(folder):
    made = plan(folder, host_gib=8, level=1)
    assert made.lacking_host == made.host_total - 8 * GIB > 0
    assert made.lacking_gpu == 0


# -- advice -----------------------------------------------------------------------------------------


def changes(made, *, fits):
    return [set(one.change) - {"gpus"} or {"gpus"} for one in made.advice if one.fits is fits]


def test_level_2_frees_a_host(folder):
    room = plan(folder, level=2).host_total / GIB
    assert {"level"} in changes(plan(folder, level=1, host_gib=room + 0.1), fits=True)


def test_engines_that_share_their_copies_free_a_host(folder):
    options = {"tp": 1, "gpus": 4, "level": 1}
    room = plan(folder, share_host_backups=True, **options).host_total / GIB
    assert {"share_host_backups"} in changes(plan(folder, host_gib=room + 0.1, **options), fits=True)


def test_the_trainers_weights_leave_if_they_and_the_engines_are_too_much(folder):
    options = {"optimizer": "sgd", "precision": "bf16", "micro_tokens": 1, "kv_gib": 0.1, "max_running": 1}
    enough = plan(folder, trainer="plain", **options).peak
    assert enough.name == "sync"
    made = plan(folder, gpu=(enough.total - MIB) / GIB, trainer="plain", **options)
    assert {"from_host"} in changes(made, fits=True)


def test_offloading_frees_the_rollout(folder):
    made = plan(folder, gpu="h100-80", fraction=0.9, offload="none")
    assert not made.fits and made.peak.name == "rollout"
    assert {"offload"} in changes(made, fits=True)
    [fraction] = [one.change["fraction"] for one in made.advice if "fraction" in one.change]
    assert plan(folder, fraction=fraction, offload="none").fits
    assert not plan(folder, fraction=fraction + 0.01, offload="none").fits  # the largest that fits


def test_activations_call_for_checkpointing_or_smaller_batches(folder):
    made = plan(folder, micro_tokens=32768, checkpointing=False)
    assert made.peak.name == "training"
    assert {"checkpointing"} in changes(made, fits=True)
    [tokens] = [one.change["micro_tokens"] for one in made.advice if "micro_tokens" in one.change]
    assert plan(folder, micro_tokens=tokens, checkpointing=False).fits
    assert not plan(folder, micro_tokens=2 * tokens, checkpointing=False).fits


def test_changes_that_do_not_help_are_not_named(folder):
    made = plan(folder, fraction=1.0)  # the rollout lacks memory, and training has enough
    assert made.peak.name == "rollout"
    assert changes(made, fits=True) == [{"fraction"}]
    assert not changes(made, fits=False)


def test_where_one_change_is_not_enough_several_are_planned_together(folder):
    made = plan(folder, fraction=1.0, micro_tokens=65536, checkpointing=False)
    [first, *others] = made.advice
    assert first.fits and len(first.change) > 1
    assert not [one for one in others if one.fits]
    assert plan(folder, **{"fraction": 1.0, "micro_tokens": 65536, "checkpointing": False, **first.change}).fits


# -- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpu", "h1000"),
        ("gpu", ""),
        ("gpu", "-4"),
        ("gpu", "nan"),
        ("gpu", "inf"),
        ("gpu", 0),
        ("tp", 0),
        ("tp", -1),
        ("tp", 1 << 20),
        ("gpus", 3),
        ("gpus", -2),
        ("fraction", 0.0),
        ("fraction", 1.01),
        ("fraction", float("nan")),
        ("kv_gib", -1.0),
        ("kv_gib", float("inf")),
        ("host_gib", -1.0),
        ("max_running", 0),
        ("micro_tokens", 0),
        ("bucket_mib", 0),
        ("level", 0),
        ("level", 3),
        ("trainer", "zero"),
        ("optimizer", "AdamW"),
        ("engine", "tgi"),
        ("precision", "fp16"),
        ("offload", "some"),
        ("dtype", "int8"),
        ("kv_dtype", "fp4"),
    ],
)
def test_a_bad_option_is_a_typed_error_that_names_it(field, value):
    options = {"tp": 2, field: value} if field == "gpus" else {field: value}
    with pytest.raises(InvalidRequestError) as caught:
        Options(**options)
    assert caught.value.details["field"] == field
    assert caught.value.details["allowed"]


def test_a_trainer_of_one_process_has_one_gpu():
    with pytest.raises(InvalidRequestError, match="for several GPUs"):
        Options(trainer="plain", tp=2)


def test_heads_that_ranks_cannot_share_are_refused(folder):
    with pytest.raises(InvalidRequestError, match="cannot be cut into 3 parts") as caught:
        plan(folder, tp=3)
    assert caught.value.details["allowed"] == [1, 2, 4, 8, 16]


def test_an_unknown_option_lists_all(folder):
    with pytest.raises(InvalidRequestError, match="unknown options: model_len") as caught:
        plan(folder, model_len=3)
    assert "fraction" in caught.value.details["allowed"]


def test_a_gpu_has_fewer_bytes_than_its_name_says():
    for name, gpu in GPUS.items():
        assert 0.9 < gpu.total / (int(name.rsplit("-", 1)[1]) * GIB) < 1
    assert Options(gpu="80").card.total == Options(gpu="80GiB").card.total == 80 * GIB
