"""Rounded normals that a GPU settles in integers of 128 bits: those of C++ and of mpmath.

Without a GPU they run in Triton's interpreter. How lists of them are settled is tested in
`test_noise_triton.py`.
"""

import os
import random

import mpmath
import pytest
import torch
from normal_words import (
    TOP,
    as_tensor,
    borders,
    holds_a_border,
    magnitudes,
    near_borders,
    units_of_border,
    upper_tail,
)

from dpflash.kernels import noise_cpu, rounded_normal

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("dpflash.kernels.noise_triton")
tail = pytest.importorskip("dpflash.kernels.normal_tail_triton")
tl = pytest.importorskip("triton.language")

# numpy tells of the infinity at the word 0.
pytestmark = [
    pytest.mark.usefixtures("digits"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FULL = os.environ.get("DPFLASH_FULL") == "1"


@triton.jit
def _tails_kernel(out_ptr, node_ptr, t_ptr, table_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    high, low = tail.tails(
        table_ptr, tl.load(node_ptr + lanes), tl.load(t_ptr + lanes).to(tl.uint64, bitcast=True),
        tl.load(t_ptr + BLOCK + lanes).to(tl.uint64, bitcast=True), lanes >= 0,
    )  # fmt: skip
    tl.store(out_ptr + lanes, high.to(tl.int64, bitcast=True))
    tl.store(out_ptr + BLOCK + lanes, low.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["r2", "r1", "r0"])
def _settled_kernel(
    out_ptr, is_settled_ptr, words_ptr, scale_ptr, table_ptr, count,
    r2: tl.uint64, r1: tl.uint64, r0: tl.uint64, BLOCK: tl.constexpr,
):  # fmt: skip
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = lanes < count
    words = tl.load(words_ptr + lanes, mask=there, other=1)
    integers, is_settled = kernels.settled(
        words, there, table_ptr, tl.load(scale_ptr), r2, r1, r0
    )  # fmt: skip
    tl.store(out_ptr + lanes, integers, mask=there)
    tl.store(is_settled_ptr + lanes, is_settled, mask=there)


def settled(words, scale):
    """([N] int64, [N] where they need no further words) of `kernels.settled`, on the CPU."""
    integers = torch.zeros(len(words), dtype=torch.int64, device=DEVICE)
    is_settled = torch.zeros(len(words), dtype=torch.bool, device=DEVICE)
    block = 32 if DEVICE.type == "cuda" else min(1024, triton.next_power_of_2(len(words)))
    _settled_kernel[(triton.cdiv(len(words), block),)](
        integers, is_settled, words.to(DEVICE),
        torch.tensor(scale, dtype=torch.float64, device=DEVICE), tail.tail_table(DEVICE),
        len(words), *tail.reciprocal_words(scale), BLOCK=block,
    )  # fmt: skip
    return integers.cpu(), is_settled.cpu()


def test_tails_are_as_exact_as_they_say():
    """Far below the 2^-96 by which they may be off where they decide."""
    nodes = [j for j in range(len(tail.tail_table(DEVICE))) for _ in range(5)][:: 1 if FULL else 9]
    source = random.Random(0)
    parts = [(0, 2**128 - 1, 2**127, source.getrandbits(128))[i % 4] for i in range(len(nodes))]
    size = triton.next_power_of_2(len(nodes))
    node = torch.zeros(size, dtype=torch.int32)
    node[: len(nodes)] = torch.tensor(nodes)
    t = torch.zeros(2, size, dtype=torch.int64)
    t[:, : len(nodes)] = torch.stack(
        [as_tensor([x >> 64 for x in parts]), as_tensor([x % 2**64 for x in parts])]
    )
    out = torch.zeros_like(t, device=DEVICE)
    _tails_kernel[(1,)](out, node.to(DEVICE), t.to(DEVICE), tail.tail_table(DEVICE), BLOCK=size)
    for j, x, high, low in zip(nodes, parts, *out[:, : len(nodes)].tolist(), strict=True):
        found = (high % 2**64 << 64) + low % 2**64
        exact = upper_tail((j + mpmath.mpf(x) / 2**128) / 64)
        assert abs(mpmath.mpf(found) / 2**128 - exact) < mpmath.mpf(2) ** -104, (j, x)


@pytest.mark.cases(7)
@pytest.mark.parametrize(
    "scale", [1e-3, 0.06, 1.7, 1000.3, 1.5 * 2**30, 2.0**44, 2.0**45 * (1 - 2**-53)]
)
def test_what_is_settled_is_what_the_cpu_settles(scale):
    """DPFLASH_FULL=1: 10,000 words that fp64 leaves undecided."""
    words = near_borders(scale, 15_000 if FULL else 60)
    _, undecided = rounded_normal.rounded_normals(words, scale)
    assert scale < 1000 or len(words) - int(undecided.sum()) < len(words) / 3
    rest = magnitudes(100 if FULL else 5)
    words = torch.cat([words, as_tensor([*rest, *(w | 2**63 for w in rest[::2])])])
    integers, is_settled = settled(words, scale)
    expected, left = noise_cpu.rounded_normals(words, scale)
    # C++ also leaves those where fp64's margin spans eight integers.
    assert bool((is_settled | left).all()) and not bool(is_settled[:2].any())
    both = is_settled & ~left
    assert torch.equal(integers[both].double(), expected[both])
    pairs = torch.stack([words, integers.abs()], 1)[is_settled]
    for word, integer in pairs.tolist():
        assert not integer or units_of_border(integer - 1, scale) > (word & TOP) + 1
        assert units_of_border(integer, scale) < word & TOP
    assert all(holds_a_border(word, scale) for word in words[~is_settled][2:50].tolist())


def test_words_next_to_a_border_fall_on_its_two_sides():
    for scale, k, p in borders():
        m = int(p)
        words = [w | sign for w in (m - 1, m, m + 1) for sign in (0, 2**63)]
        integers, is_settled = settled(as_tensor(words), scale)
        assert is_settled.tolist() == [True, True, False, False, True, True], (scale, k)
        assert integers[is_settled].tolist() == [k + 1, -k - 1, k, -k], (scale, k)


@triton.jit
def _shifted(magnitudes, FAR: tl.constexpr):
    """Normals that are off by `tail.SHIFT`."""
    return kernels.QUANTILES(magnitudes, FAR) + tail.SHIFT


@pytest.mark.skipif(torch.cuda.is_available(), reason="patches what the interpreter reads")
@pytest.mark.cases(7)
@pytest.mark.parametrize("shift", [-9, -3, -2, 2, 3, 4, 9])
def test_a_quantile_that_is_off_makes_no_integer_wrong(shift, monkeypatch):
    scale = 2.0**20
    words = near_borders(scale, 60)
    expected, was_settled = settled(words, scale)
    monkeypatch.setattr(kernels, "QUANTILES", kernels._quantiles, raising=False)
    monkeypatch.setattr(tail, "SHIFT", shift / scale, raising=False)
    monkeypatch.setattr(kernels, "_quantiles", _shifted)
    integers, is_settled = settled(words, scale)
    assert torch.equal(integers[is_settled], expected[is_settled])
    assert torch.equal(is_settled, was_settled) or abs(shift) > 2
    assert not bool(is_settled.any()) or abs(shift) < 5
