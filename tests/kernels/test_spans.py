"""Samples that are spans of tokens give what they give as rows, wherever they are.

On all backends; Triton's kernels run in its interpreter where there is no GPU.
"""

import functools
import math

import pytest
import torch

from dpflash.kernels import grads_cpu, grid_of, native, reference

pytest.importorskip("triton")
launch = pytest.importorskip("dpflash.kernels.grad_launch")

# numpy tells of the NaN and infinity that tests put into the interpreter.
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = {"reference": reference, "triton": launch}
if native.library() is not None:
    BACKENDS["cpu"] = grads_cpu
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
TOKENS, INPUTS, OUTPUTS, ROWS = 51, 19, 33, 4
# Token 8 and the last three are of no sample.
SPANS = ((9, 42), (0, 1), (3, 3), (42, 48), (1, 8))
FACTORS = torch.tensor([0.5, 1.0, 0.25, 0.0, 0.75])
GRID = grid_of(1.0)
FORMS = (None, "gram", "tile")
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float64: 1e-12}


@pytest.fixture
def small_chunks(monkeypatch):
    """Sums over tokens are made of chunks, of chunks of chunks, and so on."""
    monkeypatch.setattr(launch, "TOKEN_CHUNK", 16)


def random(*shape, seed=0, dtype=torch.float32, spans=SPANS):
    """[1, N, ...], rows at odd places of a wider buffer; NaN in the buffer and between spans."""
    values = torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    buffer = torch.full((*shape[:-1], shape[-1] + 5), math.nan, dtype=dtype)
    for start, end in spans:
        buffer[:, start:end, ..., 2:-3] = values[:, start:end].to(dtype)
    return buffer.to(DEVICE)[..., 2:-3]


def error(found, expected):
    """Distance over the norm of what was expected."""
    assert found.shape == expected.shape
    distance = float((found.double() - expected.double()).norm())
    return distance / max(float(expected.double().norm()), 1e-30)


class Operands:
    """Random operands of the operations, and their parts of one sample, in another dtype."""

    def __init__(self, dtype, spans=SPANS, tokens=TOKENS):
        made = {"dtype": dtype, "spans": spans}
        self.spans = spans
        self.x, self.dy = random(1, tokens, INPUTS, **made), random(1, tokens, OUTPUTS, **made)
        self.heads = random(1, tokens, 2, 5, seed=2, **made)
        self.d_heads = random(1, tokens, 2, 5, seed=3, **made)
        wide = self.heads.double()
        self.mean = wide.mean(-1, keepdim=True).float()
        self.rstd = (wide.var(-1, keepdim=True) + 1e-5).rsqrt().float()
        generator = torch.Generator().manual_seed(4)
        self.indices = torch.randint(0, ROWS, (1, tokens), generator=generator).to(DEVICE)
        self.weight = torch.rand(5, generator=generator).to(DEVICE, dtype)
        if dtype == torch.float64:
            self.mean, self.rstd = self.mean.double(), self.rstd.double()


def results(backend, o, factors, spans):
    """By name, what each operation gives: of samples, or the sum of them ("sum of ...")."""
    factors = factors.to(DEVICE)
    grads, squares = backend.per_sample_grad(o.x, o.dy, spans=spans, return_squares=True)
    norm = (o.mean, o.rstd, o.weight, 1)
    # torch makes dx, and takes one dtype.
    of_layer_norm = (t.to(o.mean.dtype) for t in (o.d_heads, o.heads, *norm[:3]))
    _, of_weight, of_bias = backend.layer_norm_backward(*of_layer_norm, 1, spans=spans)
    rms = backend.rms_norm_backward(o.d_heads, o.heads, *norm[1:], spans=spans)
    table = (o.indices, o.dy)
    found = {
        "grads": grads,
        "squares": squares,
        **{f"norms-{f}": backend.grad_norm(o.x, o.dy, form=f, spans=spans) for f in FORMS},
        "layer-norm-weights": of_weight,
        "layer-norm-biases": of_bias,
        "rms-norm-weights": rms[1],
        "tables": backend.embedding_per_sample_grad(*table, ROWS, spans=spans),
        "table-norms": backend.embedding_grad_norm(*table, spans=spans),
        "sum of products": backend.clipped_grad(o.x, o.dy, factors, spans=spans),
        "sum of tables": backend.embedding_clipped_grad(*table, factors, ROWS, spans=spans),
    }
    if spans is not None:
        found["sums"] = backend.span_sum(o.dy[0], spans)
        found["sums-of-numbers"] = backend.span_sum(o.dy[0, :, 0], spans)
    return found


@functools.cache
def on(backend, dtype):
    """Results for SPANS, in small chunks."""
    return results(BACKENDS[backend], Operands(DTYPES[dtype]), FACTORS, SPANS)


def of_rows(o, factors):
    """What the reference implementation gives for each sample as a row, in float64."""
    found = {}
    for i, (start, end) in enumerate(o.spans):
        own = Operands.__new__(Operands)
        for name, value in vars(o).items():
            if name in ("spans", "weight"):
                continue
            part = value[:, start:end]
            setattr(own, name, part.double() if part.is_floating_point() else part)
        own.weight = o.weight.double()
        for name, value in results(reference, own, factors[i : i + 1].double(), None).items():
            found.setdefault(name, []).append(value)
        found.setdefault("sums", []).append(own.dy.sum(1))
        found.setdefault("sums-of-numbers", []).append(own.dy[..., 0].sum(1))
    return {
        name: sum(values) if name.startswith("sum of") else torch.cat(values)
        for name, values in found.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_spans_give_what_they_give_as_rows_in_float64(backend, dtype, small_chunks):
    if backend == "triton" and dtype == "fp64":
        pytest.skip("float64 runs in the reference implementation on a GPU too")
    o = Operands(DTYPES[dtype])
    expected = of_rows(o, FACTORS)
    found = on(backend, dtype)
    assert found.keys() == expected.keys()
    most = RELATIVE[o.x.dtype]
    for name, value in found.items():
        # Gram norms are upper bounds, see `grad_launch.grad_norm`.
        assert error(value, expected[name]) <= (2e-3 if "norms" in name else most), name
    if backend == "triton":
        assert bool((found["norms-gram"] >= expected["norms-gram"]).all())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_bit_of_a_sample_depends_on_where_it_is_packed(dtype, small_chunks):
    o = Operands(DTYPES[dtype])
    found = on("triton", dtype)
    places = ((17, 50), (3, 4), (3, 3), (11, 17), (4, 11))
    moved = Operands(DTYPES[dtype], spans=places)
    for name, value in vars(moved).items():
        if name not in ("spans", "weight"):
            for (start, end), (first, _) in zip(places, SPANS, strict=True):
                value[:, start:end] = getattr(o, name)[:, first : first + end - start]
    for name, value in results(launch, moved, FACTORS, places).items():
        if not name.startswith("sum of"):
            assert torch.equal(value, found[name]), name
    alone = torch.tensor([0.5, 0, 0, 0, 0], device=DEVICE)
    sums = [launch.clipped_grad(a.x, a.dy, alone, spans=a.spans) for a in (o, moved)]
    assert torch.equal(*sums)


@pytest.mark.parametrize("spans", [(), ((3, 3), (0, 0))], ids=["none", "empty"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_without_tokens_give_zeros(backend, spans):
    o = Operands(torch.float32, spans=((0, 0),))
    for name, value in results(BACKENDS[backend], o, torch.ones(len(spans)), spans).items():
        if name.startswith("sum of"):
            assert value.shape == ((ROWS if "table" in name else OUTPUTS), value.shape[1])
        else:
            assert value.shape[0] == len(spans)
        assert not bool(value.any()), name


class CountedKernel:
    """Counts the launches of a kernel, and runs none."""

    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, programs):
        return lambda *arguments, **options: self.launched.append(programs)


def test_the_number_of_launches_does_not_depend_on_the_number_of_samples(monkeypatch):
    launched = []
    for name in vars(launch.kernels):
        if name.endswith("_kernel"):
            monkeypatch.setattr(launch.kernels, name, CountedKernel(launched))
    o, counts = Operands(torch.float32), []
    for samples in (2, 40):
        spans = tuple((2 * i, 2 * i + 2) for i in range(samples))
        results(launch, o, torch.ones(samples), spans)
        counts.append(len(launched))
    assert counts[1] == 2 * counts[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_spans_on_the_gpu_match_float64(dtype):
    spans = ((700, 1300), (0, 1), (9, 9), (1300, 1993), (1, 600))
    o = Operands(DTYPES[dtype], spans, tokens=2000)
    expected = of_rows(o, FACTORS)
    for name, value in results(launch, o, FACTORS, spans).items():
        assert error(value, expected[name]) <= (0.05 if "norms" in name else 1e-5), name
