import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpflash.kernels.block_reference import BLOCK
from dpflash.kernels.grad_configs import KERNELS, entry, table

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("compile_grads.py")
# The most that a thread may hold, and that a block may share (163, 227, 227 and 64 KiB).
REGISTERS = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512}
SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
TENSOR_MEMORY = 512
ARCHITECTURES = list(SHARED)
REDUCTIONS = (
    "clip_reduce",
    "block_clip_reduce",
    "tile_factors",
    "token_sums",
    "embedding_grad_norm",
    "embedding_clipped_grad",
)
EXACT = ("exact_clip_reduce", "exact_block_clip_reduce")
NOISY = ("noisy_clip_reduce", "offset_clip_reduce", "philox_clip_reduce")
# Of sums that wait for memory: 24 warps of a multiprocessor, or 12 where noise is made as well.
SUM_REGISTERS = {**dict.fromkeys(EXACT, 80), **dict.fromkeys(NOISY, 160)}
ENTRIES = [entry(kernel, dtype) for kernel in KERNELS for dtype in (torch.bfloat16, torch.float32)]
# Bytes that a thread may spill, by architecture and entry, where that is not 0. A clipping group
# is one size on every device; in float32 two accumulators and three TF32 products are too much.
SPILLED = {
    ("sm_80", "block_clipped_grad/32"): 264,
    ("sm_90", "block_clipped_grad/32"): 64,
}


def compiled(arch, entries, *options):
    """What the kernels need; a process of its own, since the tests' one may interpret Triton."""
    command = [sys.executable, str(SCRIPT), arch, *entries, *options]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line["entry"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert list(lines) == list(entries)
    return lines


def misfits(arch, lines):
    """What does not fit, one line of text for each."""
    return [
        f"{name} {line['sizes']}: {line[what]} {what}, at most {allowed}"
        for name, line in lines.items()
        for what, allowed in {
            "registers": SUM_REGISTERS.get(name.partition("/")[0], REGISTERS[arch]),
            "spilled": SPILLED.get((arch, name), 0),
            "shared": SHARED[arch],
            "tensor_memory": TENSOR_MEMORY,
        }.items()
        if line[what] > allowed
    ]


def test_table_names_every_kernel_for_every_architecture_and_nothing_else():
    assert sorted(table()) == sorted(ARCHITECTURES)
    for arch, rows in table().items():
        assert sorted(rows) == sorted(ENTRIES), arch


def test_no_16_bit_kernel_may_spill():
    assert not [name for _, name in SPILLED if name.endswith("/16")]


def test_table_keeps_the_clipping_groups_and_square_token_tiles():
    for arch, rows in table().items():
        for bits in (16, 32):
            clipped, gram = rows[f"block_clipped_grad/{bits}"], rows[f"gram/{bits}"]
            assert (clipped.block_m, clipped.block_n) == BLOCK, arch
            assert gram.block_m == gram.block_n, arch


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_of_the_table_fit_their_architecture(arch):
    assert not misfits(arch, compiled(arch, ENTRIES))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_reductions_fit_their_architecture(arch):
    assert not misfits(arch, compiled(arch, [f"{name}/16" for name in REDUCTIONS]))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_exact_sums_and_their_noise_fit_their_architecture(arch):
    assert not misfits(arch, compiled(arch, [f"{name}/16" for name in (*EXACT, *NOISY)]))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_exact_sums_of_odd_widths_fit_their_architecture(arch):
    entries = [f"{name}/32" for name in (*EXACT, "offset_clip_reduce")]
    assert not misfits(arch, compiled(arch, entries, "--odd"))


def test_widths_that_are_no_multiples_of_16_compile():
    lines = compiled("sm_90", ["block_clipped_grad/16"], "--odd", "--half", "fp16")
    assert not misfits("sm_90", lines)


def test_no_kernel_compiles_anew_for_another_batch_length_or_address():
    program = """
from dpflash.kernels import grad_triton, noise_triton
for module in (grad_triton, noise_triton):
    for name, kernel in vars(module).items():
        if name.endswith("_kernel"):
            print(name, *(p.name for p in kernel.params if not p.is_constexpr
                          and not p.name.endswith("_ptr") and not p.do_not_specialize))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # Widths, strides and what follows from the widths: fixed by the model.
    fixed = {"num_inputs", "num_outputs", "width", "size", "num_elements"}
    fixed |= {"tiles_i", "num_tiles", "num_blocks"}
    for line in done.stdout.splitlines():
        name, *specialised = line.split()
        left = {p for p in specialised if not p.startswith("stride_")} - fixed
        assert not left, name
    assert len(done.stdout.splitlines()) == 9
