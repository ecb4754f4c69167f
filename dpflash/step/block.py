"""Block: which releases correlated noise is correlated over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..noise.reference import MOST_NOISE
from ..privacy.keys import derive_key
from ..sampling.tracker import BatchTracker

if TYPE_CHECKING:
    from ..noise import Banded
    from ..privacy.keys import RunKeys


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

    def has_paid(self, draw: int | None = None) -> bool:
        """Whether the release of a draw, by default the current one, was charged with others."""
        return self.place_of(draw) % self.bands > 0

    @property
    def round(self) -> tuple[int, str]:
        """How many releases an event pays for, and what else begins another one, in words."""
        return self.bands, f"rounds of {self.bands}, and a draw that is not released"

    def remaining(self, events: int) -> int:
        """How many more releases `events` pay for, if none is lost."""
        return events * self.bands + (-self.place % self.bands)

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


class Allocation(Block):
    """The epoch of random allocation that is paid for: its later releases cost nothing more.

    Epoch e are draws e T to (e + 1) T - 1 under one key, each sample in one of them. Its event is
    for all of these together, so draws that are lost, and loops that leave an epoch and begin
    anew, add nothing to it. Another key is another allocation, which is paid for anew and whole.

    Args:
        steps: T, the draws of an epoch.
        keys, tracker: see `Block`.

    Guarantees:
        The releases that one event pays for are of draws of one epoch under one key, with at
        least the noise of the event.
    """

    def __init__(self, steps: int, keys: RunKeys, tracker: BatchTracker):
        super().__init__(None, keys, tracker)
        self._steps = steps
        self._least = 0.0

    def has_paid(self, draw: int | None = None) -> bool:
        """Whether the epoch of a draw, by default that of the next release, was charged."""
        return self._last == self._epoch_of(draw)

    def _epoch_of(self, draw: int | None = None) -> tuple[str, int, int]:
        draw = self._tracker.next_draw if draw is None else draw
        return (*self._stream, draw // self._steps)

    @property
    def round(self) -> tuple[int, str]:
        """See `Block.round`."""
        return self._steps, f"epochs of {self._steps}, and a checkpoint loaded without a seed"

    def remaining(self, events: int) -> int:
        """See `Block.remaining`."""
        left = self._steps - self._tracker.next_draw % self._steps
        if self.has_paid():
            return left + events * self._steps
        return left + (events - 1) * self._steps if events else 0

    def check(self, bound: float, noise_multiplier: float) -> None:
        """Refuse less noise than the epoch was charged with.

        Raises:
            ValueError: naming it.
        """
        least = self._least
        if self.has_paid() and noise_multiplier < least:
            raise ValueError(
                f"noise_multiplier={noise_multiplier!r} in an epoch of random allocation that was "
                f"charged with {least!r}: no epsilon is known for less in a part of it, "
                "so nothing was released; set it back until the epoch ends, or pass "
                "sampling='poisson'"
            )

    def begin(self, bound: float, noise_multiplier: float) -> int:
        """A release begins that is paid for; of a draw, it is its epoch."""
        if self._tracker.current is not None and not self.has_paid():
            self._last, self._least = self._epoch_of(), noise_multiplier
        return 0

    def complete(self) -> None:
        """Nothing: the epoch is paid for, whether or not the release is complete."""

    def state_dict(self) -> dict[str, Any] | None:
        """See `Block.state_dict`."""
        if self._keys.seed is None or self._last is None:
            return None
        return {"last": list(self._last), "noise_multiplier": self._least}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on in the epoch of a checkpoint, if the keys are the same."""
        self._last = None
        if state is not None:
            stream, returns, epoch = state["last"]
            self._last, self._least = (stream, returns, epoch), state["noise_multiplier"]


def refuse_large(noise_multiplier: float, scale: float) -> None:
    """Refuse noise whose z float64 would not hold exactly.

    Args:
        noise_multiplier: of the release.
        scale: `Banded.noise_scale`.

    Raises:
        ValueError: naming it.
    """
    most = MOST_NOISE / scale
    if noise_multiplier >= most:
        raise ValueError(
            f"noise_multiplier={noise_multiplier!r} with this noise_mechanism: expected less than "
            f"{most}, up to which banded noise is exact in float64; pass less, or "
            "noise_mechanism=None"
        )
