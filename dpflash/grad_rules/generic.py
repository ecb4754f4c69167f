"""Rule for any other leaf layer: each sample runs with its own copy of the parameters.

Under vmap over samples the handle [B, ...] takes the place of the parameters, and autograd's
gradient for it is the per-sample gradient. It is as slow as vmap; common layers have own rules.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves

from ..clipping.forward import ALL_ROWS
from ..packing import Units
from ..refusal import PrivateRefusal
from .base import PrivateModule, described, plain_copy, refuse_without_tensor
from .by_document import by_document
from .functions import PerSampleFunctions
from .output_shapes import OutputShapes, map_tensors


class PrivateLeaf(PrivateModule):
    """Any module whose forward treats the samples of its tensor arguments one by one."""

    takes_documents = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_private_call():
            return super().forward(*args, **kwargs)
        context = self._dpflash
        if context.units is not None:
            return self._by_document(args, kwargs, context.units)
        # transformers passes positions that all samples share as [T].
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
            # The stride of a dimension of 1 may be anything; of some, torch's backward under vmap
            # fails in 16 bit on CPUs without such arithmetic ("grad_weight must be contiguous").
            args = (args[0].flatten().view(args[0].shape), *args[1:])
        others = [a for a in (*args, *kwargs.values()) if not isinstance(a, Tensor)]
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(others)):
            raise ValueError(
                f"{described(self)} takes tensors inside of a tuple, list or dict, where the "
                "generic rule cannot tell the batch; pass them as arguments of their own"
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
                "samples in some and tokens in others; the generic rule needs the batch first in "
                f"each. {ALL_ROWS}",
                rows=rows,
                sizes=sizes,
            ) from None
        copied, shared, per_sample = self._copies(batch_size)
        if batch_size == 0:
            # Empty gradients, but with other ranks the gate takes part in their exchange.
            nothing = sum(handle.sum() for handle in per_sample.values())
            with PerSampleFunctions(context.name):
                outputs = functional_call(copied, shared, args, {**kwargs, **positions})
            return torch.utils._pytree.tree_map_only(
                Tensor, lambda t: t + nothing if t.is_floating_point() else t, outputs
            )

        def one(
            parameters: dict[str, Tensor], inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> Any:
            if not is_flattened:
                # Modules expect a batch dimension; theirs has one sample.
                inputs, named = map_tensors(lambda a: a.unsqueeze(0), (inputs, named))
            named = {**named, **positions}
            outputs = functional_call(copied, {**shared, **parameters}, inputs, named)
            return shape.of_sample(outputs)

        in_dims = (
            0,
            tuple(0 if isinstance(a, Tensor) else None for a in args),
            {k: 0 if isinstance(a, Tensor) else None for k, a in kwargs.items()},
        )
        shape = OutputShapes(
            is_flattened,
            lambda given, named: functional_call(copied, shared, given, {**named, **positions}),
        )
        with PerSampleFunctions(context.name):
            try:
                run = vmap(one, in_dims=in_dims, randomness="different")
                outputs = run(per_sample, args, kwargs)
            except RuntimeError as error:
                if misfit := context.backward.forward.misfit:
                    raise PrivateRefusal(
                        f"{misfit}{described(self)} has no rule of its own, and fails in a "
                        f"batch. {ALL_ROWS}",
                        error=str(error),
                    ) from None
                if not ("vmap" in str(error) or "functorch" in str(error)):
                    raise
                raise RuntimeError(
                    f"{described(self)} has no rule of its own, and torch.func.vmap, which runs "
                    "it for each sample, fails. Freeze it with requires_grad_(False), or use "
                    "another layer"
                ) from error
            return shape.of_batch(outputs, args, kwargs)

    def _copies(self, batch_size: int) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
        """(the module without hooks, its parameters detached, those trained for each sample)."""
        own = self.own_parameters()
        copied = plain_copy(self)
        # The call of the private module itself runs the hooks.
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            copied.__dict__[hooks] = OrderedDict()
        handles = self.private_handles(batch_size)
        shared = {n: p.detach() for n, p in own.items()}
        return copied, shared, {n: h for n in own if (h := handles.values(n)) is not None}

    def _by_document(self, args: tuple[Any, ...], kwargs: dict[str, Any], units: Units) -> Any:
        context = self._dpflash
        if isinstance(self, nn.modules.conv._ConvNd):
            self.refuse_documents()  # Its second dimension holds channels.
        inputs: Any = (args, kwargs)
        tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        if are_heads_first := all(_are_heads_first(t, units) for t in tensors):
            inputs = _turned(inputs)
        map_tensors(context.check_batch, inputs)
        copied, shared, per_document = self._copies(units.size)

        def call(own: dict[str, Tensor], inputs: Any) -> Any:
            if not are_heads_first:
                return functional_call(copied, {**shared, **own}, *inputs)
            return _turned(functional_call(copied, {**shared, **own}, *_turned(inputs)))

        with PerSampleFunctions(context.name):
            outputs = by_document(call, per_document, inputs, units, context.name)
        return _turned(outputs) if are_heads_first else outputs


def _are_heads_first(x: Tensor, units: Units) -> bool:
    """Whether x is `[R, heads, T, D]`, as attention has queries for their norms."""
    return x.ndim == 4 and x.shape[1] != x.shape[2] and tuple(x.shape[0:3:2]) == units.shape


def _turned(tree: Any) -> Any:
    return map_tensors(lambda t: t.transpose(1, 2), tree)


class PrivateParametrized(PrivateLeaf):
    """A leaf whose weight torch.nn.utils.parametrize computes, by weight_norm for example.

    The parameters of the computation count as its own, and it is repeated for each sample.
    """
