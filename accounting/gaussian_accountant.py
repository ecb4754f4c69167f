"""The accountant of steps without subsampling, exact."""

from .accountant import Accountant
from .gaussian import gaussian_delta, gaussian_epsilon
from .interval import Interval
from .pairs import Pairs, joint_noise

__all__ = ["GaussianAccountant"]

_EXACT = 1e-9  # what the closed form may lie above the truth, relatively


class GaussianAccountant(Accountant):
    """The closed form, for steps on the whole data set only: the oracle of the others.

    Guarantees:
        Exact up to rounding. Subsampled steps are refused.

    Source:
        Balle and Wang 2018, Theorem 8.
    """

    @classmethod
    def mechanism(cls) -> str:
        """The name `"gaussian"`."""
        return "gaussian"

    def _epsilon(self, pairs: Pairs, delta: float) -> Interval:
        exact = gaussian_epsilon(delta=delta, noise_multiplier=_noise(pairs))
        return Interval(exact * (1 - _EXACT), exact)

    def _delta(self, pairs: Pairs, epsilon: float) -> Interval:
        exact = gaussian_delta(epsilon=epsilon, noise_multiplier=_noise(pairs))
        return Interval(exact * (1 - _EXACT), exact)


def _noise(pairs: Pairs) -> float:
    for pair, _ in pairs:
        if pair.rate != 1:
            raise ValueError(
                f"sample_rate={pair.rate!r}: accountant='gaussian' has a closed form for steps on "
                "the whole data set, sample_rate=1, alone; use accountant='contour'"
            )
    return joint_noise(pairs)
