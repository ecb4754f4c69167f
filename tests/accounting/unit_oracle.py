"""The truth about units of several examples, in mpmath: nothing of the library.

A setting is (k, q, s, T): T steps in each of which each of a unit's k examples is drawn with
probability q and moves the sum by 1, under noise s. Of one step P = sum over j of p_j N(j, s^2)
with p_j = C(k, j) q^j (1-q)^(k-j), Q = N(0, s^2) ("remove"), or the two exchanged ("add"). The
profile delta(epsilon) is found in two unrelated ways:

- one step in closed form, since the likelihood ratio rises with the output (`one_step_delta`), and
  two steps as the integral of that over the first step's output (`two_steps_delta`);
- many steps by inverting the characteristic function: M(a) = E_Q (dP/dQ)^a is the trapezoidal sum
  over real outputs x in many digits, which needs no care about cancellation, and
  delta = (1 / 2 pi i) int M(a)^T e^(-epsilon (a - 1)) / (a (a - 1)) da upwards, right of 1. The
  digits of a row are those in which two such lines agree.

    python tests/accounting/unit_oracle.py    # rows of unit_truth.json without epsilon get theirs
"""

from __future__ import annotations

import json
from pathlib import Path

import mpmath
from mpmath import mp, mpf
from oracle import ADD, REMOVE, gaussian_delta, solve, write

TRUTH = Path(__file__).with_name("unit_truth.json")
DIGITS = 14  # of epsilon, at least, in the table
MOST_NODES = 20_000


def probabilities(k, q):
    q = mpf(q)
    return [mpmath.binomial(k, j) * q**j * (1 - q) ** (k - j) for j in range(k + 1)]


def likelihood_ratio(x, s, p):
    terms = (pj * mpmath.exp((2 * j * x - j * j) / (2 * s * s)) for j, pj in enumerate(p))
    return mpmath.fsum(terms)


def edge(ratio, s, p):
    """The output of this likelihood ratio; None if there is none."""
    if ratio <= p[0]:
        return None
    low, high = -mpf(1), mpf(1)
    while likelihood_ratio(low, s, p) > ratio:
        low *= 2
    while likelihood_ratio(high, s, p) < ratio:
        high *= 2
    x = high
    # The logarithm of what is above p_0 is convex: Newton's steps from the right never overshoot.
    for _ in range(200):
        terms = [
            pj * mpmath.exp((2 * j * x - j * j) / (2 * s * s)) for j, pj in enumerate(p) if j > 0
        ]
        total = mpmath.fsum(terms)
        slope = mpmath.fsum(j * t for j, t in enumerate(terms, 1)) / total / (s * s)
        step = mpmath.log(total / (ratio - p[0])) / slope
        x -= step
        if abs(step) < mpf(10) ** (-mp.dps + 5) * (1 + abs(x)):
            break
    return x


def one_step_delta(epsilon, k, q, s, direction):
    """Profile of one step at any real epsilon."""
    epsilon, s, p = mpf(epsilon), mpf(s), probabilities(k, q)
    x = edge(mpmath.exp(epsilon if direction == REMOVE else -epsilon), s, p)
    if x is None:
        return 1 - mpmath.exp(epsilon) if direction == REMOVE else mpf(0)
    if direction == REMOVE:
        above = mpmath.fsum(pj * mpmath.ncdf((j - x) / s) for j, pj in enumerate(p))
        return above - mpmath.exp(epsilon) * mpmath.ncdf(-x / s)
    below = mpmath.fsum(pj * mpmath.ncdf((x - j) / s) for j, pj in enumerate(p))
    return mpmath.ncdf(x / s) - mpmath.exp(epsilon) * below


def two_steps_delta(epsilon, k, q, s, direction, degree=4):
    """Profile of two steps: Gauss-Legendre over the first output, 3 * 2^(degree-1) nodes each."""
    epsilon, p, s = mpf(epsilon), probabilities(k, q), mpf(s)
    sign = 1 if direction == REMOVE else -1

    def integrand(x):
        ratio = likelihood_ratio(x, s, p)
        density = mpmath.npdf(x, 0, s) * (ratio if direction == REMOVE else 1)
        rest = epsilon - sign * mpmath.log(ratio)
        return density * one_step_delta(rest, k, q, s, direction)

    ends = [-10 * s + i * s / 2 for i in range(41 + int(2 * k / s))]
    # Where the second step may reach epsilon only by an output without any drawn example, its
    # profile has a corner, next to which it changes within tiny losses.
    corner = edge(mpmath.exp(sign * epsilon) / p[0], s, p)
    if corner is not None:
        ends += [corner] + [corner + side * s / 2**n for n in range(36) for side in (-1, 1)]
    ends = sorted(end for end in ends if ends[0] <= end)
    return mpmath.quad(integrand, ends, method="gauss-legendre", maxdegree=degree)


class Inversion:
    """Profiles of T equal steps by inversion of the characteristic function."""

    def __init__(self, k, q, s, steps, direction, shift=1.0, fineness=1.0):
        self.k, self.s, self.steps = k, mpf(s), steps
        self.p, self.remove = probabilities(k, q), direction == REMOVE
        self.shift, self.fineness = mpf(shift), mpf(fineness)
        self.tables, self.line = {}, []

    def table(self, along, turn):
        """(log dP/dQ, density times step) at equidistant outputs, for |Re a|, |Im a| up to these.

        log dP/dQ is analytic for |Im x| < pi s^2: the polynomial in e^(x / s^2) has real negative
        zeros. A shift by i h of the line multiplies |e^(a L)| by up to e^(k h |Im a| / s^2).
        """
        key = (along, turn, mp.dps)
        if key not in self.tables:
            s, nats = self.s, mp.dps * mpmath.log(10)
            step = mpf(0)
            for part in ("0.05", "0.1", "0.2", "0.35", "0.5"):
                strip = min(mpf(part) * mp.pi * s * s, s * mpmath.sqrt(2 * nats))
                growth = (strip / s) ** 2 / 2 + turn * self.k * strip / s**2 / 3
                step = max(step, 2 * mp.pi * strip / (nats + growth) / self.fineness)
            reach = s * mpmath.sqrt(2 * nats)
            count = int((along * self.k + 2 * reach) / step) + 1
            if count > MOST_NODES:
                raise ArithmeticError(f"{count} nodes of x")
            outputs = [-reach + step * i for i in range(count)]
            self.tables[key] = [
                (
                    mpmath.log(likelihood_ratio(x, s, self.p)),
                    mpmath.exp(-x * x / (2 * s * s)) * step / (s * mpmath.sqrt(2 * mp.pi)),
                )
                for x in outputs
            ]
        return self.tables[key]

    def log_moment(self, a):
        """log M(a) of one step."""
        along, turn = (
            1 << max(0, int(mpmath.ceil(abs(part))) - 1).bit_length()
            for part in (mpmath.re(a), mpmath.im(a))
        )
        table = self.table(along, turn)
        return mpmath.log(mpmath.fsum(w * mpmath.exp(a * log) for log, w in table))

    def apex(self, c):
        return 1 + c if self.remove else -c

    def height(self, c):
        return self.steps * mpmath.re(self.log_moment(self.apex(c)))

    def draw(self, epsilon):
        """Lay the line for an epsilon: nodes of a, weights and log M there."""
        with mp.workdps(20):

            def size(c):
                return self.height(c) - epsilon * c - mpmath.log(c) - mpmath.log(1 + c)

            c, before = mpmath.exp(mpf(-12)), mpmath.inf
            while c < 1e5 and size(c) < before:
                before, c = size(c), c * mpf("1.25")
            # Left of the lowest point, since far outputs may raise a wall right of it.
            c *= mpf("0.6") * self.shift
            d = c / 20
            curve = (self.height(c + d) + self.height(c - d) - 2 * self.height(c)) / d**2
            scale = 1 / mpmath.sqrt(curve + 1 / c**2)
        step = 2 / mpf(mp.dps) / self.fineness
        self.line, greatest, t = [], mpf(0), mpf(0)
        while t < 30:
            a = self.apex(c) + 1j * scale * mpmath.sinh(t)
            log = self.steps * self.log_moment(a)
            weight = 1j * scale * mpmath.cosh(t) * step / (mp.pi * a * (a - 1)) / (1 if t else 2)
            m = a - 1 if self.remove else -a
            self.line.append((m, weight, log))
            size = abs(weight) * mpmath.exp(mpmath.re(log - epsilon * m))
            greatest = max(greatest, size)
            if size < greatest * mpf(10) ** -(mp.dps - 12):
                return
            t += step
        raise ArithmeticError("the integrand does not fall")

    def delta(self, epsilon):
        """delta and its derivative along the line that was drawn."""
        terms = [(m, w * mpmath.exp(log - epsilon * m)) for m, w, log in self.line]
        return (
            mpmath.fsum(mpmath.im(term) for _, term in terms),
            -mpmath.fsum(mpmath.im(m * term) for m, term in terms),
        )

    def chernoff(self, delta):
        """An epsilon of at most this delta."""
        with mp.workdps(20):
            c, found = mpmath.exp(mpf(-6)), mpmath.inf
            while c < 1e5:
                bound = self.height(c) - mpmath.log(delta) - (1 + c) * mpmath.log(1 + c)
                bound = bound / c + mpmath.log(c)
                if bound > found:
                    break
                found, c = bound, c * mpf("1.25")
        return found

    def epsilon(self, delta):
        """The epsilon of a delta: bisection and Newton's steps on a line of a near epsilon."""
        found = self.chernoff(delta)
        for _ in range(2):
            self.draw(found)
            found = self.root(delta, found)
        return found

    def root(self, delta, high):
        low, high, found = mpf(0), 2 * high, high
        for _ in range(200):
            value, slope = self.delta(found)
            low, high = (found, high) if value > delta else (low, found)
            following = mpf(-1)
            if value > 0 > slope:
                following = found - mpmath.log(value / mpf(delta)) * value / slope
            if abs(following - found) < found * mpf(10) ** (-mp.dps // 2):
                return following
            found = following if low < following < high else (low + high) / 2
        raise ArithmeticError("the search does not end")


def closed_form(k, q, s, steps, direction):
    """The profile of one step, or of any number of whole batches; None of others."""
    if q == 1:
        return lambda e: gaussian_delta(e, mpmath.sqrt(steps) * k / mpf(s))
    if steps == 1:
        return lambda e: one_step_delta(e, k, q, s, direction)
    return None


def truth(k, q, s, steps, delta):
    """(epsilon, digits) of the greater direction."""
    if steps == 2:
        with mp.workdps(20):
            epsilon = solve(lambda e: two_steps_delta(e, k, q, s, REMOVE, 3), delta)
            assert two_steps_delta(epsilon, k, q, s, ADD, 3) <= delta
            fine = two_steps_delta(epsilon, k, q, s, REMOVE, 4)
            below = two_steps_delta(epsilon * mpf("0.999"), k, q, s, REMOVE, 3)
            # The slope of log delta over log epsilon.
            slope = mpmath.log(below / fine) * 1000
            error = abs(mpmath.log(fine / mpf(delta)) / slope)
            return epsilon, int(-mpmath.log(error + mpf(10) ** -17, 10))
    profile = closed_form(k, q, s, steps, REMOVE)
    if profile:
        with mp.workdps(40):
            epsilon = solve(profile, delta)
            assert closed_form(k, q, s, steps, ADD)(epsilon) <= delta
            return epsilon, 20
    with mp.workdps(40):
        epsilon = Inversion(k, q, s, steps, REMOVE).epsilon(delta)
        if epsilon < -steps * k * mpmath.log(1 - mpf(q)):
            added = Inversion(k, q, s, steps, ADD)
            added.draw(epsilon)
            assert added.delta(epsilon)[0] <= delta
    with mp.workdps(48):
        other = Inversion(k, q, s, steps, REMOVE, shift=0.7, fineness=1.4)
        other.draw(epsilon)
        value, slope = other.delta(epsilon)
        error = abs(value - mpf(delta)) / abs(slope * epsilon)
        return epsilon, int(-mpmath.log(error + mpf(10) ** -20, 10))


def main():
    """Compute the rows of the table that have no epsilon."""
    table = json.loads(TRUTH.read_text())
    for row in table:
        if "epsilon" not in row:
            names = ("examples_per_unit", "sample_rate", "noise_multiplier", "steps", "delta")
            epsilon, digits = truth(*(row[name] for name in names))
            assert digits >= DIGITS, row
            row |= {"epsilon": mpmath.nstr(epsilon, 20), "digits": digits}
            write(TRUTH, table)


if __name__ == "__main__":
    main()
