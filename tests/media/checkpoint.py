"""A tiny multimodal Inkling with all that stands in front of it: tokenizer, chat template, processor."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
from families.checkpoints_inkling import tiny_inkling
from media.torchvision_operators import skip_without_media
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

IMAGE, AUDIO = "<|image|>", "<|audio|>"
IMAGE_BOS, AUDIO_BOS = "<|image begins|>", "<|audio begins|>"
IMAGE_ID, AUDIO_ID = 71, 70
RATE = 16_000
LETTERS = string.ascii_letters + string.digits + " .:,?!"
"""68 of them, one token each; ids from 68 on are the special tokens."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}{IMAGE_BOS}{IMAGE}"
    f"{{% elif part['type'] == 'audio' %}}{AUDIO_BOS}{AUDIO}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %} {% endfor %}"
    "{{ suffix }}{% if add_generation_prompt %}a:{% endif %}"
)


def tiny_multimodal(path: Path, **options: Any) -> Path:
    """The checkpoint, with modules inside it; options: of `tiny_inkling`. Returns `path`."""
    tiny_inkling(path, layout="multimodal", unpadded_vocab_size=len(LETTERS) + 4, **options)
    save_processor(path)
    return path


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter, and the four that the configuration names."""
    assert len(LETTERS) == 68
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(LETTERS)}, merges=[]))
    backend.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    found.add_special_tokens({"additional_special_tokens": [AUDIO_BOS, IMAGE_BOS, AUDIO, IMAGE]})
    found.chat_template = CHAT_TEMPLATE
    return found


def save_processor(path: Path) -> None:
    """Tokenizer, template and processor; patches of 4 x 4 pixels, 4 mel bins, 20 tokens for a second of sound."""
    skip_without_media()
    from transformers.models.inkling.feature_extraction_inkling import InklingFeatureExtractor
    from transformers.models.inkling.image_processing_inkling import InklingImageProcessor
    from transformers.models.inkling.processing_inkling import InklingProcessor

    processor: Any = InklingProcessor(
        InklingFeatureExtractor(feature_size=4, sampling_rate=RATE),  # type: ignore[no-untyped-call]
        InklingImageProcessor(size={"height": 4, "width": 4}),
        tokenizer(),
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
        audio_token=AUDIO,
        image_bos_token=IMAGE_BOS,
        audio_bos_token=AUDIO_BOS,
        num_dmel_bins=8,
    )
    processor.save_pretrained(path)


def picture(width: int = 9, height: int = 6, seed: int = 0) -> Image.Image:
    """Pixels of noise."""
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def sound(seconds: float = 0.2, rate: int = RATE, seed: int = 0) -> NDArray[np.float32]:
    """Samples of noise, one channel."""
    generator = np.random.default_rng(seed)
    return generator.uniform(-0.5, 0.5, round(seconds * rate)).astype(np.float32)
