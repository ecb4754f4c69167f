"""Rule for all other leaf layers: each sample runs with its own copy of the parameters.

Under vmap over samples, copies [B, ...] (handles) replace the parameters, and autograd's gradients
for the copies are per-sample gradients. This rule is as slow as vmap. Common layers have faster
rules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves

from ..clipping.forward import ALL_ROWS, is_recomputing
from ..isolation.copies import copied
from ..isolation.dropout import WithoutDropout
from ..isolation.function_state import FunctionState
from ..packing import Units
from ..random_state import RandomState, random_state_kept
from ..refusal import PrivateRefusal
from ..verification.digests import tolerance
from .base import (
    PLAIN,
    PrivateModule,
    copy_to_store_in,
    described,
    plain_class,
    plain_copy,
    refuse_without_tensor,
    stored,
)
from .by_document import by_document
from .functions import PerSampleFunctions
from .output_shapes import OutputShapes, map_tensors

# Allowed difference relative to a row's norm: tensor cores round float32 operands to 10 bits.
_ROUNDING = 0.01
_MIXES = (
    "{} gives a sample alone another result than in a batch, so nothing was released: its forward "
    "mixes samples (statistics or a mean of the batch, attention across samples) or branches on "
    "their number. Each sample would train as a batch of one. Use statistics of a sample, as "
    "nn.GroupNorm and nn.LayerNorm do, or attention within a sample"
)


class PrivateLeaf(PrivateModule):
    """A module whose forward treats the samples of its tensor arguments one by one."""

    takes_documents = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_private_call():
            return super().forward(*args, **kwargs)
        context, given = self._dpflash, (args, dict(kwargs))
        if context.units is not None:
            return self._by_document(args, kwargs, context.units)
        # transformers passes positions that all samples share as one tensor [T].
        positions = {
            k: kwargs.pop(k)
            for k in ("position_ids",)
            if isinstance(kwargs.get(k), Tensor) and kwargs[k].ndim == 1
        }
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not tensors:
            refuse_without_tensor(self)
        if isinstance(self, nn.modules.conv._ConvNd) and tensors[0].ndim != self.weight.ndim:
            raise PrivateRefusal(
                f"input of module '{context.name}' has no batch; a private convolution needs "
                "batch and channels first: [B, channels, ...]",
                shape=tuple(tensors[0].shape),
            ) from None
        if isinstance(self, nn.modules.conv._ConvNd) and args and args[0].is_contiguous():
            # A dimension of size 1 may have any stride. With some strides, torch's backward under
            # vmap fails in 16 bit on CPUs without 16-bit arithmetic ("grad_weight must be ...").
            args = (args[0].flatten().view(args[0].shape), *args[1:])
        others = [a for a in (*args, *kwargs.values()) if not isinstance(a, Tensor)]
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(others)):
            raise ValueError(
                f"{described(self)} takes tensors inside of a tuple, list or dict, where the "
                "generic rule cannot find the batch; pass each tensor as an argument"
            )
        rows = {a.shape[0] for a in tensors if a.ndim}
        args = tuple(context.check_batch(a) if isinstance(a, Tensor) else a for a in args)
        kwargs = {
            k: context.check_batch(a) if isinstance(a, Tensor) else a for k, a in kwargs.items()
        }
        sizes = {a.shape[0] for a in (*args, *kwargs.values()) if isinstance(a, Tensor)}
        batch_size = next(iter(sizes))
        is_flattened = not rows <= {1, batch_size}
        if len(sizes) > 1 or is_flattened and len(rows) > 1:
            raise PrivateRefusal(
                f"tensor arguments of {described(self)} have different first dimensions, or "
                "samples in some and tokens in others; the first dimension of each argument must "
                f"be the batch. {ALL_ROWS}",
                rows=rows,
                sizes=sizes,
            ) from None
        shared, per_sample = self._parameters_of(batch_size)
        if batch_size == 0:
            # Gradients are empty, but the gate must take part in the exchange between ranks.
            nothing = sum(handle.sum() for handle in per_sample.values())
            with PerSampleFunctions(context.name):
                outputs = functional_call(self._copy(), shared, args, {**kwargs, **positions})
            return torch.utils._pytree.tree_map_only(
                Tensor, lambda t: t + nothing if t.is_floating_point() else t, outputs
            )

        own_copy = self._copy()

        def one(
            parameters: dict[str, Tensor], inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> Any:
            if not is_flattened:
                # Modules expect a batch dimension; under vmap each call has a batch of one sample.
                inputs, named = map_tensors(lambda a: a.unsqueeze(0), (inputs, named))
            named = {**named, **positions}
            outputs = functional_call(own_copy, {**shared, **parameters}, inputs, named)
            return shape.of_sample(outputs)

        in_dims = (
            0,
            tuple(0 if isinstance(a, Tensor) else None for a in args),
            {k: 0 if isinstance(a, Tensor) else None for k, a in kwargs.items()},
        )
        shape = OutputShapes(
            is_flattened,
            lambda given, named: functional_call(
                self._copy(), shared, given, {**named, **positions}
            ),
        )
        run = vmap(one, in_dims=in_dims, randomness="different")

        def one_by_one() -> Any:
            own_args, own_kwargs = copied((args, kwargs))
            return shape.of_batch(run(per_sample, own_args, own_kwargs), own_args, own_kwargs)

        with PerSampleFunctions(context.name):
            try:
                if batch_size > 1 and not torch.compiler.is_compiling():
                    self._compare(given, one_by_one, batch_size, tensors[0].device)
                    own_copy = self._copy()
                outputs = run(per_sample, args, kwargs)
            except RuntimeError as error:
                if misfit := context.backward.forward.misfit:
                    raise PrivateRefusal(
                        f"{misfit}{described(self)} has no rule of its own, and the general "
                        f"rule, which runs it on the batch, failed. {ALL_ROWS}",
                        error=str(error),
                    ) from None
                if self._writes_parameters(given):
                    raise RuntimeError(
                        f"{described(self)} writes its parameters in its forward; the new values "
                        "would be released without noise. Use values computed from them, as in "
                        "F.linear(x, self.weight * self.mask); or change the weights (as by "
                        "torch.renorm) after optimizer.step() if loader.is_last. To initialize "
                        "by the first batch, run a forward of public data before make_private"
                    ) from error
                if not ("vmap" in str(error) or "functorch" in str(error)):
                    raise
                raise RuntimeError(
                    f"{described(self)} has no rule of its own, and torch.func.vmap, which runs "
                    "it for each sample, fails. Freeze it with requires_grad_(False), or use "
                    "another layer"
                ) from error
            outputs = shape.of_batch(outputs, args, kwargs)
        for name, value in self._stored(own_copy):
            # `_stored` has checked that the value holds neither samples nor trained parameters.
            (self._buffers if name in self._buffers else self.__dict__)[name] = value
        return outputs

    def _compare(
        self,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        one_by_one: Callable[[], Any],
        size: int,
        device: torch.device,
    ) -> None:
        """Compare the rows of a first call with a forward of the whole batch, without dropout.

        If that forward raises an error, the next call is compared instead. Two types of layers are
        not compared: layers of torch, since they do not mix samples, and layers that draw random
        numbers other than dropout's.

        Raises:
            PrivateRefusal: most rows differ by more than rounding.
        """
        backward, mode = self._dpflash.backward, self.training
        is_of_torch = plain_class(self).__module__.startswith("torch.")
        if is_of_torch or mode in self._dpflash.compared or is_recomputing():
            return
        real = backward.step.rows.mask_of(size)
        if not backward.proof.is_on or real is not None and real.sum() < 2:
            return
        random_state, own_copy = RandomState(device), copy_to_store_in(self)
        own = FunctionState(own_copy, with_data=False)
        own_state = own.random_states()
        with WithoutDropout(), torch.no_grad(), random_state_kept(device), self._buffers_kept():
            args, kwargs = copied(given)
            with self._buffers_kept():
                try:
                    expected = own_copy.forward(*args, **kwargs)
                except Exception:
                    # The error may depend on a sample, and the run by samples may not have it.
                    return own.restore()
            is_random = not RandomState(device).equals(random_state)
            is_random |= own.random_states() != own_state
            own.restore()
            if not is_random and _is_mixed(one_by_one(), expected):
                raise PrivateRefusal(_MIXES.format(described(self))) from None
        self._dpflash.compared.add(mode)

    def _writes_parameters(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
        """Run a forward on ones, not the samples; return whether it writes its parameters."""
        # Run with larger values, since a mask or a norm limit may not change the current values.
        own = {
            n: x.detach() + 1e4 if x.is_floating_point() else x.detach()
            for n, x in self.own_parameters().items()
        }
        used = {n: x.detach().clone() for n, x in (*own.items(), *self.named_buffers())}
        args, kwargs = map_tensors(torch.ones_like, given)
        with suppress(Exception), torch.no_grad(), random_state_kept():
            functional_call(self._copy(), used, args, kwargs)
        return any(not torch.equal(used[n], p) for n, p in own.items())

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Restore the buffers that a forward in the body writes in place."""
        held = [(x, x.clone()) for x in self._buffers.values() if x is not None]
        try:
            yield
        finally:
            for x, before in held:
                if not torch.equal(x, before):
                    x.copy_(before)

    def _copy(self) -> nn.Module:
        """Return a copy without hooks, whose forward stores nothing in the module itself."""
        made = plain_copy(self) if torch.compiler.is_compiling() else copy_to_store_in(self)
        # No hooks in the copy: the call of the private module itself runs them.
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            made.__dict__[hooks] = OrderedDict()
        return made

    def _stored(self, own_copy: nn.Module) -> list[tuple[str, Any]]:
        """Return the attributes and buffers that a forward has stored in its copy.

        Raises:
            RuntimeError: a value may hold samples or trained parameters.
        """
        found = [] if torch.compiler.is_compiling() else list(stored(self, own_copy))
        for name, value in found:
            if any(map(_is_of_samples, tree_leaves(value))):
                self.refuse_stored(name)
        return found

    def _parameters_of(self, batch_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return (detached parameters, handles of the trained parameters), by name."""
        own = self.own_parameters()
        handles = self.private_handles(batch_size)
        shared = {n: p.detach() for n, p in own.items()}
        return shared, {n: h for n in own if (h := handles.values(n)) is not None}

    def _by_document(self, args: tuple[Any, ...], kwargs: dict[str, Any], units: Units) -> Any:
        context = self._dpflash
        if isinstance(self, nn.modules.conv._ConvNd):
            self.refuse_documents()  # The second dimension is channels, not tokens.
        inputs: Any = (args, kwargs)
        tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        if are_heads_first := all(_are_heads_first(t, units) for t in tensors):
            inputs = _turned(inputs)
        map_tensors(context.check_batch, inputs)
        own_copy, (shared, per_document) = self._copy(), self._parameters_of(units.size)

        def call(own: dict[str, Tensor], inputs: Any) -> Any:
            if not are_heads_first:
                return functional_call(own_copy, {**shared, **own}, *inputs)
            return _turned(functional_call(own_copy, {**shared, **own}, *_turned(inputs)))

        with PerSampleFunctions(context.name, is_packed=True):
            outputs = by_document(call, per_document, inputs, units, context.name)
        self._stored(own_copy)
        return _turned(outputs) if are_heads_first else outputs


def _is_of_samples(x: Any) -> bool:
    if not isinstance(x, Tensor):
        return not isinstance(x, PLAIN)
    return x.requires_grad or torch._C._functorch.is_batchedtensor(x)


def _is_mixed(outputs: Any, expected: Any) -> bool:
    """Return whether most rows differ from `expected`, the outputs for the whole batch.

    A few rows may differ although samples are not mixed: rounding may change an argmax.
    """
    for found, wanted in zip(tree_leaves(outputs), tree_leaves(expected), strict=False):
        if not (isinstance(found, Tensor) and isinstance(wanted, Tensor)):
            continue
        if not found.shape == wanted.shape or not found.is_floating_point() or not found.ndim:
            continue
        one, two = (x.detach().double().unsqueeze(1).flatten(1) for x in (found, wanted))
        both = (one == two) | one.isnan() & two.isnan()
        apart = (one - two).masked_fill(both, 0.0).norm(dim=1)
        allowed = max(tolerance({found.dtype}), _ROUNDING) * two.norm(dim=1)
        # NaN counts as a difference: the variance over a batch of one sample is NaN, for example.
        if int((~(apart <= allowed)).sum()) * 2 > len(found):
            return True
    return False


def _are_heads_first(x: Tensor, units: Units) -> bool:
    """Return whether x is `[R, heads, T, D]`, the layout of queries in attention's norms."""
    return x.ndim == 4 and x.shape[1] != x.shape[2] and tuple(x.shape[0:3:2]) == units.shape


def _turned(tree: Any) -> Any:
    return map_tensors(lambda t: t.transpose(1, 2), tree)


class PrivateParametrized(PrivateLeaf):
    """A leaf whose weight is computed by torch.nn.utils.parametrize, for example weight_norm.

    The parametrization's parameters count as the module's; each sample computes the weight anew.
    """
