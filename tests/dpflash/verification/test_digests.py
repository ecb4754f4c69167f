"""Digests tell rows apart by any bit, and only by bits; summaries allow what is rounding."""

import pytest
import torch

from dpflash.verification import digests
from dpflash.verification.digests import differing, greatest, row_digests, row_summaries

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.complex64,
]
# Words of one chunk, of several, and with a rest; bytes that are no whole number of words.
WIDTHS = [1, 3, 4096, 4097, 20000]


def rows_of(dtype, width, rows=3):
    generator = torch.Generator().manual_seed(width)
    bits = torch.randint(0, 256, (rows, width * max(1, dtype.itemsize)), generator=generator)
    if dtype == torch.bool:
        return bits % 2 == 0
    return bits.to(torch.uint8).view(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_single_bit_anywhere_in_a_row_changes_its_digest_and_no_other(dtype, width):
    x = rows_of(dtype, width)
    before = row_digests(x)
    assert before.shape == (3,) and before.dtype == torch.int64
    for place in {0, width // 2, width - 1}:
        y = x.clone()
        raw = y.view(torch.uint8)[1] if dtype != torch.bool else y[1]
        last = (place + 1) * max(1, dtype.itemsize) - 1
        raw[last] = ~raw[last] if dtype == torch.bool else raw[last] ^ 128
        after = row_digests(y)
        assert after[1] != before[1] and after[0] == before[0] and after[2] == before[2]


def test_two_flipped_signs_do_not_cancel():
    """As they would if words of 64 bits met odd multipliers."""
    x = torch.ones(1, 64)
    y = x.clone()
    y[0, [1, 3]] = -1
    assert row_digests(x) != row_digests(y)


def test_rows_that_are_exchanged_within_a_row_have_another_digest():
    x = torch.arange(10000.0)[None]
    y = x.clone()
    y[0, [0, 9000]] = y[0, [9000, 0]]
    assert row_digests(x) != row_digests(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_digest_depends_on_the_row_and_not_on_how_it_lies_in_memory(dtype):
    x = torch.randn(5, 6, 7).to(dtype)
    expected = row_digests(x)
    lying = torch.empty(7, 6, 5, dtype=dtype).permute(2, 1, 0).copy_(x)
    padded = torch.zeros(5 * 42 + 1, dtype=dtype)[1:].view(5, 6, 7).copy_(x)
    for other in (lying, padded, x.flatten(1), x[torch.arange(5)]):
        assert torch.equal(row_digests(other), expected)
    assert torch.equal(row_digests(x[2:4]), expected[2:4])
    assert torch.equal(row_digests(x[:1].expand(4, 6, 7)), expected[:1].expand(4))


def test_empty_rows_and_empty_batches_have_digests():
    assert row_digests(torch.zeros(3, 0)).tolist() == [0, 0, 0]
    assert row_digests(torch.zeros(0, 4)).shape == (0,)


def test_where_a_device_does_not_repeat_itself_rounding_is_allowed_and_more_is_not(monkeypatch):
    monkeypatch.setattr(digests, "is_deterministic", lambda device: False)
    monkeypatch.setattr(digests, "_PROJECTED", 70)  # so that rows have several parts
    x = torch.randn(6, 300)
    y = x.clone()
    y[1] *= 1 + 1e-6
    y[2, 0] += 0.1
    y[3] = float("nan")
    y[4] = y[4].flip(0)
    summaries = row_summaries(x), row_summaries(y)
    assert summaries[0].dtype == torch.float64
    tolerated = digests.tolerance({torch.float32, torch.int64})
    assert differing(*summaries, tolerated).tolist() == [False, False, True, True, True, False]
    assert digests.tolerance({torch.float32, torch.bfloat16}) > 0.05 > 1e-3 > tolerated


def test_summaries_of_other_shapes_differ_in_all_rows():
    one, two = row_summaries(torch.ones(3, 2)), row_summaries(torch.ones(2, 2))
    assert differing(one, two, 1.0).tolist() == [True, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_greatest_entries_show_nan_and_infinity(dtype):
    x = torch.arange(-12.0, 12.0).view(4, 2, 3).to(dtype)
    x[1, 0, 1], x[2, 1, 2] = float("nan"), -float("inf")
    found = greatest(x)
    assert found[[0, 3]].tolist() == [12.0, 11.0]
    assert found[1].isnan() and found[2] == float("inf")
    assert greatest(x[:, :, :0]).tolist() == [0.0] * 4
    assert greatest(x[:0]).tolist() == []


def test_greatest_entries_of_long_rows_are_taken_some_rows_at_a_time():
    x = torch.randn(5, 3 * digests._AT_ONCE["cpu"] // 4)
    assert torch.equal(greatest(x), torch.linalg.vector_norm(x, torch.inf, 1))
