"""Rule for single recurrent steps: nn.LSTMCell, nn.GRUCell and nn.RNNCell."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..refusal import PrivateRefusal
from .base import PrivateModule
from .recurrent import recurrence, refuse_compiler


class PrivateRecurrentCell(PrivateModule):
    """One step of an LSTM, GRU or plain RNN for x [B, I] and states [B, H].

    Each call counts as a separate operation on the parameters, so the layer for whole sequences
    (such as nn.LSTM) is faster if a model does not need single steps.
    """

    hidden_size: int

    # The arguments' names are those of the plain layer, since calls may use keywords.
    def forward(self, input: Tensor, hx: Any = None) -> Any:
        if not self.is_private_call():
            return super().forward(input, hx)
        name, mode = self._dpflash.name, self._mode()
        refuse_compiler(name, mode)
        if input.ndim != 2:
            raise PrivateRefusal(
                f"input of module '{name}' ({mode}) has no batch; a private cell needs a batch, "
                "[B, I]: give a single sample a batch dimension with unsqueeze(0)",
                shape=tuple(input.shape),
            ) from None
        x = self._dpflash.check_sequences(input)
        expected = (x.shape[0], self.hidden_size)
        if hx is None:
            zeros = x.new_zeros(expected)
            hx = (zeros, zeros) if mode == "LSTM" else zeros
        states = tuple(hx) if mode == "LSTM" else (hx, None)
        found = [tuple(h.shape) for h in states if h is not None]
        if any(shape != expected for shape in found):
            raise PrivateRefusal(
                f"hx of module '{name}' ({mode}) does not fit: expected [B, H] for each state, "
                "with the input's batch",
                shapes=found,
                expected=expected,
            ) from None
        handles = self.private_handles(x.shape[0])
        _, h, *c = recurrence(self, handles, mode, "", x.unsqueeze(1), states)
        return (h, c[0]) if c else h

    def _mode(self) -> str:
        module: Any = self
        if hasattr(module, "nonlinearity"):
            return f"RNN_{module.nonlinearity.upper()}"
        # The cell's type follows from the number of gates: their width / the cell's width.
        return {4: "LSTM", 3: "GRU"}[module.weight_hh.shape[0] // self.hidden_size]
