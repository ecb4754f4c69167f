"""Broken versions of the library's internals, each of which an audit must catch.

A bug is a function of `put(owner, name, value)`, such as `monkeypatch.setattr`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dpflash.clipping.context_gate import ContextGate
from dpflash.clipping.deferred import DeferredGradients
from dpflash.distributed import collectives
from dpflash.engine import PrivacyEngine
from dpflash.kernels import grads, squared_norm
from dpflash.sampling.samplers import CyclicPoissonBatchSampler, PoissonBatchSampler
from dpflash.sampling.slots import RealRows
from dpflash.sampling.tracker import BatchTracker
from dpflash.step import BatchNoise, ClippedSums, PrivateStep, sums
from dpflash.step import noise as noise_module

Put = Callable[[Any, str, Any], None]


def _less_noise(part: float) -> Callable[[Put], None]:
    def apply(put: Put) -> None:
        original = BatchNoise.__init__

        def init(self: Any, *arguments: Any, **keywords: Any) -> None:
            original(self, *arguments, **keywords)
            self._std *= part

        put(BatchNoise, "__init__", init)

    return apply


def _unclipped(name: str) -> Callable[[Put], None]:
    """Parameters whose names end so are not clipped."""

    def apply(put: Put) -> None:
        original = ClippedSums.add_clipped

        def add_clipped(self: Any, parameters: Any, grads: Any, factors: Any, noise: Any) -> None:
            for parameter, grad, own in zip(
                parameters, grads, noise or [None] * len(grads), strict=True
            ):
                whole = self.names[parameter].endswith(name)
                used = (factors > 0).to(factors.dtype) if whole else factors
                original(self, [parameter], [grad], used, noise and [own])

        put(ClippedSums, "add_clipped", add_clipped)

    return apply


def _draw_used_twice(put: Put) -> None:
    original = BatchNoise.__init__

    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        self._step //= 2

    put(BatchNoise, "__init__", init)


def _same_noise_for_all_parameters(put: Put) -> None:
    original = BatchNoise.__init__

    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        self._parameter_ids = dict.fromkeys(self._parameter_ids, 0)

    put(BatchNoise, "__init__", init)


def _divisor_by_drawn_size(put: Put) -> None:
    original = PrivateStep.release

    def release(self: Any, **options: Any) -> None:
        original(self, **options)
        drawn = float(max(self.tracker.current.count, 1))
        for parameter in self.parameters:
            parameter.grad.mul_(self.options.expected_batch_size / drawn)

    put(PrivateStep, "release", release)


def _shuffling(put: Put) -> None:
    def draw(self: Any, index: int) -> list[int]:
        parts = round(1 / self.sample_rate)
        seed = hashlib.sha256(self._key + bytes([index // parts % 256])).digest()
        order = list(range(self.num_samples))
        random.Random(seed).shuffle(order)
        return sorted(order[index % parts :: parts])

    put(PoissonBatchSampler, "draw", draw)


def _rate_above_the_claimed(put: Put) -> None:
    original = PoissonBatchSampler.draw

    def draw(self: Any, index: int) -> list[int]:
        rate = self.sample_rate
        vars(self)["sample_rate"] = min(1.0, 1.1 * rate)
        try:
            return original(self, index)
        finally:
            vars(self)["sample_rate"] = rate

    put(PoissonBatchSampler, "draw", draw)


def _empty_draws_without_noise(put: Put) -> None:
    original = PrivateStep._charge

    def charge(self: Any, **keywords: Any) -> BatchNoise:
        noise = original(self, **keywords)
        if not self.tracker.current.count:
            noise._std = 0.0
        return noise

    put(PrivateStep, "_charge", charge)


def _padding_contributes(put: Put) -> None:
    put(RealRows, "only", lambda self, x: x)


def _spans(of: Callable[[Any], list[tuple[int, int]]]) -> Callable[[Put], None]:
    """Documents have other tokens where their gradients and norms are made."""

    def apply(put: Put) -> None:
        original = DeferredGradients._spans

        def spans(self: Any, dy: Any) -> tuple[tuple[int, int], ...] | None:
            if self.units is None:
                return original(self, dy)
            each = dy.shape[1] // max(1, self.units.positions)
            return tuple((start * each, end * each) for start, end in of(self.units))

        put(DeferredGradients, "_spans", spans)
        # The kernels refuse samples that overlap.
        put(grads, "check_spans", lambda spans, tokens: None)

    return apply


def _one_token_too_far(units: Any) -> list[tuple[int, int]]:
    return [
        (start, end if start == end else min(end + 1, units.positions))
        for start, end in units.spans
    ]


def _with_the_next_document(units: Any) -> list[tuple[int, int]]:
    ends = sorted({end for _, end in units.spans})
    return [
        (start, end if start == end else next((e for e in ends if e > end), end))
        for start, end in units.spans
    ]


def _with_padding(units: Any) -> list[tuple[int, int]]:
    last = max(end for _, end in units.spans)
    return [
        (start, end if start == end or end < last else units.positions)
        for start, end in units.spans
    ]


def _entries_clipped_one_by_one(put: Put) -> None:
    original = BatchTracker.begin_microbatch

    def begin_microbatch(self: Any, mark: Any, own: Any) -> None:
        if mark.units is not None and mark.units.are_rows:
            mark = replace(mark.of_rows, units=None)
        original(self, mark, own)

    put(BatchTracker, "begin_microbatch", begin_microbatch)


def _float_lattice(put: Put) -> None:
    def noise(stream: Any, shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32) * stream.std

    _noise_of_another(noise, put)


def _coarse_noise_on_the_grid(put: Put) -> None:
    def noise(stream: Any, shape: torch.Size) -> torch.Tensor:
        coarse = torch.randn(shape, dtype=torch.float32) * stream.std
        return (coarse.double() / stream.grid).round() * stream.grid

    _noise_of_another(noise, put)


def _noise_of_another(noise: Callable[[Any, torch.Size], torch.Tensor], put: Put) -> None:
    def add_noise_(outs: Any, streams: Any) -> Any:
        return [out.add_(noise(own, out.shape)) for out, own in zip(outs, streams, strict=True)]

    for module in (sums, noise_module):
        put(module, "add_noise_", add_noise_)
    put(ClippedSums, "take_noise", lambda self, parameters: False)


def _squares_of_shards(put: Put) -> None:
    wait, norms, reset = ContextGate._wait, ContextGate.finish_norms, ContextGate.reset

    def own_wait(self: Any, position: int, grad: torch.Tensor) -> None:
        squares = squared_norm(grad)
        held = self.__dict__.get("_own_squares")
        self._own_squares = squares if held is None else held + squares
        wait(self, position, grad)

    def finish_norms(self: Any, grads: Any) -> torch.Tensor:
        norms(self, grads)
        squares = self._own_squares.clone()
        collectives.all_reduce_(squares, self._group, "squares of the shards")
        return squares

    def forget(self: Any) -> None:
        reset(self)
        self._own_squares = None

    put(ContextGate, "_wait", own_wait)
    put(ContextGate, "finish_norms", finish_norms)
    put(ContextGate, "reset", forget)


def _ranks_share_one_noise(put: Put) -> None:
    original = BatchNoise.stream

    def stream(self: Any, parameter: Any, begin: int = 0) -> Any:
        return original(self, parameter)

    put(BatchNoise, "stream", stream)


def _state_not_applied(put: Put) -> None:
    put(noise_module.BandedNoise, "_past", lambda self, p: _place_alone(self._pasts.get(p)))


def _place_alone(past: Any) -> Any:
    return noise_module._Past(0 if past is None else past.place)


def _of_banded_noise(change: Callable[[Any], None]) -> Callable[[Put], None]:
    def apply(put: Put) -> None:
        original = noise_module.BandedNoise.__init__

        def init(self: Any, *arguments: Any, **keywords: Any) -> None:
            original(self, *arguments, **keywords)
            change(self)

        put(noise_module.BandedNoise, "__init__", init)

    return apply


def _shift_coefficients(noise: Any) -> None:
    noise._integers = (noise._integers[0], *noise._integers[2:], 0)


def _forget_norm_of_column(noise: Any) -> None:
    noise._std_of_z = noise._std


def _parts_drawn_anew(put: Put) -> None:
    """In each round, so that a sample's draws may be neighbors."""

    def draw(self: Any, index: int) -> list[int]:
        drawn = PoissonBatchSampler.draw(self, index)
        parts = np.random.default_rng(index // self.parts).integers(self.parts, size=9999)
        return [i for i in drawn if parts[i] == index % self.parts]

    put(CyclicPoissonBatchSampler, "draw", draw)


def _replayed_z(put: Put) -> None:
    original = noise_module.BandedNoise._stream

    def stream(self: Any, std: float, grid: float, step: int, *rest: Any) -> Any:
        return original(self, std, grid, step // 2, *rest)

    put(noise_module.BandedNoise, "_stream", stream)


# Of one process.
BUGS: dict[str, Callable[[Put], None]] = {
    "noise halved": _less_noise(0.5),
    "noise / 5": _less_noise(0.2),
    "one layer unclipped": _unclipped("tables.0.weight"),
    "biases unclipped": _unclipped("bias"),
    "a norm unclipped": _unclipped("norm.weight"),
    "sampling rate 1.1 times the claimed": _rate_above_the_claimed,
    "empty draws without noise": _empty_draws_without_noise,
    "a draw used twice": _draw_used_twice,
    "one draw for all parameters": _same_noise_for_all_parameters,
    "divisor by the drawn size": _divisor_by_drawn_size,
    "shuffling": _shuffling,
    "padding contributes": _padding_contributes,
    "a sample counted in two documents": _spans(_one_token_too_far),
    "a document with the next one": _spans(_with_the_next_document),
    "a document with the padding behind it": _spans(_with_padding),
    "entries clipped one by one": _entries_clipped_one_by_one,
    "float lattice": _float_lattice,
    "coarse noise on the grid": _coarse_noise_on_the_grid,
}
# Of one process with banded noise.
BANDED_BUGS: dict[str, Callable[[Put], None]] = {
    "state not applied": _state_not_applied,
    "coefficients shifted": _of_banded_noise(_shift_coefficients),
    "norm of the column forgotten": _of_banded_noise(_forget_norm_of_column),
    "draws closer than the bands": _parts_drawn_anew,
    "z replayed": _replayed_z,
}
# Of two ranks.
RANK_BUGS: dict[str, Callable[[Put], None]] = {
    "squares of shards added": _squares_of_shards,
    "ranks share one noise": _ranks_share_one_noise,
}


def engine_with(bug: str, **arguments: Any) -> PrivacyEngine:
    """An engine of a process that has the bug from now on."""
    if bug not in _applied:
        _applied.add(bug)
        (RANK_BUGS | BUGS)[bug](setattr)
    return PrivacyEngine(**arguments)


_applied: set[str] = set()
