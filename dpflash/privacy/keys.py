"""The secret keys of a run, from the operating system or from a seed.

All random values are computed from a key and an address, see `dpflash.kernels.noise`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, NoReturn

import numpy as np

from dpflash.kernels.noise import KEY_BYTES, WORDS_PER_BLOCK, keystream

from ..distributed.mesh import Ranks
from ..refusal import warn

_CHUNK_WORDS = 1 << 20
_numbers = itertools.count()


def master_key(seed: int | None = None) -> bytes:
    """Return a 32-byte key: random from the operating system, or derived from a seed."""
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
    """Derive a 32-byte key for one purpose, independent of the keys for other purposes."""
    return hashlib.blake2b(purpose.encode(), key=key, digest_size=KEY_BYTES).digest()


def uniform_words(key: bytes, *, index: int, count: int) -> np.ndarray:
    """Return uniform random words [count], uint64, at address `index`."""
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


class Uncopied:
    """Base class of objects that hold a key; refuses copy and pickle, since both reuse the key."""

    no_copy: ClassVar[str]  # why there is no copy, and what to do instead

    # copy.copy, copy.deepcopy and pickle call this method.
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled: {self.no_copy}")


class RunKeys(Uncopied):
    """The secret keys of one run, from which each release derives its own noise and samples.

    The keys are derived from the seed, or come from the operating system. `run` is the unique name
    of the run in the ledger. `branch` names this continuation of the run ("" before a checkpoint
    is loaded).

    Guarantees:
        Without a seed, no two continuations of a run share a key. With a seed, two continuations
        share their keys unless one ledger, or one process, has recorded both continuations.
    """

    no_copy = "it would draw the same noise and samples; build another PrivacyEngine"

    def __init__(self, seed: int | None, ranks: Ranks, *, ledger_releases: int = 0):
        self.seed = seed
        # Part of the keys of noise and sampling: the ledger's number of releases when the run
        # began, or when a checkpoint was loaded that lacks some of the ledger's releases.
        self.incarnation = ledger_releases
        self._ranks = ranks
        self.master = self._new_master()
        self.branch = ""
        self.run = self._new_token()
        self._engine = next(_numbers)
        # The run, branch and release of the loaded checkpoint, see `place_of`.
        self._loaded: dict[str, Any] | None = None
        self._has_warned = False

    @property
    def noise(self) -> bytes:
        """The key of the noise."""
        return derive_key(self.master, f"noise-{self.incarnation}")

    @property
    def sampling(self) -> bytes:
        """The key of the sampling."""
        return derive_key(self.master, f"sampling-{self.incarnation}")

    def begin_model(self) -> None:
        """Change the keys for the next model, whose releases are counted from 0 again.

        The new name of the run is derived from `run` and `branch`, which are together unique to
        this engine. So ranks need not exchange the name.
        """
        self.master = derive_key(self.master, "next model")
        name = f"{self.run} {self.branch}".encode()
        self.run = hashlib.blake2b(name, digest_size=32, person=b"dpflash-run").hexdigest()
        self.branch, self._loaded = "", None

    def leave_ranks(self) -> None:
        """Continue in a forked child process, which is not a rank, under new keys."""
        self._ranks = Ranks()
        self.master, self.branch = master_key(), self._new_token()

    def claim(self, step: int) -> None:
        """Record a release before it is made, for an engine without a ledger.

        Warn if the engine that wrote a checkpoint and an engine restored from it both continue.
        Raise RuntimeError if two engines of this process, restored from the same checkpoint, make
        the same release.
        """
        claims = _claims.setdefault((self.run, self.incarnation), {})
        is_restored = self._loaded is not None
        others = [c for engine, c in claims.items() if engine != self._engine and step in c.steps]
        if is_restored and any(other.is_restored for other in others):
            raise RuntimeError(
                "another engine of this process was restored from the same checkpoint and has "
                "released steps since: neither engine's epsilon includes the other's steps, and "
                "with a seed both use the same noise, so that the difference of their releases "
                "shows the data. Continue from the other engine's newest checkpoint, or use "
                "PrivacyEngine(ledger=...) from the start, which counts both"
            )
        own = claims.setdefault(self._engine, _Claim(range(step, step), is_restored))
        own.steps, own.is_restored = range(own.steps.start, step + 1), is_restored
        if others and not self._has_warned:
            self._has_warned = True
            if self.seed is None:
                warn(
                    "the engine that wrote this run's checkpoint and one restored from it both "
                    "continue in this process: neither engine's epsilon includes the other's "
                    "steps. Release the results of one of them, or use PrivacyEngine(ledger=...)",
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, including the key if it was derived from a seed."""
        state = {
            "incarnation": self.incarnation,
            "run": self.run,
            "branch": self.branch,
            "seed": self.seed,
        }
        return state if self.seed is None else {**state, "key": self.master.hex()}

    def knows_all(self, state: Mapping[str, Any], releases: int) -> bool:
        """Return whether a checkpoint contains all releases that these keys have made so far."""
        own = place_of({**self.state_dict(), "releases": releases})
        return place_of(state) in (own, self._loaded) and state["releases"] == releases

    def load_state_dict(self, state: Mapping[str, Any], *, ledger_releases: int | None) -> None:
        """Continue the run of a checkpoint as a new branch; all ranks call this together.

        Without a seed the keys are new. With a seed the checkpoint's keys are used, unless the
        ledger has releases that the checkpoint lacks. Without a ledger, ledger_releases is None.
        """
        if self.seed is None and state["seed"] is not None:
            warn(
                f"the checkpoint's run has seed={state['seed']!r}, and this engine has it now: "
                "whoever knows the seed can subtract the noise, so results are not for release",
            )
        self._loaded = place_of(state)
        self.run, self.seed = state["run"], state["seed"]
        self.incarnation = state["incarnation"]
        if ledger_releases not in (None, state["ledger_releases"]):
            # The ledger only grows, so its number of releases is new for each continuation.
            self.incarnation = ledger_releases
        self.branch = self._new_token()
        self.master = self._new_master()
        if self.seed is not None:
            key = state["key"]
            self.master = bytes.fromhex(key) if isinstance(key, str) else key

    def _new_master(self) -> bytes:
        return self._ranks.broadcast_from_first(master_key(self.seed), "the engine's key")

    def _new_token(self) -> str:
        return self._ranks.broadcast_from_first(secrets.token_bytes(32), "a run's name").hex()


def place_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint that identifies the run, the branch and the release."""
    return {name: state[name] for name in ("run", "incarnation", "branch", "releases")}


@dataclass
class _Claim:
    """The steps that one engine of this process released in one run."""

    steps: range
    is_restored: bool


# (run, incarnation) -> id of an engine -> its releases. Without a ledger, noise that is used twice
# is detected only within one process.
_claims: dict[tuple[str, int], dict[int, _Claim]] = {}
