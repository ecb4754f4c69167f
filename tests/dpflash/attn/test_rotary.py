import math

import pytest
import torch

from dpflash.attn.rotary import rotary_angles, rotate, rotate_


def test_rotation_multiplies_each_pair_as_a_complex_number():
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    rotated = rotate(x, rotary_angles(torch.arange(5), 6))
    for t in range(5):
        for j in range(3):
            turn = complex(math.cos(t * 10_000 ** (-j / 3)), math.sin(t * 10_000 ** (-j / 3)))
            expected = torch.complex(x[:, :, t, j], x[:, :, t, j + 3]) * turn
            torch.testing.assert_close(rotated[:, :, t, j], expected.real)
            torch.testing.assert_close(rotated[:, :, t, j + 3], expected.imag)


def test_distances_stay_exact_at_position_one_million():
    angles = rotary_angles(torch.arange(1_000_002), 8)
    q, k = torch.randn(2, 1, 1, 1, 8)
    near = (rotate(q, angles[1:2]) * rotate(k, angles[:1])).sum()
    far = (rotate(q, angles[-1:]) * rotate(k, angles[-2:-1])).sum()
    torch.testing.assert_close(near, far, rtol=0, atol=1e-5)


def test_narrow_inputs_keep_their_dtype():
    x = torch.randn(1, 1, 3, 4, dtype=torch.bfloat16)
    angles = rotary_angles(torch.arange(3), 4)
    rotated = rotate(x, angles)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rotate(x.float(), angles).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_turning_in_place_is_turning_and_touches_nothing_else(dtype):
    fused = torch.randn(2, 5, 3, 3, 8).to(dtype)  # q, k and v of three heads each
    before = fused.clone()
    q, k, v = fused.transpose(1, 3).unbind(2)
    expected = rotate(before.transpose(1, 3).unbind(2)[1], rotary_angles(torch.arange(5), 8))
    rotate_(k, rotary_angles(torch.arange(5), 8))
    torch.testing.assert_close(k, expected)
    rest = before.transpose(1, 3).unbind(2)
    assert torch.equal(q, rest[0]) and torch.equal(v, rest[2])
