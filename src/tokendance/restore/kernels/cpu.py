"""The fast CPU kernel: place.cpp, compiled on first use with the machine's own compiler.

One pass over memory instead of four or five: `tokendance bench restore` prints both.
Without a compiler, or for tensors it does not take, the torch kernel runs instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tokendance.restore.kernels import reference
from tokendance.restore.kernels.base import Kernel, Rows, Slots, Turn

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("place.cpp")
# No contraction beyond what place.cpp spells out: it would round differently from the torch kernel.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC")
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_ROWS_PER_TASK = 512
_MAX_HEAD = 4096  # bytes, kMaxHead of place.cpp
_STREAM_FROM = 1 << 20
"""Bytes per plane and layer from which writes go past the caches; less is soon read again."""


class _Plane(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_void_p),
        ("head_stride", ctypes.c_int64),
        ("master", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
    )


class _Turn(ctypes.Structure):
    _fields_ = (
        ("which", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("half", ctypes.c_int64),
        ("interleaved", ctypes.c_int64),
    )


class _Work(ctypes.Structure):
    _fields_ = (
        ("planes", _Plane * 2),
        ("count", ctypes.c_int64),
        ("source", ctypes.c_void_p),
        ("master_rows", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("turn", _Turn),
        ("kind", ctypes.c_int64),
        ("stream", ctypes.c_int64),
    )


@functools.cache
def native() -> Any | None:
    """The compiled function, or None if it cannot be had here (logged once)."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.info("no C++ compiler: restore uses the torch kernel on the CPU")
        return None
    try:
        function = ctypes.CDLL(str(_built(compiler))).tokendance_place
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        logger.warning("cannot build the CPU restore kernel (%s): using torch", error)
        return None
    function.argtypes = (ctypes.POINTER(_Work), ctypes.c_int64, ctypes.c_int64)
    function.restype = None
    return function


def _built(compiler: str) -> Path:
    """The library for this source, compiler and processor, from the user's cache."""
    text = "\0".join((_SOURCE.read_text(), compiler, *_FLAGS, _processor()))
    name = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = base / "tokendance" / f"place-{name}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            fresh = Path(folder) / library.name
            command = [compiler, *_FLAGS, "-o", str(fresh), str(_SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            os.replace(fresh, library)
    return library


def _processor() -> str:
    """What -march=native depends on; a home directory may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def place_plane(
    pages: torch.Tensor, slots: Slots, rows: Rows, source: torch.Tensor, turn: Turn | None
) -> None:
    if not _run([pages], slots, [rows], source, turn):
        reference.place_plane(pages, slots, rows, source, turn)


def place_pair(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: Slots,
    k_rows: Rows,
    v_rows: Rows,
    source: torch.Tensor,
    turn: Turn | None,
) -> None:
    if not _run([k_pages, v_pages], slots, [k_rows, v_rows], source, turn):
        reference.place_pair(k_pages, v_pages, slots, k_rows, v_rows, source, turn)


def _run(
    pages: list[torch.Tensor],
    slots: Slots,
    rows: list[Rows],
    source: torch.Tensor,
    turn: Turn | None,
) -> bool:
    """False if the compiled kernel does not take these tensors."""
    function = native()
    if function is None or not _takes(pages, rows):
        return False
    offsets = [slots.offsets(plane, plane.element_size()) for plane in pages]
    work = _work(pages, offsets, rows, source, turn)
    count = len(slots)
    tasks = max(1, min(torch.get_num_threads(), count // _ROWS_PER_TASK))
    edges = [count * i // tasks for i in range(tasks + 1)]
    if tasks == 1:
        function(ctypes.byref(work), 0, count)
    else:
        # ctypes lets go of the interpreter lock, so threads of Python are enough.
        list(_pool().map(lambda a, b: function(ctypes.byref(work), a, b), edges, edges[1:]))
    return True


def _takes(pages: list[torch.Tensor], rows: list[Rows]) -> bool:
    shape, dtype = pages[0].shape[2:], pages[0].dtype
    return dtype in _KINDS and all(
        plane.dtype == dtype
        and plane.shape[2:] == shape
        and plane.stride(3) == 1
        and shape[1] * dtype.itemsize <= _MAX_HEAD
        and all(x.dtype == dtype and x.shape[1:] == shape and x.is_contiguous() for x in made_of)
        for plane, made_of in zip(pages, rows)
    )


def _work(
    pages: list[torch.Tensor],
    offsets: list[torch.Tensor],
    rows: list[Rows],
    source: torch.Tensor,
    turn: Turn | None,
) -> _Work:
    planes = [
        _Plane(
            plane.data_ptr(),
            plane.stride(2) * plane.element_size(),
            made_of.master.data_ptr(),
            made_of.own.data_ptr(),
            offset.data_ptr(),
        )
        for plane, made_of, offset in zip(pages, rows, offsets)
    ]
    heads, dim = pages[0].shape[2:]
    rotation = _Turn()
    if turn is not None:
        rotary = turn.rotary
        pointers = (x.data_ptr() for x in (turn.which, turn.cos, turn.sin))
        rotation = _Turn(*pointers, rotary.rotary_dim // 2, int(rotary.interleaved))
    return _Work(
        (_Plane * 2)(*planes),
        len(planes),
        source.data_ptr(),
        rows[0].master.shape[0],
        heads,
        dim,
        rotation,
        _KINDS[pages[0].dtype],
        int(len(source) * heads * dim * pages[0].element_size() >= _STREAM_FROM),
    )


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="tokendance-place")


KERNEL = Kernel("native", place_plane, place_pair)
