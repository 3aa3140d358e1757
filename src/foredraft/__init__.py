"""Foredraft: lossless inference for language models that carry multi-token-prediction modules."""

from foredraft.config import EngineConfig
from foredraft.engine.llm import LLM
from foredraft.errors import ConfigError, ForedraftError, ModelLoadError, RequestError, UnsupportedOptionError
from foredraft.outputs import RequestOutput, StreamChunk
from foredraft.sampling_params import SamplingParams

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
