"""Kernels compile ahead of time for GPUs that are not there, and fit them.

`make test` compiles most kernels once, for sm_90. `DPFLASH_FULL=1` compiles everything for every
architecture; `make test-all` does so under the oldest and the newest Triton.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpflash.kernels import attention_configs, grad_configs
from dpflash.kernels.attention_configs import column

pytest.importorskip("triton")

FULL = os.environ.get("DPFLASH_FULL") == "1"
full = pytest.mark.skipif(not FULL, reason="DPFLASH_FULL=1 compiles it")
OLDEST_TRITON = importlib.metadata.version("triton").startswith("3.6.")
HERE = Path(__file__).parent

# What a block may share: 163, 227, 99 and 64 KiB.
SHARED = {
    "sm_80": 166912,
    **dict.fromkeys(("sm_90", "sm_100"), 232448),
    **dict.fromkeys(("sm_86", "sm_89", "sm_120"), 101376),
    **dict.fromkeys(("gfx90a", "gfx942"), 65536),
}
TENSOR_MEMORY = 512
ARCHITECTURES = list(SHARED)
COMPILED = ARCHITECTURES if FULL else ["sm_90"]

ATTENTION = [
    attention_configs.entry(kernel, head_dim, dtype)
    for kernel in ("forward", "dq", "dkdv")
    for head_dim in attention_configs.HEAD_DIMS
    for dtype in (torch.bfloat16, torch.float32)
]
GRADS = [
    grad_configs.entry(kernel, dtype)
    for kernel in grad_configs.KERNELS
    for dtype in (torch.bfloat16, torch.float32)
]
REDUCTIONS = (
    "clip_reduce/16",
    "squares/16",
    "sum_squares/32",
    "clip_factors/32",
    "token_norms/16",
    "gram_bound/32",
    "token_sums/16",
    "embedding_grad_norm/16",
    "embedding_clipped_grad/16",
)
EXACT = ("exact_clip_reduce",)
NOISY = ("noisy_clip_reduce", "offset_clip_reduce", "philox_clip_reduce")
NOISE = [
    f"{generator}/{dtype}/{place}"
    for generator in ("chacha20", "philox")
    for dtype in ("fp32", "fp64")
    for place in ("aligned", "offset")
]
# Registers of what waits for memory: 24 warps of a multiprocessor, or 12 where noise is made as
# well, whose quantiles in fp64 are eight at a time, to hide their latency. Philox, which releases
# nothing, has 178 on sm_80 under Triton 3.9.
REGISTERS = {**dict.fromkeys(EXACT, 80), **dict.fromkeys((*NOISY, "chacha20", "settle"), 168)}
REGISTERS["philox"] = 184
SHARED_OF_NOISE = 8192
# Bytes that a thread may spill under Triton 3.6 and under later releases, where not 0, by column
# of the tables. Three TF32 products keep two halves of every operand in registers, so in float32
# no tile of head dim 256 fits.
SPILLED = {
    ("sm_80", "gram/32"): (32, 0),
    ("sm_86", "gram/32"): (32, 0),
    ("sm_86", "dq/128/32"): (8, 8),
    ("sm_86", "forward/256/32"): (32, 32),
    ("sm_86", "dq/256/32"): (64, 64),
    ("sm_86", "dkdv/256/32"): (176, 176),
    # Outside the loops over chunks only.
    ("sm_90", "dq/256/16"): (0, 128),
    ("sm_90", "dq/128/32"): (24, 0),
    ("sm_90", "forward/256/32"): (32, 64),
    ("sm_90", "dq/256/32"): (64, 160),
    ("sm_90", "dkdv/256/32"): (184, 256),
    ("sm_100", "gram/32"): (72, 0),
    # Triton 3.9 holds them to 128 registers.
    ("sm_86", "philox_clip_reduce/16"): (0, 16),
    ("sm_90", "noisy_clip_reduce/16"): (0, 8),
    ("sm_90", "philox_clip_reduce/16"): (0, 8),
    ("sm_100", "noisy_clip_reduce/16"): (0, 8),
    ("sm_100", "philox_clip_reduce/16"): (0, 8),
    # Outside the loops over chunks only.
    ("sm_100", "dkdv/64/16"): (64, 0),
}
# Instructions of a chunk that every row sees and of one that needs a mask, on sm_90. Before masks
# were ranges of columns and row statistics 8 bytes, they were 377 and 718 for forward/128/16, 315
# and 657 for dq/128/16, 282 and 480 for dkdv/128/16.
CHUNKS = {
    "forward/64/16": (320, 490),
    "forward/128/16": (390, 570),
    "dq/64/16": (290, 460),
    "dq/128/16": (355, 540),
    "dkdv/64/16": (370, 630),
    "dkdv/128/16": (280, 380),
}
# What changes the scores, and the flags that it brings. Models have one of them.
SCORE_CHANGES = {"HAS_SLOPES": [], "HAS_SOFTCAP": [], "HAS_BIAS": ["BIAS_GRAD"]}
# With one of those and every other optional feature, at head dim 80 = 64 + 16.
SPILLED_BY_FEATURES = {
    ("sm_80", "dq/128/16"): (16, 0),
    ("sm_80", "dkdv/128/16"): (32, 0),
    ("sm_86", "dq/128/16"): (48, 40),
    ("sm_86", "dkdv/128/16"): (32, 40),  # 24 under 3.6 before records of tiles
    ("sm_90", "dq/128/16"): (40, 0),
    ("sm_100", "dq/128/16"): (24, 0),
    ("sm_100", "dkdv/128/16"): (48, 0),  # 40 before
    ("sm_100", "delta/128/16"): (8, 0),
}
# With a bias among them.
SPILLED_BY_FEATURES_AND_BIAS = SPILLED_BY_FEATURES | {
    ("sm_86", "dkdv/128/16"): (40, 32),
    ("sm_100", "dkdv/128/16"): (40, 24),
}
# With a position bias and its gradient.
SPILLED_BY_BIAS: dict[tuple[str, str], tuple[int, int]] = {
    ("sm_80", "forward/256/16"): (24, 16),
    ("sm_86", "forward/64/16"): (0, 8),
    ("sm_86", "dkdv/64/16"): (8, 8),
    ("sm_86", "forward/256/16"): (48, 40),
    ("sm_86", "dq/256/16"): (32, 32),
    ("sm_100", "forward/256/16"): (48, 16),
    ("sm_100", "dkdv/64/16"): (16, 0),
}


# Runs one script after another: to import torch and Triton takes longer than most of them.
RUNNER = """
import json, runpy, sys, traceback
for line in sys.stdin:
    sys.argv = json.loads(line)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    print("end", flush=True)
"""


@pytest.fixture(scope="module")
def output():
    """output(script, *words): its lines, of a process that does not interpret Triton."""
    with subprocess.Popen(
        [sys.executable, "-c", RUNNER],
        cwd=HERE,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def run(script, *words):
            print(json.dumps([str(script), *words]), file=process.stdin, flush=True)
            lines = []
            while (line := process.stdout.readline()) != "end\n":
                assert line, f"the process ended: {lines}"
                lines.append(line)
            return lines

        yield run


@pytest.fixture
def compiled(output):
    """What the kernels need."""

    def run(script, arch, entries, *options):
        printed = output(HERE / f"compile_{script}.py", arch, *entries, *options)
        assert all(line.startswith("{") for line in printed), "".join(printed)
        lines = {line["entry"]: line for line in map(json.loads, printed)}
        assert list(lines) == list(entries)
        return lines

    return run


def misfits(arch, lines, spilled=SPILLED, *, registers=None, shared=None):
    """What does not fit or is slower than it looks, one line of text for each."""
    found = []
    for name, line in lines.items():
        most = 512 if arch.startswith("gfx") else 255  # that a thread may hold
        own = REGISTERS.get(name.partition("/")[0], most)
        budgets = {
            "registers": registers or own,
            "spilled": spilled.get((column(arch), name), (0, 0))[0 if OLDEST_TRITON else 1],
            "shared": shared or SHARED[arch],
            "tensor_memory": TENSOR_MEMORY,
        }
        found += [
            f"{arch}: {name} {line.get('sizes')}: {line[what]} {what}, at most {most}"
            for what, most in budgets.items()
            if line[what] > most
        ]
        found += [f"{arch}: {name} {line.get('sizes')}: {loss}" for loss in line["lost"]]
    return found


def attention(*kernels):
    """Entries in 16 bit; without DPFLASH_FULL of head dim 128."""
    names = [name for name in ATTENTION if name.endswith("/16") and name.startswith(kernels)]
    return names if FULL else [n for n in names if n.endswith("/128/16")]


@pytest.mark.parametrize(
    "table, entries", [(attention_configs.table, ATTENTION), (grad_configs.table, GRADS)]
)
def test_table_names_every_kernel_for_every_architecture_and_nothing_else(table, entries):
    assert set(table()) == set(map(column, ARCHITECTURES))
    for arch, rows in table().items():
        assert sorted(rows) == sorted(entries), arch


def test_table_keeps_square_token_tiles():
    for arch, rows in grad_configs.table().items():
        for bits in (16, 32):
            gram = rows[f"gram/{bits}"]
            assert gram.block_m == gram.block_n, arch


def test_budget_allows_no_spills_in_16_bit_but_of_old_releases_head_dim_256_and_noise():
    assert {name for _, name in SPILLED} <= {*ATTENTION, *GRADS, *(f"{n}/16" for n in NOISY)}
    for (arch, name), (oldest, later) in SPILLED.items():
        if name.endswith("/16"):
            makes_noise = name.partition("/")[0] in NOISY
            assert later == 0 or name == "dq/256/16" or (makes_noise and later <= 16)
            assert oldest == 0 or arch != "sm_90"


@pytest.mark.parametrize("arch", COMPILED)
def test_16_bit_attention_fits_its_architecture(arch, compiled):
    kernels = ("forward", "dq", "dkdv") if FULL else ("forward", "dkdv")
    lines = compiled("attention", arch, attention(*kernels))
    assert not misfits(arch, lines)
    if arch == "sm_90":
        for name in lines.keys() & CHUNKS.keys():
            whole, masked = lines[name]["chunks"]
            assert (whole <= CHUNKS[name][0]) and (masked <= CHUNKS[name][1]), name
            assert lines[name]["narrow_copies"] == [0, 0], name


@full
def test_least_shared_memory_is_enough_for_the_widest_head_dim(compiled):
    assert not misfits("sm_86", compiled("attention", "sm_86", ["dq/256/16"]))


@full
@pytest.mark.parametrize("arch", ["sm_86", "sm_90", "gfx90a", "gfx942"])
def test_float32_attention_fits_its_architecture(arch, compiled):
    entries = [name for name in ATTENTION if name.endswith("/32")]
    assert not misfits(arch, compiled("attention", arch, entries))


@pytest.mark.cases(0)
@pytest.mark.parametrize("change", SCORE_CHANGES)
@pytest.mark.parametrize("arch", COMPILED)
def test_split_head_dim_with_every_feature_fits_its_architecture(arch, change, compiled):
    """Slopes, a soft cap and a bias one at a time; with several of them more is spilled."""
    entries = [f"{kernel}/128/16" for kernel in ("forward", "dq", "dkdv", "delta")]
    others = [name for name in SCORE_CHANGES if name != change]
    absent = [flag for name in others for flag in (name, *SCORE_CHANGES[name])]
    options = ("--head-dim", "80", "--all-but", *absent)
    lines = compiled("attention", arch, entries, *options)
    assert all(line["flags"] for line in lines.values())
    with_bias = change == "HAS_BIAS"
    spilled = SPILLED_BY_FEATURES_AND_BIAS if with_bias else SPILLED_BY_FEATURES
    assert not misfits(arch, lines, spilled)


@full
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_attention_with_a_bias_fits_its_architecture(arch, compiled):
    """As T5 has it, with the gradient of the bias and squared norms."""
    flags = ("HAS_BIAS", "BIAS_GRAD", "HAS_KEY_RANGE", "SQUARES")
    lines = compiled("attention", arch, attention("forward", "dq", "dkdv"), "--flags", *flags)
    assert all("HAS_BIAS" in line["flags"] for line in lines.values())
    assert not misfits(arch, lines, SPILLED_BY_BIAS)


@full
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_dq_with_sums_over_rows_compiles(arch, compiled):
    """Triton 3.6 fails to compile some tiles of two stages for gfx942 once they have such sums."""
    lines = compiled("attention", arch, attention("dq"), "--flags", "HAS_SLOPES", "RUN_GRADS")
    assert all(line["flags"] == ["HAS_SLOPES", "RUN_GRADS"] for line in lines.values())


@full
@pytest.mark.parametrize("bits", [16, 32])
def test_unaligned_rows_fit_in_shared_memory(bits, compiled):
    """They spill, since each element has an address of its own; models' rows are aligned."""
    entries = [f"{kernel}/128/{bits}" for kernel in ("forward", "dq", "dkdv")]
    lines = compiled("attention", "sm_90", entries, "--head-dim", "80", "--unaligned")
    assert not misfits("sm_90", lines, {("sm_90", name): (832, 832) for name in entries})


@pytest.mark.cases(0)
@pytest.mark.parametrize("arch", COMPILED)
def test_16_bit_backward_with_squares_fits_its_architecture(arch, compiled):
    lines = compiled("attention", arch, attention("dq", "dkdv"), "--flags", "SQUARES")
    assert all(line["flags"] == ["SQUARES"] for line in lines.values())
    assert not misfits(arch, lines)


@pytest.mark.cases(0)
@pytest.mark.parametrize("arch", COMPILED)
def test_gradients_fit_their_architecture(arch, compiled):
    entries = GRADS if FULL else [name for name in GRADS if name.endswith("/16")]
    assert not misfits(arch, compiled("grads", arch, entries))


@full
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_of_spans_fit_their_architecture(arch, compiled):
    entries = [*GRADS, "token_sums/16", "token_sums/32"]
    assert not misfits(arch, compiled("grads", arch, entries, "--spans"))


@full
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_reductions_fit_their_architecture(arch, compiled):
    assert not misfits(arch, compiled("grads", arch, REDUCTIONS))


@pytest.mark.cases(0)
@pytest.mark.parametrize("arch", COMPILED)
def test_exact_sums_and_their_noise_fit_their_architecture(arch, compiled):
    names = (*EXACT, *NOISY) if FULL else (EXACT[0], NOISY[0])
    assert not misfits(arch, compiled("grads", arch, [f"{name}/16" for name in names]))


@full
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_exact_sums_of_odd_widths_fit_their_architecture(arch, compiled):
    entries = [f"{name}/32" for name in (*EXACT, "offset_clip_reduce")]
    assert not misfits(arch, compiled("grads", arch, entries, "--odd"))


@full
def test_widths_that_are_no_multiples_of_16_compile(compiled):
    lines = compiled("grads", "sm_90", ["clipped_grad/16"], "--odd", "--half", "fp16")
    assert not misfits("sm_90", lines)


@pytest.mark.parametrize("arch", COMPILED)
def test_noise_fits_its_architecture(arch, compiled):
    lines = compiled("noise", arch, [*(NOISE if FULL else NOISE[:1]), "settle"])
    assert not misfits(arch, lines, shared=SHARED_OF_NOISE)


@pytest.mark.cases(0)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_the_rotary_kernel_fits_its_architecture(arch, compiled):
    lines = compiled("rotary", arch, ["128/bf16", "80/fp32"] if FULL else ["128/bf16"])
    assert not misfits(arch, lines, registers=64)


def test_no_kernel_compiles_anew_for_another_batch_or_address(output, tmp_path):
    program = """
from dpflash.kernels import attention_triton, grad_triton, noise_triton, rotary_triton
for module in (attention_triton, grad_triton, noise_triton, rotary_triton):
    for name, kernel in vars(module).items():
        if name.endswith("_kernel"):
            print(name, *(p.name for p in kernel.params if not p.is_constexpr
                          and not p.name.endswith("_ptr") and not p.do_not_specialize))
"""
    script = tmp_path / "script.py"
    script.write_text(program)
    lines = output(script)
    # Widths, strides and what follows from the widths: fixed by the model.
    fixed = {"num_inputs", "num_outputs", "width"}
    fixed |= {"tiles_i", "num_tiles", "num_blocks"}
    fixed |= {"heads", "key_heads", "heads_per_group", "heads_per_program"}
    fixed |= {"scale", "scale_log2", "softcap_log2"}
    # What lengths decide, of attention alone: 1, a multiple of 16, or another number.
    lengths = {"num_queries", "num_keys", "num_rows", "num_runs"}
    for line in lines:
        name, *specialised = line.split()
        left = {p for p in specialised if not p.startswith("stride_")} - fixed
        left -= lengths if name.startswith("_attention_") else set()
        assert not left, name
    assert len(lines) == 19
