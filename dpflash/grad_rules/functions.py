"""Replaces or refuses torch functions whose results would be wrong in a module under vmap.

vmap stacks the embedding tables of all samples, so `padding_idx` would be a row of the first
table only. Under vmap all tensors have requires_grad=False. So attention would choose a kernel
without a gradient for its mask, and code that checks requires_grad would register no hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from .embedding import inside

_functorch = torch._C._functorch
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad}

_REMEDIES = {
    "max_norm": "changes the table as it reads the data; pass max_norm=None",
    "scale_grad_by_freq": "has no rule for private training; pass scale_grad_by_freq=False",
    "sparse": "has no rule for private training; pass sparse=False",
}


def _is_wrapped(x: Any) -> bool:
    return isinstance(x, Tensor) and bool(_functorch.is_functorch_wrapped_tensor(x))


class PerSampleFunctions(TorchFunctionMode):
    """Replaces or refuses some torch functions while a module runs under vmap.

    The row of `padding_idx` gets no gradient in any sample. Attention has a gradient for its mask.
    Hooks on gradients, which would be lost, raise RuntimeError. Options without a rule
    (`max_norm`, `scale_grad_by_freq`, `sparse`) raise ValueError. Look-ups inside a scripted
    function are not detected.
    """

    def __init__(self, name: str, *, is_packed: bool = False):
        super().__init__()
        self._name = name
        self._is_packed = is_packed  # the module runs on each packed document, without vmap

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            self._refuse(given)
            return self._rows(given["weight"], given["input"], given.get("padding_idx"))
        if func in _TABLE_FIRST:
            return self._table_first(*args, **kwargs)
        if func == _REQUIRES_GRAD:
            # Under vmap torch returns False for all tensors.
            x = args[0]
            while _is_wrapped(x):
                x = _functorch.get_unwrapped(x)
            return func(x)
        if func in _HOOKS and _is_wrapped(args[0]):
            raise RuntimeError(
                f"module '{self._name}' registers a hook on the gradient of a tensor, which is "
                "lost if a module runs sample by sample; change the gradient by a "
                "torch.autograd.Function, or in a module without parameters of its own"
            )
        if func is F.scaled_dot_product_attention and any(
            map(_is_wrapped, (*args, *kwargs.values()))
        ):
            # The other kernels have no gradient for a mask.
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **kwargs)
        if func is F.embedding_bag:
            self._refuse(inspect.signature(func).bind(*args, **kwargs).arguments)
        if func is torch.embedding_renorm_:
            self._refuse({"max_norm": args[2] if len(args) > 2 else kwargs.get("max_norm")})
        return func(*args, **kwargs)

    def _table_first(
        self,
        weight: Tensor,
        indices: Tensor,
        padding_idx: int = -1,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        """Replace `torch.embedding`, in which a negative padding_idx means no padding."""
        self._refuse({"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse})
        return self._rows(weight, indices, None if padding_idx < 0 else padding_idx)

    def _rows(self, weight: Tensor, indices: Tensor, padding_idx: int | None) -> Tensor:
        if self._is_packed:  # NaN would spread to other documents (0 * NaN = NaN).
            indices, _ = inside(indices, weight.shape[0])
            rows = F.embedding(indices, weight)
        elif _functorch.is_batchedtensor(indices):
            indices, outside = inside(indices, weight.shape[0])
            rows = F.embedding(indices, weight).masked_fill(outside.unsqueeze(-1), torch.nan)
        else:  # All samples share the positions, so an error depends only on the public length.
            rows = F.embedding(indices, weight)
        if padding_idx is None:
            return rows
        if not -weight.shape[0] <= padding_idx < weight.shape[0]:
            raise ValueError(
                f"module '{self._name}' looks up with padding_idx={padding_idx}: expected the "
                f"index of one of the {weight.shape[0]} rows of its table"
            )
        is_padding = (indices == padding_idx % weight.shape[0]).unsqueeze(-1)
        return torch.where(is_padding, rows.detach(), rows)

    def _refuse(self, given: Mapping[str, Any]) -> None:
        for option, remedy in _REMEDIES.items():
            value = given.get(option)
            if value is not None and value is not False:
                raise ValueError(
                    f"module '{self._name}' looks up in a table with {option}={value!r}, which "
                    f"{remedy}"
                )


_TABLE_FIRST = (torch.embedding, torch.ops.aten.embedding, torch.ops.aten.embedding.default)
