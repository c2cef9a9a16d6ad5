"""Every restore kernel against the sentence that defines it, row by row."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokendance.restore.kernels import best, cpu, reference
from tokendance.restore.kernels.base import Kernel, Rows, Slots, Turn
from tokendance.reuse.rotary import Rotary

PAGE = 4
KERNELS = [reference.KERNEL, pytest.param(cpu.KERNEL, id="native")]


def rotary(dim: int, interleaved: bool = False, part: int | None = None) -> Rotary:
    turned = part or dim
    freq = 1.0 / 10000 ** (torch.arange(0, turned, 2).double() / turned)
    return Rotary(freq, interleaved=interleaved, rotary_dim=turned)


class Case:
    """Random rows, slots and differences; `expected` follows the definition with no batching."""

    def __init__(
        self, rotation: Rotary, dim: int, dtype: torch.dtype, heads: int = 3, seed: int = 0
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.rotary = rotation
        self.k, self.v = (
            Rows(*(torch.randn(n, heads, dim, generator=g).to(dtype) for n in (40, 17)))
            for _ in range(2)
        )
        self.source = torch.randperm(57, generator=g)[:45]
        self.slots = torch.randperm(20 * PAGE, generator=g)[:45]
        self.deltas = torch.tensor([0, 0, -900, 3, 31_000])[torch.arange(45) // 10]
        self.shape = (20, PAGE, heads, dim)
        self.dtype = dtype

    def pages(self) -> torch.Tensor:
        return torch.full(self.shape, 7.0, dtype=self.dtype)

    def expected(self, rows: Rows, turned: bool) -> torch.Tensor:
        pages = self.pages()
        both = torch.cat(rows)
        for slot, source, delta in zip(self.slots, self.source, self.deltas):
            row = both[source : source + 1]
            if turned and delta != 0:
                row = self.rotary.rotate(row, int(delta))
            pages[slot // PAGE, slot % PAGE] = row[0]
        return pages

    def check(self, kernel: Kernel) -> None:
        slots, turn = Slots.of(self.slots, PAGE), Turn.of(self.rotary, self.deltas)
        k, v = self.pages(), self.pages()
        kernel.place_pair(k, v, slots, self.k, self.v, self.source, turn)
        self.compare(k, self.expected(self.k, True))
        assert torch.equal(v, self.expected(self.v, False))
        alone = self.pages()
        kernel.place_plane(alone, slots, self.k, self.source, turn)
        assert torch.equal(alone, k)
        kernel.place_plane(alone, slots, self.v, self.source, None)
        assert torch.equal(alone, v)

    def compare(self, got: torch.Tensor, want: torch.Tensor) -> None:
        still = torch.ones(20 * PAGE, dtype=torch.bool)
        still[self.slots[self.deltas != 0]] = False
        flat = (20 * PAGE, *self.shape[2:])
        assert torch.equal(got.reshape(flat)[still], want.reshape(flat)[still])
        # One unit in the last place: sums may be contracted to a fused multiply-add.
        torch.testing.assert_close(got, want, rtol=torch.finfo(self.dtype).eps, atol=1e-6)


CASES = [
    pytest.param(rotary(16), 16, id="neox"),
    pytest.param(rotary(64), 64, id="neox-64"),
    pytest.param(rotary(16, interleaved=True), 16, id="interleaved"),
    pytest.param(rotary(24, part=8), 24, id="partial"),
    pytest.param(rotary(24, interleaved=True, part=16), 24, id="partial-interleaved"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rotation", "dim"), CASES)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_kernel_follows_the_definition(
    kernel: Kernel, rotation: Rotary, dim: int, dtype: torch.dtype
) -> None:
    Case(rotation, dim, dtype).check(kernel)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_kernel_writes_views_of_a_shared_buffer(kernel: Kernel) -> None:
    """K and V halves of one buffer, heads outside the page: an engine's own layouts."""
    case = Case(rotary(16), 16, torch.bfloat16)
    buffer = torch.full((20, 3, PAGE, 32), 7.0, dtype=torch.bfloat16)
    k, v = buffer.transpose(1, 2).split(16, -1)
    slots, turn = Slots.of(case.slots, PAGE), Turn.of(case.rotary, case.deltas)
    kernel.place_pair(k, v, slots, case.k, case.v, case.source, turn)
    case.compare(k, case.expected(case.k, True))
    assert torch.equal(v, case.expected(case.v, False))


def test_native_kernel_equals_torch_bit_for_bit() -> None:
    if cpu.native() is None:
        pytest.skip("no C++ compiler here: the torch kernel is the CPU kernel")
    case = Case(rotary(64), 64, torch.bfloat16, heads=64)
    slots, turn = Slots.of(case.slots, PAGE), Turn.of(case.rotary, case.deltas)
    got, want = case.pages(), case.pages()
    cpu.place_plane(got, slots, case.k, case.source, turn)
    reference.place_plane(want, slots, case.k, case.source, turn)
    assert torch.equal(got, want)


def test_native_kernel_splits_work_between_threads() -> None:
    rows = 2000
    values = torch.randn(rows, 2, 16).bfloat16()
    pages = torch.zeros(rows // PAGE, PAGE, 2, 16, dtype=torch.bfloat16)
    slots = torch.randperm(rows)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        made = Rows(values, values[:0])
        cpu.place_plane(pages, Slots.of(slots, PAGE), made, torch.arange(rows), None)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(pages.flatten(0, 1)[slots], values)


def test_special_values_keep_their_bits_where_nothing_moves() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]).repeat(4)
    values = odd.expand(2, 1, 16).to(torch.bfloat16).contiguous()
    turn = Turn.of(rotary(16), torch.tensor([0, 5]))
    for kernel in (reference.KERNEL, cpu.KERNEL):
        pages = torch.zeros(1, PAGE, 1, 16, dtype=torch.bfloat16)
        slots = Slots.of(torch.tensor([2, 1]), PAGE)
        kernel.place_plane(pages, slots, Rows(values, values[:0]), torch.arange(2), turn)
        assert torch.equal(pages[0, 2].view(torch.int16), values[0].view(torch.int16))
        # A row that moves may change its bits, but nan stays nan.
        assert pages[0, 1].isnan().any()


def test_without_a_compiler_the_torch_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "native", lambda: None)
    Case(rotary(16), 16, torch.bfloat16).check(cpu.KERNEL)


def test_broken_compiler_is_reported_and_survived(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.native.cache_clear()
    try:
        assert cpu.native() is None
        assert best(torch.device("cpu")) is reference.KERNEL
        assert "cannot build" in caplog.text
    finally:
        cpu.native.cache_clear()


_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.skipif(not _TRITON, reason="triton is not installed on this machine")
def test_triton_kernels_in_the_interpreter() -> None:
    """In a process of its own: TRITON_INTERPRET has to be set before triton is imported."""
    code = """
import sys; sys.path.insert(0, sys.argv[1])
import torch
from test_restore_kernels import Case, rotary
from tokendance.restore.kernels import triton
cases = (rotary(16), 16), (rotary(16, interleaved=True), 16), (rotary(24, part=8), 24)
for rotation, dim in cases:
    Case(rotation, dim, torch.bfloat16).check(triton.KERNEL)
Case(rotary(16), 16, torch.float32).check(triton.KERNEL)
"""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    here = str(Path(__file__).parent)
    run = subprocess.run(
        [sys.executable, "-c", code, here], env=env, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not _TRITON, reason="triton is not installed on this machine")
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_triton_kernels_compile_for_a_gpu(pair: bool, interleaved: bool) -> None:
    """Compiled for a GPU that need not be here: syntax, types and shapes are checked."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tokendance.restore.kernels import triton as kernels

    names = kernels._place_kernel.arg_names
    constants = {
        "PAIR": pair,
        "TURN": True,
        "INTERLEAVED": interleaved,
        "BLOCK": 32,
        "HALF": 32,
        "DIM": 64,
    }
    pointers = {"k_offsets": "i64", "v_offsets": "i64", "source": "i64", "which": "i32"}
    pointers |= {name: "fp32" for name in ("cos", "sin")}
    pointers |= {f"{plane}_{part}": "bf16" for plane in "kv" for part in ("pages", "master", "own")}
    signature = {
        name: f"*{pointers[name]}" if name in pointers else "i32"
        for name in names
        if name not in constants
    }
    signature |= {name: "constexpr" for name in constants}
    source = ASTSource(kernels._place_kernel, signature, constants)
    compiled = compile(source, target=GPUTarget("cuda", 80, 32))
    assert "tt.load" in compiled.asm["ttir"]
