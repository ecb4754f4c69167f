import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpflash.kernels.attention_configs import HEAD_DIMS, entry, table

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("compile_attention.py")
# The most that a thread may hold, and that a block may share (163, 227, 227 and 64 KiB).
REGISTERS = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512}
SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
TENSOR_MEMORY = 512
ARCHITECTURES = list(SHARED)
ENTRIES = [
    entry(kernel, head_dim, dtype)
    for kernel in ("forward", "dq", "dkdv")
    for head_dim in HEAD_DIMS
    for dtype in (torch.bfloat16, torch.float32)
]
# Bytes that a thread may spill, by architecture and entry, where that is not 0. Three TF32
# products keep two halves of every operand in registers, so in float32 no tile of head dim 256
# fits. The 16-bit entry spills outside the loops over chunks only.
SPILLED = {
    ("sm_90", "dq/256/16"): 128,
    ("sm_90", "forward/256/32"): 64,
    ("sm_90", "dq/256/32"): 160,
    ("sm_90", "dkdv/256/32"): 256,
}
# The same with every optional feature switched on, at head dim 80 = 64 + 16.
SPILLED_BY_FEATURES = {("sm_90", "dq/128/16"): 64}
# With squared norms in the epilogue, where 16 bits of head dim 64 and 128 spill nothing either.
SPILLED_BY_SQUARES = {("sm_90", "dq/256/16"): 80}
# To save a minute: sm_80 and sm_100 would repeat what sm_90 shows.
FLOAT32_ARCHITECTURES = ["sm_90", "gfx942"]


def compiled(arch, entries, *options):
    """What the kernels need; a process of its own, since the tests' one may interpret Triton."""
    command = [sys.executable, str(SCRIPT), arch, *entries, *options]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line["entry"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert list(lines) == list(entries)
    return lines


def misfits(arch, lines, spilled):
    """What does not fit, one line of text for each; `spilled`: the bytes allowed."""
    budgets = {
        "registers": dict.fromkeys(lines, REGISTERS[arch]),
        "spilled": {name: spilled.get((arch, name), 0) for name in lines},
        "shared": dict.fromkeys(lines, SHARED[arch]),
        "tensor_memory": dict.fromkeys(lines, TENSOR_MEMORY),
    }
    return [
        f"{name} {line['sizes']}: {line[what]} {what}, at most {allowed[name]}"
        for name, line in lines.items()
        for what, allowed in budgets.items()
        if line[what] > allowed[name]
    ]


def of_bits(bits):
    return [name for name in ENTRIES if name.endswith(f"/{bits}")]


def test_table_names_every_kernel_for_every_architecture_and_nothing_else():
    assert sorted(table()) == sorted(ARCHITECTURES)
    for arch, rows in table().items():
        assert sorted(rows) == sorted(ENTRIES), arch


def test_budget_allows_no_spills_in_16_bit_up_to_head_dim_128():
    assert {name for _, name in SPILLED} <= set(ENTRIES)
    spilling = [name for _, name in (*SPILLED, *SPILLED_BY_SQUARES)]
    assert not [name for name in spilling if name.endswith(("/64/16", "/128/16"))]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_16_bit_kernel_fits_its_architecture(arch):
    assert not misfits(arch, compiled(arch, of_bits(16)), SPILLED)


@pytest.mark.parametrize("arch", FLOAT32_ARCHITECTURES)
def test_float32_kernel_fits_its_architecture(arch):
    assert not misfits(arch, compiled(arch, of_bits(32)), SPILLED)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_split_head_dim_with_every_feature_fits_its_architecture(arch):
    entries = [f"{kernel}/128/16" for kernel in ("forward", "dq", "dkdv", "delta")]
    lines = compiled(arch, entries, "--head-dim", "80", "--all-features")
    assert all(line["flags"] for line in lines.values())
    assert not misfits(arch, lines, SPILLED_BY_FEATURES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_16_bit_backward_with_squares_fits_its_architecture(arch):
    entries = [name for name in of_bits(16) if not name.startswith("forward")]
    lines = compiled(arch, entries, "--flags", "SQUARES")
    assert all(line["flags"] == ["SQUARES"] for line in lines.values())
    assert not misfits(arch, lines, SPILLED_BY_SQUARES)
