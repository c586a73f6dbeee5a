"""Group-relative policy optimisation of a small model on a task with a verifiable reward.

The task: each token belongs to one of `CLASSES` classes by its number. A prompt shows tokens of one class. The reward
of an answer is the share of its tokens from that class. A model that ignores its prompt earns 1 / CLASSES.
"""

from __future__ import annotations

from typing import Any

import torch

CLASSES = 4
VOCABULARY = 64  # few enough that the engine tries every token often
PROMPT_TOKENS, ANSWER_TOKENS = 4, 8
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
EPOCHS = 2  # over each batch; before the second one the policy has changed
WARM_UP_STEPS = 3


def make_prompts(count: int, generator: torch.Generator) -> list[list[int]]:
    """Prompts of all classes in turn, without the special tokens 0 and 1."""
    members = torch.randint(1, VOCABULARY // CLASSES, (count, PROMPT_TOKENS), generator=generator)
    classes = torch.arange(count)[:, None] % CLASSES
    return (members * CLASSES + classes).tolist()


def reward(prompt: list[int], answer: list[int]) -> float:
    """The reward of an answer, in [0, 1]."""
    return sum(token % CLASSES == prompt[0] % CLASSES for token in answer) / len(answer)


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards relative to their group: float32, [groups, answers of each]."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


class Policy:
    """The model that is trained, and its optimiser.

    Args:
        model: A causal language model of `transformers`, in float32.
        device: The device that the model moves to.
    """

    def __init__(self, model: Any, device: str) -> None:
        self.device = torch.device(device)
        self.model = model.to(self.device)
        rate = 0.2 / self.model.config.hidden_size  # a wider model takes smaller steps
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1 / WARM_UP_STEPS, 1.0, WARM_UP_STEPS)

    def train(self, prompts: list[list[int]], answers: list[list[list[int]]]) -> torch.Tensor:
        """One step on a group of answers to each prompt.

        Returns: the log-probabilities of the answers' tokens under the policy before the step, float32, on the CPU,
        [groups, answers, tokens].
        """
        groups, each = len(answers), len(answers[0])
        rewards = torch.tensor([[reward(p, a) for a in group] for p, group in zip(prompts, answers, strict=True)])
        relative = advantages(rewards).view(-1, 1).to(self.device)
        ids = torch.tensor([[*p, *a] for p, group in zip(prompts, answers, strict=True) for a in group])
        ids = ids.to(self.device)
        with torch.no_grad():
            before = self._log_probabilities(ids)
        for _ in range(EPOCHS):
            ratio = (self._log_probabilities(ids) - before).exp()
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            loss = -torch.minimum(ratio * relative, clipped * relative).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._schedule.step()
        return before.view(groups, each, ANSWER_TOKENS).cpu()

    def _log_probabilities(self, ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the answers' tokens: [sequences, tokens]."""
        logits: Any = self.model(ids, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1]
        chosen = ids[:, PROMPT_TOKENS:, None]
        return torch.log_softmax(logits.float(), -1).gather(-1, chosen).squeeze(-1)
