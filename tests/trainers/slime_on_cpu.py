"""One Megatron rank of slime or miles on the CPU: their own sender, iterator, conversion and engine actor.

Stand-ins: Megatron (its groups, and a model whose parameters have Megatron's names and shards), Ray, and the calls that
need a GPU. The sources come from the folders in SLIME_SOURCE and MILES_SOURCE.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from integration.models import new_model

RANKS = 2
PADDING = 256  # rows that Megatron adds to the vocabulary
ABSENT = ("megatron", "ray", "deep_ep", "sglang_router")

_trainers: dict[str, Trainer] = {}  # of this process


def source_of(name: str) -> str | None:
    """The folder of a trainer's sources, if the environment names it."""
    return os.environ.get(f"{name.upper()}_SOURCE")


# -- what the tests call, on both ranks ------------------------------------------------------------------------


def start(rank: int, name: str, folder: Path, url: str, adapter: bool, **options: Any) -> None:
    _trainers[name] = Trainer(rank, name, folder, url, adapter, options)


def update(rank: int, name: str, seed: int) -> str:
    """What a trainer does between two steps. Returns the engine's version."""
    return _trainers[name].cycle(seed)


def configure(rank: int, name: str, **arguments: Any) -> None:
    vars(_trainers[name].args).update(arguments)


class Trainer:
    """A tensor-parallel rank with a part of the model. Rank 0 has the GPU of an engine of one rank.

    Args:
        name: `slime` or `miles`.
        folder: The model's.
        url: The engine's.
        adapter: Whether to enable the adapter, as `--custom-megatron-init-path` does.
        options: Arguments of the trainer.
    """

    def __init__(self, rank: int, name: str, folder: Path, url: str, adapter: bool, options: dict[str, Any]) -> None:
        from transformers import AutoConfig

        self.rank, self.name, self.folder = rank, name, folder
        self.config = AutoConfig.from_pretrained(folder)
        self.args = arguments(self.config, options)
        sys.path.insert(0, str(source_of(name)))
        _stand_in_for_packages()
        updaters = importlib.import_module(f"{name}.backends.megatron_utils.update_weight.update_weight_from_tensor")
        _stand_in_for_groups(name, rank)
        if adapter:
            path = "rl_memory_plugins.integrations.slime.enable"
            importlib.import_module(f"{name}.utils.misc").load_function(path)(self.args)
        self.model = MegatronModel(self.config, rank)
        common = importlib.import_module(f"{name}.backends.megatron_utils.update_weight.common")
        more = {"is_lora": False} if name == "miles" else {}
        self.updater = updaters.UpdateWeightFromTensor(
            self.args,
            [self.model],
            weights_getter=lambda: dict(common.named_params_and_buffers(self.args, [self.model])),
            model_name=type(self.config).__name__.lower(),
            quantization_config=None,
            **more,
        )
        actors = importlib.import_module(f"{name}.backends.sglang_utils.sglang_engine")
        self.engine = actors.SGLangEngine(self.args, 0, base_gpu_id=0, num_gpus_per_engine=1)
        host, port = url.removeprefix("http://").split(":")
        vars(self.engine).update(server_host=host, server_port=int(port), node_rank=0)
        self.updater.connect_rollout_engines([Handle(self.engine)], None, engine_gpu_counts=[1], engine_gpu_offsets=[0])

    def cycle(self, seed: int) -> str:
        self.model.take(new_model(self.folder, seed))
        if self.rank == 0:
            self.engine.release_memory_occupation()
            self.engine.resume_memory_occupation(tags=["weights"])
        dist.barrier()
        self.updater.update_weights()
        dist.barrier()
        if self.rank == 0:
            self.engine.resume_memory_occupation(tags=["kv_cache", "cuda_graph"])
        return self.version()

    def version(self) -> str:
        import httpx

        if self.name == "miles":
            return str(self.engine.get_weight_version())
        # Its actor asks a route of slime's patched SGLang.
        return str(httpx.get(f"{self.engine.get_url()}/model_info").json()["weight_version"])


class Handle:
    """A Ray actor's handle. Its calls return at once what the method returns; `ray.get` here passes that on."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


# -- Megatron --------------------------------------------------------------------------------------------------


def arguments(config: Any, options: dict[str, Any]) -> SimpleNamespace:
    """The trainer's arguments, as far as a sync of a colocated engine reads them."""
    values = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": None,
        "vocab_size": config.vocab_size,
        "q_lora_rank": None,
        "num_experts": None,
        "swiglu": True,
        "update_weight_buffer_size": 1 << 20,  # several chunks
        "rollout_num_gpus_per_engine": 1,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": RANKS,
        "num_gpus_per_node": RANKS,
        "colocate": True,
        "offload_rollout": True,
        "sglang_pp_size": 1,
        "sglang_speculative_algorithm": None,
        "prefill_num_servers": None,
        "mtp_num_layers": None,
        "pause_generation_mode": "retract",
        "megatron_to_hf_mode": "raw",
        "custom_model_provider_path": None,
        "rollout_external": False,
    }
    return SimpleNamespace(**{**values, **options})


class MegatronModel(torch.nn.Module):
    """Qwen2 with the names, the fusions and the shards of Megatron's GPT model, in bfloat16."""

    def __init__(self, config: Any, rank: int) -> None:
        super().__init__()
        self.config, self._rank = config, rank
        self.take(None)

    def take(self, model: Any) -> None:
        """Take the weights of a model of `transformers`; `None` for zeros."""
        config = self.config
        if model is None:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_config(config)
        state = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
        for name, (tensor, dim) in _megatron(state, config).items():
            self._set(name, tensor if dim is None else tensor.chunk(RANKS, dim)[self._rank].contiguous(), dim)

    def _set(self, name: str, tensor: torch.Tensor, dim: int | None) -> None:
        module: torch.nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        if last not in module._parameters:
            parameter = torch.nn.Parameter(torch.empty_like(tensor), requires_grad=False)
            parameter.tensor_model_parallel = dim is not None  # type: ignore[attr-defined]
            parameter.partition_dim = -1 if dim is None else dim  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]
            module.register_parameter(last, parameter)
        module._parameters[last].data.copy_(tensor)  # type: ignore[union-attr]


def _megatron(state: dict[str, torch.Tensor], config: Any) -> dict[str, tuple[torch.Tensor, int | None]]:
    """By Megatron's name: the whole parameter, and the dimension in which ranks share it."""
    groups = config.num_key_value_heads

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, torch.full((PADDING, tensor.shape[1]), 7.0, dtype=tensor.dtype)])

    def fused_qkv(layer: str, kind: str) -> torch.Tensor:
        parts = [state[f"{layer}.self_attn.{which}_proj.{kind}"] for which in "qkv"]
        grouped = [part.view(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).flatten(0, 1)

    def fused_mlp(layer: str) -> torch.Tensor:
        gate, up = (state[f"{layer}.mlp.{which}_proj.weight"].chunk(RANKS) for which in ("gate", "up"))
        return torch.cat([part for pair in zip(gate, up, strict=True) for part in pair])

    made = {
        "module.embedding.word_embeddings.weight": (padded(state["model.embed_tokens.weight"]), 0),
        "module.decoder.final_layernorm.weight": (state["model.norm.weight"], None),
        "module.output_layer.weight": (padded(state["lm_head.weight"]), 0),
    }
    for number in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{number}", f"module.decoder.layers.{number}"
        made |= {
            f"{ours}.self_attention.linear_qkv.weight": (fused_qkv(theirs, "weight"), 0),
            f"{ours}.self_attention.linear_qkv.bias": (fused_qkv(theirs, "bias"), 0),
            f"{ours}.self_attention.linear_qkv.layer_norm_weight": (state[f"{theirs}.input_layernorm.weight"], None),
            f"{ours}.self_attention.linear_proj.weight": (state[f"{theirs}.self_attn.o_proj.weight"], 1),
            f"{ours}.mlp.linear_fc1.weight": (fused_mlp(theirs), 0),
            f"{ours}.mlp.linear_fc1.layer_norm_weight": (state[f"{theirs}.post_attention_layernorm.weight"], None),
            f"{ours}.mlp.linear_fc2.weight": (state[f"{theirs}.mlp.down_proj.weight"], 1),
        }
    return made


# -- stand-ins -------------------------------------------------------------------------------------------------


class _Anything(ModuleType):
    """A package that is not installed. Every name that it has not is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Absent(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _stand_in_for_packages() -> None:
    """Megatron's groups are set here and not later: slime's modules import the functions' module by its name."""
    sys.meta_path.insert(0, _Absent())
    torch.multiprocessing.set_sharing_strategy("file_system")  # the other one needs a common ancestor's secret
    core = importlib.import_module("megatron.core")
    layers = importlib.import_module("megatron.core.transformer.transformer_layer")
    sizes = {"pipeline_model_parallel": 1, "expert_model_parallel": 1, "expert_tensor_parallel": 1}
    sizes |= {"tensor_model_parallel": RANKS, "data_parallel": 1}
    core.mpu = SimpleNamespace(  # type: ignore[attr-defined]
        **{f"get_{kind}_world_size": functools.partial(int, size) for kind, size in sizes.items()},
        get_expert_model_parallel_rank=lambda: 0,
        get_tensor_model_parallel_group=lambda: dist.group.WORLD,
    )
    layers.get_transformer_layer_offset = lambda config: 0  # type: ignore[attr-defined]
    ray: Any = importlib.import_module("ray")
    ray.get = lambda answers: answers
    ray._private = SimpleNamespace(services=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"))


def _stand_in_for_groups(name: str, rank: int) -> None:
    """The groups that both trainers make before they make their sender, and no GPU."""
    importlib.import_module(f"{name}.utils.distributed_utils").init_gloo_group()
    iterators: Any = importlib.import_module(f"{name}.backends.megatron_utils.update_weight.hf_weight_iterator_direct")
    iterators.monkey_patch_torch_reductions = lambda: None  # SGLang's patch for CUDA's handles breaks host memory's
    if name == "slime":
        accelerator: Any = importlib.import_module("slime.utils.accelerator")
        accelerator.current_device = lambda: "cpu"
        for call in ("synchronize", "ipc_collect", "empty_cache"):
            setattr(accelerator, call, lambda *_: None)
        return
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    for call in ("synchronize", "ipc_collect", "empty_cache"):
        setattr(torch.cuda, call, lambda *_: None)
    parallel = importlib.import_module("miles.backends.training_utils.parallel")
    alone, both = (SimpleNamespace(rank=r, size=s, group=dist.group.WORLD) for r, s in ((0, 1), (rank, RANKS)))
    kinds = ("intra_dp", "intra_dp_cp", "cp", "pp", "ep", "etp", "indep_dp")
    parallel.set_parallel_state(parallel.ParallelState(tp=both, **dict.fromkeys(kinds, alone)))
