"""Inkling over prompts that show images and sound: the whole contract, every third token of a prompt being shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families.case import FamilyModel, load
from families.checkpoints_inkling import tiny_inkling
from families.contract import FamilyCase, FamilyContract, run
from families.shown_media import AUDIO_TOKEN, IMAGE_TOKEN, audio, image, inputs_of, prompts_of_row_ids, row_id
from families.test_inkling import PUBLISHED, InklingReference
from scripted import finish
from torch import Tensor
from transformers.cache_utils import MtpCache

from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.errors import RequestError
from foredraft.media import FIRST_MEDIA_ID, Media, MediaKind
from foredraft.sampling_params import SamplingParams

build_multimodal = partial(tiny_inkling, layout="multimodal", rel_extent=40)


class MediaReference(InklingReference):
    """transformers' own merging of what is shown; every module reads the merged embeddings, as far on as its depth."""

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        logits: Tensor = self.target(**inputs_of(token_ids)).logits[0]
        return logits

    def _draft_logits(self, token_ids: Sequence[int], draft_token_ids: Sequence[int], run: Any) -> Tensor:
        ids = [*token_ids, *draft_token_ids]
        model: Any = self.target.model
        merged = self._embeddings(ids)
        hidden: Tensor = model(**inputs_of(token_ids[:-1])).last_hidden_state
        cache = MtpCache(config=self.mtp.config)
        logits = []
        for module in range(len(draft_token_ids)):
            first = module + 1
            hidden = run(module, hidden, cache, merged[:, first : first + hidden.shape[1]])
            logits.append(self.mtp._project_to_logits(hidden[:, -1:])[0, 0])
        return torch.stack(logits)

    def _embeddings(self, ids: Sequence[int]) -> Tensor:
        """[1, N, hidden_size]: of tokens as the modules embed them, and of what is shown as the towers do."""
        inputs, model = inputs_of(ids), self.target.model
        merged: Tensor = self.mtp.embed_tokens(inputs["input_ids"])
        if "pixel_values" in inputs:
            merged[inputs["input_ids"] == IMAGE_TOKEN] = model.vision_tower(inputs["pixel_values"]).pooler_output[:, 0]
        if "audio_input_ids" in inputs:
            frames = model.audio_tower(inputs["audio_input_ids"]).last_hidden_state
            merged[inputs["input_ids"] == AUDIO_TOKEN] = frames[:, 0]
        return merged

    def _forward(self, module: int, hidden: Tensor, cache: MtpCache, tokens: Tensor, first_row: int) -> Tensor:
        first = first_row + module + 1
        positions = torch.arange(first, first + hidden.shape[1])[None]
        output: Tensor = self.mtp.forward_layer(module, hidden, positions, cache, inputs_embeds=tokens)
        return output


class TestShown(FamilyContract):
    """Images and sound between the tokens, at chunk boundaries, under the modules' windows, behind prefix hits."""

    case = FamilyCase(
        "inkling_media",
        build_multimodal,
        num_modules=8,
        depths=(3, 8),
        reference=MediaReference,
        module_prefix="model.mtp.layers.{}.".format,
        aliases=PUBLISHED,
        target_aliases=PUBLISHED,
        row_id=row_id,
    )

    @pytest.fixture(autouse=True)
    def prompts(self) -> Iterator[None]:
        with prompts_of_row_ids():
            yield

    def test_prompts_do_show_something(self, model: FamilyModel) -> None:
        assert any(one >= FIRST_MEDIA_ID for one in model.prompt(17))
        assert any(one < FIRST_MEDIA_ID for one in model.prompt(17))
        reference = model.reference
        assert isinstance(reference, MediaReference)
        token_ids, drafts = model.prompt(26), [3, 1, 4, 1, 5, 9, 2, 6]
        at_once, by_row = (
            run(token_ids, drafts) for run in (reference.draft_logits, reference.draft_logits_row_by_row)
        )
        assert float((at_once - by_row).abs().max()) <= 1e-5 * float(by_row.abs().max())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_multimodal(tmp_path_factory.mktemp("shown") / "model")


def engine_of(directory: Path, **settings: Any) -> Engine:
    room = {"block_size": 4, "num_blocks": 128, "max_num_seqs": 3, "max_model_len": 96, "num_speculative_tokens": 8}
    return build_engine(load(directory), EngineConfig(**(room | settings)))


def prompt_of(*parts: int | Media) -> tuple[list[int], list[Media]]:
    """Tokens, and placeholders for what is shown between them."""
    token_ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
        else:
            token_ids += [IMAGE_TOKEN if part.kind.value == "image" else AUDIO_TOKEN] * part.num_tokens
    return token_ids, [part for part in parts if isinstance(part, Media)]


def serve(engine: Engine, prompt: tuple[list[int], list[Media]], name: str = "r", **options: Any) -> Any:
    params = SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | options))
    request = engine.add_request(name, prompt[0], params, media=prompt[1])
    finish(engine)
    return request


@pytest.mark.parametrize("chunk", [9, 16, 1024])
@pytest.mark.parametrize("depth", [0, 1, 8])
def test_long_spans_in_chunks(directory: Path, chunk: int, depth: int) -> None:
    """Spans over several chunks and blocks; the greedy continuation is transformers' own."""
    prompt = prompt_of(1, image(7, 13), 2, audio(8, 11), image(9, 6), 3)
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": chunk, "num_speculative_tokens": depth}
    request = serve(engine_of(directory, **limits), prompt)
    reference = MediaReference(directory, 8)
    inputs = {
        "pixel_values": torch.cat(
            [one.features["pixel_values"] for one in prompt[1] if "pixel_values" in one.features]
        ),
        "audio_input_ids": prompt[1][1].features["audio_input_ids"],
    }
    expected = list(prompt[0])
    with torch.inference_mode():
        for _ in range(12):
            logits = reference.target(input_ids=torch.tensor([expected]), **inputs).logits
            expected.append(int(logits[0, -1].argmax()))
    assert request.output_token_ids == expected[len(prompt[0]) :]
    assert list(request.prompt_token_ids) == prompt[0]


def test_rows_are_shared_by_content(directory: Path) -> None:
    """Equal placeholders are not equal prompts; equal images are, whichever object holds them."""
    engine = engine_of(directory)
    first = serve(engine, prompt_of(1, image(7, 13), 2, 3))
    same = serve(engine, prompt_of(1, image(7, 13), 2, 3), "same")
    other = serve(engine, prompt_of(1, image(8, 13), 2, 3), "other")
    assert same.num_cached_tokens == 16
    assert other.num_cached_tokens == 0
    assert same.output_token_ids == first.output_token_ids
    cold = serve(engine_of(directory, enable_prefix_caching=False), prompt_of(1, image(8, 13), 2, 3))
    assert other.output_token_ids == cold.output_token_ids != first.output_token_ids


def test_what_is_kept_on_disk_is_found_by_content(directory: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"cache_dir": tmp_path / "cache", "cpu_cache_gib": 0.01}
    engine = engine_of(directory, **settings)
    first = serve(engine, prompt_of(1, image(7, 13), 2, 3))
    engine.close()
    engine = engine_of(directory, **settings)
    assert serve(engine, prompt_of(1, image(8, 13), 2, 3), "other").num_cached_tokens == 0
    again = serve(engine, prompt_of(1, image(7, 13), 2, 3), "again")
    assert again.num_cached_tokens == 16
    assert again.output_token_ids == first.output_token_ids
    assert again.stats.num_accepted_tokens == first.stats.num_accepted_tokens


def test_embeddings_are_made_once_and_again_where_there_is_no_room(directory: Path) -> None:
    engine = engine_of(directory, enable_prefix_caching=False)
    store = engine.runner.media
    assert store is not None
    prompt = prompt_of(1, image(7, 13), 2, audio(8, 11))
    expected = serve(engine, prompt).output_token_ids
    serve(engine, prompt, "again")
    assert store.num_encoded == 2
    assert store.num_bytes == (13 + 11) * 32 * 4
    engine = engine_of(directory, enable_prefix_caching=False, media_cache_mib=0)
    store = engine.runner.media
    assert store is not None
    assert serve(engine, prompt, "third").output_token_ids == expected
    assert store.num_encoded > 2  # windows of modules reach back into what is shown
    assert store.num_bytes == 0


@pytest.mark.parametrize("depth", [0, 8])
def test_options_that_look_at_the_prompt(directory: Path, depth: int) -> None:
    """Placeholders may lie behind the tokens that can be written: penalties, words and scores of the prompt."""
    engine = engine_of(directory, num_speculative_tokens=depth)
    prompt = prompt_of(1, image(7, 3), 2, 3, audio(8, 2), 4)
    request = serve(
        engine, prompt, repetition_penalty=1.3, presence_penalty=0.5, bad_words=[[4, 9]], prompt_logprobs=2, logprobs=1
    )
    assert request.finish_reason is not None
    assert request.error is None
    scores = request.prompt_logprobs
    assert scores is not None
    assert [score is None for score in scores] == [True, True, True, True, False, False, True, True, False]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (([1, IMAGE_TOKEN, 2], []), "the prompt has 1 placeholders of image (token 71), and what is shown fills 0"),
        (([1, 2], [image(0)]), "the prompt has 0 placeholders of image (token 71), and what is shown fills 1"),
        (
            ([1, IMAGE_TOKEN], [image(0, 2)]),
            "the prompt has 1 placeholders of image (token 71), and what is shown fills 2",
        ),
        (
            ([1, AUDIO_TOKEN, IMAGE_TOKEN], [image(0), audio(1)]),
            "token 1 of the prompt is a placeholder of audio, not image",
        ),
        (([1, 69], []), "prompt_token_ids must be between 0 and 63, not 69"),
        (([1, FIRST_MEDIA_ID], []), f"prompt_token_ids must be between 0 and 63, not {FIRST_MEDIA_ID}"),
        (([1, IMAGE_TOKEN], ["image"]), "media must hold Media, not str"),
    ],
)
def test_placeholders_that_do_not_fit(directory: Path, prompt: Any, message: str) -> None:
    engine = engine_of(directory)
    with pytest.raises(RequestError, match=re.escape(message)):
        engine.add_request("bad", prompt[0], SamplingParams(), media=prompt[1])
    assert serve(engine, prompt_of(1, image(7, 3), 2)).error is None


def test_a_text_model_takes_no_media(tmp_path: Path) -> None:
    engine = engine_of(tiny_inkling(tmp_path / "text"))
    with pytest.raises(RequestError, match=re.escape("media: the model takes no image (it takes text only)")):
        engine.add_request("bad", [1, 2], SamplingParams(), media=[image(0)])


def test_choices_share_what_is_shown(directory: Path) -> None:
    """All choices of a prompt, sampled alike with and without company."""
    with prompts_of_row_ids():
        engine = engine_of(directory)
        ids = [row_id(token_id) for token_id in range(12)]
        alone = run(engine, [ids], SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=5))
        together = run(engine, [ids, ids, ids], SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=5))
    assert {tuple(request.output_token_ids) for request in together} == {tuple(alone[0].output_token_ids)}


@pytest.mark.parametrize(
    ("kind", "features", "message"),
    [
        ("image", {"pixel_values": torch.zeros(3, 2, 5, 5, 3)}, "pixel_values must be finite numbers [3, 2, 4, 4, 3]"),
        ("image", {"pixel_values": torch.zeros(2, 2, 4, 4, 3)}, "pixel_values must be finite numbers"),
        ("image", {"pixel_values": torch.full((3, 2, 4, 4, 3), torch.nan)}, "pixel_values must be finite numbers"),
        ("image", {"audio_input_ids": torch.zeros(1, 3, 4)}, "pixel_values must be finite numbers"),
        ("audio", {"audio_input_ids": torch.zeros(1, 3, 4)}, "audio_input_ids must be integers [1, 3, 4] from 0 to 7"),
        ("audio", {"audio_input_ids": torch.full((1, 3, 4), 8)}, "audio_input_ids must be integers"),
        ("audio", {"audio_input_ids": torch.tensor(1)}, "audio_input_ids must be integers"),
    ],
)
def test_what_no_tower_can_read_is_refused(
    directory: Path, kind: str, features: dict[str, Tensor], message: str
) -> None:
    engine = engine_of(directory)
    wrong = Media(MediaKind(kind), features, 3)
    with pytest.raises(RequestError, match=re.escape(f"media: {message}")):
        engine.add_request("bad", prompt_of(1, wrong)[0], SamplingParams(), media=[wrong])
    assert serve(engine, prompt_of(1, image(7, 3), 2)).error is None


@pytest.mark.parametrize("num_tokens", [0, -1, True, 1.0, None])
def test_media_have_rows(num_tokens: Any) -> None:
    with pytest.raises(ValueError, match="num_tokens must be an integer of at least 1"):
        Media(MediaKind.IMAGE, {"pixel_values": torch.zeros(1)}, num_tokens)


@pytest.mark.parametrize("max_mib", [0, 1])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_tower_that_fails_ends_its_request_alone(directory: Path, max_mib: int, is_late: bool) -> None:
    """As where memory runs out; late: when it is to encode again what it has encoded before."""
    engine = engine_of(directory, media_cache_mib=max_mib, max_num_seqs=2, max_num_batched_tokens=18)
    store = engine.runner.media
    assert store is not None
    good, bad = prompt_of(5, 6, 7, 8, 9, image(7, 3), 2), prompt_of(5, 6, 7, 8, 9, 3, image(8, 22), 2)
    expected = [serve(engine, prompt, name).output_token_ids for name, prompt in (("good", good), ("bad", bad))]
    encode, num_left = store._encode, [1 if is_late else 0]

    def fail(media: Media) -> Tensor:
        if media.num_tokens == 22:
            num_left[0] -= 1
            if num_left[0] < 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(media)

    store._encode = fail
    store._kept.clear()
    engine.reset_prefix_cache()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [engine.add_request(f"{i}", p[0], params, media=p[1]) for i, p in enumerate((good, bad))]
    finish(engine)
    assert requests[0].output_token_ids == expected[0]
    if is_late and max_mib:  # it is still there
        assert requests[1].output_token_ids == expected[1]
    else:
        assert requests[1].error is not None
        assert "media cannot be shown to the model: OutOfMemoryError" in requests[1].error
    store._encode = encode
    assert serve(engine, bad, "after").output_token_ids == expected[1]


def test_what_becomes_of_a_callers_tensors_changes_nothing(directory: Path) -> None:
    engine = engine_of(directory)
    pixels = image(7, 13).features["pixel_values"].clone()
    expected = serve(engine, prompt_of(1, image(7, 13), 2), "first").output_token_ids
    engine.reset_prefix_cache()
    features = {"pixel_values": pixels}
    shown = Media(MediaKind.IMAGE, features, 13)
    pixels.zero_()
    features.clear()
    assert serve(engine, prompt_of(1, shown, 2), "second").output_token_ids == expected
    assert serve(engine, prompt_of(1, image(7, 13), 2), "third").output_token_ids == expected
