"""Makes Opacus use dpflash's gradient norms, noise and accountants, through Opacus' registries.

Usage::

    from dpflash.integrations import opacus as dpflash_opacus
    dpflash_opacus.register()  # grad_sample_mode="ghost" then needs no [T, T] matrices

Letters: B samples, T tokens of a sample, I inputs, O outputs, E width of an embedding table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpflash.accounting import Accountant
from dpflash.accounting.registry import ACCOUNTANTS
from dpflash.kernels import (
    NoiseStream,
    embedding_grad_norm,
    grad_norm,
    grid_of,
    per_sample_bias_grad,
    squared_norm,
)

from ..privacy.keys import master_key

PREFIX = "dpflash_"

_NormSampler = Callable[[Any, list[Tensor], Tensor], dict[Tensor, Tensor]]
_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)

# The entries of Opacus' registries before `register`; None if there was no entry.
_norm_samplers_before: dict[type[nn.Module], _NormSampler | None] = {}
_accountants_before: dict[str, type | None] = {}
_accountants_of_ours: dict[str, type] = {}

_GRAM_CHUNK_ELEMENTS = 1 << 22
# A squared norm below this fraction of its bound lost digits to cancellation: recompute by tiles.
_CANCELLATION = 1 / 1024


def register(*, replace_accountants: bool = False) -> None:
    """Make Opacus use dpflash. A second call does nothing; `unregister` undoes the call.

    `nn.Linear` and `nn.Embedding` get dpflash's norm samplers, for `grad_sample_mode="ghost"` and
    its variants. Subclasses of these two keep Opacus' norm samplers. LayerNorm and RMSNorm keep
    Opacus' computation, because their norms need no [T, T] matrix, and because Opacus raises if a
    layer with a norm sampler is called twice. Models that Opacus has already wrapped use the
    new norms from their next backward on.

    Each accountant of `dpflash.accounting` is registered under its name with the prefix
    ``"dpflash_"``, so that `PrivacyEngine(accountant="dpflash_rdp")` uses it. It loads states that
    Opacus' accountant of the same mechanism saved.

    Args:
        replace_accountants: also replace Opacus' own accountants, so that
            `PrivacyEngine(accountant="rdp")` uses dpflash's.

    Raises:
        ImportError: Opacus is missing, or older than 1.6.

    Guarantees:
        A norm is the norm of the sample's gradient as Opacus defines it, accumulated in fp32 or
        wider, so that norms of 16-bit models are never rounded to 16 bits. A sample whose gradient
        is not finite has the norm inf, and therefore the clipping factor 0. Nonfinite values in
        a forward still reach the sum, because Opacus multiplies them by the factor 0. No [T, T]
        matrix is made unless it is smaller than a quarter of the sample's gradient [O, I].
    """
    _check_version()
    from opacus.grad_sample import register_norm_sampler

    samplers = _norm_sampler_registry()
    for layer, sampler in _NORM_SAMPLERS.items():
        present = samplers.get(layer)
        if present is not sampler:
            _norm_samplers_before[layer] = present
            register_norm_sampler(layer)(sampler)
    for name, plain in ACCOUNTANTS.items():
        _register_accountant(PREFIX + name, plain)
        if replace_accountants:
            _register_accountant(name, plain)


def unregister() -> None:
    """Undo `register`. Entries that other code has registered since then stay."""
    if not _norm_samplers_before and not _accountants_before:
        return
    from opacus.accountants import registry

    both: tuple[tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]], ...] = (
        (_norm_sampler_registry(), _NORM_SAMPLERS, _norm_samplers_before),
        (registry._ACCOUNTANTS, _accountants_of_ours, _accountants_before),
    )
    for entries, ours, before in both:
        for name, entry in before.items():
            if entries.get(name) is ours[name]:
                del entries[name]
                if entry is not None:
                    entries[name] = entry
        before.clear()
    _accountants_of_ours.clear()


def use_secure_noise(optimizer: _Optimizer) -> _Optimizer:
    """Make an optimizer of Opacus draw its noise from ChaCha20, keyed by the operating system.

    Use this function in place of `secure_mode=True`, which needs torchcsprng. Call it on the
    optimizer that `make_private` returned, and again after another `make_private`. The optimizer's
    class is replaced by a subclass. The noise's standard deviations stay the same, also with
    per-layer and adaptive clipping or noise schedulers. Step hooks stay the same, and therefore
    accounting.

    Args:
        optimizer: the optimizer that `opacus.PrivacyEngine.make_private` returned: `DPOptimizer`,
            its ghost, per-layer or adaptive variant, or your own subclass; in one process only.

    Returns:
        The same object.

    Raises:
        ImportError: Opacus is missing, or older than 1.6.
        ValueError: the optimizer is not Opacus', is for several processes, is in secure_mode, or
            has a noise_generator.
        RuntimeError: in a later step, if some noise would come from another source, such as the
            noise on the quantile of `PrivacyEngineAdaptiveClipping`. The step releases nothing.

    Guarantees:
        Each release takes a new 32-byte key from the operating system, and numbers its noise
        tensors under this key. So no two parameters and no two steps share noise. This also holds
        after a resume, a copy or a fork, since there is no state that could be stored or repeated.
        The noise of a 16-bit parameter is rounded to 16 bits, as in Opacus. Noise is a correctly
        rounded Gaussian on a public grid. Opacus' sum is rounded to the grid before the noise is
        added, and the result is rounded once. No guarantee covers the sampling of batches, which
        uses torch's generator, or the rounding of Opacus' own norms and sums.
    """
    _check_version()
    from opacus.optimizers import DPOptimizer

    if not isinstance(optimizer, DPOptimizer):
        raise ValueError(
            f"optimizer is of type {type(optimizer).__name__}: expected one of Opacus; pass the "
            "optimizer that opacus.PrivacyEngine.make_private returned"
        )
    secure: Any = optimizer
    if isinstance(secure, _SecureNoise):
        return optimizer
    # Only Opacus' optimizers for several processes have this attribute.
    if hasattr(optimizer, "world_size"):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}: secure noise is for one process; train "
            "in one process, or leave use_secure_noise out"
        )
    if optimizer.secure_mode:
        raise ValueError(
            "optimizer.secure_mode=True: its noise comes from torchcsprng already; make the "
            "engine with opacus.PrivacyEngine(secure_mode=False), or leave use_secure_noise out"
        )
    if optimizer.generator is not None:
        raise ValueError(
            f"optimizer.generator={optimizer.generator!r}: expected None, because its seed would "
            "have no effect; leave noise_generator out of make_private"
        )
    plain = type(secure)
    secure.__class__ = type(f"Secure{plain.__name__}", (_SecureNoise, plain), {})
    return optimizer


def _check_version() -> None:
    try:
        from opacus.accountants import register_accountant  # noqa: F401
        from opacus.grad_sample import register_norm_sampler  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "dpflash.integrations.opacus needs Opacus 1.6 or newer: pip install --upgrade opacus"
        ) from error


def _norm_sampler_registry() -> dict[type[nn.Module], _NormSampler]:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    return GradSampleModuleFastGradientClipping.NORM_SAMPLERS


def _register_accountant(name: str, plain: type[Accountant]) -> None:
    from opacus.accountants import register_accountant, registry

    present = registry._ACCOUNTANTS.get(name)
    if present is not None and present is _accountants_of_ours.get(name):
        return
    _accountants_before[name] = present
    _accountants_of_ours[name] = _accountant_for_opacus(plain, name)
    register_accountant(name, _accountants_of_ours[name], force=True)


def _accountant_for_opacus(plain: type[Accountant], name: str) -> type[Accountant]:

    class ForOpacus(plain):  # type: ignore[valid-type, misc]
        @classmethod
        def mechanism(cls) -> str:
            return name

        def get_epsilon(self, delta: float, interval: bool = False, **_: object) -> Any:
            # make_private_with_epsilon also passes the keywords of the optimizer.
            return super().get_epsilon(delta, interval)

    ForOpacus.__name__ = ForOpacus.__qualname__ = plain.__name__
    ForOpacus.__doc__ = plain.__doc__
    return ForOpacus


def _linear_norms(
    layer: nn.Linear, activations: list[Tensor], backprops: Tensor
) -> dict[Tensor, Tensor]:
    """Return the norms [B] of the per-sample gradients of the weight and of the bias.

    The input [B, ..., I] is cast to the dtype of backprops [B, ..., O], as in the forward.
    """
    dy = _tokens(backprops)  # [B, T, O]
    norms: dict[Tensor, Tensor] = {}
    if layer.weight.requires_grad:
        x = _tokens(activations[0].to(backprops.dtype))  # [B, T, I]
        # Under the user's autocast, products in the backward would be rounded to 16 bits.
        with torch.autocast(dy.device.type, enabled=False):
            norms[layer.weight] = _norms(_squared_grad_norm(x, dy), dy)
    if layer.bias is not None and layer.bias.requires_grad:
        squares = squared_norm(per_sample_bias_grad(dy)) if len(dy) else dy.new_zeros(0)
        norms[layer.bias] = _norms(squares, dy)
    return norms


def _embedding_norms(
    layer: nn.Embedding, activations: list[Tensor], backprops: Tensor
) -> dict[Tensor, Tensor]:
    """Return the norms [B] of the table's per-sample gradients, without the padding_idx row."""
    if not layer.weight.requires_grad:
        return {}
    if layer.scale_grad_by_freq:
        raise ValueError(
            "nn.Embedding(scale_grad_by_freq=True) divides a sample's gradient by counts of the "
            "whole batch, so the norm does not bound the sample's effect; set it to False"
        )
    indices = activations[0]
    indices = indices.reshape(len(indices), indices.shape[1:].numel())  # [B, T]
    dy = backprops.reshape(*indices.shape, backprops.shape[-1])  # [B, T, E]
    if layer.padding_idx is not None:
        dy = dy.masked_fill((indices == layer.padding_idx).unsqueeze(-1), 0)
    return {layer.weight: _norms(embedding_grad_norm(indices, dy), dy)}


_NORM_SAMPLERS: dict[type[nn.Module], _NormSampler] = {
    nn.Linear: _linear_norms,
    nn.Embedding: _embedding_norms,
}


def _tokens(x: Tensor) -> Tensor:
    if x.ndim < 2:
        raise ValueError(
            f"the input or output of an nn.Linear has shape {tuple(x.shape)}: expected samples "
            "first, [B, ..., features]; pass a batch"
        )
    return x.unsqueeze(1) if x.ndim == 2 else x.flatten(1, -2)


def _norms(squares: Tensor, dy: Tensor) -> Tensor:
    """Return the square roots; NaN becomes inf, since NaN would make the clipping factor NaN."""
    norms = squares.sqrt().to(torch.promote_types(dy.dtype, torch.float32))
    return norms.masked_fill(norms.isnan(), float("inf"))


def _squared_grad_norm(x: Tensor, dy: Tensor) -> Tensor:
    """Return ||dy_i^T x_i||^2, [B]; with few tokens, by Gram matrices of chunks of samples."""
    batch, tokens, inputs = x.shape
    outputs = dy.shape[2]
    if batch == 0:
        return dy.new_zeros(0)
    many = tokens == 1 or tokens * (inputs + outputs) >= inputs * outputs
    if many or x.device.type != "cpu":
        return grad_norm(x, dy)
    chunk = max(1, _GRAM_CHUNK_ELEMENTS // max(1, tokens * (tokens + inputs + outputs)))
    pairs = zip(x.split(chunk), dy.split(chunk), strict=True)
    return torch.cat([_gram_norm(*pair) for pair in pairs])


def _gram_norm(x: Tensor, dy: Tensor) -> Tensor:
    wide = torch.promote_types(dy.dtype, torch.float32)
    x, dy = x.to(wide), dy.to(wide)
    inputs = torch.bmm(x, x.transpose(1, 2))  # [b, T, T]
    outputs = torch.bmm(dy, dy.transpose(1, 2))
    sizes = inputs.diagonal(dim1=1, dim2=2).double() * outputs.diagonal(dim1=1, dim2=2).double()
    squares = inputs.mul_(outputs).sum((1, 2), dtype=torch.float64)
    certain = squares >= sizes.clamp(min=0).sqrt().sum(1).square() * _CANCELLATION
    if not bool(certain.all()):
        squares[~certain] = grad_norm(x[~certain], dy[~certain], form="tile")
    return squares


# The functions by which Opacus adds noise to a sum.
_ADDITIONS = (torch.Tensor.add, torch.Tensor.__add__, torch.add)


class _NoiseSource(TorchFunctionMode):
    """A context in which torch.normal returns noise drawn under one new key.

    When the noise is added to a float32 sum, the sum is first rounded to the noise's grid and the
    result is rounded once, so that the result's last digits reveal nothing about the sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self._key = master_key()
        self._draws = 0
        self._last: tuple[Tensor, NoiseStream] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.normal:
            return self._normal(**(kwargs or {}))
        if func in _ADDITIONS and not kwargs and len(args) == 2 and self._last is not None:
            noise, stream = self._last
            total, other = args
            if other is noise and isinstance(total, Tensor) and total.shape == noise.shape:
                wide = torch.promote_types(total.dtype, torch.float32)
                copied = total.detach().to(wide, copy=True, memory_format=torch.contiguous_format)
                return stream.add_to_(copied).to(total.dtype)
        return func(*args, **(kwargs or {}))

    def _normal(
        self,
        *,
        mean: float,
        std: float | Tensor,
        size: Sequence[int],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if mean != 0 or generator is not None:
            raise RuntimeError(
                f"noise with mean={mean!r} and generator={generator!r}: expected 0 and None. Do "
                "not change mean and generator after use_secure_noise(optimizer)"
            )
        dtype = dtype or torch.get_default_dtype()
        wide = torch.promote_types(dtype, torch.float32)
        stream = NoiseStream(
            std=math.nextafter(float(std), math.inf) if std else 0.0,
            grid=grid_of(float(std)) if std else 1.0,
            key=self._key,
            step=0,
            parameter_id=self._draws,
        )
        noise = stream.add_to_(torch.zeros(size, device=device, dtype=wide)).to(dtype)
        self._draws += 1
        self.elements += noise.numel()
        self._last = noise, stream
        return noise


class _SecureNoise:
    """Mixin that draws the noise of an Opacus optimizer; it precedes the optimizer's class."""

    def add_noise(self: Any) -> None:
        if hasattr(self, "_adjusted_noise_multiplier"):
            self._discard()
            raise RuntimeError(
                "PrivacyEngineAdaptiveClipping draws the noise of its quantile outside of the "
                "optimizer, where use_secure_noise does not replace it. Nothing was released; use "
                "opacus.PrivacyEngine, with clipping='adaptive' for an adaptive bound"
            )
        try:
            with _NoiseSource() as source:
                super().add_noise()  # type: ignore[misc]
        except BaseException:
            self._discard()
            raise
        needed = sum(p.numel() for p in self.params)
        if float(self.noise_multiplier * self.max_grad_norm) > 0 and source.elements < needed:
            self._discard()
            raise RuntimeError(
                f"add_noise of {type(self).__mro__[2].__name__} drew {source.elements} secure "
                f"numbers for {needed} elements of parameters: use_secure_noise needs a class "
                "that draws all noise by torch.normal. Nothing was released; use a class of "
                "opacus.optimizers, or leave use_secure_noise out"
            )

    def _discard(self: Any) -> None:
        for parameter in self.params:
            parameter.grad = None
