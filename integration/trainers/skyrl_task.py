"""The task of `integration.grpo` for SkyRL: each token is a letter, and the reward is the share of a prompt's class.

Beside a Qwen's configuration `transformers` takes Qwen's tokenizer, which reads letters and no words.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from integration import grpo
from integration.models import SHAPES, write_model

NAME = "letters"
LETTERS = string.ascii_letters + string.digits
FIRST = 2  # the tokens before the letters are special
SPARE = 6  # for those that Qwen's tokenizer adds
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Letters(BaseTextEnv):  # type: ignore[misc]
    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        self._prompt = extras["reward_spec"]["ground_truth"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        answer = [FIRST + LETTERS.index(letter) for letter in action if letter in LETTERS]
        reward = grpo.reward([self._prompt], answer) if answer else 0.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


def register() -> None:
    """Let this process's `skyrl_gym` know the task."""
    import skyrl_gym

    skyrl_gym.register(id=NAME, entry_point=f"{__name__}:{Letters.__name__}")


def write_task(folder: Path, prompts: int, seed: int) -> tuple[Path, Path]:
    """Returns the folder of a new model with its tokenizer, and the file of its prompts."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    shape = SHAPES["tiny"]._replace(vocabulary=FIRST + len(LETTERS) + SPARE)
    model = write_model(folder / "model", shape, seed=seed)
    vocabulary = {"<unk>": 0, "<eos>": 1} | {letter: FIRST + index for index, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(model / "tokenizer.json"))
    special = {
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": "<unk>",
        "eos_token": "<eos>",
        "chat_template": TEMPLATE,
    }
    (model / "tokenizer_config.json").write_text(json.dumps(special))
    made = grpo.make_prompts(prompts, torch.Generator().manual_seed(seed))
    file = folder / "prompts.jsonl"
    with file.open("w") as opened:
        for prompt in made:
            content = "".join(LETTERS[max(token, FIRST) - FIRST] for token in prompt)
            row = {
                "prompt": [{"role": "user", "content": content}],
                "env_class": NAME,
                "reward_spec": {"method": "rule", "ground_truth": prompt[0]},
            }
            opened.write(json.dumps(row) + "\n")
    return model, file
