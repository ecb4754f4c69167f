"""Backward through time of LSTM, GRU and plain RNN cells: gradients of the gates in each step.

All gates are computed from the forward's states, by one product for all steps. The loop over the
steps does element-wise work and the product dgates_t W_hh.

Letters: T steps, B samples, H cell width, P width of h (H, or proj_size of an LSTM), G width of a
cell's gates together (4 H, 3 H or H).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Steps(NamedTuple):
    """The inputs of the backward.

    Attributes:
        from_x: x_t W_ih^T + b_ih, [T, B, G].
        from_h: h_{t-1} W_hh^T + b_hh, [T, B, G].
        h: states after each step, [T, B, P].
        h_before: states before each step, [T, B, P].
        c0: first cell state of an LSTM, [B, H].
        dh: gradient of h without the contributions of later steps, [T, B, P].
        dc: gradient of the last cell state of an LSTM, [B, H].
        is_last: [T, B, 1], whether step t is the sample's last step; None if all have T steps.
        weight_hh: [G, P].
        weight_hr: [P, H] if an LSTM projects its outputs, else None.
    """

    from_x: Tensor
    from_h: Tensor
    h: Tensor
    h_before: Tensor
    c0: Tensor | None
    dh: Tensor
    dc: Tensor | None
    is_last: Tensor | None
    weight_hh: Tensor
    weight_hr: Tensor | None


class StepGrads(NamedTuple):
    """The outputs of the backward.

    Attributes:
        from_x: gradient of `Steps.from_x`.
        from_h: gradient of `Steps.from_h`.
        h0: gradient of the first state, [B, P].
        c0: gradient of the first cell state, [B, H].
        projected: (o tanh(c), gradient of h) if an LSTM projects, [T, B, H] and [T, B, P].
    """

    from_x: Tensor
    from_h: Tensor
    h0: Tensor
    c0: Tensor | None = None
    projected: tuple[Tensor, Tensor] | None = None


def cell_states(gates: Tensor, c0: Tensor) -> Tensor:
    """Return an LSTM's cell states after each step, [T, B, H], from its gates [T, B, 4 H]."""
    i, f, g, _ = gates.unflatten(-1, (4, -1)).unbind(2)
    f, added = f.sigmoid(), i.sigmoid() * g.tanh()
    return f * _before(f, added, c0) + added


def _before(f: Tensor, added: Tensor, c0: Tensor) -> Tensor:
    """Return the cell states before each step, [T, B, H]."""
    found, c = torch.empty_like(f), c0
    for t in range(len(f)):
        found[t] = c
        c = torch.addcmul(added[t], f[t], c)
    return found


def lstm(s: Steps) -> StepGrads:
    """Cell c' = f c + i g with output o tanh(c'), or W_hr times that output.

    Source: Hochreiter and Schmidhuber 1997; proj_size: Sak et al. 2014.
    """
    assert s.c0 is not None and s.dc is not None
    i, f, g, o = (s.from_x + s.from_h).unflatten(-1, (4, -1)).unbind(2)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    added = i * g
    c_before = _before(f, added, s.c0)
    tanh_c = (f * c_before + added).tanh()
    slopes = torch.stack(
        [added * (1 - i), c_before * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)], 2
    )
    through_c = o * (1 - tanh_c * tanh_c)
    grads, dhs = torch.empty_like(slopes), torch.empty_like(s.dh)
    dh_later, dc = torch.zeros_like(s.dh[0]), s.dc
    if s.is_last is not None:
        dc = torch.zeros_like(dc)
    for t in reversed(range(len(f))):
        dm = torch.add(s.dh[t], dh_later, out=dhs[t])
        if s.weight_hr is not None:
            dm = dm @ s.weight_hr
        if s.is_last is not None:
            dc = torch.where(s.is_last[t], s.dc, dc)
        dc = torch.addcmul(dc, dm, through_c[t])
        torch.mul(dc.unsqueeze(1), slopes[t, :, :3], out=grads[t, :, :3])
        torch.mul(dm, slopes[t, :, 3], out=grads[t, :, 3])
        dc = dc * f[t]
        dh_later = grads[t].flatten(1) @ s.weight_hh
    flat = grads.flatten(2)
    projected = None if s.weight_hr is None else (o * tanh_c, dhs)
    return StepGrads(flat, flat, dh_later, dc, projected)


def gru(s: Steps) -> StepGrads:
    """State h' = (1 - z) n + z h with n = tanh(n_x + r n_h). Source: Cho et al. 2014."""
    x, h = s.from_x.unflatten(-1, (3, -1)), s.from_h.unflatten(-1, (3, -1))
    r, z = (x[:, :, :2] + h[:, :, :2]).sigmoid().unbind(2)
    n = torch.addcmul(x[:, :, 2], r, h[:, :, 2]).tanh()
    of_n = (1 - z) * (1 - n * n)
    slopes = torch.stack(
        [of_n * h[:, :, 2] * r * (1 - r), (s.h_before - n) * z * (1 - z), of_n * r], 2
    )
    grads, dhs = torch.empty_like(slopes), torch.empty_like(s.dh)
    dh_later = torch.zeros_like(s.dh[0])
    for t in reversed(range(len(z))):
        dh = torch.add(s.dh[t], dh_later, out=dhs[t])
        torch.mul(dh.unsqueeze(1), slopes[t], out=grads[t])
        dh_later = torch.addmm(dh * z[t], grads[t].flatten(1), s.weight_hh)
    from_x = torch.cat([grads[:, :, :2], (dhs * of_n).unsqueeze(2)], 2)
    return StepGrads(from_x.flatten(2), grads.flatten(2), dh_later)


def rnn_tanh(s: Steps) -> StepGrads:
    """State h' = tanh(x W_ih^T + h W_hh^T)."""
    return _plain(s, 1 - s.h * s.h)


def rnn_relu(s: Steps) -> StepGrads:
    """State h' = relu(x W_ih^T + h W_hh^T)."""
    return _plain(s, (s.h > 0).to(s.h.dtype))


def _plain(s: Steps, slopes: Tensor) -> StepGrads:
    grads, dh_later = torch.empty_like(slopes), torch.zeros_like(s.dh[0])
    for t in reversed(range(len(slopes))):
        torch.mul(s.dh[t] + dh_later, slopes[t], out=grads[t])
        dh_later = grads[t] @ s.weight_hh
    return StepGrads(grads, grads, dh_later)


# `mode` of torch's module -> (torch's forward of whole sequences, the backward).
CELLS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[[Steps], StepGrads]]] = {
    "LSTM": (torch.lstm, lstm),
    "GRU": (torch.gru, gru),
    "RNN_TANH": (torch.rnn_tanh, rnn_tanh),
    "RNN_RELU": (torch.rnn_relu, rnn_relu),
}
