import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dpflash
from dpflash.attn import rotary
from dpflash.attn.rotary import Turns
from dpflash.kernels import apply_rotary


def test_angles_fall_with_the_coordinate_by_powers_of_ten_thousand():
    cos, sin = Turns.at(torch.arange(5), 6, torch.float64)
    angles = [[t * 10_000 ** (-j / 3) for j in range(3)] for t in range(5)]
    expected = torch.polar(torch.ones(5, 3).double(), torch.tensor(angles).double())
    torch.testing.assert_close(torch.complex(cos, sin), expected)


def test_distances_stay_exact_at_position_one_million():
    turns = Turns.at(torch.arange(1_000_002), 8, torch.float32)
    q, k = torch.randn(2, 1, 1, 1, 8)

    def product(i, j):
        at_i, at_j = ([x[n].unsqueeze(0) for x in turns] for n in (i, j))
        return (apply_rotary(q, k, *at_i)[0] * apply_rotary(q, k, *at_j)[1]).sum()

    torch.testing.assert_close(product(1, 0), product(-2, -3), rtol=0, atol=1e-5)


def test_angles_are_made_once_for_all_layers_steps_and_directions(monkeypatch):
    rotary._of_first.__wrapped__.cache_clear()
    model = dpflash.nn.LongContextLM(9, 16, 3, 2, max_seq_len=8)
    with torch.inference_mode():
        model(torch.zeros(1, 8, dtype=torch.long))
    with FakeTensorMode(allow_non_fake_inputs=True):
        Turns.of(torch.empty(1, 1, 8, 8), 8)
    monkeypatch.setattr(Turns, "at", None)
    for _ in range(2):
        model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    turns = Turns.of(torch.empty(1, 1, 8, 8), 8)
    assert all(type(x) is torch.Tensor and not x.is_inference() for x in turns)


def test_few_tables_are_kept_and_those_of_long_sequences_are_not():
    rotary._of_first.__wrapped__.cache_clear()
    for tokens in (*range(1, 9), 1 << 20):
        Turns.of(torch.empty(1, 1, tokens, 1), 8)
    assert rotary._of_first.__wrapped__.cache_info()[1:] == (8, 4, 4)
