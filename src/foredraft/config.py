"""Engine settings: one frozen dataclass, validated once; the command line takes its flags from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from foredraft.errors import ConfigError
from foredraft.logprobs import LogprobsMode

MAX_SETTING = 2**48
MAX_CPU_CACHE_GIB = 2**18
DTYPES = ("auto", "float32", "bfloat16", "float16")
DraftSampling = Literal["probabilistic", "greedy"]
SchedulingPolicy = Literal["fcfs", "priority"]
VerificationMethod = Literal["rejection", "block", "lossy-typical"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["none", "int8"]
Execution = Literal["auto", "overlapped", "synchronous", "host", "reference"]
CudaGraphs = Literal["on-demand", "at-start", "off"]
MAX_RATES = 256
LOSSY_EPSILON, LOSSY_DELTA = 0.09, 0.3


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class EngineConfig:
    """What an engine runs and within which limits. Raises ConfigError, which names the field and the rule."""

    model: str | Path | None = _setting(None, "checkpoint directory; the built-in SmolLM2-135M-Instruct if left out")
    mtp: str | Path | None = _setting(None, "directory or file with MTP modules, if they are not with the checkpoint")
    load_format: LoadFormat = _setting(
        "auto", "dummy: random weights of the shape that config.json in the model's directory describes, to time it"
    )
    dtype: str = _setting("auto", f"one of {', '.join(DTYPES)}; auto is float32 on a CPU, else the checkpoint's")
    device: str = _setting("auto", "torch device; auto is cuda where there is one")
    quantization: Quantization = _setting(
        "none", "int8: linear layers of target and modules in 8 bits, on a CPU in float32; another target, faster"
    )
    pack_weights: bool = _setting(True, "on a CPU, copy matrices to the layout of its products: faster, more memory")
    num_speculative_tokens: int | None = _setting(
        None, "most draft tokens a step (K), all modules if left out; 0 is plain decoding"
    )
    draft_sampling: DraftSampling = _setting(
        "probabilistic", "how drafts are drawn at temperature > 0: probabilistic or greedy"
    )
    verification: VerificationMethod = _setting(
        "rejection",
        "how drafts are accepted at temperature > 0: rejection, block, or lossy-typical (changes the distribution)",
    )
    lossy_epsilon: float | None = _setting(
        None, f"lossy-typical accepts a draft above this probability; {LOSSY_EPSILON} if left out"
    )
    lossy_delta: float | None = _setting(
        None, f"and above this multiple of exp(-entropy), if that is less; {LOSSY_DELTA} if left out"
    )
    synthetic_acceptance: str | Sequence[float] | None = _setting(
        None,
        "accept drafts by chance, at conditional rates by depth, as in 0.8,0.7: to time it, not for its output",
    )
    logprobs_mode: LogprobsMode = _setting(
        "raw", "log-probabilities of the target's own logits (raw), or after options and filters (processed)"
    )
    draft_vocab_size: int | None = _setting(None, "draft among the first N token ids only (the frequent ones); faster")
    draft_vocab: str | Path | None = _setting(
        None, "among the N frequent in a file: a .json list of token ids, or a .txt or .jsonl text; or builtin"
    )
    draft_head_bits: int | None = _setting(
        None, "bits of the head that drafts are chosen with, 16 or 8; what measures best if left out"
    )
    execution: Execution = _setting(
        "auto", "who runs decode steps: the device, overlapped or synchronous, or the host; reference: to compare"
    )
    cuda_graphs: CudaGraphs = _setting(
        "on-demand", "when decode steps are captured as CUDA graphs: on-demand, at-start, or never (off)"
    )
    block_size: int = _setting(16, "rows in a cache block")
    state_interval: int = _setting(512, "rows between the states that are kept of recurrent layers; whole blocks")
    num_blocks: int | None = _setting(None, "cache blocks of a group; a sliding window gets only what it can use")
    kv_cache_memory_bytes: int | None = _setting(None, "bytes for the paged cache; 2 GiB on a CPU if left out")
    gpu_memory_utilization: float | None = _setting(None, "share of a GPU's memory to use in all; 0.9 if left out")
    cpu_cache_gib: float = _setting(0.0, "host memory for blocks that the device cache has no room for, in GiB")
    media_cache_mib: int = _setting(256, "device memory for the embeddings of images and sound, in MiB")
    cache_dir: str | Path | None = _setting(None, "directory that keeps the host's blocks across restarts")
    max_num_seqs: int = _setting(64, "most requests that run at once")
    max_num_batched_tokens: int = _setting(1024, "most rows in a step; longer prompts are prefilled in chunks")
    scheduling_policy: SchedulingPolicy = _setting("fcfs", "who runs first: fcfs, or priority (lower numbers first)")
    enable_prefix_caching: bool = _setting(True, "share the cached rows of equal beginnings between requests")
    max_model_len: int | None = _setting(None, "most tokens of a sequence, prompt included; the model's if left out")

    def __post_init__(self) -> None:
        for name in ("model", "mtp", "cache_dir", "draft_vocab"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str | Path) or value == ""):
                raise ConfigError(f"{name} must be a path or a name, not {value!r}")
        if not isinstance(self.device, str):
            raise ConfigError(f"device must be text such as cpu or cuda:0, not {self.device!r}")
        _choice("dtype", self.dtype, DTYPES)
        _choice("draft_sampling", self.draft_sampling, get_args(DraftSampling))
        _choice("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        _choice("verification", self.verification, get_args(VerificationMethod))
        _choice("logprobs_mode", self.logprobs_mode, get_args(LogprobsMode))
        _choice("load_format", self.load_format, get_args(LoadFormat))
        _choice("execution", self.execution, get_args(Execution))
        _choice("cuda_graphs", self.cuda_graphs, get_args(CudaGraphs))
        _choice("quantization", self.quantization, get_args(Quantization))
        if self.quantization == "int8" and self.dtype not in ("auto", "float32"):
            raise ConfigError(f"quantization=int8 needs dtype=float32, for what lies between layers, not {self.dtype}")
        if self.load_format == "dummy" and self.model is None:
            raise ConfigError("load_format=dummy needs model: a directory with config.json")
        self._check_lossy()
        self._check_synthetic()
        for name in ("enable_prefix_caching", "pack_weights"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}")
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        self._check_draft_head()
        _at_least("block_size", self.block_size, 1)
        _at_least("state_interval", self.state_interval, 1)
        _at_least("num_blocks", self.num_blocks, 2)
        _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        self._check_cache_size()
        self._check_host_cache()
        _at_least("media_cache_mib", self.media_cache_mib, 0)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("max_model_len", self.max_model_len, 2)

    @property
    def synthetic_rates(self) -> tuple[float, ...] | None:
        """The rates of `synthetic_acceptance` by depth, the last for all deeper ones; None if drafts are verified."""
        if self.synthetic_acceptance is None:
            return None
        return _rates("synthetic_acceptance", self.synthetic_acceptance)

    @property
    def verification_name(self) -> str:
        """What reports call the rule that accepts drafts: the method, or `synthetic` with its rates."""
        rates = self.synthetic_rates
        return self.verification if rates is None else f"synthetic {','.join(f'{rate:g}' for rate in rates)}"

    @property
    def marks(self) -> tuple[str, ...]:
        """What makes the output not the model's own, in words for reports; none for a real engine."""
        marks = ["random weights"] if self.load_format == "dummy" else []
        if self.synthetic_acceptance is not None:
            marks.append(f"acceptance by chance: {self.verification_name}")
        return tuple(marks)

    def execution_on(self, device_type: str) -> Execution:
        """How steps are run on a kind of device: as asked, else as measures best there."""
        if self.execution != "auto":
            return self.execution
        return "overlapped" if device_type == "cuda" else "host"

    def _check_synthetic(self) -> None:
        if self.synthetic_rates is not None and self.verification != "rejection":
            raise ConfigError(f"synthetic_acceptance takes the place of verification={self.verification}: give one")

    def _check_lossy(self) -> None:
        for name in ("lossy_epsilon", "lossy_delta"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"{name} must be a number from 0 to 1, not {value!r:.40}")
            if self.verification != "lossy-typical":
                raise ConfigError(f"{name} has no effect with verification={self.verification!r}")

    def _check_draft_head(self) -> None:
        _at_least("draft_vocab_size", self.draft_vocab_size, 1)
        if self.draft_vocab is not None and self.draft_vocab_size is None:
            raise ConfigError("draft_vocab needs draft_vocab_size: how many of its tokens to draft among")
        if type(self.draft_head_bits) not in (int, type(None)) or self.draft_head_bits not in (None, 8, 16):
            raise ConfigError(f"draft_head_bits must be 16 or 8, not {self.draft_head_bits!r}")

    def _check_cache_size(self) -> None:
        share = self.gpu_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization must be a number above 0 and at most 1, not {share!r}")
        names = ("num_blocks", "kv_cache_memory_bytes", "gpu_memory_utilization")
        if len(given := [name for name in names if getattr(self, name) is not None]) > 1:
            raise ConfigError(f"{' and '.join(given)} each set the size of the cache: give one of them")

    def _check_host_cache(self) -> None:
        size = self.cpu_cache_gib
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size <= MAX_CPU_CACHE_GIB:
            raise ConfigError(f"cpu_cache_gib must be a number from 0 to {MAX_CPU_CACHE_GIB}, not {size!r:.40}")
        if size and not self.enable_prefix_caching:
            raise ConfigError("cpu_cache_gib needs enable_prefix_caching: it keeps blocks that requests share")
        if self.cache_dir is not None and not size:
            raise ConfigError("cache_dir needs cpu_cache_gib: what it holds is loaded into host memory")

    def check_device(self, device_type: str) -> None:
        """Refuse a setting that has no effect on the device that is used, or does not run there."""
        execution = self.execution_on(device_type)
        if self.cuda_graphs == "at-start" and (device_type != "cuda" or execution in ("host", "reference")):
            raise ConfigError(f"cuda_graphs=at-start has no effect on {device_type} with execution={execution}")
        if self.gpu_memory_utilization is not None and device_type != "cuda":
            raise ConfigError(
                f"gpu_memory_utilization={self.gpu_memory_utilization} has no effect on {device_type}: "
                f"set kv_cache_memory_bytes or num_blocks"
            )
        if self.quantization == "int8" and device_type != "cpu":
            raise ConfigError(f"quantization=int8 runs on a CPU only, not on {device_type}: set device=cpu")

    def check_rates(self, num_speculative_tokens: int) -> None:
        """Refuse rates for depths that no draft has."""
        rates = self.synthetic_rates or ()
        if len(rates) > num_speculative_tokens:
            raise ConfigError(f"synthetic_acceptance has {len(rates)} rates for {num_speculative_tokens} draft tokens")

    def check_drafts(self, num_speculative_tokens: int) -> None:
        """Refuse settings of drafts where none is made."""
        given = [
            name for name in ("draft_vocab_size", "draft_vocab", "draft_head_bits") if getattr(self, name) is not None
        ]
        if given and num_speculative_tokens == 0:
            raise ConfigError(f"{' and '.join(given)} would have no effect: no drafts are made")

    def check_depth(self, num_speculative_tokens: int) -> None:
        """Refuse limits under which a full batch of decodes, each with so many drafts, does not fit a step."""
        rows = self.max_num_seqs * (num_speculative_tokens + 1)
        if rows > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs} "
                f"times num_speculative_tokens + 1 = {num_speculative_tokens + 1}, which is {rows}: "
                f"raise max_num_batched_tokens or lower max_num_seqs"
            )


def _rates(name: str, value: object) -> tuple[float, ...]:
    """Numbers from 0 to 1, from text with commas or from a sequence of them."""
    rule = f"{name} must be rates from 0 to 1, one for each depth, as in 0.8,0.7,0.6"
    parts: Sequence[object] = value.split(",") if isinstance(value, str) else _sequence(value)
    if not 1 <= len(parts) <= MAX_RATES or any(isinstance(part, bool) for part in parts):
        raise ConfigError(f"{rule}, and no more than {MAX_RATES}, not {value!r:.80}")
    try:
        rates = tuple(float(part) for part in parts)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{rule}, not {value!r:.80}") from error
    if not all(0 <= rate <= 1 for rate in rates):  # a NaN is refused too
        raise ConfigError(f"{rule}, not {value!r:.80}")
    return rates


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray) else ()


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _at_least(name: str, value: object, low: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, not {value!r}")
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, not {value}")
    if value > MAX_SETTING:
        raise ConfigError(f"{name} must be at most {MAX_SETTING}, not {value:.3e}")
