"""ExampleTrial: tests with a public batch, before training, whether samples stay apart.

The batch is run three times: with other contents in half of its samples, with other contents in
the other half, and unchanged. For samples that keep their contents, the losses, the layers' inputs
and the per-sample gradients must be the same in these runs. Nothing is trained on the batch. Since
the batch is public, the error says what changed, in which layer or sample, and by how much.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..packing import PackedBatch, Units
from ..refusal import PrivateRefusal
from ..verification.nested import leaves_of
from . import alteration
from .alteration import Alteration
from .comparison import changed_losses, changed_rows, changed_use, mixed
from .copies import copied
from .recording import Recording
from .sandbox import Sandbox

_LOSS = (
    "the loss of sample {sample} is {now:.6g} in the example, and {before:.6g} if other samples "
    "are replaced, so it depends on them. The usual causes are a mean, a norm or a maximum over "
    "the batch in the loop or in the loss (losses.mean(), normalized advantages, class weights, "
    "mixup, hard negatives), and data of a batch that the loop keeps for the next batch. Compute "
    "the loss of each sample from its own row alone; engine.check helps to find the operation"
)
_GRADIENT = (
    "the gradient of layer '{layer}' for a sample changed as other samples of the example were "
    "replaced, so it depends on them. Usual causes: a factor of the losses that the batch "
    "determines, a contrastive loss, or a scalar that is no mean or sum of losses of single "
    "samples (token means, class weights). Compute the loss of each sample from its own row"
)
_ROWS = (
    "the rows that engine.backward(loss_fn, batch) gets for samples of the example changed as "
    "others were replaced: the loop computes something over the batch. Compute it in loss_fn"
)
_LATE = (
    "losses or gradients of samples of make_private(example=...) changed as other samples were "
    "replaced. The loop has read private batches under no_grad before, so the error gives no "
    "details: train first, or run the loop again in a new process"
)
_CALLS = (
    "the loop left out the backward of the example, or called the model a different number of "
    "times if some of its samples were replaced: treat trials as any other microbatch (no "
    "`if not loader.is_real.any(): continue`)"
)


class ExampleTrial:
    """Runs the public batch of `make_private(example=)`: altered twice, and unchanged.

    Args:
        batch: a batch as the loop receives it, samples first; it is not changed.
        sandbox: the sandbox of model and loop.

    Attributes:
        size: U, the number of samples.
        units: the samples if they are packed documents, else None.
        recording: the recording of the current run; None outside a run.
    """

    def __init__(self, batch: Any, sandbox: Sandbox) -> None:
        self.units: Units | None = batch.units if isinstance(batch, PackedBatch) else None
        self.size = samples_in(batch)
        self.recording: Recording | None = None
        self._batch = batch
        self._sandbox = sandbox
        self._is_done = self._is_late = False

    def _altered(self) -> list[Alteration]:
        if isinstance(self._batch, PackedBatch):
            return [alteration.of_documents(self._batch, number) for number in (0, 1)]
        rng = np.random.default_rng(0)
        found = alteration.of_samples(self._batch, self.size, None, None, rng)
        assert found is not None  # see samples_in
        return [found, alteration.complement(self._batch, found, rng)]

    def runs(self) -> Iterator[Alteration]:
        """Yield the batches that the loop must run: two altered versions, then the batch itself.

        Raises:
            ValueError: samples are not kept apart; the next call tries again.
            PrivateRefusal: the same, but the loop has read private batches under no_grad before.
        """
        self._is_late |= not torch.is_grad_enabled()
        if self._is_done or not torch.is_grad_enabled():
            return
        altered = self._altered()
        every = torch.ones(self.size, dtype=torch.bool)
        itself = Alteration(copied(self._batch), every, self.units)
        recordings = []
        try:
            for given in (*altered, itself):
                real = torch.ones(len(given.kept), dtype=torch.bool)
                self.recording = Recording(real, has_rows=True)
                recordings.append(self.recording)
                self._sandbox.enter()
                yield given
                self._sandbox.leave()
        finally:
            self.recording = None
            self._sandbox.leave(loop=False)
        now = recordings.pop()
        for before, how in zip(recordings, altered, strict=True):
            if (refusal := _difference(before, now, how.kept)) is not None:
                if self._is_late:
                    raise PrivateRefusal(_LATE) from None
                raise ValueError(f"make_private(example=...): {refusal}")
        self._is_done = True


def _difference(before: Recording, now: Recording, kept: Tensor) -> str | None:
    """Compare the samples that are the same in two runs; return an error message or None.

    kept: `[U]`, bool: the samples that are the same.
    """
    if not (before.had_backward and now.had_backward) or len(before.calls) != len(now.calls):
        return _CALLS
    for first, second in zip(before.calls, now.calls, strict=True):
        if first.size == second.size == len(kept) and (refusal := mixed(first, second, kept)):
            return refusal
    rows = changed_rows(before.batch, now.batch)
    if rows is None or bool((rows & kept).any()):
        return _ROWS
    one, two = before.losses, now.losses
    if one is not None and two is not None and one.shape == two.shape == kept.shape:
        changed = changed_losses(one, two, kept)
        if bool(changed.any()):
            sample = int(changed.int().argmax())
            return _LOSS.format(sample=sample, before=float(one[sample]), now=float(two[sample]))
    pairs = [(before.backward, now.backward, kept)]
    pairs += zip(before.rows, now.rows, kept.split(1), strict=False)
    for a, b, own in pairs:
        if a is not None and b is not None and (refusal := changed_use(a, b, own, _GRADIENT)):
            return refusal
    return None


def samples_in(batch: Any) -> int:
    """Return the number of samples in an example.

    Raises:
        ValueError: the example has fewer than two samples.
    """
    if isinstance(batch, PackedBatch):
        size = batch.units.size
    else:
        dims = [len(x) for _, x in leaves_of(batch, kinds=(Tensor, np.ndarray)) if x.ndim]
        size = dims[0] if dims else 0
    if size < 2:
        raise ValueError(
            f"example={type(batch).__name__}: expected a public batch of two samples or more, as "
            "the loop receives batches (tensors with the samples first); pass 4 to 8 samples"
        )
    return size
