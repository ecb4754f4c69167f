"""Rule for any other leaf layer: vmap runs each sample with its own copy of the parameters.

Under vmap over samples the handle [B, ...] takes the place of the parameters, and autograd's
gradient for it is the per-sample gradient. It is as slow as vmap; common layers have own rules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .base import Handles, PrivateModule, plain_copy
from .lookups import PerSampleLookups


class PrivateLeaf(PrivateModule):
    """Any module whose forward treats the samples of its tensor arguments one by one."""

    def _own(self) -> Mapping[str, nn.Parameter | None]:
        """Own parameters by name."""
        return self._parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_private_call():
            return super().forward(*args, **kwargs)
        context = self._dpflash
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not tensors:
            raise ValueError(
                f"module '{context.name}' ({type(self).__name__}) was called without a tensor, so "
                "the batch cannot be told; it has no rule for private training"
            )
        if isinstance(self, nn.modules.conv._ConvNd) and tensors[0].ndim != self.weight.ndim:
            raise ValueError(
                f"input of module '{context.name}' has shape {tuple(tensors[0].shape)}; a private "
                "convolution needs batch and channels first: [B, channels, ...]"
            )
        if isinstance(self, nn.modules.conv._ConvNd) and args and args[0].is_contiguous():
            # The stride of a dimension of 1 may be anything; of some, torch's backward under vmap
            # fails in 16 bit on CPUs without such arithmetic ("grad_weight must be contiguous").
            args = (args[0].flatten().view(args[0].shape), *args[1:])
        others = [a for a in (*args, *kwargs.values()) if not isinstance(a, Tensor)]
        if any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves(others)):
            raise ValueError(
                f"module '{context.name}' ({type(self).__name__}) takes tensors inside of a "
                "tuple, list or dict, where the generic rule cannot tell the batch; pass them as "
                "arguments of their own"
            )
        args = tuple(context.check_batch(a) if isinstance(a, Tensor) else a for a in args)
        # transformers passes positions that all samples share as [T].
        positions = {
            k: kwargs.pop(k)
            for k in ("position_ids",)
            if isinstance(kwargs.get(k), Tensor) and kwargs[k].ndim == 1
        }
        kwargs = {
            k: context.check_batch(a) if isinstance(a, Tensor) else a for k, a in kwargs.items()
        }
        sizes = {a.shape[0] for a in (*args, *kwargs.values()) if isinstance(a, Tensor)}
        if len(sizes) > 1:
            raise ValueError(
                f"tensor arguments of module '{context.name}' ({type(self).__name__}) have first "
                f"dimensions {sorted(sizes)}; the generic rule needs the batch first in each"
            )
        batch_size = sizes.pop()
        own = {n: p for n, p in self._own().items() if p is not None}
        copied = plain_copy(self)
        # The call of the private module itself runs the hooks.
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            copied.__dict__[hooks] = OrderedDict()
        handles = self.private_handles(batch_size)
        shared = {n: p.detach() for n, p in own.items()}
        per_sample = {n: h for n in own if (h := handles.dense(n)) is not None}
        if batch_size == 0:
            # Empty gradients, but with other ranks the gate takes part in their exchange.
            nothing = sum(handle.sum() for handle in per_sample.values())
            with PerSampleLookups(context.name):
                outputs = functional_call(copied, shared, args, {**kwargs, **positions})
            return torch.utils._pytree.tree_map_only(
                Tensor, lambda t: t + nothing if t.is_floating_point() else t, outputs
            )

        def one(
            parameters: dict[str, Tensor], inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> Any:
            # Modules expect a batch dimension; theirs has one sample.
            inputs = tuple(a.unsqueeze(0) if isinstance(a, Tensor) else a for a in inputs)
            named = {k: a.unsqueeze(0) if isinstance(a, Tensor) else a for k, a in named.items()}
            named |= positions
            outputs = functional_call(copied, {**shared, **parameters}, inputs, named)
            return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.squeeze(0), outputs)

        in_dims = (
            0,
            tuple(0 if isinstance(a, Tensor) else None for a in args),
            {k: 0 if isinstance(a, Tensor) else None for k, a in kwargs.items()},
        )
        with PerSampleLookups(context.name):
            return vmap(one, in_dims=in_dims, randomness="different")(per_sample, args, kwargs)


class PrivateParametrized(PrivateLeaf):
    """A leaf whose weight torch.nn.utils.parametrize computes, by weight_norm for example.

    The parameters of the computation count as its own, and it is repeated for each sample.
    """

    def _own(self) -> Mapping[str, nn.Parameter | None]:
        return dict(self.named_parameters())

    def is_private_call(self) -> bool:
        trained = [n for n, p in self._own().items() if p is not None and p.requires_grad]
        for name in trained:
            if name in self._dpflash.frozen:
                self.refuse_thawed(name)
        return bool(trained) and torch.is_grad_enabled()

    def private_handles(self, batch_size: int) -> Handles:
        return Handles(self._own(), self._dpflash, batch_size)
