"""A tiny Llama that has learnt a toy language: each token follows from the two before it, mostly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_llama
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

NUM_TOKENS = 12
_STEPS, _BATCH, _LENGTH = 250, 24, 32
_CHANCES = (0.8, 0.15, 0.05)


def write_toy_target(path: Path) -> Path:
    """Train it, which takes seconds, and write it with a tokenizer that has no chat template's worth of text."""
    tiny_llama(path, num_modules=0, hidden_size=48, vocab_size=NUM_TOKENS, eos_token_id=None, seed=1)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=_STEPS)
    chance = random.Random(0)
    followers = {(a, b): chance.sample(range(NUM_TOKENS), 3) for a in range(NUM_TOKENS) for b in range(NUM_TOKENS)}
    for _ in range(_STEPS):
        texts = torch.tensor([_text(followers, chance) for _ in range(_BATCH)])
        loss = F.cross_entropy(model(texts).logits[:, 1:-1].flatten(0, 1), texts[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    model.save_pretrained(path)
    return path


def _text(followers: dict[tuple[int, int], list[int]], chance: random.Random) -> list[int]:
    text = [chance.randrange(NUM_TOKENS), chance.randrange(NUM_TOKENS)]
    while len(text) < _LENGTH:
        text += chance.choices(followers[text[-2], text[-1]], _CHANCES)
    return text
