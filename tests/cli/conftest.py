"""What the commands are tried on: a tiny model whose tokens are words, and prompts for it."""

from __future__ import annotations

import json

import pytest
from tiny_models import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("model"), num_modules=3, eos_token_id=17, tokenizer=True))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    texts = ["w1 w2 w3", "w9", "w4 w5 w6 w7 w8", "w11 w12"]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return str(file)
