"""What a benchmark writes: figures together with what they were measured on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from foredraft import LLM, __version__

_SECRET = "--api-key"


def write_report(file: Path, benchmark: str, llm: LLM, results: dict[str, Any]) -> None:
    """Write `results` as JSON with date, command line, machine, versions and model."""
    model = {
        "name": llm.info.path.name,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "device": str(llm.device),
        "num_mtp_modules": llm.info.num_mtp_modules,
        "load_format": llm.config.load_format,
        "quantization": llm.config.quantization,
        "execution": llm.engine.runner.execution,
        "is_fused": llm.engine.runner.target.fused is not None,
        "cuda_graphs": asdict(captured) if (captured := llm.engine.runner.captured) is not None else None,
        "verification": llm.engine.limits.verification,
    }
    _write(file, benchmark, {"model": model, **results})


def write_server_report(file: Path, benchmark: str, server: dict[str, Any], results: dict[str, Any]) -> None:
    """Write `results` of a server: like `write_report`, with what is known of the server in place of the model.

    Machine and versions are those of the client.
    """
    _write(file, benchmark, {"server": server, **results})


def _write(file: Path, benchmark: str, results: dict[str, Any]) -> None:
    report = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(_without_secrets(["foredraft", *sys.argv[1:]])),
        "machine": machine(),
        "versions": {
            "foredraft": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        **results,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _without_secrets(command: list[str]) -> list[str]:
    """The words of a command line, with those of `--api-key` left out."""
    kept = [f"{_SECRET}=..." if word.startswith(f"{_SECRET}=") else word for word in command]
    return ["..." if before == _SECRET else word for before, word in zip(["", *kept], kept)]


def machine() -> dict[str, Any]:
    """The processor, how many cores this process may use, torch's threads, and the GPU, if there is one."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
