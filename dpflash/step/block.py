"""Block: which releases correlated noise is correlated over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..privacy.keys import derive_key
from ..sampling.tracker import BatchTracker

if TYPE_CHECKING:
    from ..noise import Banded
    from ..privacy.keys import RunKeys

# z has 8 more bits than the grid of the sums, so of `_validate._MOST_NOISE` these are left.
_MOST_NOISE = 2.0**6


class Block:
    """The block under way: consecutive releases of consecutive draws, under one key.

    A draw without a release, or another key, ends it: a sample's next draw would not be as many
    releases later as there are bands. The next release begins another block, without a past.

    Args:
        mechanism: the noise; None, or one band, if it is independent, so that every release is a
            block.
        keys: of the noise.
        tracker: follows the microbatches of the training loop.

    Guarantees:
        Two draws of one part (equal modulo the bands) that are released in one block have places
        that differ by a multiple of the bands.
    """

    def __init__(self, mechanism: Banded | None, keys: RunKeys, tracker: BatchTracker):
        self.bands = 1 if mechanism is None else mechanism.bands
        self._scale = 1.0 if mechanism is None else mechanism.noise_scale()
        self._keys = keys
        self._tracker = tracker
        self._length = 0
        self._last: tuple[str, int, int] | None = None
        self._numbers: tuple[float, float] | None = None
        self._begun: tuple[int, tuple[str, int, int] | None, tuple[float, float]] | None = None

    @property
    def place(self) -> int:
        """How many releases of its block precede that of the current draw."""
        return self.place_of(None)

    def place_of(self, draw: int | None) -> int:
        """How many releases of its block precede that of a draw; None for the current one."""
        if self.bands == 1 or self._last is None:
            return 0
        if draw is None:
            mark = self._tracker.current
            draw = self._tracker.next_draw if mark is None else mark.draw
        return self._length if self._last == (*self._stream, draw - 1) else 0

    @property
    def left_of_round(self) -> int:
        """How many releases of the next draws are charged already."""
        return -self.place % self.bands

    @property
    def _stream(self) -> tuple[str, int]:
        """What draws and noise are a function of, besides their numbers."""
        return derive_key(self._keys.noise, "block").hex(), self._tracker.returns

    def check(self, bound: float, noise_multiplier: float) -> None:
        """Refuse another bound or noise than that of the block, and noise that is not exact.

        Raises:
            ValueError: naming it.
        """
        if self.bands == 1:
            return
        refuse_large(noise_multiplier, self._scale)
        if not self.place or self._numbers == (bound, noise_multiplier):
            return
        assert self._numbers is not None
        names = "max_grad_norm", "noise_multiplier"
        changed = zip(names, (bound, noise_multiplier), self._numbers, strict=True)
        name, now, before = next(x for x in changed if x[1] != x[2])
        raise ValueError(
            f"{name}={now!r}, and {before!r} in the release before: banded noise is correlated "
            f"over releases of one {name}, so nothing was released; set it back, or pass "
            "make_private(noise_mechanism=None) for a schedule"
        )

    def begin(self, bound: float, noise_multiplier: float) -> int:
        """The release of the current draw begins; returns its place."""
        place, mark = self.place, self._tracker.current
        last = None if mark is None else (*self._stream, mark.draw)
        self._begun = place, last, (bound, noise_multiplier)
        return place

    def complete(self) -> None:
        """The release that has begun is complete: that of the next draw belongs to its block."""
        assert self._begun is not None
        place, self._last, self._numbers = self._begun
        self._length = place + 1

    def state_dict(self) -> dict[str, Any] | None:
        """The block as plain values, with a seed; without one another key ends it at a load."""
        if self.bands == 1 or self._keys.seed is None or self._last is None:
            return None
        return {"length": self._length, "last": list(self._last), "numbers": self._numbers}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on in the block of a checkpoint, if the keys are the same."""
        if state is None:
            self._length, self._last = 0, None
            return
        stream, returns, draw = state["last"]
        bound, noise_multiplier = state["numbers"]
        self._length, self._last = int(state["length"]), (stream, returns, draw)
        self._numbers = bound, noise_multiplier


def refuse_large(noise_multiplier: float, scale: float) -> None:
    """Refuse noise whose z float64 would not hold exactly.

    Args:
        noise_multiplier: of the release.
        scale: `Banded.noise_scale`.

    Raises:
        ValueError: naming it.
    """
    most = _MOST_NOISE / scale
    if noise_multiplier >= most:
        raise ValueError(
            f"noise_multiplier={noise_multiplier!r} with this noise_mechanism: expected less than "
            f"{most}, up to which banded noise is exact in float64; pass less, or "
            "noise_mechanism=None"
        )
