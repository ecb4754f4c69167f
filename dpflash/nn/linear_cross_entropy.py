"""Language-model head and cross-entropy loss in one layer, which never holds all logits."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import _validate
from ..grad_rules.linear_cross_entropy import linear_cross_entropy
from ..packing import Units


class LinearCrossEntropy(nn.Linear):
    """Cross-entropy of each sample with the logits x W^T + b, computed in chunks of tokens.

    Losses and gradients equal those of ``dpflash.losses.cross_entropy(F.linear(x, W, b),
    targets)``, but only one chunk of logits exists at a time: the backward recomputes the logits.
    The layer has the parameters of `torch.nn.Linear`, so ``head.weight = embedding.weight`` ties
    them. Without targets the layer returns the logits.

    Letters: B samples, T tokens, E features, V classes.

    Args:
        in_features: E.
        num_classes: V.
        bias: whether the layer has a bias b.
        ignore_index: targets with this value are ignored. A sample whose targets are all ignored
            has the loss 0 and a zero gradient.
        reduction: "mean" or "sum", over each sample's valid targets.
        chunk_tokens: tokens per chunk; None means chunks of 2^24 logits (64 MiB).
        device: device of the parameters.
        dtype: dtype of the parameters. Under autocast, matrix products run in autocast's dtype;
            softmax and losses are in float32 or wider.

    Raises:
        ValueError: for a value outside of the ranges above.

    Guarantees:
        Entry i of the losses depends on ``x[i]`` and ``targets[i]`` alone.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        reduction: Literal["mean", "sum"] = "mean",
        chunk_tokens: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _validate.positive_int(in_features=in_features, num_classes=num_classes)
        _validate.one_of(reduction=(reduction, ("mean", "sum")))
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise ValueError(f"ignore_index={ignore_index!r}: expected an integer; pass -100")
        _validate.optional(_validate.positive_int, chunk_tokens=chunk_tokens)
        super().__init__(in_features, num_classes, bias, device=device, dtype=dtype)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.chunk_tokens = chunk_tokens

    def forward(
        self, x: Tensor, targets: Tensor | None = None, units: Units | None = None
    ) -> Tensor:
        """Return the loss of each sample or, without targets, the logits.

        Args:
            x: `[B, T, E]` (or `[B, ..., E]`), of the weight's dtype.
            targets: `[B, T]` (or `[B, ...]`), int64 class indices, already shifted for next-token
                prediction. Every target must be in `0..V-1` or equal to ignore_index; otherwise
                the sample's loss is NaN and its gradient zero.
            units: the `units` of a batch of `dpflash.packing`, if its samples are not rows of x.

        Returns:
            `[B]`, float32 (float64 for float64), in nats. Without targets `[B, T, V]`.

        Raises:
            ValueError: for shapes and dtypes that do not fit.
        """
        if targets is None:
            return F.linear(x, self.weight, self.bias)
        self.check(x, targets)
        if units is not None:
            x, targets = (units.flattened(t, "head").unsqueeze(0) for t in (x, targets))
        return linear_cross_entropy(
            x,
            self.weight,
            self.bias,
            targets,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            chunk_tokens=self.chunk_tokens,
            units=units,
        )

    def check(self, x: Tensor, targets: Tensor) -> None:
        """Raise ValueError if a shape or dtype of the inputs of `forward` is not supported."""
        if x.dtype != self.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"x has dtype {x.dtype}, the weight {self.weight.dtype}: expected the same; use "
                "x.to(head.weight.dtype) or torch.autocast"
            )
        if targets.dtype != torch.int64:
            raise ValueError(
                f"targets have dtype {targets.dtype}: expected torch.int64 class indices; convert "
                "integers with targets.long(), soft targets are not supported"
            )
        if x.ndim < 2 or x.shape[-1] != self.in_features or x.shape[:-1] != targets.shape:
            raise ValueError(
                f"x of shape {tuple(x.shape)} does not fit targets of shape "
                f"{tuple(targets.shape)}: expected x [B, ..., {self.in_features}] and targets "
                "[B, ...]; the batch comes first and features last, add a batch with unsqueeze(0)"
            )

    def extra_repr(self) -> str:
        """Return the representation of `torch.nn.Linear` with this layer's arguments."""
        return (
            f"{super().extra_repr()}, ignore_index={self.ignore_index}, "
            f"reduction={self.reduction!r}, chunk_tokens={self.chunk_tokens}"
        )
