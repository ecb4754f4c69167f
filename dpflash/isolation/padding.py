"""PaddingTrial: the loss of a sample must not depend on how far its batch is padded.

A microbatch whose length follows from its longest sample is run twice before it is trained on,
without dropout: as it is, and its shorter samples by themselves, without the padding that only
the longer ones need. Their losses must be equal up to rounding.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..refusal import UNTESTED
from ..verification.digests import tolerance
from ..verification.nested import map_tensors
from .alteration import Alteration, copied, entries_of, rows_of
from .dropout import WithoutDropout
from .sandbox import Sandbox

# So many rows at least must end with one value, which then counts as padding.
_LEAST = 4
_CHANGED = (
    "the loss of a sample changed as longer samples of the batch were left out and it was padded "
    "less, so nothing was released: other samples' lengths change its gradient. Mask the padding "
    "(attention_mask, means over a sample's own tokens, pack_padded_sequence), with positions "
    "that padding does not shift; or pad all samples to one public length, as by "
    f"collate_fn=dpflash.sampling.PadTo(512, {{'labels': -100}}). {UNTESTED}"
)


class PaddingTrial:
    """Which microbatches are tried with less padding, and what the losses of both were.

    Args:
        sandbox: of model and loop.

    Attributes:
        is_running: whether one of the two runs is under way.
        refused: why the last microbatch that was tried was refused, or None.
        has_compared: whether samples kept their losses in some microbatch.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.is_running = self.has_compared = False
        self.refused: str | None = None
        self._sandbox = sandbox
        self._fields: dict[str, _Field] = {}
        self._is_tried = False
        self._kept = torch.empty(0, dtype=torch.bool)
        self._losses: list[Tensor] = []
        self._dtypes: set[torch.dtype] = set()
        self._words = 0
        self._is_random = False
        self._stack = ExitStack()
        self._expected: torch.Generator | None = None
        self._others: tuple[Any, Any] = (None, None)

    def runs(
        self, batch: Any, size: int, real: Tensor | None, *, begins_draw: bool, is_due: bool
    ) -> list[Any]:
        """The two microbatches to run, the shorter one first; none where it is not tried.

        Args:
            batch: not changed.
            size: B.
            real: `[B]`, bool: rows that are samples; None for all.
            begins_draw: whether it is the first microbatch of a draw.
            is_due: whether microbatches of this draw are tried.
        """
        self.end(loop=False)  # of an iterator that the loop has left
        self._is_tried &= not begins_draw
        found = [(n, x) for n, x in entries_of(batch, size) if x.ndim > 1]
        for place, x in found:
            self._fields.setdefault(place, _Field()).note(x, is_due=is_due)
        if self._is_tried or not is_due:
            return []
        varied = {n: field for n, field in self._fields.items() if field.has_varied}
        # The ones of a mask are at one end, and its zeros at the other.
        ends = [{n for n, f in varied.items() if left in f.padding} for left in (False, True)]
        # A mask alone does not tell which of them is padding.
        ends = [own if any(not varied[n].is_mask for n in own) else set() for own in ends]
        left = len(ends[True]) > len(ends[False])
        padded = {n: varied[n] for n in ends[left]}
        if len(ends[False]) == len(ends[True]):
            return []
        shorter = of_shorter(batch, size, real, padded, left=left)
        if shorter is None:
            return []
        self._is_tried = True
        self._kept, self._losses, self._is_random = shorter.kept, [], False
        return [shorter.batch, copied(batch)]

    def begin(self) -> None:
        """A run begins."""
        self._sandbox.enter()
        self._stack.enter_context(WithoutDropout())
        self.is_running = True

    def start(self) -> None:
        """The loop gets the microbatch now, with its generators seeded."""
        if self.is_running:
            self._words = 0
            self._expected = torch.Generator()
            self._expected.set_state(torch.get_rng_state())
            self._others = random.getstate(), _numpy_state()

    def forward(self, dtypes: set[torch.dtype], *, is_random: bool) -> None:
        """The model was called, which draws one number of torch's generator for its masks.

        Args:
            dtypes: that it computes in.
            is_random: whether it drew other numbers too, dropout aside.
        """
        self._words += 1
        self._dtypes |= dtypes
        self._is_random |= is_random

    def end(self, *, loop: bool = True) -> None:
        """A run is over; restores model and loop."""
        if not self.is_running:
            return
        self.is_running = False
        self._stack.close()
        if self._expected is not None:
            for _ in range(self._words):
                torch.randint(2**62, (), generator=self._expected)
            same = torch.equal(self._expected.get_state(), torch.get_rng_state())
            self._is_random |= not same or self._others != (random.getstate(), _numpy_state())
        self._sandbox.leave(loop=loop)

    def refusal(self, losses: Tensor) -> str | None:
        """A message where losses `[B]` of the second run are not those of the first, or None."""
        self._losses.append(losses.detach().clone())
        if len(self._losses) < 2:
            return None
        (before, now), self._losses = self._losses, []
        if self._is_random or not before.shape == now.shape == self._kept.shape:
            return None
        both = before.isfinite() & now.isfinite()
        # Float64 models of Hugging Face have norms and rotations in float32.
        dtypes = self._dtypes | {now.dtype, torch.float32}
        allowed = tolerance(dtypes) * torch.maximum(before.abs(), now.abs())
        wrong = ((before - now).abs() > allowed) & both
        if bool((wrong.cpu() & self._kept).any()):
            # A loop that catches the error meets it again.
            self.refused = _CHANGED
        else:
            self.refused, self.has_compared = None, True
        return self.refused


class _Field:
    """A tensor `[B, T, ...]` of each microbatch: whether T varies, and what pads its rows.

    Attributes:
        has_varied: whether microbatches had several T.
        is_mask: whether each row was zeros before ones, or ones before zeros.
    """

    def __init__(self) -> None:
        self.has_varied, self.is_mask = False, True
        self._length: int | None = None
        self._rows = 0
        # How many rows end with at least two of a value, on the right and on the left.
        self._ends: Counter[tuple[bool, tuple[float, ...]]] = Counter()

    def note(self, x: Tensor, *, is_due: bool) -> None:
        """Take the field of another microbatch; of one that is not tried its length alone."""
        self.has_varied |= self._length not in (None, x.shape[1])
        self._length = x.shape[1]
        if not is_due:
            return
        x = x.detach().cpu().double()  # not all operations take all integers
        self.is_mask &= x.ndim == 2 and bool(((x == 0) | (x == 1)).all())
        self.is_mask = self.is_mask and bool(((x[:, 1:] != x[:, :-1]).sum(1) < 2).all())
        self._rows += len(x)
        for left in (False, True):
            for row in x.flip(1) if left else x:
                if len(row) > 2 and torch.equal(row[-1], row[-2]) and bool((row != row[-1]).any()):
                    self._ends[left, tuple(row[-1].flatten().tolist())] += 1

    @property
    def padding(self) -> dict[bool, Tensor]:
        """For the right end (False) and the left one, the value with which many rows end."""
        found = {}
        for (left, value), count in reversed(self._ends.most_common()):
            if count >= max(_LEAST, self._rows / 3):
                found[left] = torch.tensor(value, dtype=torch.float64)
        return found

    def count(self, x: Tensor, *, left: bool) -> Tensor:
        """`[B]`: how many entries at an end of each row are padding."""
        columns = x.detach().cpu().double().reshape(*x.shape[:2], -1)
        is_padding = (columns == self.padding[left]).all(2)
        return (is_padding if left else is_padding.flip(1)).int().cumprod(1).sum(1)


def of_shorter(
    batch: Any, size: int, real: Tensor | None, fields: dict[str, _Field], *, left: bool
) -> Alteration | None:
    """The shorter samples of a batch, without padding that all of them have.

    All other rows are copies of one of them. A mask says how far rows are padded; without one,
    a quarter of the padding is cut, since samples may end with its value.

    Args:
        batch: not changed.
        size: B.
        real: `[B]`, bool: rows that are samples; None for all.
        fields: by the place of their tensors, those that are padded.
        left: whether they are padded at the left.

    Returns:
        None where half of the samples have no padding.
    """
    padded = {n: x for n, x in entries_of(batch, size) if n in fields}
    is_sample = torch.ones(size, dtype=torch.bool) if real is None else real
    samples, lengths = int(is_sample.sum()), {x.shape[1] for x in padded.values()}
    if samples < 2 or len(lengths) != 1:
        return None
    masks = [n for n in padded if fields[n].is_mask]
    counts = [fields[n].count(padded[n], left=left) for n in masks or padded]
    found = torch.stack(counts).amin(0).masked_fill(~is_sample, 0)
    least = int(found.sort(descending=True).values[samples // 2 - 1])
    cut = least if masks else least // 4
    if cut == 0 or cut >= min(lengths):
        return None
    kept = found >= least
    source = torch.where(kept, torch.arange(size), int(kept.int().argmax()))
    rows = rows_of(batch, source.tolist(), size)
    # Also fields of other values, such as positions, have this length.
    chosen = {id(x) for n, x in entries_of(rows, size) if x.ndim > 1}
    (length,) = lengths

    def cropped(x: Tensor) -> Tensor:
        if id(x) not in chosen or x.shape[1] != length:
            return x
        return (x[:, cut:] if left else x[:, :-cut]).contiguous()

    return Alteration(map_tensors(cropped, rows), kept & is_sample, places=False)


def _numpy_state() -> Any:
    return repr(np.random.get_state(legacy=False))
