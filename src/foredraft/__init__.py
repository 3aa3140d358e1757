"""Foredraft: lossless inference for language models that carry multi-token-prediction modules."""

from typing import TYPE_CHECKING

from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, ForedraftError, ModelLoadError, RequestError
from foredraft.logits_processor import LogitsProcessor, StatefulLogitsProcessor, TokenHistory
from foredraft.logprobs import TokenLogprob
from foredraft.outputs import Choice, RequestOutput, StreamChunk, TextPiece
from foredraft.sampling_params import SamplingParams
from foredraft.stopping import FinishReason
from foredraft.structured_output import StructuredOutput

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM
    from foredraft.media import MediaPrompt
else:

    def __getattr__(name):
        # On first use: they bring torch and transformers, which take seconds and `foredraft --help` does not need.
        from importlib import import_module

        modules = {"LLM": "foredraft.engine.llm", "MediaPrompt": "foredraft.media"}
        if name not in modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(modules[name]), name)
        return found


__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Choice",
    "ConfigError",
    "EngineConfig",
    "FinishReason",
    "ForedraftError",
    "LogitsProcessor",
    "MediaPrompt",
    "ModelLoadError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StatefulLogitsProcessor",
    "StreamChunk",
    "StructuredOutput",
    "TextPiece",
    "TokenHistory",
    "TokenLogprob",
    "__version__",
]
