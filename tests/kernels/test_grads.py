"""What grads.py refuses and whom it calls; results are tested beside the kernels."""

import dataclasses
import inspect
import re
import sys

import pytest
import torch

from dpflash import kernels
from dpflash.kernels import grads, grads_cpu, reference

X, DY = torch.zeros(3, 4, 5), torch.zeros(3, 4, 6)
FACTORS, INDICES = torch.ones(3), torch.zeros(3, 4, dtype=torch.int64)
GRID = 2.0**-30
NOISE = kernels.NoiseStream(std=1.0, grid=GRID, key=bytes(32), step=0, parameter_id=0)
END = dataclasses.replace(NOISE, offset=2**35 - 19)
REFUSED = {
    "form": ("grad_norm", (X, DY), {"form": "gramm"}, "form is 'gramm'"),
    "factors-short": ("clipped_grad", (X, DY, torch.ones(2)), {}, "factors has shape (2,)"),
    "factors-wide": ("clip_reduce", (X, torch.ones(3, 1)), {}, "for each of the 3 samples"),
    "factors-integer": ("clip_reduce", (X, INDICES[:, 0]), {}, "factors has dtype torch.int64"),
    "factors-list": (
        "clip_reduce",
        (X, [1.0, 1.0, 1.0]),
        {},
        "factors is a list: give a Tensor, for instance torch.as_tensor(factors)",
    ),
    "factors-number": ("clipped_grad", (X, DY, 1.0), {}, "factors is a float: give a Tensor"),
    "factors-number-of-table": (
        "embedding_clipped_grad",
        (INDICES, DY, 0.5, 9),
        {},
        "factors is a float: give a Tensor",
    ),
    "factors-scalar": ("clip_reduce", (X, FACTORS[0]), {}, "factors has shape (): give one"),
    "factors-float64": (
        "clipped_grad",
        (X, DY, FACTORS.double()),
        {},
        "factors has dtype torch.float64 and the samples torch.float32: give "
        "(factors * (1 - 2**-22)).float(), as factors.float() may round up",
    ),
    "factors-float64-of-stored": (
        "clip_reduce",
        (X.half(), FACTORS.double()),
        {},
        "factors has dtype torch.float64 and the samples torch.float16",
    ),
    "factors-float64-of-table": (
        "embedding_clipped_grad",
        (INDICES, DY, FACTORS.double(), 9),
        {},
        "factors has dtype torch.float64",
    ),
    "factors-of-table": (
        "embedding_clipped_grad",
        (INDICES, DY, torch.ones(4), 9),
        {},
        "factors has shape (4,)",
    ),
    "noise-number": ("clip_reduce", (X, FACTORS), {"noise": 1.0}, "noise is a float: give a"),
    "noise-key": ("clip_reduce", (X, FACTORS), {"noise": bytes(32)}, "noise is a bytes: give a"),
    "noise-at-the-end": (
        "clip_reduce",
        (X, FACTORS),
        {"noise": END},
        "20 elements of out end beyond the stream's 34359738368; split the parameter",
    ),
    "noise-on-another-grid": (
        "clip_reduce",
        (X, FACTORS),
        {"noise": NOISE, "grid": 2 * GRID},
        f"noise on the grid {GRID!r} where grid is {2 * GRID!r}: give noise of the same grid",
    ),
    "noise-into": (
        "clip_reduce",
        (X, FACTORS),
        {"noise": NOISE, "grid": GRID, "into": torch.zeros(4, 5).double()},
        "and the sum goes into another: give noise of the same grid, and no `into`",
    ),
    "grid-zero": ("clip_reduce", (X, FACTORS), {"grid": 0.0}, "grid=0.0: expected a power of two"),
    "into-without-a-grid": (
        "clip_reduce",
        (X, FACTORS),
        {"into": torch.zeros(4, 5).double()},
        "into is given without a grid: only sums on a grid are added up in place; pass grid too",
    ),
    "into-narrow": (
        "clip_reduce",
        (X, FACTORS),
        {"grid": GRID, "into": torch.zeros(4, 5)},
        "into has shape (4, 5), dtype torch.float32 and strides (5, 1): give a contiguous float64",
    ),
    "into-strided": (
        "clip_reduce",
        (X, FACTORS),
        {"grid": GRID, "into": torch.zeros(5, 4).double().t()},
        "and strides (1, 4): give a contiguous float64 tensor of shape (4, 5)",
    ),
    "into-shape": (
        "clip_reduce",
        (X, FACTORS),
        {"grid": GRID, "into": torch.zeros(5, 4).double()},
        "give a contiguous float64 tensor of shape (4, 5)",
    ),
    "into-list": ("clip_reduce", (X, FACTORS), {"grid": GRID, "into": []}, "into is a list: give"),
    "dtype": ("per_sample_grad", (X.to(torch.float8_e5m2), DY), {}, "x has dtype"),
    "complex": ("per_sample_grad", (X, DY.to(torch.complex64)), {}, "dy has dtype"),
    "integer": ("squared_norm", (INDICES,), {}, "grads has dtype torch.int64"),
    "scalar": ("clip_reduce", (X[0, 0, 0], FACTORS), {}, "grads has shape (): give [B, ...]"),
    "scalar-norm": ("squared_norm", (X[0, 0, 0],), {}, "grads has shape (): give [B, ...]"),
    "x-list": (
        "grad_norm",
        (X.tolist(), DY),
        {},
        "x is a list: give a Tensor, for instance torch.as_tensor(x)",
    ),
    "x-array": ("clipped_grad", (X.numpy(), DY, FACTORS), {}, "x is a ndarray: give a Tensor"),
    "dy-list": ("per_sample_grad", (X, DY.tolist()), {}, "dy is a list: give a Tensor"),
    "dy-list-of-bias": ("per_sample_bias_grad", (DY.tolist(),), {}, "dy is a list: give a"),
    "dy-list-of-table": ("embedding_grad_norm", (INDICES, DY.tolist()), {}, "dy is a list: give"),
    "indices-list": ("embedding_grad_norm", (INDICES.tolist(), DY), {}, "indices is a list: give"),
    "grads-list": ("clip_reduce", (X.tolist(), FACTORS), {}, "grads is a list: give a Tensor"),
    "grads-list-of-norm": ("squared_norm", (X.tolist(),), {}, "grads is a list: give a Tensor"),
    "norm-list": ("rms_norm_backward", (X, X.tolist(), X, None, 1), {}, "x is a list: give a"),
    "normalised-string": ("rms_norm_backward", (X, X, X[..., :1], None, "1"), {}, "ndim is '1'"),
    "norm-dtypes": (
        "layer_norm_backward",
        (X, X.double(), X[..., :1], X[..., :1], None, 1),
        {},
        "dy has dtype torch.float32 and x torch.float64: give both the same",
    ),
    "tokens": ("grad_norm", (X, DY[:, 1:]), {}, "(3, 4, 5) and (3, 3, 6)"),
    "samples": ("clipped_grad", (X[1:], DY, FACTORS), {}, "(2, 4, 5) and (3, 4, 6)"),
    "two-dimensions": ("per_sample_grad", (X[0], DY), {}, "x has shape (4, 5)"),
    "bias": ("per_sample_bias_grad", (DY[0],), {}, "dy has shape (4, 6)"),
    "indices": ("embedding_grad_norm", (INDICES.float(), DY), {}, "indices has shape (3, 4)"),
    "devices": ("grad_norm", (X.to("meta"), DY), {}, "meta and cpu"),
    "normalised": (
        "layer_norm_backward",
        (X, X, X[..., :1], X[..., :1], None, 3),
        {},
        "ndim is 3",
    ),
    "spans-of-rows": (
        "per_sample_grad",
        (X, DY),
        {"spans": ((0, 1),)},
        "spans beside a tensor of shape (3, 4, 6): give the tokens of all samples as the only row",
    ),
    "spans-end": ("span_sum", (X[0], ((2, 5),)), {}, "spans: give pairs 0 <= start"),
    "spans-order": (
        "grad_norm",
        (X[:1], DY[:1]),
        {"spans": ((2, 1),)},
        "spans: give pairs",
    ),
    "spans-overlap": (
        "per_sample_grad",
        (X[:1], DY[:1]),
        {"spans": ((0, 2), (3, 4), (1, 3))},
        "two spans overlap; give each token to one sample at most",
    ),
    "spans-list": (
        "embedding_grad_norm",
        (INDICES[:1], DY[:1]),
        {"spans": [(0, 1)]},
        "spans: give a tuple of tuples (first token, end)",
    ),
    "spans-lists": (
        "embedding_per_sample_grad",
        (INDICES[:1], DY[:1], 2),
        {"spans": ([0, 1],)},
        "spans: give a tuple of tuples",
    ),
    "spans-factors": (
        "clipped_grad",
        (X[:1], DY[:1], FACTORS),
        {"spans": ((0, 1),)},
        "factors has shape (3,): give one factor for each of the 1 samples",
    ),
    "spans-factors-of-table": (
        "embedding_clipped_grad",
        (INDICES[:1], DY[:1], FACTORS, 2),
        {"spans": ((0, 1),)},
        "factors has shape (3,): give one factor for each of the 1 samples",
    ),
    "spans-normalised": (
        "rms_norm_backward",
        (X[0], X[0], X[0, :, :1], None, 1),
        {"spans": ((0, 1),)},
        "ndim is 1 where x has shape (4, 5): give the number of normalised dimensions, at least "
        "two fewer",
    ),
    "spans-of-norms": (
        "layer_norm_backward",
        (X, X, X[..., :1], X[..., :1], None, 1),
        {"spans": ((0, 5),)},
        "spans beside a tensor of shape (3, 4, 5)",
    ),
    "norm-shapes": ("rms_norm_backward", (DY, X, X[..., :1], None, 1), {}, "dy and x have shapes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(case):
    name, args, named, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(kernels, name)(*args, **named)


MIXED = {
    "grad_norm": (),
    "per_sample_grad": (),
    "clipped_grad": (FACTORS,),
}


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_float64_beside_a_narrower_operand_is_refused_with_the_conversion_that_loses_nothing(
    name, narrow
):
    operation = getattr(kernels, name)
    message = (
        f"x has dtype torch.float64 and dy {narrow}: give both the same, for instance "
        "dy.to(x.dtype)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        operation(X.double(), DY.to(narrow), *MIXED[name])
    message = f"x has dtype {narrow} and dy torch.float64: give both the same, for instance x.to("
    with pytest.raises(ValueError, match=re.escape(message)):
        operation(X.to(narrow), DY.double(), *MIXED[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_a_16_bit_operand_beside_float32_gives_what_its_float32_copy_gives(name, dtype):
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(3, 4, n, generator=generator) for n in (5, 6))
    operation, more = getattr(kernels, name), MIXED[name]
    x, narrow = x.to(dtype), dy.to(dtype)
    assert torch.equal(operation(x, dy, *more), operation(x.float(), dy, *more))
    assert torch.equal(
        operation(x.float(), narrow, *more), operation(x.float(), narrow.float(), *more)
    )


def test_float64_factors_of_float64_operands_keep_their_digits():
    x, dy, factors = X.double() + 1, DY.double() + 1, torch.tensor([1 / 3, 0.1, 0.0]).double()
    factors[:2] += 2.0**-40
    stored = kernels.per_sample_grad(x, dy)
    expected = (factors.view(-1, 1, 1) * stored).sum(0)
    for found in (kernels.clipped_grad(x, dy, factors), kernels.clip_reduce(stored, factors)):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    on_a_grid = kernels.clip_reduce(stored, factors, grid=2.0**-48)
    torch.testing.assert_close(on_a_grid, expected, rtol=0, atol=2.0**-47)


def test_the_conversion_that_the_message_names_rounds_factors_down():
    exact = torch.rand(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert bool((exact.float().double() > exact).any())
    factors = (exact * (1 - 2**-22)).float()
    assert bool((factors.double() <= exact).all())
    assert bool((factors.double() >= exact * (1 - 2**-21)).all())
    assert float(kernels.clip_reduce(torch.ones(10_000), factors)) > 0


OPERATIONS = [
    n for n, f in vars(grads).items() if inspect.isfunction(f) and f.__module__ == grads.__name__
]
OPERATIONS = [n for n in OPERATIONS if not n.startswith("_")]


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_help_of_an_operation_is_the_references_and_says_what_the_dispatch_refuses(name):
    text = inspect.getdoc(getattr(kernels, name))
    of_reference = inspect.getdoc(getattr(reference, name))
    before, guarantees, after = of_reference.partition("\n\nGuarantees:")
    assert text.startswith(before + "\n\nRaises:\n    ValueError: ")
    assert text.endswith(guarantees + after)
    headings = [line for line in text.splitlines() if re.fullmatch(r"[A-Z]\w+:", line)]
    order = ["Args:", "Returns:", "Raises:", *(["Guarantees:"] if guarantees else [])]
    assert headings == order
    for parameter in inspect.signature(getattr(kernels, name)).parameters:
        assert re.search(rf"^    (\w+, )*{parameter}(, \w+)*: ", text, re.MULTILINE), parameter


def test_the_help_says_what_a_reader_cannot_guess():
    assert "squared" in inspect.getdoc(kernels.grad_norm).splitlines()[0].lower()
    for name in ("clipped_grad", "clip_reduce", "embedding_clipped_grad"):
        text = " ".join(inspect.getdoc(getattr(kernels, name)).split())
        assert "not checked" in text.lower() and "break the bound" in text, name
        assert "A factor of exactly 0 removes its sample" in text, name


def test_tensors_of_a_device_without_triton_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "dpflash.kernels.grad_launch", None)
    monkeypatch.delattr(kernels, "grad_launch", raising=False)
    x, dy = X.to("meta"), DY.to("meta")
    with pytest.raises(ImportError, match="device meta need triton.*move the tensors to the CPU"):
        kernels.grad_norm(x, dy)


def test_float64_runs_in_plain_torch_on_every_device(monkeypatch):
    monkeypatch.setitem(sys.modules, "dpflash.kernels.grad_launch", None)
    found = kernels.per_sample_grad(X.double().to("meta"), DY.double().to("meta"))
    assert found.dtype == torch.float64 and found.shape == (3, 6, 5)


def test_every_operation_of_the_launcher_has_the_signature_of_the_reference():
    launch = pytest.importorskip("dpflash.kernels.grad_launch")

    def own(module):
        return {
            name: value
            for name, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == module.__name__
            and not name.startswith("_")
        }

    dispatched, references = own(grads), own(reference)
    launched = own(launch).keys() - {"precision", "noise_width"}
    assert launched == dispatched.keys()
    for name in launched:
        wanted = inspect.signature(references[name])
        found = (inspect.signature(x[name]) for x in (own(launch), dispatched))
        assert all(signature == wanted for signature in found), name


def test_every_operation_on_the_cpu_has_the_signature_of_the_reference_implementation():
    for name in OPERATIONS:
        own, wanted = (inspect.signature(getattr(m, name)) for m in (grads_cpu, reference))
        assert own == wanted, name


def test_every_name_of_the_dispatch_is_public():
    names = [n for n in vars(grads) if not n.startswith("_") and callable(getattr(grads, n))]
    own = [n for n in names if getattr(grads, n).__module__ == grads.__name__]
    assert own and set(own) <= set(kernels.__all__)
    assert all(getattr(kernels, name) is getattr(grads, name) for name in own)


def test_the_reference_s_new_results_agree_with_what_they_stand_for():
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(3, 9, n, generator=generator) for n in (7, 8))
    stored, squares = kernels.per_sample_grad(x, dy, return_squares=True)
    assert torch.equal(stored, kernels.per_sample_grad(x, dy))
    for form in (None, "gram", "tile"):
        torch.testing.assert_close(kernels.grad_norm(x, dy, form=form), squares, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        kernels.per_sample_bias_grad(dy.bfloat16()), dy.bfloat16().float().sum(1)
    )
