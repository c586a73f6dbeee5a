"""FSDP1, FSDP2, tensor-parallel and Megatron-style shards on two ranks, against the unsharded model."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from models import Tied, collected, same, whole
from torch import nn

from rl_memory_plugins.errors import InvalidRequestError
from rl_memory_plugins.trainer import (
    FSDP1Source,
    FusedQKV,
    GateUp,
    MegatronSource,
    ModelSource,
    Offloader,
    Replicated,
    Split,
)
from rl_memory_plugins.trainer.sources import gather


def everything(tensor):
    """On a CPU there is nothing to offload, unless one asks for it."""
    return True


def fsdp2(blocks=3, width=8):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Tied(blocks, width)
    expected = whole(model)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, expected


def fsdp1(use_orig_params, blocks=3, width=8):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = Tied(blocks, width)
    expected = whole(model)
    from models import Block

    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )
    return wrapped, expected


def step(model, optimizer):
    """One training step; the same on all ranks."""
    loss = model(torch.tensor([[1, 2, 3]])).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def fsdp2_gathers(rank):
    model, expected = fsdp2()
    return same(collected(ModelSource(model)), expected)


def fsdp2_casts_and_renames(rank):
    model, expected = fsdp2()
    source = ModelSource(model, dtype=torch.bfloat16, rename=lambda name: None if "norm" in name else f"model.{name}")
    return same(collected(source), {f"model.{k}": v.bfloat16() for k, v in expected.items() if "norm" not in k})


def fsdp2_offloaded(rank):
    model, expected = fsdp2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    twin = Tied()
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))  # leaves the root gathered
    offloader = Offloader(model, moves=everything)
    for _ in range(2):
        offloader.offload()
        assert all(p.to_local().untyped_storage().nbytes() == 0 for p in model.parameters())
        same(collected(ModelSource(model)), expected)
        offloader.load()
        same(collected(ModelSource(model)), expected)
        assert abs(step(model, optimizer) - step(twin, twin_optimizer)) < 1e-5
        expected = {name: tensor for name, tensor in collected(ModelSource(model)).items()}
        for name, tensor in whole(twin).items():
            torch.testing.assert_close(expected[name], tensor)
    return True


def fsdp2_peak(rank):
    model, expected = fsdp2(blocks=12, width=32)
    largest = max(tensor.nbytes for tensor in expected.values())
    with LiveBytes() as live, patch.object(gather, "BATCH_BYTES", largest):
        for _name, _tensor in ModelSource(model).tensors():
            del _tensor
    return live.peak, largest, sum(tensor.nbytes for tensor in expected.values())


def gathers_together(rank, batch_bytes):
    """Tensors of any shape and dtype, cut or not; how many collectives it took, and how many bytes they gave."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, replicas = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    torch.manual_seed(0)
    expected = {
        "uneven": torch.randn(7, 3),
        "half": torch.randn(5).bfloat16(),
        "one row": torch.randn(1, 3),
        "empty": torch.randn(0, 4),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "whole": torch.randn(2),
        "replicated": torch.randn(4, 2),
        "replicas": torch.randn(6, 2),
    }
    cut = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in expected.items()}
    cut |= {
        "whole": expected["whole"],
        "replicated": distribute_tensor(expected["replicated"], mesh, [Replicate()]),
        "replicas": distribute_tensor(expected["replicas"], replicas, [Replicate(), Shard(0)]),
    }
    with (
        patch.object(gather, "BATCH_BYTES", batch_bytes),
        patch.object(gather, "all_gather", side_effect=gather.all_gather) as collective,
    ):
        same(collected(ModelSource(cut)), expected)
    return [call.args[0].numel() for call in collective.call_args_list]


def gathers_in_the_middle(rank):
    """Whoever breaks off and keeps the iterator keeps nothing else: as the frames of an error may."""
    model, _ = fsdp2()
    kept = ModelSource(model).tensors()
    next(kept)
    return torch.is_grad_enabled()


def padded_parts(rank):
    """One row on two ranks is padded to twice its size, and counts as that."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    cut = {str(number): distribute_tensor(torch.randn(1, 16), mesh, [Shard(0)]) for number in range(8)}
    with (
        patch.object(gather, "BATCH_BYTES", 256),
        patch.object(gather, "all_gather", side_effect=gather.all_gather) as collective,
    ):
        collected(ModelSource(cut))
    return max(call.args[0].nbytes for call in collective.call_args_list)


def fsdp1_gathers(rank, use_orig_params):
    model, expected = fsdp1(use_orig_params)
    for _ in range(2):
        same(collected(FSDP1Source(model)), expected)
    cast = {name: tensor.bfloat16() for name, tensor in expected.items()}
    return same(collected(FSDP1Source(model, dtype=torch.bfloat16)), cast)


def fsdp1_offloaded(rank, use_orig_params):
    model, expected = fsdp1(use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    twin = Tied()
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))
    offloader, states = Offloader(model, moves=everything), Offloader(optimizer, moves=everything)
    source = FSDP1Source(model)
    for number in range(2):
        moved = offloader.offload()
        assert moved.bytes >= sum(tensor.nbytes for tensor in expected.values()) // 2
        assert (states.offload().bytes > 0) == (number > 0)
        same(collected(source), expected)
        assert offloader.load() and states.load() is not None
        assert abs(step(model, optimizer) - step(twin, twin_optimizer)) < 1e-5
        expected = collected(source)
        for name, tensor in whole(twin).items():
            torch.testing.assert_close(expected[name], tensor)
    return True


def fsdp1_before_the_first_forward(rank, offloaded):
    """All parameters are wrapped below the root, which has none of its own; the bare root is nested or not."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 5), nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 4)))
    expected, x = whole(plain), torch.ones(2, 8)
    loss = plain(x).square().mean().item()
    cpu = {"device_id": torch.device("cpu")}
    plain[0] = FullyShardedDataParallel(plain[0], **cpu)
    for number in range(2):
        plain[1][number] = FullyShardedDataParallel(plain[1][number], **cpu)
    plain[1] = FullyShardedDataParallel(plain[1], **cpu)
    model = FullyShardedDataParallel(plain, **cpu)
    assert model._handle is None
    source, offloader = FSDP1Source(model), Offloader(model, moves=everything)
    if offloaded:
        assert offloader.offload().bytes
    for _ in range(2):
        same(collected(source), expected)
    offloader.load()
    result = model(x).square().mean()
    result.backward()
    assert abs(result.item() - loss) < 1e-6
    return same(collected(source), expected)


def fsdp1_one_unit_at_a_time(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model, _ = fsdp1(True)
    most = 0
    for _name, _tensor in FSDP1Source(model).tensors():
        units = [unit for unit in FullyShardedDataParallel.fsdp_modules(model) if unit._handle]
        gathered = [unit._handle.flat_param._full_param_padded.untyped_storage().nbytes() > 0 for unit in units]
        most = max(most, sum(gathered))
    return most, len(units)


def tensor_parallel_gathers(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    expected = {"column": torch.randn(7, 4), "row": torch.randn(3, 5), "norm": torch.randn(4)}
    placements = {"column": Shard(0), "row": Shard(1), "norm": Replicate()}
    parts = {name: distribute_tensor(tensor, mesh, [placements[name]]) for name, tensor in expected.items()}
    return same(collected(ModelSource(parts)), expected)


@pytest.mark.parametrize("job", [fsdp2_gathers, fsdp2_casts_and_renames, fsdp2_offloaded, tensor_parallel_gathers])
def test_dtensors(pair, job):
    assert pair.run(job) == [True, True]


def test_many_dtensors_take_one_collective(pair):
    together, alone = pair.run(gathers_together, 1 << 20)[0], pair.run(gathers_together, 1)[0]
    assert len(together) == 2  # up to what needs none, and after it
    assert len(alone) == 5  # and none for what is empty


def test_a_gather_that_is_broken_off_leaves_autograd_on(pair):
    assert pair.run(gathers_in_the_middle) == [True, True]


def test_a_batch_is_as_large_as_what_is_moved(pair):
    assert pair.run(padded_parts) == [256, 256]


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("job", [fsdp1_gathers, fsdp1_offloaded])
def test_fsdp1(pair, job, use_orig_params):
    assert pair.run(job, use_orig_params) == [True, True]


@pytest.mark.parametrize("offloaded", [False, True])
def test_fsdp1_may_be_sent_before_the_first_forward(pair, offloaded):
    assert pair.run(fsdp1_before_the_first_forward, offloaded) == [True, True]


def test_fsdp1_has_one_unit_whole_at_a_time(pair):
    for most, units in pair.run(fsdp1_one_unit_at_a_time):
        assert (most, units) == (1, 4)


def test_the_peak_of_gathering_is_a_few_tensors_whatever_the_model(pair):
    # The whole and the parts that it is made of; Gloo's threads may hold on to those of the tensor before.
    for peak, largest, total in pair.run(fsdp2_peak):
        assert largest <= peak <= 2 * 2.1 * largest < total / 4


# -- Megatron's shards, made by hand ---------------------------------------------------------------------------

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 16, 8, 4, 2, 12, 13, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp, self.norm = Attention(), MLP(), nn.LayerNorm(HIDDEN, bias=False)


def unsharded():
    torch.manual_seed(3)
    model = nn.Module()
    model.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
    model.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def megatron_shards(full, tp_rank, tp, layers):
    """What a rank of Megatron holds of some layers, by its own names and layer numbers."""
    shards = {}
    if 0 in layers:
        padded = torch.cat([full["embed_tokens.weight"], torch.full((3, HIDDEN), 9.0)])
        shards["embedding.weight"] = padded.chunk(tp)[tp_rank]
    for number, layer in enumerate(layers):
        theirs, mine = f"layers.{layer}.", f"decoder.layers.{number}."
        for kind in ("weight", "bias"):
            q, k, v = (full[f"{theirs}self_attn.{part}_proj.{kind}"] for part in "qkv")
            per_head = []
            for head in range(KV_HEADS):
                queries = HEADS // KV_HEADS * HEAD_DIM
                per_head += [
                    q[head * queries : (head + 1) * queries],
                    k[head * HEAD_DIM : (head + 1) * HEAD_DIM],
                    v[head * HEAD_DIM : (head + 1) * HEAD_DIM],
                ]
            shards[f"{mine}linear_qkv.{kind}"] = torch.cat(per_head).chunk(tp)[tp_rank]
        shards[f"{mine}linear_proj.weight"] = full[f"{theirs}self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank]
        gate, up = (full[f"{theirs}mlp.{part}_proj.weight"].chunk(tp)[tp_rank] for part in ("gate", "up"))
        shards[f"{mine}linear_fc1.weight"] = torch.cat([gate, up])
        shards[f"{mine}linear_fc2.weight"] = full[f"{theirs}mlp.down_proj.weight"].chunk(tp, 1)[tp_rank]
        shards[f"{mine}norm.weight"] = full[f"{theirs}norm.weight"]
        shards[f"{mine}linear_qkv._extra_state"] = torch.zeros(1)
    return {name: shard.clone() for name, shard in shards.items()}


def name_map(first_layer):
    def names(local):
        if local == "embedding.weight":
            return ["embed_tokens.weight"], Split(0, size=VOCAB)
        _, _, number, module, kind = local.split(".")
        prefix = f"layers.{first_layer + int(number)}."
        if kind == "_extra_state":
            return None
        if module == "linear_qkv":
            fused = [f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv"]
            return fused, FusedQKV(HEADS, KV_HEADS, HEAD_DIM)
        if module == "linear_fc1":
            return [f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"], GateUp()
        if module == "norm":
            return [f"{prefix}norm.weight"], Replicated()
        target = {"linear_proj": "self_attn.o_proj", "linear_fc2": "mlp.down_proj"}[module]
        return [f"{prefix}{target}.weight"], Split(1)

    return names


def megatron_tensor_parallel(rank):
    full = unsharded()
    shards = megatron_shards(full, rank, 2, range(LAYERS))
    source = MegatronSource(shards, name_map(0), tp_group=dist.group.WORLD)
    offloader = Offloader(shards, moves=everything)
    offloader.offload()
    same(collected(source), full)
    offloader.load()
    cast = MegatronSource(shards, name_map(0), tp_group=dist.group.WORLD, dtype=torch.bfloat16)
    return same(collected(cast), {name: tensor.bfloat16() for name, tensor in full.items()})


def megatron_in_parts(rank, stages):
    """What the ranks hold of each tensor makes it up, with the same layouts on all ranks."""
    full, half = unsharded(), LAYERS // 2
    if stages:
        shards = megatron_shards(full, 0, 1, range(rank * half, (rank + 1) * half))
        source = MegatronSource(shards, name_map(rank * half), pp_group=dist.group.WORLD)
    else:
        shards = megatron_shards(full, rank, 2, range(LAYERS))
        source = MegatronSource(shards, name_map(0), tp_group=dist.group.WORLD)
    specs, layouts = source.specs(), source.layouts()
    source.leave_out([spec.name for spec, layout in zip(specs, layouts, strict=True) if layout])
    held = {
        spec.name: (layout.box(rank), source.held(spec.name))
        for spec, layout in zip(specs, layouts, strict=True)
        if layout and layout.box(rank)
    }
    shared = [None, None]
    dist.all_gather_object(shared, (layouts, held))
    assert shared[0][0] == shared[1][0]
    got = dict(source.tensors())
    for spec, layout in zip(specs, layouts, strict=True):
        if layout:
            layout.require(spec)
            got[spec.name] = torch.full(spec.shape, torch.nan)
            for _, parts in shared:
                for box, part in [parts[spec.name]] if spec.name in parts else []:
                    got[spec.name][tuple(slice(first, first + count) for first, count in box)] = part
    assert all(layouts) if stages else sum(layout is None for layout in layouts) == LAYERS  # the norms
    return same(got, full)


@pytest.mark.parametrize("stages", [False, True])
def test_what_megatrons_ranks_hold_makes_up_the_checkpoint(pair, stages):
    assert pair.run(megatron_in_parts, stages) == [True, True]


def megatron_pipeline_parallel(rank):
    full = unsharded()
    half = LAYERS // 2
    shards = megatron_shards(full, 0, 1, range(rank * half, (rank + 1) * half))
    source = MegatronSource(shards, name_map(rank * half), pp_group=dist.group.WORLD)
    return same(collected(source), full)


def expert_parallel(rank):
    """A name that all hold is taken from the first; the experts' local numbers are the same."""
    torch.manual_seed(4)
    full = {"router": torch.randn(4, 8), **{f"experts.{i}": torch.randn(6, 8) for i in range(4)}}
    mine = {"router": full["router"] + rank, **{f"local.{i}": full[f"experts.{2 * rank + i}"] for i in (0, 1)}}

    def names(local):
        number = 2 * rank + int(local[-1]) if local.startswith("local.") else None
        return ([local] if number is None else [f"experts.{number}"]), Replicated()

    return same(collected(MegatronSource(mine, names, pp_group=dist.group.WORLD)), full)


def megatron_peak(rank):
    full = unsharded()
    source = MegatronSource(megatron_shards(full, rank, 2, range(LAYERS)), name_map(0), tp_group=dist.group.WORLD)
    with LiveBytes() as live:
        for _name, _tensor in source.tensors():
            del _tensor
    fused = (HEADS + 2 * KV_HEADS) * HEAD_DIM * HIDDEN * 4
    return live.peak, fused, sum(tensor.nbytes for tensor in full.values())


@pytest.mark.parametrize("job", [megatron_tensor_parallel, megatron_pipeline_parallel, expert_parallel])
def test_megatron(pair, job):
    assert pair.run(job) == [True, True]


def test_megatron_holds_one_parameter_in_pieces_and_in_whole(pair):
    for peak, fused, total in pair.run(megatron_peak):
        assert fused <= peak <= 2 * 3 * fused < total  # twice for Gloo's threads, as above


def test_a_layout_must_give_as_many_tensors_as_names():
    with pytest.raises(InvalidRequestError, match="w: GateUp"):
        MegatronSource({"w": torch.zeros(4, 2)}, lambda name: (["only"], GateUp()))


def megatron_plan_fails_on_one_rank(rank):
    def names(local):
        if rank == 1:
            raise KeyError(local)
        return [local], Replicated()

    kinds = []
    for group in ("tp_group", "pp_group"):
        try:
            MegatronSource({"w": torch.zeros(2)}, names, **{group: dist.group.WORLD})
        except Exception as error:
            kinds.append(f"{type(error).__name__}: {error}")
    return kinds


def test_a_plan_that_fails_on_one_rank_fails_on_all(pair):
    zero, one = pair.run(megatron_plan_fails_on_one_rank)
    assert zero == ["RLMemoryError: KeyError: 'w'"] * 2
    assert one == ["KeyError: 'w'"] * 2


def megatron_groups_that_share_ranks(rank):
    """As where experts are spread over the tensor-parallel ranks; a group of this rank alone is one too."""
    alone = [dist.new_group([one]) for one in (0, 1)][rank]
    everyone = dist.new_group([0, 1])
    w = {"w": torch.full((2,), float(rank))}
    refused = []
    for number, groups in enumerate([(dist.group.WORLD, everyone), (alone, everyone), (everyone, alone)]):
        try:
            source = MegatronSource(
                w, lambda name: ([f"{name}.{rank}"], Replicated()), tp_group=groups[0], pp_group=groups[1]
            )
        except InvalidRequestError as error:
            refused.append((number, error.details["ranks"]))
        else:
            collected(source)
    return refused


def test_groups_that_share_more_than_one_rank_are_refused_on_all(pair):
    assert pair.run(megatron_groups_that_share_ranks) == [[(0, [0, 1])]] * 2
