"""Restore kernels; `best` picks the fastest one that runs on a device."""

from __future__ import annotations

import importlib.util

import torch

from tokendance.restore.kernels import cpu, reference
from tokendance.restore.kernels.base import Kernel


def best(device: torch.device) -> Kernel:
    """Triton on GPUs that have it, compiled C++ on the CPU, torch everywhere else."""
    if device.type == "cpu":
        return cpu.KERNEL if cpu.native() is not None else reference.KERNEL
    if importlib.util.find_spec("triton") is None:
        return reference.KERNEL
    from tokendance.restore.kernels import triton

    return triton.KERNEL
