"""Rounded normals: the quantile's error, words at borders, and the three steps that settle them.

mpmath is the judge. What runs in C++ is tested on every width of vectors that this machine has.
"""

import math
import os
import re

import mpmath
import pytest
import scipy.stats
import torch
from normal_words import (
    TOP,
    as_tensor,
    borders,
    holds_a_border,
    magnitudes,
    never,
    random_words,
    upper_tail,
)

from dpflash.kernels import native as cpp
from dpflash.kernels import noise_cpu, rounded_normal
from dpflash.kernels.rounded_normal import RELATIVE_ERROR, settle, tail_quantiles

FULL = os.environ.get("DPFLASH_FULL") == "1"
pytestmark = pytest.mark.usefixtures("digits")


def test_the_quantile_is_as_exact_as_it_says_in_every_region_and_at_their_borders():
    """DPFLASH_FULL=1: 100 times as many words."""
    words = magnitudes(12_000 if FULL else 120)
    m = torch.tensor(words)
    found = tail_quantiles(m.double() * 2.0**-64, (TOP - m).double() * 2.0**-64)
    worst = 0.0
    for word, x in zip(words, found.tolist(), strict=True):
        # Near the median q is that of the next word's end.
        x = mpmath.mpf(x)
        p = mpmath.mpf(word + (x < 1)) / 2**64
        error = (upper_tail(x) - p) / mpmath.npdf(x)
        worst = max(worst, float(abs(error) / x) if x else float(abs(error)))
    assert worst <= RELATIVE_ERROR / 4


def test_the_kernels_have_the_coefficients_of_the_reference_implementation():
    source = (cpp._FOLDER / "rounded_normal.h").read_text(encoding="utf-8")
    for name in ("Center", "Tail", "Far"):
        text = re.search(rf"Ratio k{name} = \{{(.*?)\}};", source, re.DOTALL).group(1)
        numbers = [float(x) for x in re.findall(r"[-+.\de]+", text)]
        assert tuple(numbers) == sum(getattr(rounded_normal, name.upper()), ())


SCALES = [0.01, 0.3, 1.0, 1.7, 1000.3, 1.5 * 2**30, 1.1 * 2**37, 2.0**45 * (1 - 2**-53)]


@pytest.mark.parametrize("scale", SCALES)
def test_what_fp64_decides_is_what_mpmath_finds(scale):
    words = as_tensor([*range(3), *magnitudes(12), *(w | 2**63 for w in magnitudes(4))])
    integers, undecided = rounded_normal.rounded_normals(words, scale)
    decided = ~undecided
    assert bool(decided.any()) and undecided[:1]
    for word, found in zip(words[decided].tolist(), integers[decided].tolist(), strict=True):
        assert found == settle(word, scale, never)


@pytest.mark.parametrize("scale", SCALES)
def test_what_the_kernels_decide_is_what_mpmath_finds(scale, processor):
    """A quantile off by more than its bound shows on a scale of 2^45 (DPFLASH_FULL: 10^5)."""
    words = magnitudes(8000 if FULL else 12)
    words = as_tensor([0, 2**63, *words, *(w | 2**63 for w in words[::2])])
    integers, undecided = noise_cpu.rounded_normals(words, scale)
    assert undecided[:2].all()
    for word, found in list(zip(words.tolist(), integers.tolist(), strict=True))[2:]:
        if math.isnan(found):
            # Not looked at: the quantile's bound of error (rounded_normal.h) spans eight integers.
            y = abs(settle(word, scale, lambda _: 0))
            spanned = 2 * (y * 2**-47 + 2 * scale / (word & TOP))
            assert holds_a_border(word, scale) or spanned >= 7.99
        else:
            assert found == settle(word, scale, never)


@pytest.mark.parametrize("scale", [1.5 * 2**30, 1.1 * 2**37, 1.3 * 2**43])
def test_the_kernels_leave_open_only_words_that_hold_a_border(scale, processor):
    """In 10^6 words are 10^6 18 scale 2^-64 borders: on the greatest scale 11 +- 4."""
    words = random_words(10**5 if scale < 2**40 else 10**6)
    integers, undecided = noise_cpu.rounded_normals(words, scale)
    _, of_fp64 = rounded_normal.rounded_normals(words[: 10**5], scale)
    assert int(of_fp64.sum()) > 0
    expected = len(words) * 18.2 * scale / 2**64
    assert int(undecided.sum()) <= expected + 6 * math.sqrt(expected) + 1e-3
    assert all(holds_a_border(word, scale) for word in words[undecided].tolist())


@pytest.mark.parametrize("sign", [1, -1])
def test_words_next_to_a_border_fall_on_its_two_sides(sign, processor):
    bit = 2**63 if sign < 0 else 0
    for scale, k, p in borders():
        m = int(p)
        words = as_tensor([w | bit for w in (m - 1, m, m + 1)])
        expected = [sign * (k + 1), None, sign * k]
        integers, undecided = noise_cpu.rounded_normals(words, scale)
        assert undecided.tolist() == [False, True, False], (scale, k)
        assert integers.tolist()[::2] == expected[::2]
        integers, undecided = rounded_normal.rounded_normals(words, scale)
        assert undecided[1]
        for i in (0, 2):
            assert undecided[i] or integers[i] == expected[i], (scale, k)
            assert settle(int(words[i]), scale, never) == expected[i]


def test_a_word_that_holds_a_border_takes_as_many_further_words_as_it_needs():
    for scale, k, p in borders():
        m, rest = int(p), p - int(p)
        further = int(rest * 2**64)
        last = int((rest * 2**64 - further) * 2**64)
        for words, expected in (
            ([further - 1], k + 1),
            ([further + 1], k),
            ([further, last - 1], k + 1),
            ([further, last + 1], k),
        ):
            if min(words) < 0 or max(words) >= 2**64:
                continue
            asked = []

            def draw(number, words=words, asked=asked):
                asked.append(number)
                return words[number]

            assert settle(m, scale, draw) == expected
            assert settle(m | 2**63, scale, draw) == -expected
            assert asked == 2 * list(range(len(words)))


def test_no_zero_is_negative(processor):
    # The last three are settled one by one.
    words = as_tensor([TOP, 2**64 - 1, 2**63 | 2**62, 2**63 | 1, 2**63 | 2, 2**63 | 2**51])
    for function in (noise_cpu.rounded_normals, rounded_normal.rounded_normals):
        integers, undecided = function(words, 0.02)
        assert not bool(undecided.any() or integers.any() or integers.signbit().any())


def test_on_a_coarse_grid_the_distribution_is_the_rounded_normals(processor):
    """Chi-square of 2 * 10^5 draws against the exact masses; false alarm 1e-4, three times."""
    scale, count = 1.3, 200_000
    integers, undecided = noise_cpu.rounded_normals(random_words(count, 7), scale)
    assert not bool(undecided.any())
    ends = [float(upper_tail(mpmath.mpf(k - 0.5) / scale)) for k in range(-5, 7)]
    masses = [1 - ends[0], *(a - b for a, b in zip(ends, ends[1:], strict=False)), ends[-1]]
    found = torch.bincount(integers.clamp(-6, 6).long() + 6, minlength=13)
    assert scipy.stats.chisquare(found.numpy(), [count * m for m in masses]).pvalue > 1e-4


def test_a_scale_below_which_no_border_is_reached_gives_zeros():
    """P(|N| > 9.1) < 2^-64, so that on a scale of 0.05 only the word 0 can reach 1/2."""
    words = torch.cat([random_words(1000), as_tensor([1, 2, 2**63 + 1])])
    for function in (noise_cpu.rounded_normals, rounded_normal.rounded_normals):
        integers, undecided = function(words, 0.05)
        assert not bool(integers[~undecided].any())
        assert all(settle(w, 0.05, never) == 0 for w in words[undecided].tolist())


def test_the_value_of_the_word_zero_is_drawn_from_beyond_its_interval():
    """P(N > 9.16) = 2^-65 and P(N > 16.0) = 2^-191."""
    assert settle(0, 1.0, [2**63].__getitem__) == 9
    assert settle(0, 1.0, [0, 2].__getitem__) == 16
    assert settle(2**63, 1.0, [0, 2].__getitem__) == -16
