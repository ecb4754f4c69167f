"""WithoutDropout: disables dropout in all torch functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
}
# Position of dropout_p in the arguments of F.multi_head_attention_forward.
_DROPOUT_OF_HEADS = 10


class WithoutDropout(TorchFunctionMode):
    """Disables dropout in every torch function that applies it."""

    seen = False  # whether dropout was disabled in some call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            on = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            self.seen |= bool(on) and kwargs.get("p", args[1] if len(args) > 1 else 0.5) > 0
            return args[0] if args else kwargs["input"]
        # Set its dropout to 0: functions that it calls do not pass through this mode.
        if func is F.multi_head_attention_forward:
            self.seen |= kwargs.get("training", True) and args[_DROPOUT_OF_HEADS] > 0
            args = (*args[:_DROPOUT_OF_HEADS], 0.0, *args[_DROPOUT_OF_HEADS + 1 :])
        if func is F.scaled_dot_product_attention:
            given = args[4] if len(args) > 4 else kwargs.pop("dropout_p", 0.0)
            self.seen |= given > 0
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return func(*args, **kwargs)
