"""attention_backend: chooses the library whose kernels compute attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch

from dpflash.kernels.attention_vendor import AUTO, BACKENDS

from .. import _validate

# The current backend, and whether a private model's forward runs.
_current: ContextVar[tuple[str, bool]] = ContextVar("attention_backend", default=(AUTO, False))
# The backend for torch.compile, which can guard on a global but cannot trace a ContextVar.
_traced = AUTO
# The backend of the private model whose forward ran last, for recomputed forwards.
_again: str | None = None


def attention_backend(backend: str) -> AbstractContextManager[None]:
    """Context manager that chooses whose kernels compute attention. It needs a `with` statement.

    ::

        with dpflash.attention_backend("fast"):
            o = dpflash.attention(q, k, v, causal=True)
        o.sum().backward()  # uses the backend of its forward

    Other libraries have kernels for dense and causal attention in 16 bit. For all other calls
    (patterns, sinks, slopes, masks, biases, fewer queries than keys, float32) and on ROCm GPUs,
    dpflash's own kernels run. They also run on a CPU, except for short samples (see
    `dpflash.attention`). `dpflash doctor` and `engine.optimization` name a device's kernels.

    Args:
        backend: one of three names.

            - "auto": the forward of cuDNN, or of FlashAttention 4 if the package flash-attn-4 is
              installed, and a deterministic backward: FlashAttention 4's or dpflash's own.
            - "fast": the forward of "auto" and the fastest backward: cuDNN's, or FlashAttention
              2's on GPUs before compute capability 9.0. The same as "auto" if lse has a gradient.
            - "own": dpflash's kernels only.

    Raises:
        ValueError: backend is not one of these names.

    Guarantees:
        With "auto" and "own", results and gradients are bitwise reproducible; with "fast",
        gradients are not. With "own", a sample's result has the same bits for every number of
        samples; with "auto" and "fast" its bits may differ. Privacy does not depend on the
        backend: each gradient is computed once, then clipped. Calls use "own" in private models
        with exact=True and under torch.use_deterministic_algorithms. Private models that may run
        two backwards (grad_sample_mode="ghost") use "auto" in place of "fast".

    The backend is set for the current thread. Functions under torch.compile use the backend that
    was set last by any thread. Activation checkpointing recomputes forwards in the backward,
    outside of the with block. A private model then uses the backend of the private model whose
    forward ran last. Other models use the backend that is set during the backward.
    """
    _validate.one_of(backend=(backend, BACKENDS))
    return _chosen(backend)


@contextmanager
def _chosen(backend: str, *, of_model: bool = False) -> Iterator[None]:
    global _traced
    is_traced = torch.compiler.is_compiling()
    traced, before = _traced, None if is_traced else _current.get()
    if before is not None:
        _current.set((backend, of_model or before[1]))
    _traced = backend
    try:
        yield
    finally:
        if before is not None:
            _current.set(before)
        _traced = traced


@contextmanager
def attention_backend_of_model(backend: str) -> Iterator[None]:
    """Set the backend of a private model's forward, and of its recomputation in a backward."""
    global _again
    _again = backend
    with _chosen(backend, of_model=True):
        yield


def current_backend() -> str:
    """Return the backend that is set for this thread, see `attention_backend`."""
    if torch.compiler.is_compiling():
        return _traced
    chosen, _ = _current.get()
    # The ContextVar of the forward is not set in the threads in which autograd runs backwards.
    if chosen == AUTO and _again is not None and torch._C._current_graph_task_id() != -1:
        return _again
    return chosen


def is_in_private_model() -> bool:
    """Return whether a private model's forward runs; its recomputation does not count."""
    return _current.get()[1]
