"""attention_backend: whose kernels attention may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch

from dpflash.kernels.attention_vendor import AUTO, BACKENDS

from .. import _validate

# The choice, and whether a private model's forward runs.
_current: ContextVar[tuple[str, bool]] = ContextVar("attention_backend", default=(AUTO, False))
# What torch.compile reads, and guards on: it traces no ContextVar.
_traced = AUTO
# The choice of the private model whose forward ran last, for recomputed forwards.
_again: str | None = None


def attention_backend(backend: str) -> AbstractContextManager[None]:
    """Choose whose kernels attention uses inside a with block; without one it changes nothing.

    ::

        with dpflash.attention_backend("fast"):
            o = dpflash.attention(q, k, v, causal=True)
        o.sum().backward()  # by the choice of its forward

    Dense and causal attention in 16 bit is what other libraries have kernels for. All other calls
    (patterns, sinks, slopes, masks, biases, fewer queries than keys, float32) run in dpflash's
    own kernels, and so does everything on a GPU of ROCm and, but for short samples (see
    `dpflash.attention`), on a CPU. `dpflash doctor` and `engine.optimization` name the kernels
    of a device.

    Args:
        backend: "auto": cuDNN's forward or FlashAttention 4's (the package flash-attn-4, where it
            is installed), and a backward that repeats: FlashAttention 4's deterministic one, or
            dpflash's own. "fast": the fastest backward too, which is cuDNN's, or FlashAttention
            2's on GPUs before compute capability 9.0; where lse has a gradient, as with "auto".
            "own": dpflash's kernels alone.

    Raises:
        ValueError: another name.

    Guarantees:
        With "auto" and "own" results and gradients repeat bit for bit; with "fast" gradients do
        not. With "own" the bits of a sample do not depend on the number of samples; with the
        others they may. A gradient is computed once, and clipped as it is: neither decides about
        privacy. Private models with exact=True, and all calls under
        torch.use_deterministic_algorithms, use "own"; those that may run two backwards
        (grad_sample_mode="ghost") use "auto" in place of "fast".

    A choice holds for the thread that made it. Functions under torch.compile read the choice that
    any thread made last. Activation checkpointing runs forwards again in the backward, outside of
    the with block: private models keep their choice there (that of the model whose forward ran
    last), other models use the choice at that time.
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
    """`attention_backend` for a private model's forward, and for what its backward runs again."""
    global _again
    _again = backend
    with _chosen(backend, of_model=True):
        yield


def current_backend() -> str:
    """Return the backend that `attention_backend` has set here."""
    if torch.compiler.is_compiling():
        return _traced
    chosen, _ = _current.get()
    # A backward runs in threads of its own, which know nothing of the forward's choice.
    if chosen == AUTO and _again is not None and torch._C._current_graph_task_id() != -1:
        return _again
    return chosen


def is_in_private_model() -> bool:
    """Whether a private model's forward runs; False where a backward runs it again."""
    return _current.get()[1]
