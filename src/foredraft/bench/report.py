"""What a benchmark writes: figures together with what they were measured on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from foredraft import LLM, __version__


def write_report(file: Path, benchmark: str, llm: LLM, results: dict[str, Any]) -> None:
    """Write `results` as JSON with date, command line, machine, versions and model."""
    report = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["foredraft", *sys.argv[1:]]),
        "machine": machine(),
        "versions": {
            "foredraft": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "model": {
            "name": llm.info.path.name,
            "dtype": str(llm.dtype).removeprefix("torch."),
            "device": str(llm.device),
            "num_mtp_modules": llm.info.num_mtp_modules,
        },
        **results,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


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
