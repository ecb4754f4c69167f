"""Block: consecutive releases that share correlated noise, or are charged as one event."""

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
    """The current block: the releases of consecutive logical batches under one noise key.

    In a block, the releases in which a sample takes part must be a multiple of `bands` apart. So
    a logical batch without a release, or a new key, begins a new block.

    Args:
        mechanism: the banded noise. With None, or with one band, noise is independent and each
            release is a block by itself.
        keys: the keys of the noise.
        tracker: follows the microbatches of the training loop.

    Guarantees:
        If two logical batches are released in one block and their numbers are equal modulo
        `bands`, the numbers of their releases in the block differ by a multiple of `bands`.
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
        """Number of releases in the block before the release of the current logical batch."""
        return self.place_of(None)

    def place_of(self, draw: int | None) -> int:
        """Return how many releases of the block precede a logical batch (default: the current)."""
        if self.bands == 1 or self._last is None:
            return 0
        if draw is None:
            mark = self._tracker.current
            draw = self._tracker.next_draw if mark is None else mark.draw
        return self._length if self._last == (*self._stream, draw - 1) else 0

    def has_paid(self, draw: int | None = None) -> bool:
        """Return whether an earlier event pays for a logical batch (default: current)."""
        return self.place_of(draw) % self.bands > 0

    @property
    def round(self) -> tuple[int, str]:
        """Return (number of releases per event, text on what begins a new event)."""
        return self.bands, f"rounds of {self.bands}, and a logical batch that is not released"

    def remaining(self, events: int) -> int:
        """Return how many more releases `events` more events allow if no logical batch is lost."""
        return events * self.bands + (-self.place % self.bands)

    @property
    def _stream(self) -> tuple[str, int]:
        """Return (digest of the noise key, how often the loader was set back)."""
        return derive_key(self._keys.noise, "block").hex(), self._tracker.returns

    def check(self, bound: float, noise_multiplier: float) -> None:
        """Raise if bound or noise differ from the block's values, or if noise cannot be exact.

        Raises:
            ValueError: bound or noise_multiplier is refused.
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
            f"{name}={now!r}, and {before!r} in the release before: banded noise needs the same "
            f"{name} in all releases, so nothing was released. Set it back; if it must change in "
            "training, pass make_private(noise_mechanism=None)"
        )

    def begin(self, bound: float, noise_multiplier: float) -> int:
        """Begin the release of the current logical batch; return its number in the block."""
        place, mark = self.place, self._tracker.current
        last = None if mark is None else (*self._stream, mark.draw)
        self._begun = place, last, (bound, noise_multiplier)
        return place

    def complete(self) -> None:
        """Complete the release that has begun; the next batch's release may join its block."""
        assert self._begun is not None
        place, self._last, self._numbers = self._begun
        self._length = place + 1

    def state_dict(self) -> dict[str, Any] | None:
        """Return the block as plain values; None without a seed: loading then ends the block."""
        if self.bands == 1 or self._keys.seed is None or self._last is None:
            return None
        return {"length": self._length, "last": list(self._last), "numbers": self._numbers}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue the block of a checkpoint if the keys are the same."""
        if state is None:
            self._length, self._last = 0, None
            return
        stream, returns, draw = state["last"]
        bound, noise_multiplier = state["numbers"]
        self._length, self._last = int(state["length"]), (stream, returns, draw)
        self._numbers = bound, noise_multiplier


class Allocation(Block):
    """The last epoch of random allocation that was charged; one event pays for the whole epoch.

    Epoch e consists of the logical batches e T to (e + 1) T - 1 under one key. Each sample is in
    one of them. One event pays for all of them, even if logical batches are lost, or if the loop
    leaves the epoch and begins it again. A new key begins a new allocation at the full cost.

    Args:
        steps: T, the number of logical batches in an epoch.
        keys, tracker: see `Block`.

    Guarantees:
        All releases that one event pays for are of logical batches of one epoch under one key,
        and their noise is at least the event's noise.
    """

    def __init__(self, steps: int, keys: RunKeys, tracker: BatchTracker):
        super().__init__(None, keys, tracker)
        self._steps = steps
        self._least = 0.0

    def has_paid(self, draw: int | None = None) -> bool:
        """Return whether the epoch of a logical batch (default: the next one) was charged."""
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
        """Raise if the noise is less than the noise that the epoch was charged with.

        Raises:
            ValueError: noise_multiplier is too small.
        """
        least = self._least
        if self.has_paid() and noise_multiplier < least:
            raise ValueError(
                f"noise_multiplier={noise_multiplier!r} in an epoch of random allocation that was "
                f"charged with {least!r}: no epsilon is known for an epoch whose noise decreases. "
                "Nothing was released. Set noise_multiplier back until the epoch ends, or pass "
                "sampling='poisson'"
            )

    def begin(self, bound: float, noise_multiplier: float) -> int:
        """Begin a charged release; note its epoch as charged if the batch is the loader's."""
        if self._tracker.current is not None and not self.has_paid():
            self._last, self._least = self._epoch_of(), noise_multiplier
        return 0

    def complete(self) -> None:
        """Do nothing: the epoch is charged whether or not the release is complete."""

    def state_dict(self) -> dict[str, Any] | None:
        """See `Block.state_dict`."""
        if self._keys.seed is None or self._last is None:
            return None
        return {"last": list(self._last), "noise_multiplier": self._least}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue the epoch of a checkpoint if the keys are the same."""
        self._last = None
        if state is not None:
            stream, returns, epoch = state["last"]
            self._last, self._least = (stream, returns, epoch), state["noise_multiplier"]


def refuse_large(noise_multiplier: float, scale: float) -> None:
    """Raise if float64 cannot hold the independent noise z of the banded noise exactly.

    Args:
        noise_multiplier: the noise multiplier of the release.
        scale: the value of `Banded.noise_scale`.

    Raises:
        ValueError: noise_multiplier is too large.
    """
    most = MOST_NOISE / scale
    if noise_multiplier >= most:
        raise ValueError(
            f"noise_multiplier={noise_multiplier!r} with this noise_mechanism: expected less than "
            f"{most}, up to which banded noise is exact in float64; pass less, or "
            "noise_mechanism=None"
        )
