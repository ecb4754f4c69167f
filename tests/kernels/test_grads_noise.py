"""Sums of per-sample gradients with noise: fused is unfused, in the twins and in the kernels.

Without a GPU the kernels run in Triton's interpreter.
"""

import math

import pytest
import torch

from dpflash import kernels
from dpflash.kernels import NoiseStream, gaussian_noise_
from dpflash.kernels.grad_configs import GradConfig

# numpy tells of the NaN that tests put into the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPERATIONS = ["clip_reduce", "clipped_grad", "block_clip_reduce", "block_clipped_grad"]
every_operation = pytest.mark.parametrize("name", OPERATIONS)
SIDES = (1, 3, 17, 64, 130)
# The most by which a kernel's normal and the CPU's differ.
ULPS = 8


@pytest.fixture(autouse=True)
def poisoned_memory():
    """What `torch.empty` gives is NaN, so that whoever reads it is found out."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def launch():
    pytest.importorskip("triton")
    return pytest.importorskip("dpflash.kernels.grad_launch")


@pytest.fixture
def larger_tiles(launch, monkeypatch):
    """The interpreter takes its time for each tile, whatever its size."""
    monkeypatch.setattr(launch, "INTERPRETED", GradConfig(64, 64, 16, 4, 1))
    monkeypatch.setattr(launch, "noise_width", lambda hip: 32)
    monkeypatch.setattr(launch, "REDUCE_BLOCK", 4096)
    return launch


def stream(**changed):
    address = {"std": 0.7, "key": bytes(range(32)), "step": 2**40 + 7, "parameter_id": 2**31 + 5}
    return NoiseStream(**{**address, **changed})


def operands(outputs, inputs, batch, dtype=torch.float32):
    """x and dy, stored gradients, and factors."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    shapes = ((batch, 4, inputs), (batch, 4, outputs), (batch, outputs, inputs))
    tensors = [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]
    return *tensors, (torch.rand(batch, generator=generator) + 0.1).to(DEVICE)


def call(module, name, given, noise=None, block=(16, 16), divisor=1.0):
    x, dy, grads, factors = given
    function = getattr(module, name)
    if name == "clip_reduce":
        return function(grads, factors, divisor=divisor, noise=noise)
    if name == "clipped_grad":
        return function(x, dy, factors, noise=noise)
    pair = (grads,) if name == "block_clip_reduce" else (x, dy)
    return function(*pair, 2.0, block=block, noise=noise)


def address_of(noise):
    names = ("std", "key", "step", "parameter_id", "offset", "generator")
    return {name: getattr(noise, name) for name in names}


def unfused(module, name, given, noise, divisor=1.0, **options):
    """The sum, then `gaussian_noise_` of the same house, then the division."""
    total = call(module, name, given, **options)
    if module is kernels:
        gaussian_noise_(total, **address_of(noise))
    else:
        from dpflash.kernels import noise_triton

        noise_triton.gaussian_noise_(total, **address_of(noise))
    return total if divisor == 1 else total / divisor


@every_operation
@pytest.mark.parametrize("outputs", SIDES, ids="O{}".format)
@pytest.mark.parametrize("inputs", SIDES, ids="I{}".format)
def test_fused_noise_of_the_twins_is_unfused_noise_bit_for_bit(name, outputs, inputs):
    for batch in (0, 1, 3):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            given = tuple(t.cpu() for t in operands(outputs, inputs, batch, dtype))
            for noise in (stream(), stream(offset=13), stream(generator="philox", offset=5)):
                found = call(kernels, name, given, noise)
                assert torch.equal(found, unfused(kernels, name, given, noise))
                assert found.dtype == torch.promote_types(dtype, torch.float32)
                assert not torch.equal(found, call(kernels, name, given))


STREAMS = [("chacha20", 0), ("chacha20", 13), ("philox", 5)]
every_stream = pytest.mark.parametrize(("generator", "offset"), STREAMS)


@every_operation
@every_stream
@pytest.mark.parametrize(
    "sizes", [(1, 1, 0), (3, 17, 1), (17, 3, 3), (40, 24, 1)], ids="O{0[0]}-I{0[1]}-B{0[2]}".format
)
def test_fused_noise_of_the_kernels_is_unfused_noise(name, sizes, generator, offset, launch):
    given, noise = operands(*sizes), stream(generator=generator, offset=offset)
    assert torch.equal(call(launch, name, given, noise), unfused(launch, name, given, noise))


@every_operation
@pytest.mark.parametrize("sizes", [(130, 64, 3), (64, 130, 1)], ids="O{0[0]}-I{0[1]}".format)
def test_fused_noise_is_unfused_noise_over_several_tiles(name, sizes, larger_tiles):
    given, noise = operands(*sizes), stream()
    found = call(larger_tiles, name, given, noise, block=(64, 64))
    assert torch.equal(found, unfused(larger_tiles, name, given, noise, block=(64, 64)))


@every_operation
@every_stream
def test_the_kernels_noise_alone_is_the_cpus_within_the_documented_ulps(
    name, generator, offset, launch
):
    noise = stream(generator=generator, offset=offset, std=1.0)
    found = call(launch, name, operands(19, 24, 0), noise).cpu()
    expected = gaussian_noise_(torch.zeros(19, 24), **address_of(noise))
    size = expected.abs()
    unit = torch.nextafter(size, torch.tensor(math.inf)) - size
    assert bool(((found - expected).abs() <= ULPS * unit).all())


@pytest.mark.parametrize(("generator", "elements"), [("chacha20", 2**35), ("philox", 2**33)])
@every_operation
def test_the_last_elements_of_a_stream_are_reached(name, generator, elements, launch):
    noise = stream(generator=generator, offset=elements - 3 * 17)
    given = operands(3, 17, 0)
    found = call(launch, name, given, noise)
    assert bool(found.isfinite().all())
    assert torch.equal(found, unfused(launch, name, given, noise))


@pytest.mark.parametrize("offset", [0, 3])
def test_noise_is_divided_with_the_sum(offset, launch):
    given, noise = operands(17, 3, 3), stream(offset=offset)
    for module in (kernels, launch):
        found = call(module, "clip_reduce", given, noise, divisor=7.0)
        assert torch.equal(found, unfused(module, "clip_reduce", given, noise, divisor=7.0))


@pytest.mark.parametrize("shape", [(2,), (3, 5), (2, 1500), (2, 3, 5, 7)], ids=str)
def test_stored_gradients_of_any_shape_get_noise_in_row_major_order(shape, launch):
    noise = stream(offset=2**20 + 3)
    grads, factors = torch.randn(shape).to(DEVICE), torch.ones(shape[0], device=DEVICE)
    for module in (kernels, launch):
        flat = module.clip_reduce(grads.reshape(shape[0], -1), factors, noise=noise)
        found = module.clip_reduce(grads, factors, noise=noise)
        assert found.shape == shape[1:] and torch.equal(found.view(-1), flat)
        total = module.clip_reduce(grads, factors)
        expected = noise.add_to_(torch.zeros_like(total))
        torch.testing.assert_close(found - total, expected, rtol=1e-5, atol=1e-6)


@every_operation
def test_rows_of_a_parameter_get_the_noise_that_they_have_in_the_whole(name, launch):
    given, noise = operands(20, 11, 0), stream(offset=8)
    for module in (kernels, launch):
        whole = call(module, name, given, noise)
        for begin, end in ((0, 5), (5, 20)):
            part = operands(end - begin, 11, 0)
            own = stream(offset=8 + 11 * begin)
            assert torch.equal(call(module, name, part, own), whole[begin:end])


@every_operation
def test_a_second_call_gives_the_bits_of_the_first_and_another_step_other_bits(name, launch):
    given = operands(9, 16, 2)
    for module in (kernels, launch):
        first = call(module, name, given, stream())
        assert torch.equal(call(module, name, given, stream()), first)
        for other in ({"step": 8}, {"parameter_id": 1}, {"key": bytes(32)}, {"offset": 1}):
            # Equal by chance: less than one element in 10^4.
            assert int((call(module, name, given, stream(**other)) == first).sum()) <= 2


@every_operation
def test_noise_of_std_0_is_none(name, launch):
    given = operands(17, 16, 2)
    for module in (kernels, launch):
        assert torch.equal(call(module, name, given, stream(std=0)), call(module, name, given))


@every_operation
def test_a_sample_that_is_not_finite_adds_nothing_beside_noise(name, launch):
    given, noise = operands(18, 20, 3), stream()
    x, dy, grads, factors = given
    x[1], dy[1], grads[1], factors[1] = math.nan, math.nan, math.inf, 0
    for module in (kernels, launch):
        found = call(module, name, given, noise)
        kept = call(module, name, tuple(t[[0, 2]] for t in given), noise)
        assert bool(found.isfinite().all())
        torch.testing.assert_close(found, kept, rtol=1e-6, atol=1e-6)


MUTANTS = {
    "shifted": lambda words: (*words[:-1], words[-1] + 1),
    "group-shifted": lambda words: (*words[:-1], words[-1] + 8),
    "step-reused": lambda words: (*words[:9], 0, 0, *words[11:]),
    "parameter-reused": lambda words: (*words[:11], 0, words[12]),
    "key-word-lost": lambda words: (*words[:8], 0, *words[9:]),
    "first-twice": lambda words: (*words[:-1], 0),
}


@every_operation
@pytest.mark.parametrize("mutant", MUTANTS)
def test_noise_at_another_address_is_noticed(name, mutant, launch, monkeypatch):
    given, noise = operands(3, 17, 0), stream(offset=13)
    expected = unfused(launch, name, given, noise)
    address = launch._address
    monkeypatch.setattr(launch, "_address", lambda stream: MUTANTS[mutant](address(stream)))
    assert not (call(launch, name, given, noise) == expected).any()


@every_operation
def test_the_kernels_take_numbers_of_numpy(name, launch):
    np = pytest.importorskip("numpy")
    noise = stream(std=np.float64(0.7), step=np.int64(2**40 + 7), parameter_id=np.uint32(2**31))
    plain = stream(parameter_id=2**31)
    given = operands(3, 8, 0)
    assert torch.equal(call(launch, name, given, noise), call(launch, name, given, plain))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@every_operation
@pytest.mark.parametrize("sizes", [(264, 520), (130, 257)], ids="O{0[0]}-I{0[1]}".format)
def test_fused_noise_is_unfused_noise_on_the_gpu(name, dtype, sizes):
    given = operands(*sizes, 3, dtype)
    for noise in (stream(), stream(offset=13), stream(generator="philox")):
        found = call(kernels, name, given, noise, block=(128, 128))
        expected = unfused(kernels, name, given, noise, block=(128, 128))
        assert torch.equal(found, expected)
        assert torch.equal(call(kernels, name, given, noise, block=(128, 128)), found)
