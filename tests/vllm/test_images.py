"""Embeddings of images in vLLM's cache are those of former weights after a load that no call announces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

SIZE, PATCH, HIDDEN, QUERIES = 28, 14, 128, 4


def write_vision_model(folder: Path, seed: int = 0, dtype: str = "float32") -> Path:
    """A small vision model with random weights, and a processor for it. It needs no torchvision."""
    import tokenizers
    import torch
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        OPTConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    words = {"<s>": 0, "</s>": 1, "<pad>": 2, "<image>": 3, **{f"w{one}": one for one in range(4, 256)}}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w4"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )
    pixels = BlipImageProcessorPil(size={"height": SIZE, "width": SIZE})
    Blip2Processor(pixels, tokenizer, num_query_tokens=QUERIES).save_pretrained(folder)
    shape = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**shape, intermediate_size=128, image_size=SIZE, patch_size=PATCH),
        qformer_config=Blip2QFormerConfig(
            **shape, intermediate_size=128, vocab_size=256, encoder_hidden_size=HIDDEN, cross_attention_frequency=1
        ),
        text_config=OPTConfig(
            **shape, ffn_dim=128, vocab_size=256, max_position_embeddings=512, word_embed_proj_dim=HIDDEN
        ),
        num_query_tokens=QUERIES,
        image_token_index=3,
    )
    torch.manual_seed(seed)
    model = Blip2ForConditionalGeneration(config).to(getattr(torch, dtype))
    for parameter in model.parameters():  # far apart, so that each weight shows in the answer
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


SCRIPT = """
    import sys
    import numpy, torch
    from PIL import Image
    from safetensors.torch import load_file
    from vllm import SamplingParams
    from rl_memory_plugins.vllm import LLM

    folder = sys.argv[1]
    llm = LLM(folder, dtype="float32", max_model_len=256, max_num_seqs=2, enforce_eager=True, rl_memory=True,
              kv_cache_memory_bytes=64 << 20, limit_mm_per_prompt={"image": 1})
    image = Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (28, 28, 3), numpy.uint8))

    def served(text, name):
        # the log-probabilities of the most likely first tokens
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20)
        request = {"prompt": text, "multi_modal_data": {"image": image}, "multi_modal_uuids": {"image": name}}
        (found,) = llm.generate([request], params, use_tqdm=False)[0].outputs[0].logprobs
        return torch.tensor([found[token].logprob for token in sorted(found)])

    def are_equal(some, others):
        return some.shape == others.shape and torch.allclose(some, others, atol=1e-3)

    before = served("w9 w10", "first")
    assert are_equal(before, served("w9 w10", "second")), "the name of an image shows in the answer"
    weights = load_file(folder + "/model.safetensors")
    generator = torch.manual_seed(1)
    for name in [name for name in weights if "vision_model" in name]:
        weights[name] = torch.randn(weights[name].shape, generator=generator)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    worker.model_runner.model.load_weights(weights.items())
    after = served("w9 w10", "first")
    assert are_equal(after, served("w9 w10", "third")), "the embedding of the former weights"
    assert not are_equal(after, before), "the weights of the tower do not show in the answer"
    print("done")
"""


def test_image_embeddings_do_not_outlive_a_load(forked_python: Callable[..., str], tmp_path: Path) -> None:
    """Stock: the image is looked up by its name, and its embedding is that of the former vision tower (trl#7198)."""
    folder = write_vision_model(tmp_path / "model")
    assert forked_python(SCRIPT, str(folder), VLLM_ENABLE_V1_MULTIPROCESSING="0").endswith("done\n")
