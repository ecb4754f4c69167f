"""Merging attention over two halves of the keys."""

import math

import torch

from dpflash.kernels.attention import merge_


def attention(scores, v):
    lse = scores.logsumexp(3)
    p = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(3)).exp()
    return p @ v, lse


def test_two_halves_merge_to_the_whole_also_where_one_or_both_have_no_key():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 2, 5, 8, generator=generator, dtype=torch.float64)
    v = torch.randn(1, 2, 8, 3, generator=generator, dtype=torch.float64)
    scores[:, :, 1] = scores[:, :, 2, :4] = scores[:, :, 3, 4:] = -math.inf
    o, lse = attention(scores[..., :4], v[:, :, :4])
    merge_(o, lse, *attention(scores[..., 4:], v[:, :, 4:]))
    expected, expected_lse = attention(scores, v)
    torch.testing.assert_close(o, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
    assert bool((o[:, :, 1] == 0).all()) and bool((lse[:, :, 1] == -math.inf).all())
