"""Rule for parameters of a module that has layers below it, such as the class token of ViT.

The module's forward runs under vmap over samples, with the handles `[B, ...]` in place of its own
parameters: an operation between a parameter and the data sees one sample and that sample's copy,
whatever the operation is. The layers below run outside of vmap, on the whole batch, with rules of
their own. Where the forward reads a parameter of a layer below, as Mamba reads the weight of its
convolution, it gets that layer's handle.

Source: `torch.func.vmap`; the gradient of a handle is the per-sample gradient of autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from .base import PrivateModule, plain_class, plain_copy
from .lookups import PerSampleLookups

_functorch = torch._C._functorch

# Anything else might keep tensors of one sample beyond the call, as a cache does.
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


class PrivateOwner(PrivateModule):
    """A module with parameters of its own and with layers below it.

    Its forward treats samples one by one, and the first dimension of its inputs and outputs, and
    of those of the layers below, is the batch. Tensors with another first dimension are taken for
    what all samples share, and must not need a gradient.

    Guarantees:
        An operation of this forward cannot reach a row of another sample. What the layers below
        do is theirs, and is proven with the first batches.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_private_call():
            return super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"module '{self._dpflash.name}' ({plain_class(self).__name__}) has parameters of "
                "its own and layers below it, which torch.compile cannot trace; use "
                "optimize='balanced', or leave out torch.compile"
            )
        leaves, structure = tree_flatten((args, kwargs))
        batch_size = self._batch_size(leaves)
        leaves = [self._checked(leaf, batch_size) for leaf in leaves]
        handles = self.private_handles(batch_size)
        own = [n for n in self._dpflash.slots if handles[n] is not None]
        owned = {n: handle for n in own if (handle := handles.dense(n)) is not None}
        if batch_size == 0:
            # Empty gradients, but with other ranks the gate takes part in their exchange.
            nothing = sum(handle.sum() for handle in owned.values())
            outputs = super().forward(*args, **kwargs)
            return tree_map_only(
                Tensor, lambda t: t + nothing if t.is_floating_point() else t, outputs
            )
        copied = _copy_of(self)
        in_dims = [
            0 if isinstance(x, Tensor) and x.ndim and len(x) == batch_size else None for x in leaves
        ]

        def one(parameters: dict[str, Tensor], *inputs: Any) -> Any:
            level = _functorch.maybe_current_level()
            outside = _Outside(self._dpflash.name, batch_size, level)
            copied.__dict__["_modules"] = {n: outside.of(m) for n, m in self._modules.items()}
            copied.__dict__["_parameters"] = {
                n: None if p is None else parameters.get(n, p.detach())
                for n, p in self._parameters.items()
            }
            # Modules expect a batch dimension; theirs has one sample.
            rows = [
                x if dim is None else x.unsqueeze(0)
                for x, dim in zip(inputs, in_dims, strict=True)
            ]
            own_args, own_kwargs = tree_unflatten(rows, structure)
            outputs = copied.forward(*own_args, **own_kwargs)
            return tree_map_only(Tensor, self._row, outputs)

        with PerSampleLookups(self._dpflash.name):
            run = vmap(one, in_dims=(0, *in_dims), randomness="different")
            return run(owned, *leaves)

    def _batch_size(self, leaves: list[Any]) -> int:
        """The batch size of the call: of the first tensor whose first dimension is not shared."""
        name, kind = self._dpflash.name, plain_class(self).__name__
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                raise ValueError(
                    f"module '{name}' ({kind}) got a {type(leaf).__name__}, which may keep "
                    "tensors of single samples; a module with parameters of its own and layers "
                    "below it takes tensors and plain values. For a cache pass use_cache=False"
                )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        if not tensors:
            raise ValueError(
                f"module '{name}' ({kind}) was called without a tensor, so the batch cannot be "
                "told; it has no rule for private training"
            )
        return len(self._dpflash.check_batch(tensors[0]))

    def _checked(self, leaf: Any, batch_size: int) -> Any:
        """A tensor of the batch as it is; one that all samples share only without a gradient."""
        if not isinstance(leaf, Tensor) or (leaf.ndim and len(leaf) == batch_size):
            return self._dpflash.check_batch(leaf) if isinstance(leaf, Tensor) else leaf
        if leaf.requires_grad:
            raise ValueError(
                f"module '{self._dpflash.name}' ({plain_class(self).__name__}) got a tensor of "
                f"shape {tuple(leaf.shape)} that depends on layers that are trained, in a batch "
                f"of {batch_size}; its first dimension must be the batch"
            )
        return leaf

    def _row(self, output: Tensor) -> Tensor:
        if not output.ndim or output.shape[0] != 1:
            raise ValueError(
                f"module '{self._dpflash.name}' ({plain_class(self).__name__}) returned a tensor "
                f"of shape {tuple(output.shape)} for one sample; a module with parameters of its "
                "own and layers below it returns tensors whose first dimension is the batch. "
                "Move the parameters into a module of their own, or freeze them with "
                "requires_grad_(False)"
            )
        return output.squeeze(0)


def _copy_of(module: nn.Module) -> Any:
    """A copy with the original class, whose parameters and layers can be replaced."""
    return plain_copy(module)


class _Outside:
    """Has the layers below an owner run outside of its vmap.

    Args:
        owner: dotted name of the owner.
        batch_size: B.
        level: of the owner's vmap.
    """

    def __init__(self, owner: str, batch_size: int, level: int):
        self.owner = owner
        self.batch_size = batch_size
        self.level = level

    def of(self, module: nn.Module | None) -> nn.Module | None:
        """A copy of a layer, whose calls run the layer itself on the whole batch."""
        if module is None:
            return None
        copied = object.__new__(_type_outside(plain_class(module)))
        copied.__dict__ = {k: v for k, v in module.__dict__.items() if k != "_dpflash"}
        copied.__dict__["_module"] = module
        copied.__dict__["_outside"] = self
        copied.__dict__["_parameters"] = {}
        copied.__dict__["_modules"] = {n: self.of(child) for n, child in module._modules.items()}
        return copied

    def parameter(self, module: nn.Module, name: str) -> Any:
        """A parameter that the owner's forward reads from a layer: its handle, as a batch."""
        parameter = module._parameters[name]
        if parameter is None or not parameter.requires_grad:
            return parameter
        handle = None
        if isinstance(module, PrivateModule) and module.is_private_call():
            with temporarily_pop_interpreter_stack():
                handle = module.private_handles(self.batch_size).dense(name)
        if handle is None:
            raise RuntimeError(
                f"module '{self.owner}' reads parameter '{name}' of a layer below it that is not "
                "private; freeze it with requires_grad_(False)"
            )
        return _functorch._add_batch_dim(handle, 0, self.level)

    def call(self, module: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a layer on the whole batch, and hand its outputs out sample by sample."""
        leaves, structure = tree_flatten((args, kwargs))
        mapped = [isinstance(x, Tensor) and _functorch.is_batchedtensor(x) for x in leaves]
        leaves = [
            self._whole(module, x) if is_mapped else x
            for x, is_mapped in zip(leaves, mapped, strict=True)
        ]
        with temporarily_pop_interpreter_stack():
            whole_args, whole_kwargs = tree_unflatten(leaves, structure)
            outputs = module(*whole_args, **whole_kwargs)
        return tree_map_only(Tensor, lambda t: self._rows(module, t, any(mapped)), outputs)

    def _whole(self, module: Any, x: Tensor) -> Tensor:
        """`[B, ...]` of what is `[1, ...]` for each sample."""
        if not x.ndim or x.shape[0] != 1:
            raise ValueError(
                f"module '{self.owner}' calls its layer {type(module).__name__} with a tensor of "
                f"shape {tuple(x.shape)} for one sample; a module with parameters of its own calls "
                "layers with tensors whose first dimension is the batch"
            )
        row = _functorch._remove_batch_dim(x.squeeze(0), self.level, self.batch_size, 0)
        return row

    def _rows(self, module: Any, x: Tensor, is_mapped: bool) -> Tensor:
        if x.ndim and x.shape[0] == self.batch_size and (is_mapped or self.batch_size != 1):
            return _functorch._add_batch_dim(x.unsqueeze(1), 0, self.level)
        if x.requires_grad or is_mapped:
            raise ValueError(
                f"layer {type(module).__name__} below module '{self.owner}' returned a tensor of "
                f"shape {tuple(x.shape)} in a batch of {self.batch_size}; its first dimension "
                "must be the batch"
            )
        return x


class _LayerOutside(nn.Module):
    """A layer as the forward of its owner sees it."""

    _module: nn.Module
    _outside: _Outside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outside.call(self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in self._module._parameters:
            return self._outside.parameter(self._module, name)
        return super().__getattr__(name)


_TYPES: dict[type[nn.Module], type[nn.Module]] = {}


def _type_outside(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _TYPES:
        _TYPES[kind] = type(kind.__name__, (_LayerOutside, kind), {})
    return _TYPES[kind]
