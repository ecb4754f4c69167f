"""Configuration, checkpointed state and corpus of a training job."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dpflash.accounting import get_noise_multiplier

from .. import _validate
from ..clipping.planner import DEFAULT_LEVEL, LEVELS, clipping_for
from ..privacy.spending import DEFAULT_ACCOUNTANT
from .data import ByteDocuments, default_data_dir


@dataclass(frozen=True)
class TrainingConfig:
    """The configuration of a training job.

    Attributes:
        data: folder of text files; None for the sources of Python's standard library.
        suffixes: file name suffixes to read; None for all (with data=None: ".py").
        max_total_bytes: maximum size of all documents, which are held in memory.
        seq_len: tokens per window; each step trains on one window of a sampled document.
        batch_size: expected documents per step, over all ranks.
        physical_batch_size: maximum number of documents in memory at once, per rank.
        steps: noisy steps.
        dataset_size: public number from which the sample rate is computed; None declares the
            number of documents public.
        target_epsilon: epsilon after all steps; None if noise_multiplier is given.
        noise_multiplier: noise standard deviation over max_grad_norm; 0 for no privacy.
        delta: delta of the guarantee.
        max_epsilon: training ends before the step that would exceed this; steps lost when a
            process was killed count. None for no limit.
        accountant: name of the accountant.
        clipping, grad_sample_mode, max_grad_norm, optimize: as in `PrivacyEngine.make_private`;
            clipping=None means the default of the optimize level.
        learning_rate: Adam learning rate.
        embed_dim, layers, heads: size of the model.
        eval_windows: held-out windows per evaluation.
        baseline: whether to train the same model without privacy afterwards.
        checkpoint_every: steps between checkpoints.
        seed: makes the run repeatable, and therefore not fit for release; None for a fresh key.
        device: "cpu" or "cuda".

    Raises:
        ValueError: for an invalid value; the message names the argument and the way out.
    """

    data: str | None = None
    suffixes: Collection[str] | None = None
    max_total_bytes: int = 512 * 2**20
    seq_len: int = 2048
    batch_size: int = 64
    physical_batch_size: int = 16
    steps: int = 20
    dataset_size: int | None = None
    target_epsilon: float | None = 8.0
    noise_multiplier: float | None = None
    delta: float = 1e-5
    max_epsilon: float | None = None
    accountant: str = DEFAULT_ACCOUNTANT
    clipping: str | None = None
    grad_sample_mode: str = "auto"
    max_grad_norm: float = 1.0
    optimize: str = DEFAULT_LEVEL
    learning_rate: float = 0.01
    embed_dim: int = 64
    layers: int = 2
    heads: int = 1
    eval_windows: int = 64
    baseline: bool = True
    checkpoint_every: int = 10
    seed: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        _validate.positive_int(
            max_total_bytes=self.max_total_bytes,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            physical_batch_size=self.physical_batch_size,
            steps=self.steps,
            embed_dim=self.embed_dim,
            layers=self.layers,
            heads=self.heads,
            eval_windows=self.eval_windows,
            checkpoint_every=self.checkpoint_every,
        )
        if self.dataset_size is not None:
            _validate.positive_int(dataset_size=self.dataset_size)
            if self.batch_size > self.dataset_size:
                raise ValueError(
                    f"dataset_size={self.dataset_size} below batch_size={self.batch_size}: the "
                    "sample rate would be above 1; lower batch_size"
                )
        _validate.probability(delta=self.delta)
        _validate.positive(learning_rate=self.learning_rate, max_grad_norm=self.max_grad_norm)
        _validate.finite(learning_rate=self.learning_rate)
        if self.target_epsilon is not None and self.noise_multiplier is not None:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier!r} conflicts with target_epsilon="
                f"{self.target_epsilon!r}, which determines the noise; pass one of them"
            )
        if self.target_epsilon is not None:
            _validate.positive(target_epsilon=self.target_epsilon)
            _validate.finite(target_epsilon=self.target_epsilon)
        elif self.noise_multiplier is not None:
            _validate.non_negative(noise_multiplier=self.noise_multiplier)
            _validate.finite(noise_multiplier=self.noise_multiplier)
        else:
            raise ValueError("target_epsilon=None: pass target_epsilon or noise_multiplier")
        if self.max_epsilon is not None:
            _validate.positive(max_epsilon=self.max_epsilon)
            _validate.finite(max_epsilon=self.max_epsilon)
            if self.noise_multiplier == 0:
                raise ValueError(
                    f"max_epsilon={self.max_epsilon!r} with noise_multiplier=0: a run without "
                    "noise has no epsilon; pass one of them"
                )
        _validate.one_of(device=(self.device, ("cpu", "cuda")), optimize=(self.optimize, LEVELS))
        clipping = clipping_for(self.optimize, self.clipping, self.grad_sample_mode)
        object.__setattr__(self, "clipping", clipping)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(
                f"seed={self.seed!r}: expected 0 <= seed < 2^63; pass such a number, or None"
            )
        data = default_data_dir() if self.data is None else Path(self.data)
        suffixes = (".py",) if self.data is None and self.suffixes is None else self.suffixes
        object.__setattr__(self, "data", os.fspath(data.absolute()))
        if suffixes is not None and not isinstance(suffixes, str):
            suffixes = sorted(set(suffixes))
        object.__setattr__(self, "suffixes", suffixes)

    def sample_rate(self, num_documents: int) -> float:
        """The probability that a step samples a document.

        The number of documents is used only if dataset_size is None.
        """
        return self.batch_size / (self.dataset_size or num_documents)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Parallelism:
    """How ranks share a job. Results do not depend on it, so a resumed run may change it.

    Attributes:
        context_parallel: number of ranks over which the tokens of each window are sharded. The
            documents of a step are divided over the world size / context_parallel groups.
        context_mode: how keys and values are exchanged: "auto", "ring", "all_gather" or "ulysses".
        sharding: which tokens each rank holds: "contiguous", or "zigzag", which balances the work
            of causal attention.
        shard_parameters: whether to shard parameters and optimizer state over the ranks that
            divide the documents (FSDP2).
        rank_timeout: seconds that a rank waits for another one.

    Raises:
        ValueError: for an invalid value; the message names the argument and the way out.
    """

    context_parallel: int = 1
    context_mode: str = "auto"
    sharding: str = "contiguous"
    shard_parameters: bool = False
    rank_timeout: float = 600.0

    def __post_init__(self) -> None:
        _validate.positive_int(context_parallel=self.context_parallel)
        _validate.one_of(
            context_mode=(self.context_mode, ("auto", "ring", "all_gather", "ulysses")),
            sharding=(self.sharding, ("contiguous", "zigzag")),
        )
        _validate.positive(rank_timeout=self.rank_timeout)
        _validate.finite(rank_timeout=self.rank_timeout)

    def check(self, config: TrainingConfig) -> None:
        """Check that a job can be shared in this way.

        Raises:
            ValueError: there are more ranks than tokens of a window, or than heads for "ulysses".
        """
        context = self.context_parallel
        if context > config.seq_len:
            raise ValueError(
                f"context_parallel={context} with seq_len={config.seq_len}: a rank would have "
                "no token; lower context_parallel or raise seq_len"
            )
        if self.context_mode == "ulysses" and context > config.heads:
            raise ValueError(
                f"context_mode='ulysses' with context_parallel={context} and heads="
                f"{config.heads}: a rank would have no head; pass context_mode='ring' or "
                "'all_gather', or lower context_parallel"
            )


@dataclass
class TrainingState:
    """The state of a job in its checkpoint, besides the engine's own state."""

    config: dict[str, Any]
    data_digest: str
    noise_multiplier: float
    init_seed: int
    window_key: bytes
    bits_before: float | None = None
    bits_after: float | None = None
    bits_nonprivate: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    baseline_losses: list[float] = field(default_factory=list)
    baseline: dict[str, Any] | None = None
    seconds: float = 0.0
    tokens: int = 0
    clipped_samples: int = 0
    seen_samples: int = 0
    peak_memory_mb: float = 0.0
    stopped: str | None = None
    verified: bool | str = "pending"
    rounded_sums: list[str] = field(default_factory=list)
    finished: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The fields by name; tensors are not copied."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Corpus:
    """The training documents and the held-out documents of a job.

    Attributes:
        train: training documents; each is one privacy unit.
        held_out: documents for evaluation, never trained on; epsilon does not cover them.
        left_out: `ByteDocuments.left_out` of the whole folder.
        digest: digest of all names and contents, compared when the job is resumed.
    """

    train: ByteDocuments
    held_out: ByteDocuments
    left_out: str
    digest: str

    @classmethod
    def read(cls, config: TrainingConfig) -> Corpus:
        """Read the corpus of a config.

        Raises:
            FileNotFoundError, ValueError: the folder cannot be used, or has fewer training
                documents than a batch.
        """
        assert config.data is not None
        documents = ByteDocuments.from_folder(
            config.data, suffixes=config.suffixes, max_total_bytes=config.max_total_bytes
        )
        train, held_out = documents.split()
        if config.dataset_size is None and config.batch_size > len(train):
            raise ValueError(
                f"batch_size={config.batch_size}: {config.data} has "
                f"{_validate.counted(len(train), 'document')} for training; lower it or add "
                "documents"
            )
        digest = blake2b(digest_size=16)
        for path, content in zip(documents.paths, documents.contents, strict=True):
            for data in (path.encode(errors="surrogateescape"), content):
                digest.update(blake2b(data, digest_size=16).digest())
        return cls(train, held_out, documents.left_out, digest.hexdigest())


def noise_for(config: TrainingConfig, num_documents: int) -> float:
    """The noise multiplier of a job: the configured one, or the one that meets target_epsilon."""
    size = config.dataset_size or num_documents
    problem = _validate.large_delta(config.delta, size, "document")
    if problem is not None:
        warnings.warn(problem, stacklevel=3)
    if config.noise_multiplier is not None:
        return float(config.noise_multiplier)
    assert config.target_epsilon is not None
    return get_noise_multiplier(
        target_epsilon=config.target_epsilon,
        target_delta=config.delta,
        sample_rate=config.sample_rate(num_documents),
        steps=config.steps,
        accountant=config.accountant,
    )


# Values of the option "way", which jobs of earlier versions have in their files.
_MODES = {"stored": "instantiate", "two_pass": "ghost"}


def current_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a job's file, under the names that they have now."""
    current = dict(options)
    if "way" in current:
        mode = current.pop("way")
        current["grad_sample_mode"] = _MODES.get(mode, mode)
    return current
