"""Foredraft: lossless inference for language models that carry multi-token-prediction modules."""

from typing import TYPE_CHECKING

from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, ForedraftError, ModelLoadError, RequestError, UnsupportedOptionError
from foredraft.outputs import RequestOutput, StreamChunk
from foredraft.sampling_params import SamplingParams

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM
else:

    def __getattr__(name):
        # On first use: it brings torch and transformers, which take seconds and `foredraft --help` does not need.
        if name != "LLM":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from foredraft.engine.llm import LLM

        globals()["LLM"] = LLM
        return LLM


__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ConfigError",
    "EngineConfig",
    "ForedraftError",
    "ModelLoadError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "UnsupportedOptionError",
    "__version__",
]
