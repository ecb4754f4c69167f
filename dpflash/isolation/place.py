"""PlaceTrial: tests that a sample's loss does not depend on its place in the batch.

A sample's place is the length to which it is padded, and the samples in the rows around it. A
packed document's place is its position in its row. Before a microbatch is trained on, it is run
without dropout and with its samples in other places:
- half of the samples exchange their rows,
- the shorter samples run without the padding for the longer samples, or
- the documents of each row are in reverse order.
Up to rounding, losses must equal the losses of training. If the loop reduces losses to a scalar,
per-sample gradients are compared instead. If the model has dropout, the comparison is with another
run without dropout, and not with training.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..random_state import generators_of
from ..refusal import UNTESTED
from ..verification.nested import map_tensors
from .comparison import changed_losses
from .copies import copied
from .dropout import WithoutDropout
from .place_gradients import PlaceGradients
from .rows import exchanged, mask_sums, rows_of
from .sandbox import Sandbox

# For losses [B], gradients are compared too, in this number of logical batches at the start.
_FIRST = 2
# Dtypes with a machine epsilon above this have 16 bits or fewer.
_COARSE = 1e-5


_Backward = Callable[[list[Tensor], list[Tensor]], object]


class Kind(NamedTuple):
    """A way to move samples to other places: less padding, other order, or other rows.

    Attributes:
        how: the description of these places in `engine.trials`.
        refusal: the message if losses change.
    """

    how: str
    refusal: str


LESS_PADDING = Kind(
    "with less padding",
    "the loss of a sample changed as the longer samples of the batch were left out and it was "
    "padded less, so nothing was released: it depends on their length. Mask the padding "
    "(attention_mask, means over a sample's own tokens, pack_padded_sequence), and use positions "
    "that padding does not shift. Or pad all samples to one public length: "
    "collate_fn=dpflash.sampling.PadTo(512, {'labels': -100}); fields of tuples are named by "
    "number. If masks are targets, samples with more ones count as longer, and the loss mixes "
    f"samples: a Dice loss must sum over each sample, x.flatten(1).sum(1). {UNTESTED}",
)
OTHER_NEIGHBORS = Kind(
    "with documents elsewhere in rows",
    "the loss of a document changed as documents stood elsewhere in their row, so nothing was "
    "released: it depends on the document's place, which the lengths of other documents "
    "determine, or on neighboring documents. Positions must begin anew with each document: use "
    "batch.position_ids, not arange(T). Attention, targets (batch.targets, not "
    "input_ids.roll(-1)), convolutions and other layers must not cross documents, see "
    f"docs/packing.md. {UNTESTED}",
)
OTHER_ORDER = Kind(
    "with the other samples in another order",
    "the loss of a sample changed as other samples of the batch exchanged their rows, so nothing "
    "was released: it depends on those samples, or on their order. The usual causes:\n"
    "  - a capacity that the first rows use up (mixture of experts), a sum over rows (cumsum), "
    "rows that the loop sorts or moves\n"
    "  - data that loop or model keep for the next row or microbatch (a queue, a running mean)\n"
    "  - row indices that collate_fn computes: compute them in the loop\n"
    f"{UNTESTED}",
)


# The kinds that `engine.trials` names.
OF_ROWS = (LESS_PADDING, OTHER_ORDER)
OF_DOCUMENTS = (OTHER_NEIGHBORS,)


class Place(NamedTuple):
    """A microbatch whose samples were moved to other places.

    Attributes:
        batch: the microbatch to run.
        kept: `[U]`, bool: the samples whose losses must not change; each is still in its own row.
        kind: how the samples were moved.
    """

    batch: Any
    kept: Tensor
    kind: Kind


class PlaceTrial:
    """Tests that losses do not depend on padding, on row order, or on neighbors in a packed row.

    Args:
        sandbox: the sandbox of model and loop.
        has_ranks: whether there are other ranks, which must run the same number of microbatches.
        devices: the model's devices other than the CPU.
        modules: function that returns the model's modules.
        is_alone: whether this rank has whole samples and parameters, so that backwards exchange
            nothing.
        declared: the loss_reduction, or None. If it is set, each logical batch compares gradients.
            If it is None, only the first two logical batches do, and only for 32-bit models.
        numbers: maps "max_grad_norm" to its current value.

    Attributes:
        is_running: whether one of the runs has begun and not ended.
        gradients: watches the gradients of the current run; None if they are not compared.
        waits: whether the losses of the microbatch itself will be compared.
        refused: the message of a refusal for the last tried microbatch, or None.
        compared: the kinds of places in which the losses did not change.
        without_dropout: the torch function mode in which the forwards of a run are called.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        has_ranks: bool,
        devices: Collection[torch.device],
        modules: Callable[[], Iterable[nn.Module]] = tuple,
        is_alone: bool = True,
        declared: str | None = None,
        numbers: Mapping[str, float],
    ) -> None:
        self.is_running = self.waits = False
        self.compared: set[Kind] = set()
        self.refused: str | None = None
        self._sandbox, self._has_ranks = sandbox, has_ranks
        self._tried: set[Kind] = set()  # The kinds tried in this logical batch.
        self._places: list[Place] = []
        self._turn = 0
        self._losses: list[Tensor] = []
        self.gradients: PlaceGradients | None = None
        self._modules, self._is_alone = modules, is_alone
        self._declared, self._numbers = declared, numbers
        self._runs: list[PlaceGradients] = []
        self._waits_for_gradients = False
        # Pairs (output of the model, leaf that the loop gets instead), see `ends_at`.
        self._ends: list[tuple[Tensor, Tensor]] = []
        self._backward: _Backward = lambda outputs, grads: None
        self._dtypes: set[torch.dtype] = set()
        self._words = 0
        self._is_random = self._is_by_sample = False
        self.without_dropout = WithoutDropout()
        self._expected: torch.Generator | None = None
        self._generators = [g for g in generators_of(*devices) if g.device.type != "cpu"]
        self._others: Any = None

    def is_due(self, *, begins_draw: bool, is_tried: bool) -> bool:
        """Return whether to run the next microbatch with samples in other places.

        Args:
            begins_draw: whether the next microbatch is the first one of a logical batch.
            is_tried: whether the schedule tries microbatches of this logical batch.
        """
        self.end(loop=False)  # The loop may have left an earlier iterator within a run.
        self.waits = self._waits_for_gradients = False
        if begins_draw:
            self._tried = set()
        # A further comparison would overwrite `refused`.
        return is_tried and (begins_draw or self.refused is None)

    def take_by_sample(self) -> None:
        """Note that the losses of the microbatch itself are computed one sample at a time."""
        self._is_by_sample = True

    def runs(self, batch: Any, places: Sequence[Place]) -> Iterator[Any]:
        """Yield the microbatches with moved samples, then, if needed, an unmoved copy.

        Args:
            batch: the microbatch, which is not changed.
            places: moved versions of the batch; with several ranks, each logical batch runs one.
        """
        if self._has_ranks:
            if self._tried:
                return
            none = Place(copied(batch), torch.zeros(0, dtype=torch.bool), LESS_PADDING)
            places = [places[self._turn % len(places)] if places else none]
        else:
            places = [place for place in places if place.kind not in self._tried]
            places = [place for place in places if bool(place.kept.any())]
        if not places:
            return
        self._tried |= {place.kind for place in places}
        self._places = [place._replace(batch=None) for place in places]
        self._turn += 1
        self.refused = None
        self._losses, self._runs, self._is_random = [], [], False
        self.without_dropout, self._is_by_sample = WithoutDropout(), False
        yield from (place.batch for place in places)
        if self._has_ranks or self.without_dropout.seen or self._is_by_sample:
            yield copied(batch)
        else:
            self.waits = len(self._losses) == len(places)
            self._waits_for_gradients = len(self._runs) == len(places)

    def attach(self, backward: _Backward) -> None:
        """Set the function that runs a backward from (outputs, gradients of the outputs)."""
        self._backward = backward

    def begin(self) -> None:
        """Begin a run."""
        self._ends = []
        self._sandbox.enter()
        self.is_running = True
        if self._declared is not None or (self._is_alone and self._turn <= _FIRST):
            self.gradients = PlaceGradients(self._turn)

    def start(self) -> None:
        """Note that the loop receives the microbatch now, and that the generators are seeded."""
        if self.is_running:
            self._words = 0
            self._expected = torch.Generator()
            self._expected.set_state(torch.get_rng_state())
            self._others = self._other_states()

    def forward(self, dtypes: set[torch.dtype], *, is_random: bool) -> None:
        """Record a call of the model, which draws one number, a mask seed, from torch's generator.

        Args:
            dtypes: the dtypes that the model computes in.
            is_random: whether the call drew random numbers other than those of dropout.
        """
        self._words += 1
        self._dtypes |= dtypes
        if self._declared is None and _epsilon(self._dtypes) > _COARSE:
            # In deep models, 16-bit rounding may change gradients more than other samples do.
            self.gradients = None
        self._is_random |= is_random

    def ends_at(self, outputs: Any) -> Any:
        """Replace the model's outputs by detached copies, so a scalar loss's backward ends there.

        Later `end` runs the backward of the model itself, from the outputs and their gradients.
        """

        def cut(x: Tensor) -> Tensor:
            if not x.requires_grad:
                return x
            own = x.detach().requires_grad_()
            self._ends.append((x, own))
            return own.clone()  # The loop may change it in place.

        return map_tensors(cut, outputs)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Disable dropout in layers that a checkpoint recomputes, as in the forward of the run."""
        training = [module for module in self._modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def take_scalar(self, loss: Tensor) -> bool:
        """Backpropagate a scalar loss to the copies of `ends_at`; return whether there are any."""
        if self._ends:
            torch.autograd.backward(loss, inputs=[own for _, own in self._ends])
        return bool(self._ends)

    def end(self, *, loop: bool = True) -> None:
        """End a run; restore the model and, if `loop`, the state of the loop."""
        if not self.is_running:
            return
        self.is_running = False
        if self._expected is not None:
            for _ in range(self._words):
                torch.randint(2**62, (), generator=self._expected)
            same = torch.equal(self._expected.get_state(), torch.get_rng_state())
            self._is_random |= not same or self._others != self._other_states()
        ends, self._ends = [(x, own.grad) for x, own in self._ends], []
        reached = [(x, grad) for x, grad in ends if grad is not None]
        if loop and reached:
            self._backward([x for x, _ in reached], [grad for _, grad in reached])
        self._sandbox.leave(loop=loop)
        found, self.gradients = self.gradients, None
        if loop and found is not None and found.values:
            self._runs.append(found)
            if len(self._runs) > len(self._places):
                for group in found.values:
                    self._compare_gradients(found, group)

    def _other_states(self) -> tuple[Any, ...]:
        own = [generator.get_state().numpy().tobytes() for generator in self._generators]
        return random.getstate(), pickle.dumps(np.random.get_state(legacy=False)), *own

    def of_training(self, refuse: Callable[[str], object]) -> tuple[PlaceGradients, ...]:
        """Return a watch that compares the training backward with the runs; () if not needed.

        Args:
            refuse: called with the message of a refusal, before gradients are summed.
        """
        if not self._waits_for_gradients:
            return ()

        def finished(group: int) -> None:
            self._compare_gradients(found, group)
            if self.refused is not None:
                refuse(self.refused)

        found = PlaceGradients(self._turn, finished)
        return (found,)

    def take(self, losses: Tensor) -> None:
        """Record the losses `[U]` of a run or, if `waits`, of the microbatch itself.

        The last recorded losses are compared with the earlier ones; a difference sets `refused`.
        """
        self._losses.append(losses.detach().clone())
        if len(self._losses) <= len(self._places):
            return
        (*before, now), self._losses, self.waits = self._losses, [], False
        self._compare(before, now)

    def _compare_gradients(self, now: PlaceGradients, group: int) -> None:
        runs, parts = self._runs[: len(self._places)], _of_group(now.parts, group)
        if not parts or any(_of_group(run.parts, group) != parts for run in runs):
            return
        values, sizes = now.values[group], now.squares[group].sqrt()
        before = [run.values[group] for run in runs]
        # Allow the changes of all samples together to be a thousandth of the bound.
        count = max(1, len(values))
        least = 1e-3 * self._numbers["max_grad_norm"] / count
        least /= count if self._declared == "mean" else 1
        self._compare(before, values, sizes=sizes, least=least)

    def _compare(
        self, before: list[Tensor], now: Tensor, *, sizes: Tensor | None = None, least: float = 0.0
    ) -> None:
        """Compare losses, or products of gradients, of the runs with `now`; may set `refused`."""
        count = len(self._places[0].kept)
        if self._is_random or any(x.shape != now.shape or len(x) != count for x in (*before, now)):
            return
        # Also float32, in which Hugging Face's float64 models compute norms and positions.
        eps = _epsilon(self._dtypes | {now.dtype, torch.float32})
        rounding = eps ** (2 / 3)
        if sizes is not None and eps > _COARSE:
            rounding = eps**0.5
        elif sizes is not None:
            # Allow the changes of all samples together to be a thousandth of a gradient.
            rounding = max(rounding, min(eps**0.5, 1e-3 / max(1, len(now))))
        for found, place in zip(before, self._places, strict=True):
            changed = changed_losses(
                found, now, place.kept, rounding=rounding, sizes=sizes, least=least
            )
            if bool(changed.any()):
                # Store the message, so that a loop that catches the error gets the error again.
                self.refused = place.kind.refusal
                return
            self.compared.add(place.kind)


def _epsilon(dtypes: Collection[torch.dtype]) -> float:
    """Return the largest machine epsilon of the floating-point dtypes; 0 without such dtypes."""
    found = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
    return max(found, default=0.0)


def _of_group(parts: Collection[tuple[int, int, bool]], group: int) -> set[tuple[int, bool]]:
    return {(position, is_dense) for number, position, is_dense in parts if number == group}


def fuller_left_out(batch: Any, rows: Sequence[bool]) -> tuple[Any, list[bool]] | None:
    """Replace the longer samples (rows with the most ones in a mask) by copies of another row.

    A loop may cut padded rows to the longest sample, which is then one of the shorter samples.

    Args:
        batch: the microbatch, which is not changed.
        rows: which of its rows are samples.

    Returns:
        (the new batch, which rows keep their own sample); None if the masks do not differ.
    """
    size, samples = len(rows), [row for row, is_sample in enumerate(rows) if is_sample]
    for sums in mask_sums(batch, size) if samples else ():
        filled = sums.tolist()
        own = sorted(filled[row] for row in samples)
        most = min(own[(len(own) - 1) // 2], own[-1] - 1)
        kept = [filled[row] <= most and is_sample for row, is_sample in enumerate(rows)]
        if any(kept):
            source = [row if kept[row] else kept.index(True) for row in range(size)]
            return rows_of(batch, source, size), kept
    return None


def in_another_order(
    batch: Any, samples: Tensor, rng: np.random.Generator
) -> tuple[Any, list[bool]] | None:
    """Exchange the rows of a random half of the samples; the other samples are compared.

    Args:
        batch: the microbatch, which is not changed.
        samples: `[B]`, int64: the number of each row's sample; -1 for padding rows.
        rng: a secret generator.

    Returns:
        (the batch with exchanged rows; for each row, whether its sample is compared). None if the
        batch has fewer than three samples, or no part with rows.
    """
    of_row = samples.numpy()
    numbers, order = rng.permutation(np.unique(of_row[of_row >= 0])), np.arange(len(of_row))
    if len(numbers) < 3:
        return None
    is_moved = np.isin(of_row, numbers[: max(2, len(numbers) // 2)])
    rows = rng.permutation(is_moved.nonzero()[0])
    order[rows] = np.roll(rows, 1)
    changed, has_rows = exchanged(copied(batch), order.tolist(), len(of_row))
    return (changed, (~is_moved).tolist()) if has_rows else None
