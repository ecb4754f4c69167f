"""The audited run: canaries with orthogonal gradients, trained through the real engine.

Each table of the model has one weight for each canary, and a canary's loss is a multiple of the
sum of its own weights. So canary i's gradient is nonzero only in the canary's own coordinates, is
the same at every step, and is longer than max_grad_norm, so that only clipping bounds it. In these
coordinates a release is canary i's contribution (0 or the bound) plus noise, and this noise is
independent of the noise in other coordinates. So the scores of different canaries, and of
different steps, are independent given which canaries are in the data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from ..config import PerformanceConfig, PrivacyConfig
from ..noise import Banded

if TYPE_CHECKING:
    from ..engine import PrivacyEngine

# Norm of a canary's gradient before clipping, divided by max_grad_norm.
EXCESS = 4.0
_Batch = tuple[Tensor, Tensor]


NewEngine = Callable[..., "PrivacyEngine"]


class CanaryModel(nn.Module):
    """Computes losses [B] linear in two tables; each canary has its own weight in each table."""

    def __init__(self, canaries: int, *, scale: float, background: bool = False):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(canaries, 1) for _ in range(1 if background else 2)
        )
        self.background = nn.Embedding(1, 1) if background else None
        self.scale = scale

    def forward(self, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return losses [B] of canaries `numbers` [B], multiplied by `weights` [B]."""
        numbers = numbers[:, None]
        values = [table(numbers) for table in self.tables]
        if self.background is not None:
            values.append(self.background(torch.zeros_like(numbers)))
        total = torch.stack(values).sum(0).flatten(1).sum(1)
        return total * (self.scale * weights)


class Canaries(Dataset[_Batch]):
    """A dataset with one entry (number, weight of the loss) for each canary in `numbers`."""

    def __init__(self, numbers: NDArray[np.int64]):
        self.numbers = torch.from_numpy(numbers)
        self.weights = torch.ones(len(numbers), dtype=torch.float64)

    def include(self, included: NDArray[np.bool_]) -> None:
        """Set the loss weight to 1 for canaries in `included`, bool [canaries], else to 0."""
        self.weights = torch.from_numpy(included).double()[self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> _Batch:
        return self.numbers[index], self.weights[index]

    def __getitems__(self, indices: list[int]) -> list[_Batch]:
        chosen = torch.tensor(indices)
        return [(self.numbers[chosen], self.weights[chosen])]


def collate(entries: Sequence[_Batch]) -> _Batch:
    """Make a batch of entries, which the dataset returns one by one or as one batch."""
    if len(entries) == 1 and entries[0][0].ndim == 1:
        return entries[0]
    numbers, weights = zip(*entries, strict=True)
    return torch.stack(numbers), torch.stack(weights)


@dataclass(frozen=True)
class Release:
    """One release of a run."""

    # `[tables, canaries]`, float64 (of a sharded table, this rank's rows): released gradients,
    # times the expected batch size by which the engine divides sums
    sums: NDArray[np.float64]
    background: float  # the sum in the parameter that all canaries share, else nan
    # `[canaries]`: how often the loader sampled each canary for the logical batch
    drawn: NDArray[np.int64]


def mechanism_of(privacy: PrivacyConfig) -> Banded:
    """Return the noise mechanism of these settings; independent noise has one band."""
    mechanism = privacy.noise_mechanism
    return mechanism if isinstance(mechanism, Banded) else Banded(bands=1)


def whitened(releases: NDArray[np.float64], mechanism: Banded) -> NDArray[np.float64]:
    """Multiply releases y `[T, ...]` by C / |c|, so that their noise becomes independent.

    C is the banded matrix of the mechanism's coefficients c. The standard deviation of the noise
    becomes noise_multiplier * max_grad_norm.
    """
    found = np.zeros_like(releases)
    for i, c in enumerate(mechanism.coefficients[: len(releases)]):
        found[i:] += c * releases[: len(releases) - i]
    return found / mechanism.noise_scale()


def as_it_is(model: nn.Module) -> None:
    """Do nothing to the model: the default of `Run(prepare=)`."""


class Run:
    """A run of the canary model with a new engine and these settings.

    The model has `canaries` canaries; the dataset has the canaries in `numbers` (default: all).
    Without `background` the model has two tables; with it, one table and a parameter that all
    canaries share. `prepare` is called with the model before `make_private`, for instance to shard
    the model. `bounds` `[parameters]` is a canary's contribution to each parameter.
    """

    _model_type: type[nn.Module] = CanaryModel

    def __init__(
        self,
        engine: PrivacyEngine,
        privacy: PrivacyConfig,
        performance: PerformanceConfig,
        *,
        canaries: int,
        numbers: NDArray[np.int64] | None = None,
        background: bool = False,
        device: str = "cpu",
        prepare: Callable[[nn.Module], object] = as_it_is,
    ):
        everyone = np.arange(canaries) if numbers is None else numbers
        self.engine, self.canaries = engine, canaries
        self.dataset = Canaries(everyone)
        # Equal norms in both layers, so that flat and per-layer clipping use the whole bound.
        scale = EXCESS * privacy.bound / math.sqrt(2)
        options = {"background": True} if background else {}
        model = self._model_type(canaries, scale=scale, **options)
        model = model.to(device=device, dtype=torch.float64)
        prepare(model)
        rate = privacy.sample_rate
        assert rate is not None
        with quietly():
            made: tuple[Any, Any, Any] = engine.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
                data_loader=self._new_loader(max(1, round(rate * len(np.unique(everyone))))),
                privacy=privacy,
                performance=performance,
            )
        self.model, self.optimizer, self.loader = made
        parts = {
            name: group.bound / math.sqrt(len(group.parameters))
            for group in engine.groups()
            for name in group.parameters
        }
        self.bounds = np.array([parts[name] for name, _ in model.named_parameters()])

    def draws(self, count: int) -> Iterator[NDArray[np.int64]]:
        """Yield how often each entry is in a logical batch, `[entries]`, for `count` batches."""
        sampler: Any = self.loader.batch_sampler
        for index in range(count):
            drawn = np.array(sampler.draw(index), dtype=np.int64)
            yield np.bincount(drawn, minlength=len(self.dataset))

    def releases(self) -> Iterator[Release]:
        """Train for one epoch without changing the model, and yield each release."""
        drawn = np.zeros(self.canaries, dtype=np.int64)
        device = next(self.model.parameters()).device
        with quietly():
            for batch in self.loader:
                self.engine.backward(self._losses(batch, device))
                drawn += self._drawn(batch)
                is_last = self.loader.is_last
                self.optimizer.step()
                if is_last:
                    yield self._read(drawn)
                    drawn = np.zeros_like(drawn)
                self.optimizer.zero_grad()

    def _new_loader(self, batch_size: int) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=batch_size, collate_fn=collate)

    def _losses(self, batch: Any, device: torch.device) -> Tensor:
        numbers, weights = batch
        losses: Tensor = self.model(numbers.to(device), weights.to(device))
        return losses

    def _drawn(self, batch: Any) -> NDArray[np.int64]:
        """Return how often each canary is sampled in a microbatch, `[canaries]`."""
        numbers, _ = batch
        return np.bincount(numbers[self.loader.is_real], minlength=self.canaries)

    def _read(self, drawn: NDArray[np.int64]) -> Release:
        factor = self.optimizer.expected_batch_size
        grads = [p.grad for p in self.model.parameters()]
        # Read only this rank's rows of a sharded parameter.
        own = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        read = [grad.double().flatten().cpu().numpy() for grad in own]
        background = math.nan
        if self.model.background is not None:
            background = float(read.pop()[0]) * factor
        return Release(np.stack(read) * factor, background, drawn)


@contextmanager
def quietly() -> Iterator[None]:
    """Ignore warnings, such as those about empty batches, which are public here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
