"""The kinds: what each checkpoint is, and how the engines are started on it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from integration.kinds.checkpoints import COMMON, VOCABULARY, Write, of, with_file, with_mtp, with_nextn_layer
from integration.kinds.quantised import as_sent, awq, block_fp8, channel_fp8, fp8, fp8_cache, gptq
from integration.kinds.ways import STREAM, WAYS
from tests import weight_kinds
from tests.vllm.test_images import write_vision_model


class Kind(NamedTuple):
    write: Write
    dtype: str = "float32"
    module: bool = False  # what is sent is made of transformers' model in memory, and is not the tensors of the file
    task: str = "generate"  # or "embed", "classify", "image", "words"
    adapter: bool = False  # requests use a LoRA adapter
    tp: int = 1
    ways: tuple[str, ...] = WAYS
    vllm: Mapping[str, Any] = MappingProxyType({})  # options of the engine
    sglang: Mapping[str, Any] = MappingProxyType({})


BF16 = "bfloat16"
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "added": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
}
DELTA = {  # of GPUs' kernels some take heads of 128 only
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
    "added": {"full_attention_interval": 2},
}
QWEN3_NEXT = of("Qwen3NextConfig", **{**MOE, **DELTA, "shared_expert_intermediate_size": 128})
#: Half-width vocabularies of two ranks are padded.
ODD_VOCABULARY = VOCABULARY - 23

GLM = of(
    "Glm4MoeConfig",
    intermediate_size=512,
    head_dim=64,
    moe_intermediate_size=128,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    kept_float32="e_score_correction_bias",
)
QUANTISED = of("LlamaConfig", intermediate_size=512)
WIDE = of("Qwen3Config", intermediate_size=512, head_dim=128)  # on two ranks each part has whole blocks
EXPERTS = of("Qwen3MoeConfig", intermediate_size=512, **MOE)
VLLM_FP8_CACHE = {"kv_cache_dtype": "fp8"}
SGLANG_FP8_CACHE = {"kv_cache_dtype": "fp8_e4m3"}

KINDS = {
    "dense": Kind(of("Qwen2Config", intermediate_size=512)),
    "dense tied": Kind(of("Qwen3Config", intermediate_size=512, head_dim=64, tie_word_embeddings=True)),
    "dense bf16": Kind(of("LlamaConfig", intermediate_size=512), BF16),
    "dense, layers in host memory": Kind(
        of("LlamaConfig", intermediate_size=512), BF16, vllm={"cpu_offload_gb": 1}, sglang={"cpu_offload_gb": 1}
    ),
    "dense, two ranks, padded vocabulary": Kind(
        of("LlamaConfig", intermediate_size=512, vocab_size=ODD_VOCABULARY), tp=2
    ),
    "Phi-3 (fused projections on disk)": Kind(of("Phi3Config", intermediate_size=512)),
    "OLMo-2": Kind(of("Olmo2Config", intermediate_size=512)),
    "Gemma 2": Kind(
        of(
            "Gemma2Config",
            intermediate_size=512,
            head_dim=64,
            tie_word_embeddings=True,
            added={"hidden_act": "gelu_pytorch_tanh"},
        )
    ),
    "Gemma 3 (sliding window)": Kind(
        of(
            "Gemma3TextConfig",
            model_class="Gemma3ForCausalLM",
            intermediate_size=512,
            head_dim=64,
            sliding_window=64,
            tie_word_embeddings=True,
        )
    ),
    "GLM-4": Kind(of("Glm4Config", intermediate_size=512, head_dim=64)),
    "Mistral fp16": Kind(of("MistralConfig", intermediate_size=512, head_dim=64), "float16"),
    "Granite": Kind(of("GraniteConfig", intermediate_size=512)),
    "StarCoder2": Kind(of("Starcoder2Config", intermediate_size=512)),
    "StableLM": Kind(of("StableLmConfig", intermediate_size=512)),
    "Cohere 2": Kind(
        of("Cohere2Config", intermediate_size=512, head_dim=64, sliding_window=64, tie_word_embeddings=True),
        sglang={"attention_backend": "torch_native"},  # Triton's does not know this model's windows
    ),
    "EXAONE 4": Kind(
        of("Exaone4Config", intermediate_size=512, sliding_window=None, added={"sliding_window_pattern": None})
    ),
    "GPT-2 (transposed on disk)": Kind(
        of(
            "GPT2Config",
            n_positions=1024,
            n_embd=256,
            n_layer=2,
            n_head=4,
            num_key_value_heads=None,
            tie_word_embeddings=True,
        )
    ),
    "OPT": Kind(
        of("OPTConfig", ffn_dim=512, word_embed_proj_dim=256, num_key_value_heads=None, tie_word_embeddings=True)
    ),
    "OLMoE": Kind(
        of("OlmoeConfig", intermediate_size=128, num_experts=8, num_experts_per_tok=2, num_key_value_heads=4)
    ),
    "Qwen2-MoE (shared expert)": Kind(
        of("Qwen2MoeConfig", intermediate_size=512, **{**MOE, "shared_expert_intermediate_size": 128, "head_dim": None})
    ),
    "ERNIE 4.5 MoE": Kind(
        of(
            "Ernie4_5_MoeConfig",
            intermediate_size=512,
            moe_intermediate_size=128,
            moe_num_experts=8,
            moe_k=2,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
        )
    ),
    "Mixtral": Kind(of("MixtralConfig", intermediate_size=128, num_local_experts=8)),
    "Qwen3-MoE by expert": Kind(of("Qwen3MoeConfig", intermediate_size=512, **MOE)),
    "Qwen3-MoE fused": Kind(of("Qwen3MoeConfig", intermediate_size=512, **MOE), module=True, ways=(STREAM,)),
    "Qwen3-MoE, two ranks": Kind(of("Qwen3MoeConfig", intermediate_size=512, **MOE), tp=2),
    "GLM-4-MoE": Kind(GLM, BF16),
    "GLM-4-MoE that speculates with its MTP layer": Kind(
        with_nextn_layer(GLM),
        vllm={"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}},
        sglang={
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 1,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 2,
        },
    ),
    "DeepSeek-V3": Kind(
        of("DeepseekV3Config", intermediate_size=512, kept_float32="e_score_correction_bias", **LATENT), BF16
    ),
    "DeepSeek-V3 with its MTP layer on disk": Kind(
        with_nextn_layer(of("DeepseekV3Config", intermediate_size=512, **LATENT))
    ),
    "gpt-oss": Kind(
        of(
            "GptOssConfig",
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=128,
            head_dim=64,
            sliding_window=64,
            initial_context_length=256,
        ),
        BF16,
    ),
    "Qwen3-Next": Kind(QWEN3_NEXT, BF16),
    "Qwen3-Next with its MTP layer on disk": Kind(with_mtp(QWEN3_NEXT), BF16),
    "Qwen3.5 text": Kind(
        of("Qwen3_5TextConfig", model_class="Qwen3_5ForCausalLM", intermediate_size=512, **DELTA), BF16
    ),
    "Jamba (Mamba and attention)": Kind(
        of(
            "JambaConfig",
            intermediate_size=512,
            num_experts=1,
            num_experts_per_tok=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=16,
            use_mamba_kernels=False,
        )
    ),
    "Falcon-H1 (Mamba 2 beside attention)": Kind(
        of(
            "FalconH1Config",
            intermediate_size=512,
            head_dim=64,
            mamba_n_heads=8,
            mamba_d_head=64,
            mamba_d_ssm=512,
            mamba_n_groups=1,
            mamba_d_state=64,
        )
    ),
    "Granite 4 hybrid": Kind(
        of(
            "GraniteMoeHybridConfig",
            intermediate_size=128,
            shared_intermediate_size=128,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["mamba", "attention"],
            mamba_n_heads=8,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=64,
            mamba_expand=2,
        )
    ),
    "Mamba 2": Kind(
        of(
            "Mamba2Config",
            state_size=64,
            num_heads=8,
            head_dim=64,
            n_groups=1,
            num_attention_heads=None,
            num_key_value_heads=None,
            added={"intermediate_size": 512, "rms_norm": True},
        )
    ),
    "BLIP-2 (an image in the prompt)": Kind(write_vision_model, task="image", vllm={"max_model_len": 256}),
    "BLIP-2 that serves text": Kind(
        write_vision_model, task="words", vllm={"max_model_len": 256, "limit_mm_per_prompt": {"image": 0}}
    ),
    "BLIP-2 that serves text, from its module": Kind(
        write_vision_model,
        task="words",
        vllm={"max_model_len": 256, "limit_mm_per_prompt": {"image": 0}},
        module=True,
        ways=(STREAM,),
    ),
    "Qwen2.5-VL": Kind(
        with_file(
            of(
                "Qwen2_5_VLConfig",
                model_class="Qwen2_5_VLForConditionalGeneration",
                text_config={
                    **COMMON,
                    "intermediate_size": 512,
                    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
                },
                vision_config={
                    "depth": 2,
                    "hidden_size": 128,
                    "intermediate_size": 256,
                    "num_heads": 4,
                    "out_hidden_size": 256,
                    "fullatt_block_indexes": [1],
                },
                **dict.fromkeys(COMMON),
            ),
            "preprocessor_config.json",
            image_processor_type="Qwen2VLImageProcessor",
            processor_class="Qwen2_5_VLProcessor",
        ),
        vllm={"limit_mm_per_prompt": {"image": 0, "video": 0}},
        sglang={"mm_attention_backend": "sdpa"},
    ),
    "embeddings (Qwen3)": Kind(
        of("Qwen3Config", model_class="AutoModel", intermediate_size=512, head_dim=64), task="embed"
    ),
    "embeddings of a causal model": Kind(
        of("Qwen3Config", intermediate_size=512, head_dim=64), task="embed", vllm={"convert": "embed"}
    ),
    "reward (sequence classification)": Kind(
        # SGLang's head has a bias that no checkpoint has. On a GPU its numbers differ in each process.
        of("Qwen2Config", model_class="Qwen2ForSequenceClassification", intermediate_size=512, num_labels=3),
        task="classify",
    ),
    "reward (Llama, whose head has no bias)": Kind(
        of("LlamaConfig", model_class="LlamaForSequenceClassification", intermediate_size=512, num_labels=3),
        task="classify",
    ),
    "BERT embeddings": Kind(
        of(
            "BertConfig",
            model_class="BertModel",
            intermediate_size=512,
            added={"position_embedding_type": "absolute"},
            **dict.fromkeys(["num_key_value_heads", "bos_token_id", "eos_token_id", "tie_word_embeddings"]),
        ),
        task="embed",
    ),
    "LoRA adapter over updated weights": Kind(
        of("LlamaConfig", intermediate_size=512), adapter=True, vllm={"enable_lora": True, "max_lora_rank": 8}
    ),
    "int8 W8A8 (compressed-tensors)": Kind(weight_kinds.write_int8, BF16),
    "int4 WNA16 (compressed-tensors)": Kind(weight_kinds.write_int4, BF16),
    "GPTQ int4": Kind(gptq(QUANTISED), BF16),
    "AWQ int4": Kind(awq(QUANTISED), "float16"),
    "FP8 per tensor": Kind(fp8(QUANTISED), BF16),
    "FP8 in blocks": Kind(block_fp8(of("Qwen3Config", intermediate_size=512, head_dim=64)), BF16),
    "FP8 in blocks, two ranks": Kind(block_fp8(WIDE), BF16, tp=2),
    "FP8 per channel (compressed-tensors)": Kind(channel_fp8(QUANTISED), BF16),
    "FP8 KV cache with scales": Kind(fp8_cache(QUANTISED), BF16, vllm=VLLM_FP8_CACHE, sglang=SGLANG_FP8_CACHE),
    "FP8 per tensor, FP8 KV cache with scales": Kind(
        fp8_cache(fp8(QUANTISED)), BF16, vllm=VLLM_FP8_CACHE, sglang=SGLANG_FP8_CACHE
    ),
    "FP8 in blocks, from a module in 16 bits": Kind(as_sent(block_fp8, WIDE), BF16, module=True, ways=(STREAM,)),
    "GPTQ int4, from a module in 16 bits": Kind(as_sent(gptq, QUANTISED), BF16, module=True, ways=(STREAM,)),
    "FP8 per tensor, experts": Kind(fp8(EXPERTS), BF16),
    "FP8 in blocks, experts": Kind(block_fp8(EXPERTS), BF16),
    "int4 WNA16, experts": Kind(
        weight_kinds.write_int4_experts,
        BF16,
        sglang={"moe_runner_backend": "triton"},  # Marlin's kernels are compiled at first use, which takes many minutes
    ),
    "FP8 that the engine makes, experts": Kind(
        EXPERTS, BF16, vllm={"quantization": "fp8"}, sglang={"quantization": "fp8"}
    ),
    "FP8 that the engine makes": Kind(QUANTISED, BF16, vllm={"quantization": "fp8"}, sglang={"quantization": "fp8"}),
}

#: A third, for every change: of each sort of loader the kind that has found most, on an engine that can run it on the
#: CPU.
CHOSEN = {
    "vllm": (
        "dense, two ranks, padded vocabulary",
        "GPT-2 (transposed on disk)",
        "Gemma 3 (sliding window)",
        "Qwen3-MoE fused",
        "GLM-4-MoE that speculates with its MTP layer",
        "gpt-oss",
        "DeepSeek-V3 with its MTP layer on disk",
        "Qwen3-Next with its MTP layer on disk",
        "Granite 4 hybrid",
        "BLIP-2 that serves text",
        "reward (sequence classification)",
        "GPTQ int4",
        "FP8 per channel (compressed-tensors)",
        "FP8 KV cache with scales",
    ),
    "sglang": (
        "dense tied",
        "GLM-4",
        "Phi-3 (fused projections on disk)",
        "Qwen3-MoE fused",
        "embeddings of a causal model",
        "FP8 that the engine makes",
        "LoRA adapter over updated weights",
        "int4 WNA16 (compressed-tensors)",
        "GPTQ int4, from a module in 16 bits",
    ),
}
