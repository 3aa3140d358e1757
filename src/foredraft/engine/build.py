"""From a loaded checkpoint and settings to an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.cache.groups import CacheLayout, StoredRows
from foredraft.cache.manager import CacheManager
from foredraft.cache.persistence import load_cache
from foredraft.cache.snapshot import Signature
from foredraft.cache.storage import CacheStorage
from foredraft.config import LOSSY_DELTA, LOSSY_EPSILON, EngineConfig, Execution
from foredraft.engine.draft_vocabulary import build_draft_head
from foredraft.engine.engine import Engine, EngineLimits, KeptCache
from foredraft.engine.text_tools import TextTools
from foredraft.errors import ConfigError
from foredraft.kernels.decode_ops import decode_kernels_of
from foredraft.kernels.ops import kernels_of
from foredraft.models.draft_head import DraftHead
from foredraft.models.experts import run_every_expert
from foredraft.models.fingerprint import fingerprint
from foredraft.models.loader import LoadedModel
from foredraft.models.mtp import MtpModules
from foredraft.models.target import TargetModel
from foredraft.runner.memory import CPU_CACHE_BYTES, CacheDemand, CacheSize, size_cache
from foredraft.runner.model_runner import ModelRunner, current_device
from foredraft.runner.profiling import GPU_MEMORY_UTILIZATION, measure_memory, profile_memory
from foredraft.runner.resident.decoder import ResidentDecoder
from foredraft.runner.resident.step import ResidentModel
from foredraft.runner.settings import RunnerSettings
from foredraft.runner.verification import VerificationSettings
from foredraft.sampling.grammar import GrammarCompiler
from foredraft.scheduler.scheduler import Scheduler
from foredraft.scheduler.shares import SchedulerLimits
from foredraft.speculation.drafter import Drafter

_logger = logging.getLogger(__name__)


def build_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    drafter_type: Callable[[TargetModel, MtpModules, CacheStorage, DraftHead], Drafter] = Drafter,
    target_type: Callable[[PreTrainedModel], TargetModel] = TargetModel,
) -> Engine:
    """Put an engine together for a loaded checkpoint. Raises ConfigError for settings that do not fit it."""
    with current_device(loaded.target.device):
        return _build(loaded, config, drafter_type, target_type)


def _build(
    loaded: LoadedModel,
    config: EngineConfig,
    drafter_type: Callable[[TargetModel, MtpModules, CacheStorage, DraftHead], Drafter],
    target_type: Callable[[PreTrainedModel], TargetModel],
) -> Engine:
    config.check_device(loaded.target.device.type)
    _warn_of_unreal_output(config)
    target = target_type(loaded.target)
    modules = MtpModules(loaded.mtp) if loaded.mtp is not None else None
    max_depth = resolve_depth(config, modules.num_modules if modules is not None else 0)
    config.check_depth(max_depth)
    config.check_rates(max_depth)
    config.check_drafts(max_depth)
    draft_head = build_draft_head(config, loaded, target) if modules is not None else None
    module_rows = modules.stored if modules is not None else StoredRows()
    state_span = -(-max(config.state_interval, max_depth + 1) // config.block_size)
    layout = CacheLayout.build(
        target.stored, module_rows, target.hidden_size, target.dtype, max_depth=max_depth, state_span=state_span
    )

    tools = _text_tools(loaded, target.vocab_size)
    verification = _verification_settings(config, draft_head.token_ids if draft_head is not None else None)
    execution = _execution(config, target)
    max_positions = min(
        config.max_model_len or loaded.info.max_position_embeddings, loaded.info.max_position_embeddings
    )
    if target.device.type == "cuda" and target.dtype is torch.float32 and execution in ("overlapped", "synchronous"):
        run_every_expert(loaded.target, loaded.mtp)
    if execution != "reference":
        target.fuse(max_positions, is_packed=config.pack_weights)
        if modules is not None and target.fused is not None:
            modules.fuse(target.fused, is_packed=config.pack_weights)

    def make_resident(storage: CacheStorage) -> ResidentDecoder:
        model = ResidentModel(
            target,
            modules,
            storage,
            draft_head,
            verification,
            max_positions,
            kernels_of(target.device),
            decode_kernels_of(target.device),
        )
        max_blocks = -(-max_positions // config.block_size) + 1
        use_graphs = config.cuda_graphs != "off" and target.is_capturable
        return ResidentDecoder(model, config.max_num_seqs, max_depth, max_blocks, use_graphs=use_graphs)

    is_resident = execution in ("overlapped", "synchronous") and drafter_type is Drafter
    runner_settings = RunnerSettings(
        verification,
        tools.compiler,
        make_resident if is_resident else None,
        execution,
        config.media_cache_mib << 20,
    )

    def make_runner(storage: CacheStorage, host_storage: CacheStorage | None = None) -> ModelRunner:
        drafter = None
        if modules is not None and draft_head is not None:
            drafter = drafter_type(target, modules, storage, draft_head)
        return ModelRunner(target, drafter, storage, host_storage, runner_settings)

    demand = CacheDemand(config, layout, max_depth, loaded.info.max_position_embeddings)
    size = _cache_size(demand, make_runner, target.device, _media_bytes(demand) if target.placeholders else 0)
    storage = _storage(layout, size.num_blocks, config.block_size, target.device)
    host_storage = _host_storage(layout, size)
    runner = make_runner(storage, host_storage)
    if config.cuda_graphs == "at-start":
        runner.capture()
    cache = CacheManager(
        layout,
        size.num_blocks,
        config.block_size,
        is_shared=config.enable_prefix_caching,
        num_host_blocks=host_storage.num_blocks if host_storage is not None else (),
    )
    kept = None
    if config.cache_dir is not None and host_storage is not None:
        kept = _kept_cache(Path(config.cache_dir), loaded, layout, config.block_size)
        load_cache(kept.directory, kept.signature, cache, host_storage)
    scheduler_limits = SchedulerLimits(
        config.max_num_seqs, config.max_num_batched_tokens, len(module_rows.kv), config.scheduling_policy
    )
    limits = EngineLimits(
        target.vocab_size,
        size.max_model_len,
        max_depth,
        loaded.eos_token_ids,
        config.verification_name,
        target.placeholders,
    )
    scheduler, overlaps = Scheduler(cache, scheduler_limits), execution == "overlapped"
    return Engine(runner, scheduler, cache, limits, size, kept, tools, overlaps=overlaps)


def _execution(config: EngineConfig, target: TargetModel) -> Execution:
    """Who runs decode steps. Where passes wait for the GPU they gain nothing from state that stays there: the host, if
    the settings leave it open. Raises ConfigError for graphs at start that cannot be."""
    if target.stored.states:
        if config.execution not in ("auto", "host", "reference"):
            raise ConfigError(
                f"execution={config.execution}: recurrent layers, as in {target.config.model_type}, are run by the host"
            )
        return "reference" if config.execution == "reference" else "host"
    if target.is_capturable:
        return config.execution_on(target.device.type)
    if config.cuda_graphs == "at-start":
        raise ConfigError(f"cuda_graphs=at-start: passes of {target.config.model_type} wait for the GPU; set it to off")
    return "host" if config.execution == "auto" else config.execution


def _warn_of_unreal_output(config: EngineConfig) -> None:
    """Whoever sees the output must know that it is no model's. Without a set-up of logging it is on standard error."""
    if config.load_format == "dummy":
        _logger.warning("load_format=dummy: the weights are random, and so is the output")
    if config.synthetic_rates is not None:
        _logger.warning(
            "synthetic_acceptance: drafts are accepted by chance (%s), the output is NOT the target's",
            config.verification_name,
        )


def _text_tools(loaded: LoadedModel, vocab_size: int) -> TextTools:
    if loaded.tokenizer is None:
        return TextTools()
    return TextTools(loaded.tokenizer, GrammarCompiler(loaded.tokenizer, vocab_size, loaded.eos_token_ids))


def _verification_settings(config: EngineConfig, drafted_token_ids: Tensor | None) -> VerificationSettings:
    return VerificationSettings(
        method=config.verification,
        greedy_drafts=config.draft_sampling == "greedy",
        epsilon=LOSSY_EPSILON if config.lossy_epsilon is None else config.lossy_epsilon,
        delta=LOSSY_DELTA if config.lossy_delta is None else config.lossy_delta,
        logprobs_mode=config.logprobs_mode,
        synthetic_rates=config.synthetic_rates,
        drafted_token_ids=drafted_token_ids,
    )


def _media_bytes(demand: CacheDemand) -> int:
    """The most that embeddings of media take: those that are kept, one more, and those that a step reads."""
    config, layout = demand.config, demand.layout
    num_rows = min(config.max_model_len or demand.max_positions, demand.max_positions) + config.max_num_batched_tokens
    return (config.media_cache_mib << 20) + num_rows * layout.hidden_size * layout.dtype.itemsize


def _cache_size(
    demand: CacheDemand, make_runner: Callable[[CacheStorage], ModelRunner], device: torch.device, media_bytes: int = 0
) -> CacheSize:
    """As the settings say; where they say nothing, and on a GPU, from the memory that the largest steps leave.

    media_bytes: what embeddings of media will take beside the cache.
    """
    config = demand.config
    if config.num_blocks is not None or config.kv_cache_memory_bytes is not None:
        return size_cache(demand, config.kv_cache_memory_bytes)
    if device.type != "cuda":
        return size_cache(demand, CPU_CACHE_BYTES)
    utilization = config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
    without_steps = size_cache(demand, measure_memory(device).cache_bytes(utilization, media_bytes))
    profile = profile_memory(make_runner, demand, without_steps, device)
    return size_cache(demand, profile.cache_bytes(utilization, media_bytes))


def _storage(
    layout: CacheLayout, num_blocks: Sequence[int], block_size: int, device: torch.device, *, is_host: bool = False
) -> CacheStorage:
    """Tensors for the blocks; is_host: those on the host, pinned where there is a GPU."""
    try:
        return CacheStorage(layout, num_blocks, block_size, device, pin=is_host and torch.cuda.is_available())
    except (RuntimeError, TypeError) as error:  # torch has a TypeError for sizes beyond 64 bits
        num_bytes = sum(layout.bytes_per_block(group, block_size) * count for group, count in enumerate(num_blocks))
        raise ConfigError(
            f"there is no memory for a cache of {max(num_blocks)} blocks, {num_bytes} bytes, on {device.type}: "
            f"lower {'cpu_cache_gib' if is_host else 'num_blocks, kv_cache_memory_bytes or gpu_memory_utilization'}"
        ) from error


def _host_storage(layout: CacheLayout, size: CacheSize) -> CacheStorage | None:
    if not size.num_host_blocks:
        return None
    num_blocks = (size.num_host_blocks,) * len(layout.groups)
    return _storage(layout, num_blocks, size.block_size, torch.device("cpu"), is_host=True)


def _kept_cache(directory: Path, loaded: LoadedModel, layout: CacheLayout, block_size: int) -> KeptCache:
    try:
        directory = directory.absolute()  # it stays where it is, whatever the process does with its own
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(f"cache_dir={str(directory)!r} cannot be written: {error}") from error
    signature = Signature(
        model=fingerprint(loaded.target),
        mtp=fingerprint(loaded.mtp) if loaded.mtp is not None else "",
        dtype=str(layout.dtype),
        layout=repr(layout.groups),
        block_size=block_size,
    )
    return KeptCache(directory, signature)


def resolve_depth(config: EngineConfig, num_mtp_modules: int) -> int:
    """The most draft tokens a step: as asked, else as many as there are modules.

    Raises ConfigError if more are asked than the modules can make; one module may be chained over several drafts.
    """
    wanted = config.num_speculative_tokens
    if wanted is None:
        return num_mtp_modules
    if wanted > 0 and num_mtp_modules == 0 and config.load_format == "dummy":
        raise ConfigError(
            f"num_speculative_tokens={wanted}, but config.json declares no MTP modules: set num_mtp_layers there"
        )
    if wanted > 0 and num_mtp_modules == 0:
        raise ConfigError(f"num_speculative_tokens={wanted}, but the checkpoint has no MTP modules; name them with mtp")
    if wanted > num_mtp_modules > 1:
        raise ConfigError(f"num_speculative_tokens={wanted}, but the checkpoint has {num_mtp_modules} MTP modules")
    return wanted
