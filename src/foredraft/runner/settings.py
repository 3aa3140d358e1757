"""How a runner decides, drafts and executes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foredraft.cache.storage import CacheStorage
from foredraft.config import Execution
from foredraft.models.media_store import DEFAULT_MEDIA_BYTES
from foredraft.runner.resident.decoder import ResidentDecoder
from foredraft.runner.verification import VerificationSettings
from foredraft.sampling.grammar import GrammarCompiler


@dataclass(frozen=True)
class RunnerSettings:
    """compiler: makes the grammars of requests that ask for one.

    resident: makes what runs steady decodes with state on the device, for a given storage; None: every step is run by
    the host, request by request. execution: what that is called. max_media_bytes: what the `MediaStore` keeps.
    """

    verification: VerificationSettings
    compiler: GrammarCompiler | None = None
    resident: Callable[[CacheStorage], ResidentDecoder] | None = None
    execution: Execution = "host"
    max_media_bytes: int = DEFAULT_MEDIA_BYTES


DEFAULT_SETTINGS = RunnerSettings(VerificationSettings())
