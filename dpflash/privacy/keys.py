"""The secret keys of a run, from the operating system or from a seed.

A random value is a function of a key and an address, see `dpflash.kernels.noise`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from dpflash.kernels.noise import KEY_BYTES, WORDS_PER_BLOCK, keystream

from ..distributed.mesh import Ranks

_CHUNK_WORDS = 1 << 20
_numbers = itertools.count()


def master_key(seed: int | None = None) -> bytes:
    """A new 32-byte key: from the operating system, or from a seed for reproducible research."""
    if seed is None:
        return os.urandom(KEY_BYTES)
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ValueError(
            f"seed={seed!r}: expected an integer, or None for keys from the operating system"
        )
    return hashlib.blake2b(
        str(int(seed)).encode(), digest_size=KEY_BYTES, person=b"dpflash-seed"
    ).digest()


def derive_key(key: bytes, purpose: str) -> bytes:
    """An independent 32-byte key for one purpose, so that sampling and noise never share bits."""
    return hashlib.blake2b(purpose.encode(), key=key, digest_size=KEY_BYTES).digest()


def uniform_words(key: bytes, *, index: int, count: int) -> np.ndarray:
    """Uniform words [count], uint64, at address `index`."""
    parts = [
        np.frombuffer(
            keystream(
                key,
                first=index,
                second=0,
                block=start // WORDS_PER_BLOCK,
                count=min(_CHUNK_WORDS, count - start),
            ),
            dtype="<u8",
        )
        for start in range(0, count, _CHUNK_WORDS)
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype="<u8")


class RunKeys:
    """The secret keys of one run, under which no two releases get the same noise.

    Args:
        seed: derives the keys from this number; None for keys from the operating system.
        ranks: the ranks that share the keys.

    Attributes:
        seed: the seed passed, or that of the loaded checkpoint.
        run: the unique name of the run in the ledger.
        incarnation: a number in the noise and sampling keys. It changes when a checkpoint older
            than the ledger is loaded, so that no noise is used twice.
    """

    def __init__(self, seed: int | None, ranks: Ranks):
        self.seed = seed
        self.incarnation = 0
        self._ranks = ranks
        self._master = ranks.broadcast_from_first(master_key(seed), "the engine's key")
        # Distinguishes two processes that continue from one state.
        self._branch = ""
        self.run = self._new_token()
        self._engine = next(_numbers)
        self._is_restored = False
        self._has_warned = False

    @property
    def master(self) -> bytes:
        """The key that the other keys are derived from."""
        return self._master

    @property
    def noise(self) -> bytes:
        """The key of the noise."""
        return derive_key(self._master, f"noise-{self.incarnation}{self._branch}")

    @property
    def sampling(self) -> bytes:
        """The key of the draws."""
        return derive_key(self._master, f"sampling-{self.incarnation}")

    def begin_model(self) -> None:
        """Change the keys for another model, whose releases are counted from 0 again."""
        self._master = derive_key(self._master, "next model")
        self.run = self._new_token()

    def branch_off(self) -> None:
        """Switch to a noise key that no other process uses. With a seed: no change."""
        if self.seed is None:
            self._branch = f"-{self._new_token()}"

    def leave_ranks(self) -> None:
        """Continue in a forked process, which is none of the ranks, with noise of its own."""
        self._ranks = Ranks()
        self.branch_off()

    def claim(self, step: int) -> None:
        """Record a release before it is made, for an engine without a ledger.

        Warns if the engine that wrote a checkpoint and one restored from it both continue.

        Raises:
            RuntimeError: another engine of this process, restored from the same checkpoint, has
                made this release.
        """
        claims = _claims.setdefault((self.run, self.incarnation), {})
        others = [c for engine, c in claims.items() if engine != self._engine and step in c.steps]
        if self._is_restored and any(other.is_restored for other in others):
            raise RuntimeError(
                "another engine of this process was restored from the same checkpoint and has "
                "released steps since: neither engine's epsilon includes the other's steps, and "
                "with a seed both use the same noise, so that their difference shows the data. "
                "Continue from the other's newest checkpoint, or use PrivacyEngine(ledger=...) "
                "from the start, which counts both"
            )
        own = claims.setdefault(self._engine, _Claim(range(step, step), self._is_restored))
        own.steps, own.is_restored = range(own.steps.start, step + 1), self._is_restored
        if others and not self._has_warned:
            self._has_warned = True
            if self.seed is None:
                warnings.warn(
                    "the engine that wrote this run's checkpoint and one restored from it both "
                    "continue in this process: neither engine's epsilon includes the other's "
                    "steps. Release the results of one of them, or use PrivacyEngine(ledger=...)",
                    stacklevel=5,
                )

    def state_dict(self) -> dict[str, Any]:
        """The keys as plain values. Keep them secret: whoever has them can subtract the noise."""
        return {
            "key": self._master,
            "incarnation": self.incarnation,
            "run": self.run,
            "branch": self._branch,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, ledger_releases: int | None) -> None:
        """Continue with the keys of a checkpoint.

        Args:
            state: of the run that wrote the checkpoint.
            ledger_releases: number of releases in the ledger. None without a ledger: the other
                run may have continued, so this one needs noise of its own.
        """
        self._master = state["key"]
        self.incarnation = state["incarnation"]
        self.run = state["run"]
        self.seed = state["seed"]
        self._branch = state["branch"]
        if ledger_releases is None:
            self._is_restored = True
            self.branch_off()
        elif ledger_releases != state["ledger_releases"]:
            # The ledger only grows, so no other continuation of this run has used this number.
            self.incarnation = ledger_releases

    def _new_token(self) -> str:
        return self._ranks.broadcast_from_first(secrets.token_bytes(32), "a run's name").hex()


@dataclass
class _Claim:
    """The releases that one engine of this process made in one run."""

    steps: range
    is_restored: bool


# (run, incarnation) -> engine -> its releases. Without a ledger, noise that is used twice can be
# detected within one process only.
_claims: dict[tuple[str, int], dict[int, _Claim]] = {}
