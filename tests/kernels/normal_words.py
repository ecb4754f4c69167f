"""Words for tests of rounded normals: of all regions, and next to borders."""

import random

import mpmath
import torch

from dpflash.kernels.rounded_normal import settle

TOP = 2**63 - 1


def never(number):
    raise AssertionError("no further word is needed")


def as_tensor(words):
    """64-bit words from integers of either sign or from 0 on."""
    return torch.tensor([w - 2**64 if w >= 2**63 else w for w in words], dtype=torch.int64)


def random_words(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    high = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    return high << 32 | torch.randint(0, 2**32, (count,), generator=generator)


def magnitudes(count):
    """Of all regions and their borders: near the median, in the tail, far out."""
    spread = 40 * count
    words = [TOP, TOP - 1, TOP - 2**9, TOP - 2**40, 2**62, 1, 2, 3, 2**12, 2**52, 2**53 - 1]
    for border in (0.075, mpmath.exp(-25)):
        at = int(border * 2**64)
        words += [at - 2**30, at - 1, at, at + 1, at + 2**30]
    words += [w & TOP for w in random_words(count).tolist()]
    words += [(w & TOP) >> i % 63 | 1 for i, w in enumerate(random_words(count, 1).tolist())]
    words += [TOP - ((w & TOP) >> i % 62) for i, w in enumerate(random_words(count, 2).tolist())]
    return words + [TOP * k // spread for k in range(1, spread, 40)]


def upper_tail(x):
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


def units_of_border(k, scale):
    """P(N > (k + 1/2) / scale) in units of 2^-64."""
    return upper_tail((mpmath.mpf(k) + 0.5) / mpmath.mpf(scale)) * 2**64


def borders():
    """(scale, k, its units); no unit holds two borders."""
    for scale in (0.06, 1.0, 7.3, 1.5 * 2**30, 1.1 * 2**37, 2.0**45 * (1 - 2**-53)):
        far = int(9 * scale)
        for k in sorted({0, 1, far // 1000, far // 7, far // 3, far // 2, far * 4 // 5, far}):
            p = units_of_border(k, scale)
            if p > 4 * scale + 2:
                yield scale, k, p


def near_borders(scale, count):
    """0, and words near borders from 0 to 9; one in three holds one."""
    source, words = random.Random(int(scale)), [0, 2**63]
    while len(words) < count:
        units = int(units_of_border(int(scale * source.uniform(0, 9)), scale))
        words += [
            max(1, units + offset) | source.getrandbits(1) << 63
            for offset in (0, source.choice((-1, 1)), source.randint(-(2**12), 2**12))
        ]
    return as_tensor(words)


def holds_a_border(word, scale):
    low, high = (settle(word, scale, lambda _, further=w: further) for w in (2**64 - 1, 0))
    return abs(high) > abs(low)
