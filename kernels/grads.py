"""Per-sample gradient operations, dispatched to the backend of the tensors' device.

Signatures and semantics are those of the reference implementations in `reference.py`.

- On a CPU `grads_cpu.py` runs. The reference implementations run if its C++ cannot be compiled,
  and inside of `torch.compile`.
- On a GPU the Triton kernels run; for float64 operands the reference implementations run.

Letters: B samples, T tokens of a sample, I inputs, O outputs, V rows of a table, E its width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Literal, TypeVar, overload

import torch
from torch import Tensor

from . import grads_cpu, native, reference
from .grid import check_grid
from .noise import NoiseStream
from .spans import Spans, check_spans

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_Operation = TypeVar("_Operation", bound=Callable[..., object])
_RAISES = """

Raises:
    ValueError: an argument is not of the type, shape, dtype or range above, or the tensors are on
        several devices; the message names the argument and what to give instead.
    ImportError: the tensors are on a GPU, not float64, and triton cannot be imported."""


def _documented_by(
    reference_function: Callable[..., object],
) -> Callable[[_Operation], _Operation]:
    """Decorator: set an operation's docstring to that of its reference, plus `_RAISES`."""
    text, guarantees, rest = inspect.cleandoc(reference_function.__doc__ or "").partition(
        "\n\nGuarantees:"
    )

    def document(operation: _Operation) -> _Operation:
        operation.__doc__ = text + _RAISES + guarantees + rest
        return operation

    return document


@overload
def per_sample_grad(
    x: Tensor, dy: Tensor, *, spans: Spans | None = None, return_squares: Literal[False] = False
) -> Tensor: ...
@overload
def per_sample_grad(
    x: Tensor, dy: Tensor, *, spans: Spans | None = None, return_squares: Literal[True]
) -> tuple[Tensor, Tensor]: ...
@_documented_by(reference.per_sample_grad)
def per_sample_grad(
    x: Tensor, dy: Tensor, *, spans: Spans | None = None, return_squares: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """See `reference.per_sample_grad`."""
    _check_uses(x, dy)
    _check_spans(spans, dy)
    return _backend(x, dy).per_sample_grad(x, dy, spans=spans, return_squares=return_squares)


@_documented_by(reference.span_sum)
def span_sum(x: Tensor, spans: Spans) -> Tensor:
    """See `reference.span_sum`; the GPU's kernel takes fp64 too."""
    _check("x", x)
    _check_spans(spans, x.unsqueeze(0))
    return _backend(x, any_dtype=True).span_sum(x, spans)


@_documented_by(reference.per_sample_bias_grad)
def per_sample_bias_grad(dy: Tensor) -> Tensor:
    """See `reference.per_sample_bias_grad`."""
    _check("dy", dy, 3)
    return _backend(dy).per_sample_bias_grad(dy)


@_documented_by(reference.grad_norm)
def grad_norm(
    x: Tensor, dy: Tensor, *, form: str | None = None, spans: Spans | None = None
) -> Tensor:
    """See `reference.grad_norm`."""
    _check_uses(x, dy)
    _check_spans(spans, dy)
    if form not in (None, "gram", "tile"):
        raise ValueError(f"form is {form!r}: give 'gram', 'tile', or None for the cheaper form")
    return _backend(x, dy).grad_norm(x, dy, form=form, spans=spans)


@_documented_by(reference.products_are_separate)
def products_are_separate(*dy: Tensor) -> bool:
    """See `reference.products_are_separate`."""
    return bool(_backend(*dy).products_are_separate(*dy))


@_documented_by(reference.clipped_grad)
def clipped_grad(x: Tensor, dy: Tensor, factors: Tensor, *, spans: Spans | None = None) -> Tensor:
    """See `reference.clipped_grad`."""
    _check_uses(x, dy)
    _check_factors(factors, x, _check_spans(spans, dy))
    return _backend(x, dy).clipped_grad(x, dy, factors, spans=spans)


@_documented_by(reference.clip_reduce)
def clip_reduce(
    grads: Tensor,
    factors: Tensor,
    *,
    grid: float | None = None,
    into: Tensor | None = None,
    noise: NoiseStream | None = None,
) -> Tensor:
    """See `reference.clip_reduce`."""
    _check_clip_reduce(grads, factors, grid, into, noise)
    return _backend(grads).clip_reduce(grads, factors, grid=grid, into=into, noise=noise)


@_documented_by(reference.clip_reduce_all)
def clip_reduce_all(
    grads: Sequence[Tensor],
    factors: Tensor,
    *,
    grid: float | None = None,
    into: Sequence[Tensor] | None = None,
    noise: Sequence[NoiseStream] | None = None,
) -> Sequence[Tensor]:
    """See `reference.clip_reduce_all`."""
    for own, total, stream in reference.of_each(grads, into, noise):
        _check_clip_reduce(own, factors, grid, total, stream)
    backend = _backend(*grads)
    return backend.clip_reduce_all(grads, factors, grid=grid, into=into, noise=noise)


@_documented_by(reference.squared_norm)
def squared_norm(*grads: Tensor, into: Tensor | None = None) -> Tensor:
    """See `reference.squared_norm`."""
    for own in grads:
        _check("grads", own)
        _check_same("grads", (grads[0], own), 1)
    if into is not None:
        _check_wide("into", into, grads[0].shape[:1])
    return _backend(*grads).squared_norm(*grads, into=into)


@_documented_by(reference.clip_factors)
def clip_factors(
    squared_norms: Tensor, bound: float, function: str = "hard", *, keep: Tensor | None = None
) -> Tensor:
    """See `reference.clip_factors`; the GPU's kernel takes the fp64 squares."""
    _check("squared_norms", squared_norms, 1)
    squares = squared_norms.double()
    if keep is not None:
        _check_keep(keep, squares)
    return _backend(squares, any_dtype=True).clip_factors(squares, bound, function, keep=keep)


@_documented_by(reference.embedding_per_sample_grad)
def embedding_per_sample_grad(
    indices: Tensor, dy: Tensor, num_embeddings: int, *, spans: Spans | None = None
) -> Tensor:
    """See `reference.embedding_per_sample_grad`."""
    _check_look_ups(indices, dy)
    _check_spans(spans, dy)
    return _backend(dy).embedding_per_sample_grad(indices, dy, num_embeddings, spans=spans)


@_documented_by(reference.embedding_grad_norm)
def embedding_grad_norm(indices: Tensor, dy: Tensor, *, spans: Spans | None = None) -> Tensor:
    """See `reference.embedding_grad_norm`."""
    _check_look_ups(indices, dy)
    _check_spans(spans, dy)
    return _backend(dy).embedding_grad_norm(indices, dy, spans=spans)


@_documented_by(reference.embedding_clipped_grad)
def embedding_clipped_grad(
    indices: Tensor,
    dy: Tensor,
    factors: Tensor,
    num_embeddings: int,
    *,
    spans: Spans | None = None,
) -> Tensor:
    """See `reference.embedding_clipped_grad`."""
    _check_look_ups(indices, dy)
    _check_factors(factors, dy, _check_spans(spans, dy))
    backend = _backend(dy)
    return backend.embedding_clipped_grad(indices, dy, factors, num_embeddings, spans=spans)


@_documented_by(reference.layer_norm_backward)
def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    ndim: int,
    *,
    spans: Spans | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.layer_norm_backward`."""
    _check_norm(dy, x, ndim, spans)
    return _backend(dy, x).layer_norm_backward(dy, x, mean, rstd, weight, ndim, spans=spans)


@_documented_by(reference.rms_norm_backward)
def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    ndim: int,
    *,
    spans: Spans | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.rms_norm_backward`."""
    _check_norm(dy, x, ndim, spans)
    return _backend(dy, x).rms_norm_backward(dy, x, rstd, weight, ndim, spans=spans)


def _backend(*tensors: Tensor, any_dtype: bool = False) -> ModuleType:
    """Return the tensors' backend, a module; with `any_dtype`, Triton also runs float64."""
    device = tensors[0].device
    if device.type == "cpu" and not torch.compiler.is_compiling():
        return reference if native.library() is None else grads_cpu
    double = any(t.dtype == torch.float64 for t in tensors)
    if device.type == "cpu" or (double and not any_dtype):
        return reference
    try:
        from . import grad_launch
    except ImportError as error:
        if double:
            return reference
        raise ImportError(
            f"per-sample gradients on device {device} need triton: pip install 'triton>=3.6', or "
            "move the tensors to the CPU"
        ) from error
    return grad_launch


def _check(name: str, tensor: Tensor, ndim: int | None = None) -> None:
    """Check that a tensor is floating-point and has `ndim` dimensions (None: at least one)."""
    _check_dtype(name, tensor)
    if ndim is None:
        if tensor.ndim == 0:
            raise ValueError(f"{name} has shape (): give [B, ...], samples first")
    elif tensor.ndim != ndim:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: give {ndim} dimensions, samples and tokens "
            "first"
        )


def _check_dtype(name: str, tensor: Tensor) -> None:
    _check_tensor(name, tensor)
    if tensor.dtype not in _DTYPES:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}: convert it to float32, bfloat16, float16 or float64"
        )


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}: give a Tensor, for instance "
            f"torch.as_tensor({name})"
        )


def _check_same(names: str, tensors: Sequence[Tensor], ndim: int) -> None:
    """Check that two tensors have the same first `ndim` dimensions and the same device."""
    first, second = tensors
    if first.shape[:ndim] != second.shape[:ndim]:
        raise ValueError(
            f"{names} have shapes {tuple(first.shape)} and {tuple(second.shape)}: give both the "
            f"same {'samples' if ndim == 1 else 'samples and tokens'}"
        )
    _check_device(names, first, second)


def _check_device(names: str, first: Tensor, second: Tensor) -> None:
    if first.device != second.device:
        raise ValueError(
            f"{names} are on devices {first.device} and {second.device}: move both to one"
        )


def _check_widths(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Check that both tensors are fp64, or neither; other dtypes may differ."""
    double = torch.float64
    if tensor.dtype == other.dtype or double not in (tensor.dtype, other.dtype):
        return
    narrow, wide = (other_name, name) if tensor.dtype == double else (name, other_name)
    raise ValueError(
        f"{name} has dtype {tensor.dtype} and {other_name} {other.dtype}: give both the same, for "
        f"instance {narrow}.to({wide}.dtype)"
    )


def _check_uses(x: Tensor, dy: Tensor) -> None:
    _check("x", x, 3)
    _check("dy", dy, 3)
    _check_same("x and dy", (x, dy), 2)
    _check_widths("x", x, "dy", dy)


def _check_look_ups(indices: Tensor, dy: Tensor) -> None:
    _check("dy", dy, 3)
    _check_tensor("indices", indices)
    if indices.ndim != 2 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"indices has shape {tuple(indices.shape)} and dtype {indices.dtype}: give rows of "
            "the table as int64, [samples, tokens]"
        )
    _check_same("indices and dy", (indices, dy), 2)


def _check_spans(spans: Spans | None, of_tokens: Tensor) -> int:
    """Return the number of samples; check that spans fit into the single row of `of_tokens`."""
    if spans is None:
        return of_tokens.shape[0]
    if of_tokens.shape[0] != 1:
        raise ValueError(
            f"spans beside a tensor of shape {tuple(of_tokens.shape)}: give the tokens "
            "of all samples as the only row, [1, tokens, ...]"
        )
    if not isinstance(spans, tuple) or not all(isinstance(span, tuple) for span in spans):
        raise ValueError("spans: give a tuple of tuples (first token, end)")
    check_spans(spans, of_tokens.shape[1])
    return len(spans)


def _check_keep(keep: Tensor, squares: Tensor) -> None:
    _check_tensor("keep", keep)
    if keep.dtype != torch.bool or keep.shape != squares.shape:
        raise ValueError(
            f"keep has shape {tuple(keep.shape)} and dtype {keep.dtype}: give a bool for each of "
            f"the {len(squares)} samples"
        )
    _check_device("keep and squared_norms", keep, squares)


def _check_factors(factors: Tensor, of_samples: Tensor, batch: int) -> None:
    """Check factors, but not their values: reading values would synchronize with the GPU."""
    _check_dtype("factors", factors)
    if factors.shape != (batch,):
        raise ValueError(
            f"factors has shape {tuple(factors.shape)}: give one factor for each of the {batch} "
            "samples"
        )
    _check_device("factors and the samples", factors, of_samples)
    if factors.dtype == torch.float64 != of_samples.dtype:
        raise ValueError(
            f"factors has dtype torch.float64 and the samples {of_samples.dtype}: give "
            "(factors * (1 - 2**-22)).float(), as factors.float() may round up"
        )


def _check_clip_reduce(
    grads: Tensor,
    factors: Tensor,
    grid: float | None,
    into: Tensor | None,
    noise: NoiseStream | None,
) -> None:
    _check("grads", grads)
    _check_factors(factors, grads, grads.shape[0])
    _check_into(into, grid, grads.shape[1:])
    _check_noise(noise, grads.shape[1:].numel())
    if noise is not None and (into is not None or grid not in (None, noise.grid)):
        raise ValueError(
            f"noise on the grid {noise.grid!r} where grid is {grid!r}"
            + (" and the sum goes into another" if into is not None else "")
            + ": give noise of the same grid, and no `into`; call noise.add_to_(into) afterwards"
        )


def _check_noise(noise: NoiseStream | None, elements: int) -> None:
    if noise is None:
        return
    if not isinstance(noise, NoiseStream):
        # The message must not show the value, which may be a key.
        raise ValueError(
            f"noise is a {type(noise).__name__}: give a NoiseStream, or None for no noise"
        )
    noise.check_length(elements)


def _check_into(into: Tensor | None, grid: float | None, shape: torch.Size) -> None:
    if grid is not None:
        check_grid(grid)
    if into is None:
        return
    if grid is None:
        raise ValueError(
            "into is given without a grid: only sums on a grid are added up in place; "
            "pass grid too, or leave into out"
        )
    _check_wide("into", into, shape)


def _check_wide(name: str, into: Tensor, shape: torch.Size) -> None:
    _check_tensor(name, into)
    if into.dtype != torch.float64 or into.shape != shape or not into.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(into.shape)}, dtype {into.dtype} and strides "
            f"{into.stride()}: give a contiguous float64 tensor of shape {tuple(shape)}"
        )


def _check_norm(dy: Tensor, x: Tensor, ndim: int, spans: Spans | None) -> None:
    _check("x", x)
    _check("dy", dy)
    others = 1 if spans is None else 2
    if not isinstance(ndim, int) or not 0 < ndim <= x.ndim - others:
        raise ValueError(
            f"ndim is {ndim!r} where x has shape {tuple(x.shape)}: give the number of normalised "
            f"dimensions, at least {('one', 'two')[others - 1]} fewer than x has"
        )
    _check_spans(spans, x)
    _check_same("dy and x", (dy, x), x.ndim)
    _check_widths("dy", dy, "x", x)
