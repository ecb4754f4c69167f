"""The loss of one step as a random variable: one direction of one dominating pair.

s is the pair's noise, q its rate, l(x) = log(1 - q + q exp((2x - 1) / (2 s^2))) its loss at the
output x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from .pairs import Pair

__all__ = ["UNIT", "Array", "Law", "law_of"]

Array = NDArray[Any]

UNIT = float(np.finfo(np.float64).eps)
_REACH = 38.5  # standard deviations beyond which float64 knows no density


@dataclass(frozen=True)
class Law:
    """One direction of one pair on a line on which its loss rises.

    The line is x if something is removed (P is the mixture), and -x if something is added.
    """

    noise: float
    rate: float
    sign: int  # 1: removed, -1: added

    def loss(self, t: Array) -> Array:
        u = (2 * self.sign * t - 1) / (2 * self.noise**2)
        if self.rate == 1:
            return self.sign * u
        low, high = np.minimum(u, 500.0), np.maximum(u, 500.0)
        above = math.log(self.rate) + np.log1p((1 / self.rate - 1) * np.exp(-high))
        loss = np.log1p(self.rate * np.expm1(low))
        return self.sign * np.where(u > 500, high + above, loss)

    def place(self, loss: Array) -> Array:
        """Where the loss is this one; infinite beyond the losses that occur."""
        value = self.sign * loss
        if self.rate == 1:
            return self.sign * (self.noise**2 * value + 0.5)
        with np.errstate(divide="ignore", invalid="ignore"):
            low = np.log1p(np.maximum(np.expm1(np.minimum(value, 30.0)) / self.rate, -1.0))
        high = np.maximum(value, 30.0)
        high = high - math.log(self.rate) + np.log1p((self.rate - 1) * np.exp(-high))
        return self.sign * (self.noise**2 * np.where(value > 30, high, low) + 0.5)

    def density(self, t: Array) -> Array:
        x = self.sign * t
        found = np.exp(-np.square(x / self.noise) / 2)
        if self.sign == 1:
            shifted = np.exp(-np.square((x - 1) / self.noise) / 2)
            found = (1 - self.rate) * found + self.rate * shifted
        return found / (self.noise * math.sqrt(2 * math.pi))

    def slope(self, t: Array) -> Array:
        """The loss's derivative: P(sampled | x) / s^2."""
        u = (2 * self.sign * t - 1) / (2 * self.noise**2)
        return self.rate * np.exp(u - self.sign * self.loss(t)) / self.noise**2

    def log_tails(self, t: float, above: bool) -> tuple[float, float]:
        """Logarithms of the masses under P and under Q of what is below (or above) t."""
        side = -1.0 if above else 1.0
        x = side * t * self.sign if self.sign == 1 else side * t
        # In the frame in which the tail is (-inf, x]: the shifted mean is at +-1.
        mean = side * self.sign
        plain = float(log_ndtr(x / self.noise))
        shifted = float(log_ndtr((x - mean) / self.noise))
        both = shifted
        if self.rate < 1:
            both = float(
                np.logaddexp(math.log1p(-self.rate) + plain, math.log(self.rate) + shifted)
            )
        return (both, plain) if self.sign == 1 else (plain, both)

    def ends(self) -> tuple[float, float]:
        """The finite part of the line that has a density in float64."""
        reach = _REACH * self.noise
        return (-reach, 1 + reach) if self.sign == 1 else (-1 - reach, reach)

    def step(self) -> float:
        """A length within which everything is nearly a polynomial."""
        return min(self.noise / 8, self.noise**2 / 2)


def law_of(pair: Pair, sign: int) -> Law:
    """The pair's law if something is removed (sign 1) or added (-1), where that is not one."""
    return Law(pair.noise, pair.rate, 1 if pair.symmetric or pair.rate == 1 else sign)
