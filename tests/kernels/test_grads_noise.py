"""Exact sums of stored gradients with noise, in one kernel: the reference's bits.

Without a GPU the kernel runs in Triton's interpreter, where ChaCha20 takes its time: Philox stands
in for it wherever the words do not matter.
"""

import math

import pytest
import torch

from dpflash.kernels import NoiseStream, grid_of, reference

pytest.importorskip("triton")
launch = pytest.importorskip("dpflash.kernels.grad_launch")
noise_triton = pytest.importorskip("dpflash.kernels.noise_triton")
tl = pytest.importorskip("triton.language")

# numpy tells of the NaN that tests put into the interpreter.
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GRID = grid_of(1.0)


def stream(**changed):
    address = {"std": 0.7, "grid": GRID, "key": bytes(range(32)), "step": 2**40 + 7}
    return NoiseStream(**{**address, "parameter_id": 2**31 + 5, "generator": "philox", **changed})


def stored(batch, *shape, dtype=torch.float32):
    """Per-sample gradients and factors."""
    generator = torch.Generator().manual_seed(batch)
    grads = torch.randn(batch, *shape, generator=generator).to(DEVICE, dtype)
    return grads, (torch.rand(batch, generator=generator) + 0.1).to(DEVICE)


def same_bits(found, expected):
    assert found.dtype == expected.dtype == torch.float32 and found.shape == expected.shape
    return torch.equal(found.cpu().view(torch.int32), expected.cpu().view(torch.int32))


def expected_of(grads, factors, noise):
    return reference.clip_reduce(grads.cpu(), factors.cpu(), grid=GRID, noise=noise)


CASES = {
    "chacha20-aligned": ((3, 40, 24), {"generator": "chacha20"}, torch.float32),
    "chacha20-offset": ((2, 3, 17), {"generator": "chacha20", "offset": 13}, torch.bfloat16),
    "philox-aligned": ((1, 1031), {}, torch.float16),
    "philox-offset": ((2, 3, 5, 7), {"offset": 5}, torch.float32),
    "no-samples": ((0, 17, 3), {"offset": 2}, torch.float32),
    "one-element": ((3,), {"offset": 7}, torch.float32),
    "no-elements": ((3, 0), {}, torch.float32),
    "last-of-chacha20": ((1, 51), {"generator": "chacha20", "offset": 2**35 - 51}, torch.float32),
    "last-of-philox": ((1, 51), {"offset": 2**33 - 51}, torch.float32),
    "small-std": ((2, 30), {"std": 1e-9}, torch.float32),
    "large-std": ((2, 300), {"std": 1e4}, torch.float32),
    "std-0": ((2, 30), {"std": 0}, torch.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_an_exact_sum_with_noise_is_the_references_bit_for_bit(case):
    shape, changed, dtype = CASES[case]
    grads, factors = stored(*shape, dtype=dtype)
    noise = stream(**changed)
    found = launch.clip_reduce(grads, factors, grid=GRID, noise=noise)
    assert same_bits(found, expected_of(grads, factors, noise))


@pytest.mark.parametrize("offset", [0, 5])
def test_noise_does_not_depend_on_how_a_sum_is_cut_into_programs(offset, monkeypatch):
    monkeypatch.setattr(launch, "REDUCE_BLOCK", 256)
    grads, factors = stored(2, 600)
    noise = stream(offset=offset)
    found = launch.clip_reduce(grads, factors, grid=GRID, noise=noise)
    assert same_bits(found, expected_of(grads, factors, noise))
    part = launch.clip_reduce(
        grads[:, 250:], factors, grid=GRID, noise=stream(offset=offset + 250)
    )
    assert same_bits(part, found[250:])


def test_noise_on_a_rounded_sum_is_rounded_once_with_it():
    grads, factors = stored(3, 50)
    total = launch.clip_reduce(grads, factors)
    found = launch.clip_reduce(grads, factors, noise=stream())
    assert same_bits(found, stream().add_to_(total.clone()))
    assert not torch.equal(found, total)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sample_that_is_not_finite_adds_nothing_beside_noise(value):
    grads, factors = stored(3, 50)
    grads[1], factors[1] = value, 0
    found = launch.clip_reduce(grads, factors, grid=GRID, noise=stream())
    assert same_bits(found, expected_of(grads[[0, 2]], factors[[0, 2]], stream()))


def test_a_sum_of_the_largest_steps_and_its_noise_round_once():
    # In fp32 the sum alone would round: its last steps are below the noise's.
    grads = torch.tensor([[2.0**20 + 0.125, -(2.0**20) - 0.125]], device=DEVICE)
    noise, factors = stream(std=1e-3), torch.ones(1, device=DEVICE)
    found = launch.clip_reduce(grads, factors, grid=GRID, noise=noise)
    assert same_bits(found, expected_of(grads, factors, noise))


def test_the_kernel_takes_numbers_of_numpy():
    np = pytest.importorskip("numpy")
    noise = stream(
        **{"std": np.float64(0.7), "step": np.int64(2**40 + 7), "parameter_id": np.uint32(2**31)},
        **{"offset": np.int64(3), "grid": np.float64(GRID)},
    )
    plain = stream(parameter_id=2**31, offset=3)
    grads, factors = stored(1, 8)
    found = launch.clip_reduce(grads, factors, grid=GRID, noise=noise)
    assert same_bits(found, expected_of(grads, factors, plain))


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="patches what the interpreter reads"
)


@interpreted
@pytest.mark.parametrize("capacity", [60, 59])
def test_a_sum_of_which_all_is_undecided_is_settled_or_refused(capacity, monkeypatch):
    grads, factors = stored(3, 60)
    noise = stream(offset=5)
    expected = expected_of(grads, factors, noise)
    monkeypatch.setattr(noise_triton, "_RELATIVE_ERROR", tl.constexpr(1.0))
    monkeypatch.setattr(noise_triton, "expected_capacity", lambda elements, scale: capacity)
    if capacity < 60:
        with pytest.raises(RuntimeError, match="arithmetic is wrong"):
            launch.clip_reduce(grads, factors, grid=GRID, noise=noise)
    else:
        found = launch.clip_reduce(grads, factors, grid=GRID, noise=noise)
        assert same_bits(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("generator", ["chacha20", "philox"])
@pytest.mark.parametrize("offset", [0, 13])
def test_an_exact_sum_with_noise_on_the_gpu_is_the_cpus_bit_for_bit(offset, generator, dtype):
    grads, factors = stored(5, 264, 521, dtype=dtype)
    for std in (0.7, 100.0):
        noise = stream(std=std, generator=generator, offset=offset)
        found = launch.clip_reduce(grads, factors, grid=GRID, noise=noise)
        assert same_bits(found, expected_of(grads, factors, noise))
