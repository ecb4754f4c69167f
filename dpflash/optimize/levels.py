"""Optimization levels: what each level changes, and the sentences that report this to users.

none          textbook DP-SGD: each layer keeps its per-sample gradients.
conservative  a planner chooses the grad_sample_mode of flat clipping; only rounding changes.
balanced      conservative, and the model's forward runs under bfloat16 autocast.
aggressive    balanced, with per-layer clipping and a compiled forward.

No level changes the epsilon of a step: sampling, noise and clipping bound are the same. Clipping
and noise run in the backward of the clipping gates, outside of autocast and the compiled graph.
If private data determines the number of rows, 16-bit rounding affects the bound, see `_OF_16_BIT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..clipping.planner import clipping_for
from ..distributed.mesh import Ranks
from ..grad_rules.convert import Layer, untraceable


@dataclass(frozen=True)
class Asked:
    """The arguments of `make_private` that determine the changes of a level."""

    level: str  # one of `planner.LEVELS`
    clipping: str | None  # None for the level's own clipping
    mode: str  # grad_sample_mode of flat clipping
    public_batch_size: int  # number of samples in the microbatch that the planner plans for
    memory_budget: int  # bytes that the per-sample gradients of a microbatch may take
    ranks: Ranks  # the ranks that train the model


@dataclass(frozen=True)
class Optimization:
    """The changes that an optimization level makes to a private model."""

    level: str  # "none", "conservative", "balanced" or "aggressive"
    clipping: str  # "flat" or "per_layer"
    autocast: bool  # whether the model's forward runs under bfloat16 autocast
    compiled: bool  # whether torch.compile compiles the model's forward in training
    # sentences that begin with their subject: "privacy", "clipping", "numerics" or "memory", or
    # with "left out" if an optimization is not used
    changes: tuple[str, ...]
    # size of the per-sample gradients of all layers for a microbatch of public_batch_size samples
    stored_bytes: int
    float8: frozenset[str] = frozenset()  # names of the linear layers that multiply in float8

    def __str__(self) -> str:
        return "\n  ".join((f"optimize={self.level!r}", *self.changes))

    @property
    def summary(self) -> str:
        """A one-line summary."""
        parts = [f"{self.clipping} clipping"]
        parts += ["bfloat16 autocast"] * self.autocast + ["torch.compile"] * self.compiled
        parts += ["float8 products"] * bool(self.float8)
        return f"optimize={self.level!r}: {', '.join(parts)}"

    def with_change(self, sentence: str) -> Optimization:
        """Return a copy with an additional sentence."""
        return replace(self, changes=(*self.changes, sentence))

    def without_compiler(self, why: str) -> Optimization:
        """Return a copy without torch.compile that reports the reason."""
        gone = _of_compiler(self.stored_bytes)
        kept = (change for change in self.changes if change not in gone)
        changes = (*kept, f"left out: torch.compile, since {why}")
        return replace(self, compiled=False, changes=changes)


PLAIN = Optimization("none", "flat", autocast=False, compiled=False, changes=(), stored_bytes=0)


def choose(
    asked: Asked, module: nn.Module, layers: Sequence[Layer], trained: Sequence[nn.Parameter]
) -> Optimization:
    """Return what a level changes for a model; raise ValueError if the device lacks bfloat16."""
    level, device = asked.level, trained[0].device
    clipping = clipping_for(level, asked.clipping, asked.mode)
    autocast = False
    changes = [_PRIVACY]
    if level == "none":
        changes += [*_of_none(clipping), *_of_narrow(trained)]
    else:
        changes.append(_clipping(asked, clipping))
    if level == "conservative":
        changes += [*_CONSERVATIVE, *_of_narrow(trained)]
    elif level != "none":
        autocast, numerics = _autocast(level, trained)
        changes += numerics
    # Size of all per-sample gradients, in fp32 or wider.
    size = sum(max(4, p.element_size()) * p.numel() for p in trained) * asked.public_batch_size
    if level != "aggressive":
        return Optimization(level, clipping, autocast, False, tuple(changes), size)
    changes += _of_compiler(size)
    compiled = Optimization(level, clipping, autocast, True, tuple(changes), size)
    obstacle = _obstacle(asked, module, layers, device, size)
    return compiled if obstacle is None else compiled.without_compiler(obstacle)


_PRIVACY = (
    "privacy: epsilon is that of every other level, since sampling, noise and clipping are the "
    "same; norms, clip factors, sums and noise stay float32 or wider"
)
_OF_16_BIT = (
    "numerics: the shape of a batch determines which kernels compute its 16-bit products, and so "
    "their rounding. Batches of the private loader have a public number of rows, so no sample "
    "affects the rounding of others. Batches of BatchMemoryManager, batches from elsewhere, and "
    "batches of a collate_fn that pads to the longest sample have no public shape. With these, "
    "one sample was seen to change the sum by 1.0009 max_grad_norm, and by 1.0083 max_grad_norm "
    "in a search for large changes"
)
_CONSERVATIVE = (
    "numerics: grad_sample_modes differ by rounding alone",
    "memory: the per-sample gradients that the planner stores stay within memory_budget",
)


def _of_none(clipping: str) -> tuple[str, ...]:
    return (
        f"clipping: {clipping}; each layer keeps its per-sample gradients; no planner",
        "numerics: those of the model, unchanged",
        "memory: one gradient per sample of the batch for each parameter; memory_budget has no "
        "effect",
    )


def _clipping(asked: Asked, clipping: str) -> str:
    text = f"clipping: {clipping}"
    if asked.clipping is not None or asked.mode != "auto":
        text += " as asked for"
    if asked.mode != "auto":
        return f"{text}, grad_sample_mode={asked.mode!r}"
    if clipping == "flat":
        return f"{text}, the planner chooses each layer's mode"
    if asked.clipping is not None:
        return text
    return (
        f"{text} instead of flat; each module has an equal fraction of the squared bound. This "
        "changes the gradient estimate, so tune learning rate and max_grad_norm again; "
        "clipping='flat' clips by one norm over all modules"
    )


def _autocast(level: str, trained: Sequence[nn.Parameter]) -> tuple[bool, tuple[str, ...]]:
    """Return (whether to use autocast, sentences); raise if the device lacks bfloat16."""
    device = trained[0].device
    others = sorted({str(p.dtype) for p in trained} - {"torch.float32"})
    if others:
        text = f"left out: autocast, since parameters are {', '.join(others)}"
        return False, (text, *_of_narrow(trained))
    able = torch.amp.is_autocast_available(device.type)
    if able and device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)
    if not able:
        raise ValueError(
            f"optimize={level!r}: the device {device} has no bfloat16; pass "
            "optimize='conservative', which keeps the model's own dtype"
        )
    text = (
        "numerics: the model's forward and backward multiply in bfloat16 (about 3 digits); its "
        "outputs and the losses are float32. An autocast region of your own takes precedence"
    )
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if device.type == "cpu" and not fast:
        text += ". This CPU is not known to have bfloat16 instructions, so it may be slower"
    memory = "memory: activations saved for the backward take about half as much"
    return True, (text, _OF_16_BIT, memory)


def _of_narrow(trained: Sequence[nn.Parameter]) -> tuple[str, ...]:
    narrow = any(p.is_floating_point() and p.dtype.itemsize < 4 for p in trained)
    return (_OF_16_BIT,) if narrow else ()


def _of_compiler(size: int) -> tuple[str, ...]:
    return (
        "numerics: in training torch.compile fuses the model's operations, which rounds less "
        "often. The first batches take up to minutes. New batch sizes do not recompile the "
        "model, but the first batch of one sample does",
        "memory: whatever modes were planned, the compiled backward returns per-sample gradients "
        f"of all layers together: {size / 2**20:,.1f} MiB for a batch of the planned size",
        "left out: torch.compile's own CUDA graphs, which would replay code that must run anew in "
        "each step",
    )


def _obstacle(
    asked: Asked, module: nn.Module, layers: Sequence[Layer], device: torch.device, size: int
) -> str | None:
    compiled = (
        isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl is not None
        for m in module.modules()
    )
    if any(compiled):
        return "the model is compiled already"
    if asked.mode not in ("auto", "instantiate"):
        return f"grad_sample_mode={asked.mode!r} was set, but compiling needs 'instantiate'"
    if asked.ranks.everyone is not None:
        return (
            "several ranks exchange gradients during the backward, and a compiled backward "
            "returns them only at its end"
        )
    untraced = untraceable(layers)
    if untraced is not None:
        return f"the forward of module '{untraced}' runs sample by sample and cannot be traced"
    if size > asked.memory_budget:
        return (
            f"its per-sample gradients would take {size} bytes together, beyond "
            f"memory_budget={asked.memory_budget}"
        )
    if device.type not in ("cpu", "cuda"):
        return f"it was not tested on {device.type}"
    return None if torch._dynamo.is_dynamo_supported() else "it does not support this Python"
