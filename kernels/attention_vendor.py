"""Computes attention by the kernels of dpflash, cuDNN or FlashAttention, chosen for each call.

`choose` selects kernels that support the call's arguments and are as reproducible as the backend
requires. The kernels are called as separate operators, never through
`F.scaled_dot_product_attention`, which selects kernels by a setting of the process.

Sources: PyTorch 2.9 to 2.13, `aten/src/ATen/native/cudnn/MHA.cpp` and
`native/transformers/cuda/attention_backward.cu`; flash-attention, `flash_attn/cute/interface.py`.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim of
queries and keys, E that of values.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_reference import AttentionGrads, AttentionInputs, squared_norms
from .layout import on_device
from .tile_graph import TileGraph, real_cpu_tensors

AUTO, OWN, FAST = "auto", "own", "fast"
BACKENDS = (AUTO, OWN, FAST)

CUDNN, FLASH, FA4, FA4_FAST = "cudnn", "flash", "fa4", "fa4-fast"
_NAMES = {
    OWN: "dpflash's kernels",
    CUDNN: "cuDNN",
    FLASH: "PyTorch's FlashAttention 2",
    FA4: "FlashAttention 4, deterministic",
    FA4_FAST: "FlashAttention 4",
}
_OLDEST_CUDNN = 91600
# cuDNN counts samples and heads in 16 bits.
_MOST = 2**16 - 1
_VENDORS_HEAD_DIM, _WIDE_HEAD_DIM = 128, 256


class Machine(NamedTuple):
    """The attention kernels that a device can run."""

    capability: tuple[int, int] | None  # of an NVIDIA GPU; None for other devices
    cudnn: int = 0  # version, such as 91600; 0 if there is no cuDNN
    fa4: bool = False  # whether FlashAttention 4 is installed


class Call(NamedTuple):
    """The properties of a call by which `choose` selects its kernels.

    Attributes:
        machine: the kernels that the tensors' device can run.
        backend: one of BACKENDS.
        deterministic: whether torch.use_deterministic_algorithms is on.
        kind: "dense" or "causal"; None for any other graph.
        is_plain: no sinks, slopes, key ranges, softcap or bias, and no request for a result that
            only dpflash's kernels return.
        is_aligned: whether rows of all tensors begin at multiples of 16 bytes and do not overlap.
        dtype: dtype of q, k and v.
        shape: B, H, G, T, S, D, E.
        has_dlse: whether lse has a gradient.
    """

    machine: Machine
    backend: str
    deterministic: bool
    kind: str | None
    is_plain: bool
    is_aligned: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    has_dlse: bool = False


class Choice(NamedTuple):
    """The libraries whose kernels run the forward and the backward, and the reason."""

    forward: str
    backward: str
    why: str


_ON_OTHERS = Choice(OWN, OWN, "the device is no NVIDIA GPU")


def choose(call: Call) -> Choice:
    """Choose the kernels for the forward and the backward of a call.

    With "auto" and "own", forward and backward are bitwise reproducible. Only with dpflash's own
    kernels are the bits of a sample's result also independent of the other samples.
    """
    machine, fast = call.machine, call.backend == FAST
    if machine.capability is None:
        return _ON_OTHERS
    if (why := _only_own(call)) is not None:
        return Choice(OWN, OWN, why)
    major, head_dim = machine.capability[0], call.shape[5]
    is_narrow = head_dim <= _VENDORS_HEAD_DIM
    if major in (8, 12):
        why = "cuDNN and FlashAttention 4 are for compute capability 9.0 and 10"
        if fast and is_narrow and not call.has_dlse:
            return Choice(OWN, FLASH, f"{why}; FlashAttention 2 has the faster backward")
        return Choice(OWN, OWN, why)
    if major not in (9, 10):
        return Choice(OWN, OWN, "no other kernel was tried on this compute capability")
    if not is_narrow:
        if not machine.fa4 or major != 9:
            return Choice(OWN, OWN, f"head dim {head_dim} needs FlashAttention 4 on 9.0")
        return Choice(FA4, FA4_FAST if fast else OWN, "FlashAttention 4 is installed")
    has_cudnn = machine.cudnn >= _OLDEST_CUDNN
    if not has_cudnn and not (machine.fa4 and major == 10):
        return Choice(OWN, OWN, "cuDNN 9.16 or newer is not installed")
    forward = FA4 if machine.fa4 and major == 10 else CUDNN
    if fast and has_cudnn and not call.has_dlse:
        return Choice(forward, CUDNN, "the fastest; gradients are not bitwise reproducible")
    if machine.fa4:
        return Choice(forward, FA4, "FlashAttention 4 has a bitwise reproducible backward")
    return Choice(forward, OWN, "only the forward of cuDNN is bitwise reproducible")


def _only_own(call: Call) -> str | None:
    """Return why a call must run in dpflash's own kernels, or None if it need not."""
    batch, heads, groups, queries, keys, head_dim, value_dim = call.shape
    if call.backend == OWN:
        return "attention_backend is 'own'"
    if call.deterministic:
        return "torch.use_deterministic_algorithms is on"
    if call.kind is None or not call.is_plain:
        return "the call is not plain dense or causal attention"
    # Other kernels align a causal mask to the first key if T and S differ.
    if queries != keys or queries < 2 or 0 in (batch, heads, groups):
        return "the call is empty, has one query, or has fewer queries than keys"
    if max(batch, heads) > _MOST:
        return f"the call has more than {_MOST:,} samples or heads"
    if call.dtype not in (torch.float16, torch.bfloat16):
        return "the call is not in 16 bit"
    if head_dim != value_dim or head_dim % 8 or head_dim > _WIDE_HEAD_DIM:
        return "other libraries do not support the head dim"
    return None if call.is_aligned else "rows do not begin at multiples of 16 bytes"


@functools.cache
def machine(device: torch.device) -> Machine:
    """Return the attention kernels that a device can run."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return Machine(None)
    # With this setting torch expects lse in another layout than dpflash's forward writes.
    is_ragged = os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0") != "0"
    cudnn = 0 if is_ragged else torch.backends.cudnn.version() or 0
    return Machine(torch.cuda.get_device_capability(device), cudnn, _fa4() is not None)


def describe(device: torch.device, backend: str = AUTO) -> str:
    """Describe in a sentence the kernels of dense and causal calls on a device, and the reason."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    shape = (1, 1, 1, 1024, 1024, 128, 128)
    options = (backend, deterministic, "causal", True, True, torch.bfloat16, shape)
    forward, backward, why = choose(Call(machine(device), *options))
    if forward == backward:
        kernels = f"by {_NAMES[forward]}"
    else:
        kernels = f"forward by {_NAMES[forward]}, backward by {_NAMES[backward]}"
    return f"attention: dense and causal calls in 16 bit, head dim up to 128, {kernels}: {why}"


def choice_of(
    inputs: AttentionInputs, *, has_dlse: bool = False, only_grads: bool = True
) -> Choice:
    """Choose the kernels for the forward and the backward of a call, see `choose`.

    Args:
        inputs: inputs of the call.
        has_dlse: for a backward, whether lse has a gradient.
        only_grads: for a backward, whether only dq, dk, dv and their norms are requested.
    """
    q, k, v = _qkv(inputs)
    found = machine(q.device)
    if found.capability is None:  # On the CPU each microsecond counts.
        return _ON_OTHERS
    extras = (inputs.sinks, inputs.slopes, inputs.key_range, inputs.softcap, inputs.bias)
    return choose(
        Call(
            found,
            inputs.backend,
            torch.are_deterministic_algorithms_enabled(),
            kind_of(inputs.graph),
            only_grads and all(x is None for x in extras),
            all(map(_is_aligned, (q, k, v))),
            q.dtype,
            (*q.shape[:2], k.shape[1], q.shape[2], *k.shape[2:], v.shape[3]),
            has_dlse,
        )
    )


def attention_forward(
    inputs: AttentionInputs, kernel: str, *, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """See `attention_reference.attention_forward`; o is rounded to 16 bits even if `wide`."""
    q, k, v, scale, causal = *_qkv(inputs), inputs.scale, kind_of(inputs.graph) == "causal"
    if kernel == CUDNN:
        o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
        lse = lse.squeeze(3)
    else:
        fa4 = _fa4()
        assert kernel == FA4 and fa4 is not None, "flash-attn-4 is not installed"
        with on_device(q):
            o, lse = fa4.forward(
                *(x.transpose(1, 2) for x in (q, k, v)),
                softmax_scale=scale,
                causal=causal,
                return_lse=True,
            )
        o = o.transpose(1, 2)
    return o.float() if wide else o, lse.contiguous()


def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    inputs: AttentionInputs,
    kernel: str,
    *,
    squares: bool = False,
    wide: bool = False,
) -> AttentionGrads:
    """See `attention_reference.attention_backward`; gradients are rounded even if `wide`."""
    q, k, v, scale, causal = *_qkv(inputs), inputs.scale, kind_of(inputs.graph) == "causal"
    do, o = _as_result(do, q), _as_result(o, q)
    lse, tokens = lse.contiguous(), q.shape[2]
    # Without dropout, seed and offset are not read.
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    if kernel == CUDNN:
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            *(do, q, k, v, o, lse.unsqueeze(3), seed, seed, None, None, None),
            *(tokens, tokens, 0.0, causal),
            scale=scale,
        )
    elif kernel == FLASH:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
            *(do, q, k, v, o, lse, None, None, tokens, tokens, 0.0, causal, seed, seed),
            scale=scale,
        )
    else:
        fa4 = _fa4()
        assert kernel in (FA4, FA4_FAST) and fa4 is not None, "flash-attn-4 is not installed"
        with on_device(q):
            of_tokens = fa4.backward(
                *(x.transpose(1, 2) for x in (q, k, v, o, do)),
                lse,
                softmax_scale=scale,
                causal=causal,
                deterministic=kernel == FA4,
                dlse=None if dlse is None else dlse.float().contiguous(),
            )
        grads = tuple(x.transpose(1, 2) for x in of_tokens[:3])
    of_samples = squared_norms(*grads) if squares else None
    dq, dk, dv = (x.float() if wide else x for x in grads)
    return AttentionGrads(dq, dk, dv, squares=of_samples)


def kind_of(graph: TileGraph) -> str | None:
    """Return "dense" if each query sees all keys, "causal" if it sees the keys up to its own.

    Return None for other graphs, and for graphs that were built on the device.
    """
    if graph.rows.runtime:
        return None
    if "kind" not in graph.plans:
        with real_cpu_tensors():
            graph.plans["kind"] = _read_kind(graph)
    found: str | None = graph.plans["kind"]
    return found


def _read_kind(graph: TileGraph) -> str | None:
    side = graph.rows
    if (len(side.variants), len(side.groups), len(side.runs)) != (2, 1, 1):
        return None
    group, (*run, lo, hi) = side.groups[0].tolist(), side.runs[0].tolist()
    if group[:3] != [0, 1, graph.num_queries] or run != [0, 1, graph.num_keys]:
        return None
    # The band of a shard may be wider than the shard.
    if side.log_multiplicity.item() != 0 or hi < graph.num_queries - 1:
        return None
    return "dense" if lo <= 1 - graph.num_keys else "causal" if lo == 0 else None


def _is_aligned(x: Tensor) -> bool:
    """Return whether rows begin at multiples of 16 bytes without overlap, as vendors require."""
    *outer, last = zip(x.shape, x.stride(), strict=True)
    return (
        x.data_ptr() % 16 == 0
        and last[1] == 1
        and all(
            size == 1 or (stride > 0 and stride * x.itemsize % 16 == 0) for size, stride in outer
        )
    )


def _qkv(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.q, inputs.k, inputs.v


def _as_result(x: Tensor, q: Tensor) -> Tensor:
    """Convert o or its gradient to the dtype and the memory layout of q.

    PyTorch caches cuDNN plans by the layouts of q, k and v only (later versions by all layouts).
    So o or do in another layout would be read as if it had the layout of an earlier call.
    """
    result = torch.empty_like(q)
    if x.dtype == q.dtype and x.stride() == result.stride() and x.data_ptr() % 16 == 0:
        return x
    return result.copy_(x)


class _FlashAttention4(NamedTuple):
    """Functions of FlashAttention 4, which take tensors `[B, T, H, D]`."""

    forward: Callable[..., Any]  # returns o, and lse `[B, H, T]`
    backward: Callable[..., Any]


@functools.cache
def _fa4() -> _FlashAttention4 | None:
    """Return FlashAttention 4, or None if flash-attn-4 is missing or has another signature."""
    try:
        interface = import_module("flash_attn.cute.interface")
        found = _FlashAttention4(interface.flash_attn_func, interface._flash_attn_bwd)
    except (ImportError, AttributeError):
        return None
    is_known = {"deterministic", "dlse"} <= signature(found.backward).parameters.keys()
    return found if is_known and "return_lse" in signature(found.forward).parameters else None
