"""Rule for recurrent layers: nn.LSTM, nn.GRU and nn.RNN.

Letters: B samples, T steps, I inputs, H cell width, P width of h, G width of a cell's gates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpflash.kernels import per_sample_bias_grad

from ..clipping.planner import LinearShape
from ..clipping.precision import without_autocast
from ..refusal import PrivateRefusal
from ..verification.second_order import differentiable_once
from .base import Handles, PrivateModule, Slot, autocast_dtype, taken
from .batch_second import samples_first
from .recurrent_cells import CELLS, Steps, cell_states


class _Weights(NamedTuple):
    """The parameters of one layer in one direction, or their handles."""

    ih: Any
    hh: Any
    bias_ih: Any
    bias_hh: Any
    hr: Any

    @property
    def given(self) -> list[Tensor]:
        """The parameters that are not None, in the order of torch's operators."""
        return [w for w in self if w is not None]


class _Recurrence(torch.autograd.Function):
    """One layer in one direction: returns y [B, T, P], h_T [B, P] and, for an LSTM, c_T [B, H].

    The forward is torch's own operator. The backward computes dgates [B, T, G] of all steps. Each
    weight then has one linear operation on T tokens: (x, dgates) for W_ih, (h_{t-1}, dgates) for
    W_hh, and (o tanh(c), dh) for W_hr.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mode: str,
        lengths: Tensor | None,
        slots: tuple[Slot | None, ...],
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        *weights_and_handles: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights = _Weights(*weights_and_handles[:5])
        with without_autocast(x.device.type):
            results = _run(mode, lengths, x, h0, c0, weights)
        ctx.mode, ctx.lengths, ctx.slots = mode, lengths, slots
        ctx.save_for_backward(x, h0, c0, results[0], *weights)
        return results

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor, dh: Tensor, *dc: Tensor) -> tuple[Tensor | None, ...]:
        x, h0, c0, y, *saved = ctx.saved_tensors
        weights, needs = _Weights(*saved), ctx.needs_input_grad
        wide = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device.type):
            h_before = torch.cat([h0.unsqueeze(1), y[:, :-1]], 1)
            steps = _steps(ctx.lengths, [x, h0, c0, y, h_before, dy, dh, *dc], weights, wide)
            found = CELLS[ctx.mode][1](steps)
            from_x, from_h = (_samples_first(t, x.dtype) for t in (found.from_x, found.from_h))
            in_slot, hidden_slot, projection_slot = ctx.slots
            handles = _Weights(
                ih=taken(in_slot, x, from_x) if needs[11] else None,
                hh=taken(hidden_slot, h_before, from_h) if needs[12] else None,
                bias_ih=per_sample_bias_grad(from_x) if needs[13] else None,
                bias_hh=per_sample_bias_grad(from_h) if needs[14] else None,
                hr=taken(
                    projection_slot, *(_samples_first(t, x.dtype) for t in found.projected or ())
                )
                if needs[15]
                else None,
            )
            dx = from_x @ weights.ih if needs[3] else None
        dc0 = None if found.c0 is None else found.c0.to(x.dtype)
        return (None, None, None, dx, found.h0.to(x.dtype), dc0, *(None,) * 5, *handles)


def _run(
    mode: str,
    lengths: Tensor | None,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    weights: _Weights,
) -> tuple[Tensor, ...]:
    """Run the forward of one layer in one direction by torch's operator.

    Padding runs through the layer, too. torch's operator for packed sequences is not used, since
    a sample's bits would depend on the lengths of other samples.
    """
    forward, has_bias = CELLS[mode][0], weights.bias_ih is not None
    states = [h.unsqueeze(0).contiguous() for h in (h0, c0) if h is not None]
    hx: Any = states if c0 is not None else states[0]
    y, *last = forward(x.contiguous(), hx, weights.given, has_bias, 1, 0.0, False, False, True)
    if lengths is None:
        return (y, *(h[0] for h in last))
    rows, step = torch.arange(len(x), device=x.device), lengths.to(x.device) - 1
    h = y[rows, step]
    y = y.masked_fill(torch.arange(x.shape[1], device=x.device)[:, None] > step[:, None, None], 0)
    if c0 is None:
        return y, h
    before = torch.cat([h0.unsqueeze(1), y[:, :-1]], 1)
    from_x = F.linear(x, weights.ih, weights.bias_ih)
    gates = from_x + F.linear(before, weights.hh, weights.bias_hh)
    return y, h, cell_states(gates.transpose(0, 1), c0)[step, rows]


def _steps(
    lengths: Tensor | None, tensors: list[Tensor | None], weights: _Weights, wide: torch.dtype
) -> Steps:
    """Return the inputs of a cell's backward, in the dtype `wide`, with the steps first."""
    x, _, c0, y, h_before, dy, dh, *dc = [t if t is None else t.to(wide) for t in tensors]
    assert x is not None and y is not None and h_before is not None
    assert dy is not None and dh is not None
    w = _Weights(*(t if t is None else t.to(wide) for t in weights))
    dy, is_last = dy.clone(), None
    if lengths is None:
        dy[:, -1] += dh
    else:
        last = (lengths - 1).to(x.device)
        dy[torch.arange(len(x), device=x.device), last] += dh
        is_last = torch.arange(x.shape[1], device=x.device)[:, None, None] == last[:, None]
    from_x, from_h = F.linear(x, w.ih, w.bias_ih), F.linear(h_before, w.hh, w.bias_hh)
    from_x, from_h, h, h_before, dh = (
        t.transpose(0, 1).contiguous() for t in (from_x, from_h, y, h_before, dy)
    )
    dc_last = dc[0] if dc else None
    return Steps(from_x, from_h, h, h_before, c0, dh, dc_last, is_last, w.hh, w.hr)


def _samples_first(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.transpose(0, 1).to(dtype).contiguous()


def recurrence(
    module: PrivateModule,
    handles: Handles,
    mode: str,
    suffix: str,
    x: Tensor,
    states: tuple[Tensor, Tensor | None],
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Run x [B, T, I] through the layer whose parameter names end in `suffix`.

    Returns:
        Outputs [B, T, P] and the last states, [B, P] and [B, H].
    """
    names = [n + suffix for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")]
    parameters = [module._parameters.get(n) for n in names]
    dtype = autocast_dtype(x) or x.dtype
    slots = []
    for name, parameter in ((names[k], parameters[k]) for k in (0, 1, 4)):
        slot = None
        if parameter is not None:
            outputs, inputs = parameter.shape
            shape = LinearShape(x.shape[0], x.shape[1], inputs, outputs, dtype)
            slot = handles.slot(name, shape)
        slots.append(slot)
    results: tuple[Tensor, ...] = _Recurrence.apply(
        mode,
        lengths,
        tuple(slots),
        x.to(dtype),
        *(h if h is None else h.to(dtype) for h in states),
        *(p if p is None else p.detach().to(dtype) for p in parameters),
        *(handles[n] for n in names),
    )
    return results


def refuse_compiler(name: str, kind: str) -> None:
    """Raise an error while torch.compile is tracing."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"module '{name}' ({kind}) has no private backward under torch.compile; call the "
            "model without it, or make_private with optimize='none' or 'conservative'"
        )


class PrivateRecurrent(PrivateModule):
    """`nn.LSTM`, `nn.GRU` or `nn.RNN` with the outputs of the plain module.

    The forward is torch's. The backward recomputes all gates in one product from the states, and
    then loops over the steps in Python. So the backward needs more time and memory than the plain
    module's backward, most of all with grad_sample_mode="ghost".

    A PackedSequence is padded to the longest sequence that the module has received. It must be
    packed with ``enforce_sorted=False``. Unpack with `total_length`: otherwise later layers'
    shapes depend on the batch's longest sample, and the first batch is refused.

    Guarantees:
        Row i of all outputs depends only on row i of the inputs and states. For packed sequences
        this holds up to rounding: the longest length, which is private, may change the rounding of
        products of all samples. For an exact bound, pad to a public length.
        States that a loop carries over to the next batch are data of other samples, whose
        contribution is not bounded.
    """

    mode: str
    input_size: int
    hidden_size: int
    proj_size: int
    num_layers: int
    dropout: float
    batch_first: bool
    bidirectional: bool

    # The arguments' names are those of the plain layer, since calls may use keywords.
    def forward(self, input: Any, hx: Any = None) -> Any:
        if not self.is_private_call():
            return super().forward(input, hx)
        refuse_compiler(self._dpflash.name, self.mode)
        x, lengths = self._samples_first(input)
        given = self._states(hx, x)
        handles = self.private_handles(x.shape[0])
        last: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            if layer and self.dropout and self.training:
                x = F.dropout(x, self.dropout)
            both = []
            for reverse in range(1 + self.bidirectional):
                suffix = f"_l{layer}" + ("_reverse" if reverse else "")
                steps = _reversed(x, lengths) if reverse else x
                states = given[len(last)]
                y, *ends = recurrence(self, handles, self.mode, suffix, steps, states, lengths)
                both.append(_reversed(y, lengths) if reverse else y)
                last.append(tuple(ends))
            x = both[0] if len(both) == 1 else torch.cat(both, 2)
        h, *c = (torch.stack(states) for states in zip(*last, strict=True))
        return self._as_given(x, lengths, input), (h, c[0]) if c else h

    def _samples_first(self, given: Any) -> tuple[Tensor, Tensor | None]:
        """Return the input [B, T, I], and the numbers of steps [B] if it is packed, else None."""
        context = self._dpflash
        if isinstance(given, PackedSequence):
            if given.sorted_indices is None:
                # Raise, since the isolation test detects nothing in a batch that happens to be
                # sorted.
                raise ValueError(
                    f"input of module '{context.name}' ({self.mode}) is packed with "
                    "enforce_sorted=True, so the model orders samples by their lengths, and "
                    "other layers have them in another order. Leave samples in the batch's order "
                    "and pass enforce_sorted=False"
                )
            length = context.note_length(len(given.batch_sizes))
            padded, lengths = pad_packed_sequence(given, batch_first=True, total_length=length)
            return context.check_sequences(padded, is_padded=True), lengths
        if given.is_nested or given.ndim != 3:
            expected = "[B, T, I]" if self.batch_first else "[T, B, I] (batch_first=False)"
            raise PrivateRefusal(
                f"input of module '{context.name}' ({self.mode}) is nested, or has no batch; a "
                f"private recurrent layer needs a batch, {expected}, or a PackedSequence: give "
                "single samples a batch dimension with unsqueeze",
                dimensions=given.ndim,
            ) from None
        return context.check_sequences(
            given if self.batch_first else samples_first(context, given)
        ), None

    def _states(self, hx: Any, x: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Return the first states of each layer and direction: h [B, P], and c [B, H] or None."""
        count, batch = self.num_layers * (1 + self.bidirectional), x.shape[0]
        is_lstm, outputs = self.mode == "LSTM", self.proj_size or self.hidden_size
        widths = (outputs, self.hidden_size) if is_lstm else (outputs,)
        if hx is None:
            hx = [x.new_zeros(count, batch, width) for width in widths]
        states = list(hx) if is_lstm else [hx[0] if isinstance(hx, list) else hx]
        found = [tuple(h.shape) for h in states]
        expected = [(count, batch, width) for width in widths]
        if found != expected:
            raise PrivateRefusal(
                f"hx of module '{self._dpflash.name}' ({self.mode}) does not fit: expected layers "
                "first and the input's batch second",
                shapes=found,
                expected=expected,
            ) from None
        h, c = states[0], states[1] if is_lstm else [None] * count
        return list(zip(h, c, strict=True))

    def _as_given(self, y: Tensor, lengths: Tensor | None, given: Any) -> Any:
        """Return the output with the batch dimension of the input, or packed like the input."""
        if lengths is None:
            return y if self.batch_first else y.transpose(0, 1)
        if given.sorted_indices is not None:
            y = y.index_select(0, given.sorted_indices)
            lengths = lengths[given.sorted_indices.cpu()]
        return given._replace(data=pack_padded_sequence(y, lengths, batch_first=True).data)


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse the steps of x [B, T, ...]; padding stays at the end."""
    if lengths is None:
        return x.flip(1)
    step = torch.arange(x.shape[1], device=x.device)
    ends = lengths.to(x.device)[:, None]
    source = torch.where(step < ends, ends - 1 - step, step)
    return x.gather(1, source.unsqueeze(2).expand_as(x))
