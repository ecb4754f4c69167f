"""Exact sums of stored gradients with noise, in one kernel: the reference's bits.

Without a GPU the kernel runs in Triton's interpreter, where ChaCha20 takes its time: Philox stands
in for it wherever the words do not matter.
"""

import math

import pytest
import torch

from dpflash.kernels import NoiseStream, grid_of, reference, settle_noise

pytest.importorskip("triton")
launch = pytest.importorskip("dpflash.kernels.grad_launch")
noise_triton = pytest.importorskip("dpflash.kernels.noise_triton")
tensor_table = pytest.importorskip("dpflash.kernels.tensor_table")
tl = pytest.importorskip("triton.language")

# numpy tells of the NaN that tests put into the interpreter.
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GRID = grid_of(1.0)


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="patches what the interpreter reads"
)


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


SHAPES = ((40, 24), (17,), (0, 3), (3, 7), (1031,), (64,), (5,), (33,), (49,), (51,))


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, programs):
        assert len(programs) == 1  # other dimensions take 65,535 programs at most
        self.launches += 1
        return self.kernel[programs]


def several(dtypes=(torch.float32, torch.bfloat16)):
    """Gradients of parameters of several shapes and dtypes, and their factors."""
    made = [stored(3, *s, dtype=dtypes[i % len(dtypes)])[0] for i, s in enumerate(SHAPES)]
    return made, stored(3)[1]


@pytest.mark.cases(0)
@pytest.mark.parametrize("kind", ["rounded", "exact", "into", "noise", "no noise"])
def test_sums_of_several_parameters_are_those_of_each_in_a_launch_a_kind(kind, monkeypatch):
    kernel = Counted(launch.kernels._clip_reduce_kernel)
    monkeypatch.setattr(launch.kernels, "_clip_reduce_kernel", kernel)
    grads, factors = several()
    grid = None if kind == "rounded" else GRID
    into = [torch.ones(s, dtype=torch.float64, device=DEVICE) for s in SHAPES]
    offsets = [0, 8, 3, 5, 16, 0, 2**20 + 1, 0, 0, 0]
    noise = [stream(parameter_id=7 * i, offset=n) for i, n in enumerate(offsets)]
    if kind == "no noise":
        noise = [stream(std=0)] * len(grads)
    options = {"into": {"into": into}, "noise": {"noise": noise}, "no noise": {"noise": noise}}
    each = [{name: x[i] for name, x in options.get(kind, {}).items()} for i in range(len(grads))]
    expected = [
        reference.clip_reduce(
            g.cpu(),
            factors.cpu(),
            grid=grid,
            **{**own, **({"into": own["into"].cpu().clone()} if "into" in own else {})},
        )
        for g, own in zip(grads, each, strict=True)
    ]
    found = launch.clip_reduce_all(grads, factors, grid=grid, **options.get(kind, {}))
    for one, other in zip(found, expected, strict=True):
        if kind == "rounded":  # the order of the sum is not the reference's
            assert torch.allclose(one.cpu(), other, rtol=1e-5, atol=1e-6)
        else:
            assert one.dtype == other.dtype and torch.equal(one.cpu(), other)
    # Of two dtypes, with 16 bytes at a time or not, and with noise from within a group or not.
    assert kernel.launches == {"noise": 6}.get(kind, 4)


def test_noise_of_several_sums_is_that_of_each_in_a_launch_a_kind(monkeypatch):
    kernel = Counted(noise_triton._add_noise_kernel)
    monkeypatch.setattr(noise_triton, "_add_noise_kernel", kernel)
    sums = [g[0].float() for g in several()[0] if g.numel()]
    noise = [stream(parameter_id=i, offset=3 * (i % 2)) for i in range(len(sums))]
    expected = [own.add_to_(x.cpu().clone()) for own, x in zip(noise, sums, strict=True)]
    noise_triton.add_noise_(sums, noise)
    assert all(map(same_bits, sums, expected)) and kernel.launches == 3


def leave_all_undecided(monkeypatch, capacity=None):
    monkeypatch.setattr(noise_triton, "_RELATIVE_ERROR", tl.constexpr(1.0))
    monkeypatch.setattr(
        noise_triton, "expected_capacity", lambda elements, scale: capacity or elements
    )
    monkeypatch.setattr(noise_triton, "SETTLE_BLOCK", 1024)


@interpreted
def test_another_default_device_changes_nothing(monkeypatch):
    """As after torch.set_default_device("cuda"): what a launch copies there is on the CPU."""
    grads, factors = several()
    noise = [stream(parameter_id=i) for i in range(len(grads))]
    expected = [expected_of(g, factors, own) for g, own in zip(grads, noise, strict=True)]
    leave_all_undecided(monkeypatch)
    tensor_table._owners.__wrapped__.cache_clear()
    with torch.device("meta"):
        found = launch.clip_reduce_all(grads, factors, grid=GRID, noise=noise)
        launch.squared_norm(*grads)
    assert all(map(same_bits, found, expected))


@interpreted
def test_what_is_undecided_in_several_sums_is_settled_in_each(monkeypatch):
    grads, factors = several()
    unsettled = []
    noise = [stream(parameter_id=i, offset=5 * i, unsettled=unsettled) for i in range(len(grads))]
    expected = [expected_of(g, factors, own) for g, own in zip(grads, noise, strict=True)]
    leave_all_undecided(monkeypatch)
    found = launch.clip_reduce_all(grads, factors, grid=GRID, noise=noise)
    assert all(x.isnan().all() for x in found)
    # Sums that are kept wider meanwhile get their noise too.
    wider = found[0].double()
    unsettled[0] = unsettled[0]._replace(outs=(wider, *unsettled[0].outs[1:]))
    assert settle_noise(unsettled)
    assert all(map(same_bits, [wider.float(), *found[1:]], expected))


@pytest.mark.parametrize("chunk", [64, 8192])
def test_squared_norms_of_several_parameters_take_a_launch_a_kind(chunk, monkeypatch):
    kernel = Counted(launch.kernels._squares_kernel)
    monkeypatch.setattr(launch.kernels, "_squares_kernel", kernel)
    monkeypatch.setattr(launch, "SQUARES_CHUNK", chunk)
    monkeypatch.setattr(launch, "REDUCE_BLOCK", 64)
    grads, _ = several()
    grads[1][2] = math.inf
    others = torch.rand(3, dtype=torch.float64, device=DEVICE)
    exact = sum((g.double().flatten(1).square().sum(1) for g in grads), others.clone()).cpu()
    found = launch.squared_norm(*grads, into=others)
    assert found is others and kernel.launches == 4
    assert bool((found[:2].cpu() >= exact[:2] * (1 - 1e-14)).all())
    assert torch.allclose(found[:2].cpu(), exact[:2], rtol=1e-11) and found[2] == math.inf


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


@interpreted
@pytest.mark.parametrize("capacity", [60, 59])
def test_a_sum_of_which_all_is_undecided_is_settled_or_refused(capacity, monkeypatch):
    grads, factors = stored(3, 60)
    noise = stream(offset=5)
    expected = expected_of(grads, factors, noise)
    leave_all_undecided(monkeypatch, capacity)
    if capacity < 60:
        with pytest.raises(RuntimeError, match="computes wrongly"):
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
