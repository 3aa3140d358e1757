"""A tiny random checkpoint whose tokens are the 256 bytes, so that it can write any text: JSON for instance."""

from __future__ import annotations

from pathlib import Path

from tiny_models import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS_ID = 0  # the byte 0, which no text of ours holds


def byte_llama(path: Path, *, num_modules: int = 3) -> Path:
    """Llama with MTP modules, a tokenizer of bytes with a chat template, and an end token."""
    tiny_llama(path, num_modules=num_modules, vocab_size=256, eos_token_id=EOS_ID, max_position_embeddings=1024)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}:"
    tokenizer.save_pretrained(path)
    return path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the byte i."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # the others stand further up in order
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
