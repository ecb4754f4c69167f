"""What every accountant is: a history of phases, and epsilon and delta read off it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from . import _validate

Phase = tuple[float, float, int]  # noise_multiplier, sample_rate, steps


class _NoisyOptimizer(Protocol):
    """What the optimizer hook reads."""

    @property
    def noise_multiplier(self) -> float: ...

    @property
    def accumulated_iterations(self) -> int: ...


class Accountant(ABC):
    """A history of noisy steps, and the privacy that they cost together.

    The methods, `history` and the state's keys are those of Opacus' IAccountant, so that either
    library's engine can use either's accountants.

    Attributes:
        history: one (noise_multiplier, sample_rate, steps) per phase of equal steps, in the order
            in which they were taken. It may be assigned; it is checked when it is read.

    Guarantees:
        The steps are Poisson-subsampled Gaussian mechanisms: each sample enters each batch
        independently with probability sample_rate, and the noise's standard deviation is
        noise_multiplier times the L2 sensitivity of the sum. Neighbouring data sets differ by one
        added or removed sample.
    """

    def __init__(self) -> None:
        self.history: list[Phase] = []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Write one step into the history.

        Args:
            noise_multiplier: the noise's standard deviation over the sensitivity, >= 0.
            sample_rate: the chance of one sample to be in the batch, in [0, 1].

        Raises:
            ValueError: an argument is out of its range.
        """
        _validate.non_negative(noise_multiplier=noise_multiplier)
        _validate.rate(sample_rate=sample_rate)
        steps = 0
        if self.history and tuple(self.history[-1][:2]) == (noise_multiplier, sample_rate):
            steps = self.history.pop()[2]
        self.history.append((noise_multiplier, sample_rate, steps + 1))

    @abstractmethod
    def get_epsilon(self, delta: float) -> float:
        """Epsilon of the whole history at this delta.

        Args:
            delta: in (0, 1).

        Returns:
            An epsilon >= 0 for which the history is (epsilon, delta)-private; inf where none is
            known.

        Raises:
            ValueError: delta is out of its range, or the history is malformed.
        """

    @abstractmethod
    def get_delta(self, epsilon: float) -> float:
        """Delta of the whole history at this epsilon.

        Args:
            epsilon: >= 0, finite.

        Returns:
            A delta in [0, 1] for which the history is (epsilon, delta)-private.

        Raises:
            ValueError: epsilon is out of its range, or the history is malformed.
        """

    def get_epsilon_lower(self, delta: float) -> float | None:
        """A certified lower end of the history's true epsilon, or None where there is none."""
        return None

    @classmethod
    @abstractmethod
    def mechanism(cls) -> str:
        """The name under which this kind of accountant is created and saved."""

    def __len__(self) -> int:
        """Number of phases, as in Opacus; the steps are their third entries."""
        return len(self.history)

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[_NoisyOptimizer], None]:
        """A function for an optimizer's step hook that writes each of its steps.

        Args:
            sample_rate: the chance of one sample to be in one of the optimizer's batches.

        Returns:
            A function of an optimizer with `noise_multiplier` and `accumulated_iterations`.
        """

        def hook_fn(optim: _NoisyOptimizer) -> None:
            self.step(
                noise_multiplier=optim.noise_multiplier,
                sample_rate=sample_rate * optim.accumulated_iterations,
            )

        return hook_fn

    def state_dict(self) -> dict[str, Any]:
        """The history and the mechanism's name, under Opacus' keys."""
        return {"history": list(self.history), "mechanism": self.mechanism()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the history by a saved one.

        Args:
            state_dict: what `state_dict` of this class, or of Opacus' class of the same mechanism,
                returned.

        Raises:
            ValueError: the state is empty, lacks a key, is of another mechanism, or its history is
                malformed. The present history is then left as it is.
        """
        if not state_dict:
            raise ValueError(
                f"state_dict={state_dict!r}: expected the keys 'history' and 'mechanism'; "
                "pass what state_dict() returned"
            )
        for key in ("history", "mechanism"):
            if key not in state_dict:
                raise ValueError(
                    f"state_dict has the keys {sorted(map(str, state_dict))} and no {key!r}; "
                    "pass what an accountant's state_dict() returned"
                )
        saved = state_dict["mechanism"]
        if saved != self.mechanism():
            raise ValueError(
                f"state_dict of mechanism {saved!r} cannot be loaded into an accountant of "
                f"mechanism {self.mechanism()!r}; create the accountant that was saved"
            )
        history = state_dict["history"]
        if not isinstance(history, tuple | list):
            raise ValueError(
                f"state_dict['history']={history!r}: expected a list of "
                "(noise_multiplier, sample_rate, steps); pass what state_dict() returned"
            )
        self.history = self._checked(history)

    def _phases(self) -> list[Phase]:
        """The history, checked, without phases that took no step."""
        return [phase for phase in self._checked(self.history) if phase[2] > 0]

    @staticmethod
    def _checked(history: list[Phase] | tuple[Phase, ...]) -> list[Phase]:
        """The history as tuples; refuses malformed entries."""
        for entry in history:
            _validate.phase(entry)
        return [(entry[0], entry[1], entry[2]) for entry in history]
