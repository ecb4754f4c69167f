import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dpflash
from dpflash.attn import rotary
from dpflash.attn.rotary import Turns, rotate, rotate_


def turns(tokens, head_dim, dtype=torch.float64):
    return Turns.at(torch.arange(tokens), head_dim, dtype)


def test_rotation_multiplies_each_pair_as_a_complex_number():
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    rotated = rotate(x, turns(5, 6))
    for t in range(5):
        for j in range(3):
            turn = complex(math.cos(t * 10_000 ** (-j / 3)), math.sin(t * 10_000 ** (-j / 3)))
            expected = torch.complex(x[:, :, t, j], x[:, :, t, j + 3]) * turn
            torch.testing.assert_close(rotated[:, :, t, j], expected.real)
            torch.testing.assert_close(rotated[:, :, t, j + 3], expected.imag)


def test_distances_stay_exact_at_position_one_million():
    cos, sin = turns(1_000_002, 8, torch.float32)
    q, k = torch.randn(2, 1, 1, 1, 8)

    def product(i, j):
        at = (Turns(cos[n : n + 1], sin[n : n + 1]) for n in (i, j))
        return math.prod(rotate(x, turn) for x, turn in zip((q, k), at, strict=True)).sum()

    torch.testing.assert_close(product(1, 0), product(-2, -3), rtol=0, atol=1e-5)


def test_narrow_inputs_keep_their_dtype():
    x = torch.randn(1, 1, 3, 4, dtype=torch.bfloat16)
    own = turns(3, 4, torch.bfloat16)
    rotated = rotate(x, own)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate(x.float(), own).bfloat16())


@pytest.mark.cases(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_turning_in_place_is_turning_and_touches_nothing_else(dtype):
    fused = torch.randn(2, 5, 3, 3, 8).to(dtype)  # q, k and v of three heads each
    before = fused.clone()
    q, k, v = fused.transpose(1, 3).unbind(2)
    own = turns(5, 8, dtype)
    expected = rotate(before.transpose(1, 3).unbind(2)[1], own)
    rotate_(k, own)
    torch.testing.assert_close(k, expected)
    rest = before.transpose(1, 3).unbind(2)
    assert torch.equal(q, rest[0]) and torch.equal(v, rest[2])
    there = k.clone()
    torch.testing.assert_close(rotate_(k, own, back=True), rest[1], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(k, rotate(there, Turns(own.cos, -own.sin)))


def test_angles_are_made_once_for_all_layers_steps_and_directions(monkeypatch):
    rotary._kept.clear()
    model = dpflash.nn.LongContextLM(9, 16, 3, 2, max_seq_len=8)
    with torch.inference_mode():
        model(torch.zeros(1, 8, dtype=torch.long))
    with FakeTensorMode(allow_non_fake_inputs=True):
        Turns.of(torch.empty(1, 1, 8, 8), 8)
    monkeypatch.setattr(Turns, "at", None)
    for _ in range(2):
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    assert all(type(x) is torch.Tensor and not x.is_inference() for x in rotary._kept.popitem()[1])


def test_few_tables_are_kept_and_those_of_long_sequences_are_not():
    rotary._kept.clear()
    for tokens in (*range(1, 9), 1 << 20):
        Turns.of(torch.empty(1, 1, tokens, 1), 8)
    assert [key[0] for key in rotary._kept] == [5, 6, 7, 8]
