"""The offline front end: load a model, generate, chat, stream."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine, resolve_depth
from foredraft.engine.engine import Engine
from foredraft.engine.handover import Handover
from foredraft.engine.media_limits import MediaLimits
from foredraft.engine.media_parts import read_prompt, take_media
from foredraft.engine.media_reader import MediaReader
from foredraft.engine.open_request import OpenRequest
from foredraft.engine.open_requests import OpenRequests
from foredraft.errors import ConfigError, RequestError
from foredraft.media import MediaPrompt
from foredraft.models.builtin import BUILTIN_NAME, builtin_checkpoint, builtin_mtp_directory
from foredraft.models.loader import CheckpointInfo, inspect_checkpoint, load_checkpoint
from foredraft.models.quantization import quantize_linear_layers
from foredraft.outputs import Choice, RequestOutput, StreamChunk
from foredraft.runner.memory import CacheSize
from foredraft.sampling_params import SamplingParams
from foredraft.statistics import EngineStats
from foredraft.stopping import FinishReason

Prompt = str | Sequence[int] | MediaPrompt | Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """A model ready to generate.

    `LLM()` is the built-in model with its eight MTP modules; `LLM("path/to/checkpoint")` another. All settings of
    `EngineConfig` are accepted as keywords. Raises ConfigError or ModelLoadError.
    """

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        config = _config(EngineConfig, model, settings)
        path, mtp = resolve_model(config)
        info = inspect_checkpoint(path, mtp, config.load_format, config.num_speculative_tokens)
        depth = resolve_depth(config, info.num_mtp_modules)
        config.check_depth(depth)
        self.config = config
        self.info = info
        self.device = _device(config.device)
        config.check_device(self.device.type)
        self.dtype = _dtype(config, info, self.device)
        num_modules = min(depth, info.num_mtp_modules)
        loaded = load_checkpoint(
            path, mtp, num_modules=num_modules, dtype=self.dtype, device=self.device, load_format=config.load_format
        )
        if config.quantization == "int8":
            quantize_linear_layers(loaded.target, loaded.mtp)
        self.loaded = loaded
        self.tokenizer: PreTrainedTokenizerBase | None = loaded.tokenizer
        self.requests = OpenRequests(build_engine(loaded, config))
        limits = MediaLimits(max_tokens=self.engine.limits.max_model_len)
        self._media = None if loaded.processor is None else MediaReader(loaded.processor, limits=limits)

    def close(self) -> None:
        """End all requests and, with `cache_dir`, save the cache. `with LLM(...) as llm:` closes at its end."""
        try:
            self.engine.close()
        finally:
            self.requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """What runs the requests, for callers who drive it step by step."""
        return self.requests.engine

    @property
    def stats(self) -> EngineStats:
        """Totals since the start or the last `reset_stats`."""
        return self.engine.stats

    @property
    def cache_size(self) -> CacheSize:
        """How many tokens the cache holds, and the blocks and bytes of each of its groups."""
        return self.engine.cache_size

    def reset_stats(self) -> None:
        self.engine.reset_stats()

    def reset_prefix_cache(self) -> None:
        """Forget all cached rows; requests that run are not disturbed."""
        self.engine.reset_prefix_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, all in one batch; outputs in the order of the prompts, each with its `n` choices.

        A prompt is text, token ids, a `MediaPrompt`, or {"prompt": text or token ids, "images": [...], "audio": [...]}
        with one placeholder token for each that is shown: images of Pillow's, (samples, rate), or files.

        A prompt that can never be served gets an output with finish_reason "error" and the reason; the others are
        unharmed. Raises RequestError if `params` does not fit `prompts`.
        """
        many = _prompts(prompts)
        each = _params(params, len(many))
        outputs: dict[int, RequestOutput] = {}
        opened: dict[int, OpenRequest] = {}
        try:
            for index, (prompt, one) in enumerate(zip(many, each)):
                try:
                    opened[index] = self._submit(prompt, one)
                except RequestError as error:
                    outputs[index] = _failed(self.requests.next_id(), error)
            while any(request.output is None for request in opened.values()):
                self.requests.step()
        finally:
            for request in opened.values():
                self.requests.discard(request)
        for index, request in opened.items():
            assert request.output is not None
            outputs[index] = request.output
        return [outputs[index] for index in range(len(many))]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, with the tokenizer's chat template.

        A message is {"role": ..., "content": ...}. A content is text or a list of parts as in OpenAI's API: text,
        `image_url`, `input_audio`; or {"type": "image", "image": ...} and {"type": "audio", "audio": ...} with what
        `generate` takes. Raises RequestError if there is no chat template, or if something cannot be shown.
        """
        if not _is_list(messages):
            raise RequestError(f"messages must be a list, not {type(messages).__name__}")
        several: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        return self.generate([self.read_conversation(conversation) for conversation in several], params)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, up to where the assistant answers."""
        return list(self.read_conversation(messages).token_ids)

    def read_conversation(self, messages: Sequence[Message]) -> MediaPrompt:
        """The prompt that a conversation makes, with what it shows. Raises RequestError."""
        tokenizer = self._require_tokenizer()
        if not tokenizer.chat_template:
            raise RequestError("messages need a chat template, and the tokenizer has none: use generate")
        is_list = _is_list(messages) and len(messages) > 0
        if not is_list or not all(isinstance(m, Mapping) and "role" in m and "content" in m for m in messages):
            raise RequestError('messages must be a list of {"role": ..., "content": ...}')
        conversation, media = take_media(messages, self._media, is_callers_own=True)
        try:
            text: Any = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RequestError(f"messages do not fit the chat template: {error}") from error
        token_ids = self._encode(tokenizer, text, add_special_tokens=False)
        return MediaPrompt(token_ids) if self._media is None else self._media.prompt(token_ids, media, "messages")

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[StreamChunk, None, None]:
        """Continue one prompt; yields what each step adds, and the whole output with the last chunk.

        Several streams may be read in turn. A stream that is closed early aborts its request.
        Raises RequestError at once, before the first chunk is asked for.
        """
        chunks = self._chunks(self._submit(prompt, params or SamplingParams()))
        next(chunks)  # a generator that was never begun would not abort its request when it is closed
        return chunks

    def prefill(self, prompt: Prompt, params: SamplingParams | None = None) -> Handover:
        """Run one prompt up to its first token, for another engine to go on from there with `resume`.

        Other requests go on meanwhile. Raises RequestError as `stream` does, for more than one choice, and if the
        request has ended with that token.
        """
        params = params or SamplingParams()
        if isinstance(params, SamplingParams) and params.n != 1:
            raise RequestError(f"n must be 1, not {params.n}: one choice is handed over at a time")
        request = self.engine.add_request(self.requests.next_id(), self.token_ids(prompt), params)
        try:
            while request.finish_reason is None and not request.output_token_ids:
                self.requests.step(ahead=False)
            if request.finish_reason is not None:
                reason = request.error or f"finish_reason {request.finish_reason.value}"
                raise RequestError(f"the request has ended ({reason}): nothing is left to hand over")
            return self.engine.export_request(request.request_id)
        finally:
            self.engine.abort(request.request_id)

    def resume(self, handover: Handover) -> Generator[StreamChunk, None, None]:
        """Go on with a request that another engine has begun; yields chunks as `stream` does, first all that there was.

        It waits for room like any other request, and its rows are computed again if there is none for them. Raises
        HandoverError and RequestError at once, as `Engine.import_request` does.
        """
        params = handover.params
        prompt = handover.prompt_token_ids
        echo = (lambda: self._echo(prompt, prompt, params)) if params.echo else None
        chunks = self._chunks(self.requests.resume(handover, echo))
        next(chunks)
        return chunks

    def _chunks(self, request: OpenRequest) -> Generator[StreamChunk, None, None]:
        try:
            yield StreamChunk((), ())
            while True:
                while not request.chunks:
                    self.requests.step()
                chunk = request.chunks.pop(0)
                yield chunk
                if chunk.output is not None:
                    return
        finally:
            self.requests.discard(request)

    def _submit(self, prompt: Prompt, params: SamplingParams) -> OpenRequest:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        read = self.read_prompt(prompt)
        echo = (lambda: self._echo(prompt, read.token_ids, params)) if params.echo else None
        return self.requests.submit(read.token_ids, params, echo, read.media)

    def _echo(self, prompt: Prompt, token_ids: Sequence[int], params: SamplingParams) -> str:
        if isinstance(prompt, str) or self.tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=params.skip_special_tokens))

    def token_ids(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt as they are run; RequestError if it is text and there is no tokenizer."""
        return list(self.read_prompt(prompt).token_ids)

    def read_prompt(self, prompt: Prompt) -> MediaPrompt:
        """A prompt as it is run, with what it shows. Raises RequestError."""
        if isinstance(prompt, MediaPrompt):
            return prompt
        if isinstance(prompt, Mapping):
            return read_prompt(prompt, self.token_ids, self._media)
        if isinstance(prompt, str):
            return MediaPrompt(self._encode(self._require_tokenizer(), prompt, add_special_tokens=True))
        if not _is_list(prompt):
            raise RequestError(f"a prompt must be text or a list of token ids, not {type(prompt).__name__}")
        return MediaPrompt(list(prompt))

    @staticmethod
    def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not Unicode text: {error.reason} at character {error.start}") from error
        return [int(token_id) for token_id in tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]]

    def _require_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise RequestError("prompt is text, but the checkpoint has no tokenizer: give token ids")
        return self.tokenizer


def resolve_model(config: EngineConfig) -> tuple[str | Path, str | Path | None]:
    """Where the target and its modules are; with no model named, the built-in one is made ready."""
    if config.model is not None:
        return config.model, config.mtp
    return builtin_checkpoint(), config.mtp or builtin_mtp_directory()


def model_name(config: EngineConfig) -> str:
    """What the model is called where no other name is given: as its directory is."""
    return BUILTIN_NAME if config.model is None else Path(config.model).absolute().name or "model"


def describe_model(config: EngineConfig) -> CheckpointInfo:
    """What the checkpoint that `config` names holds; nothing is loaded."""
    return inspect_checkpoint(*resolve_model(config), config.load_format)


def _config(kind: type[EngineConfig], model: str | Path | None, settings: dict[str, Any]) -> EngineConfig:
    known = set(kind.__dataclass_fields__)
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(f"unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return kind(model=model, **settings)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _dtype(config: EngineConfig, info: CheckpointInfo, device: torch.device) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else info.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | MediaPrompt) or (isinstance(prompts, Mapping) and "prompt" in prompts):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(
            f"prompts must be text, a list of token ids or a list of prompts, not {type(prompts).__name__}"
        )
    if prompts and all(isinstance(token_id, int) for token_id in prompts):
        return [prompts]
    return list(prompts)


def _params(params: Any, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not _is_list(params):
        raise RequestError(f"params must be SamplingParams or a list of them, not {type(params).__name__}")
    if len(params) != count:
        raise RequestError(f"params has {len(params)} entries for {count} prompts: give one for all or one for each")
    return list(params)


def _failed(request_id: str, error: RequestError) -> RequestOutput:
    return RequestOutput(request_id, (), (Choice(0, (), (), "", FinishReason.ERROR, str(error)),))
