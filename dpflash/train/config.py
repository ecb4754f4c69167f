"""Configuration, checkpointed state and corpus of a training job."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dpflash.accounting import epochs_to_steps

from .. import _validate
from ..attn.backend import AUTO, BACKENDS
from ..clipping.planner import DEFAULT_LEVEL, LEVELS, clipping_for
from ..noise import Banded, compare_bands
from ..patterns import from_text
from ..privacy.spending import DEFAULT_ACCOUNTANT
from ..refusal import PrivateRefusal
from .data import (
    HELD_OUT,
    ByteDocuments,
    check_unit,
    default_data_dir,
    has_several_documents,
    noun_of,
)

# Sizes of a new model; a pretrained model has its own sizes.
_SIZES = {"embed_dim": 64, "layers": 2, "heads": 1}
_STEPS = 20
_EXAMPLES_PER_UNIT = 4


@_validate.naming_unknown_fields
@dataclass(frozen=True)
class TrainingConfig:
    """The configuration of a training job: the options that `dpflash train --help` explains.

    None means the default that the help states. With `pack`, a document that is longer than a row
    is cut into windows, whose gradients are summed before clipping. If a document has more tokens
    than a microbatch, each step trains on one window of it that fills a microbatch.
    """

    data: str | None = None
    unit: str = "file"
    unit_name: str | None = None
    examples_per_unit: int | None = None
    field: str = "text"
    suffixes: Collection[str] | None = None
    max_total_bytes: int = 512 * 2**20
    eval_data: str | None = None
    eval_fraction: float | None = None
    label_field: str | None = None
    labels: Collection[str] | None = None
    class_weights: Sequence[float] | None = None  # public, in the order of labels
    model: str | None = None
    tokenizer: str | None = None
    lora_rank: int | None = None
    pattern: str | None = None
    seq_len: int = 2048
    pack: bool = False
    batch_size: int = 64
    physical_batch_size: int = 16
    steps: int | None = None
    epochs: float | None = None
    dataset_size: int | None = None
    # epsilon after all steps; None if noise_multiplier is passed
    target_epsilon: float | None = 8.0
    noise_multiplier: float | None = None
    bands: int | str = 1  # number of noise bands; "auto": the number with the least error
    delta: float = 1e-5
    allow_large_delta: bool = False
    max_epsilon: float | None = None
    ledger: str | None = None  # None means a new ledger in the job's folder
    accountant: str = DEFAULT_ACCOUNTANT
    clipping: str | None = None  # None means the default of the optimize level
    grad_sample_mode: str = "auto"
    max_grad_norm: float = 1.0
    optimize: str = DEFAULT_LEVEL
    attention_backend: str = AUTO
    cuda_graph: bool = False
    fp8: bool = False
    learning_rate: float | None = None
    embed_dim: int | None = None
    layers: int | None = None
    heads: int | None = None
    eval_windows: int = 64
    baseline: bool | None = None
    checkpoint_every: int = 10
    seed: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        self._resolve_model()
        self._resolve_data()
        self._resolve_labels()
        if self.epochs is None:
            self._set(steps=_STEPS if self.steps is None else self.steps)
            _validate.positive_int(steps=self.steps)
        elif self.steps is not None:
            raise ValueError(
                f"epochs={self.epochs!r} conflicts with steps={self.steps!r}; pass one of them"
            )
        _validate.positive_int(
            max_total_bytes=self.max_total_bytes,
            seq_len=self.seq_len,
            batch_size=self.batch_size,
            physical_batch_size=self.physical_batch_size,
            eval_windows=self.eval_windows,
            checkpoint_every=self.checkpoint_every,
        )
        if self.pack and self.seq_len < 2:
            raise ValueError("seq_len=1 with pack: a row would have no target; raise seq_len")
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
        for name in ("epochs", "target_epsilon", "noise_multiplier", "max_epsilon"):
            if (value := getattr(self, name)) is not None:
                check = _validate.positive
                if name == "noise_multiplier":
                    check = _validate.non_negative
                check(**{name: value})
                _validate.finite(**{name: value})
        if self.target_epsilon is not None and self.noise_multiplier is not None:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier!r} conflicts with target_epsilon="
                f"{self.target_epsilon!r}, which determines the noise; pass one of them"
            )
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise ValueError("target_epsilon=None: pass target_epsilon or noise_multiplier")
        if isinstance(self.bands, str) and self.bands.isdecimal():
            self._set(bands=int(self.bands))
        if self.bands != "auto":
            _validate.positive_int(bands=self.bands)
        elif self.noise_multiplier is not None:
            raise ValueError(
                f"bands='auto' with noise_multiplier={self.noise_multiplier!r}: bands are chosen "
                "for a target_epsilon; pass target_epsilon instead, or a number of bands"
            )
        if self.max_epsilon is not None and self.noise_multiplier == 0:
            raise ValueError(
                f"max_epsilon={self.max_epsilon!r} with noise_multiplier=0: a run without noise "
                "has no epsilon; drop one of the two"
            )
        _validate.one_of(
            device=(self.device, ("cpu", "cuda")),
            optimize=(self.optimize, LEVELS),
            attention_backend=(self.attention_backend, BACKENDS),
        )
        clipping = clipping_for(self.optimize, self.clipping, self.grad_sample_mode)
        self._set(clipping=clipping)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(
                f"seed={self.seed!r}: expected 0 <= seed < 2^63; pass such a number, or None"
            )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _resolve_data(self) -> None:
        check_unit(self.unit)
        if has_several_documents(self.unit):
            if self.examples_per_unit is None:
                self._set(examples_per_unit=_EXAMPLES_PER_UNIT)
            _validate.positive_int(examples_per_unit=self.examples_per_unit)
        elif self.examples_per_unit is not None:
            raise ValueError(
                f"examples_per_unit={self.examples_per_unit!r} with unit={self.unit!r}: each unit "
                "has one document; pass unit='folder' or 'field:NAME', or drop examples_per_unit"
            )
        _validate.optional(_validate.words, unit_name=self.unit_name)
        if self.unit_name is not None and not has_several_documents(self.unit):
            raise ValueError(
                f"unit_name={self.unit_name!r} with unit={self.unit!r}: only units that are "
                "folders or values of a field have a name; pass unit='folder' or 'field:NAME', or "
                "drop unit_name"
            )
        data = default_data_dir() if self.data is None else Path(self.data)
        suffixes = (".py",) if self.data is None and self.suffixes is None else self.suffixes
        if suffixes is not None and not isinstance(suffixes, str):
            suffixes = sorted(set(suffixes))
        self._set(data=os.fspath(data.absolute()), suffixes=suffixes)
        if self.ledger is not None:
            self._set(ledger=os.path.realpath(self.ledger))
        fraction = self.eval_fraction
        if self.eval_data is not None:
            if fraction:
                raise ValueError(
                    f"eval_fraction={fraction!r} conflicts with eval_data={self.eval_data!r}; "
                    "pass one of them"
                )
            self._set(eval_data=os.fspath(Path(self.eval_data).absolute()), eval_fraction=0.0)
            if self.eval_data == self.data:
                raise ValueError(
                    f"eval_data={self.eval_data!r} is the training data; pass other documents, "
                    "or eval_fraction to hold out a part of the training data"
                )
            return
        fraction = HELD_OUT if fraction is None else fraction
        _validate.non_negative(eval_fraction=fraction)
        if fraction >= 1:
            raise ValueError(
                f"eval_fraction={fraction!r}: expected a number below 1; pass a number such as 0.1"
            )
        self._set(eval_fraction=fraction)

    def _resolve_labels(self) -> None:
        if (self.label_field is None) != (self.labels is None):
            raise ValueError(
                f"label_field={self.label_field!r} with labels={self.labels!r}: a classifier "
                "needs the field of the label, and the names of all labels, which count as "
                "public; pass both"
            )
        weights = self.class_weights
        if self.labels is None:
            if weights is not None:
                raise ValueError(
                    f"class_weights={weights!r} needs labels: weights are for the classes of a "
                    "classifier; pass label_field and labels, or drop class_weights"
                )
            return
        if len(set(self.labels)) != len(self.labels) or len(self.labels) < 2:
            raise ValueError(
                f"labels={self.labels!r}: expected at least two labels, and none of them twice"
            )
        self._set(labels=[*map(str, self.labels)])
        if self.model is None or self.pack or self.unit in ("file", "folder"):
            raise ValueError(
                f"label_field={self.label_field!r} with model={self.model!r}, unit={self.unit!r} "
                f"and pack={self.pack!r}: a classifier is a model of transformers that is "
                "fine-tuned on records, each with a text and a label; pass model, unit='record' "
                "or 'field:NAME', and no pack"
            )
        if weights is None:
            return
        if not isinstance(weights, Sequence):
            raise ValueError(f"class_weights={weights!r}: expected a list, in the labels' order")
        for weight in weights:
            _validate.non_negative(class_weights=weight)
            _validate.finite(class_weights=weight)
        self._set(class_weights=[*map(float, weights)])
        if len(weights) != len(self.labels) or not 1e-30 <= max(weights, default=0.0) <= 1e30:
            raise ValueError(
                f"class_weights={weights!r} with labels={self.labels!r}: expected one number for "
                "each label, in the same order, the largest of them from 1e-30 to 1e30"
            )

    def _resolve_model(self) -> None:
        if self.model is None:
            for name in ("tokenizer", "lora_rank"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} needs model: a new model reads bytes and "
                        "trains all its parameters; pass model, or leave this option out"
                    )
            for name, size in _SIZES.items():
                if getattr(self, name) is None:
                    self._set(**{name: size})
                _validate.positive_int(**{name: getattr(self, name)})
            if self.pattern is not None:
                self._set(pattern=from_text(self.pattern, causal=True, tokens=self.seq_len).key)
        else:
            for name in (*_SIZES, "pattern"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} with model={self.model!r}: the model "
                        "already determines this value; drop one of the two options"
                    )
            _validate.optional(_validate.positive_int, lora_rank=self.lora_rank)
            self._set(model=os.fspath(Path(self.model).absolute()))
            if self.tokenizer is not None:
                self._set(tokenizer=os.fspath(Path(self.tokenizer).absolute()))
        if self.learning_rate is None:
            pretrained = 1e-4 if self.lora_rank is None else 1e-3
            self._set(learning_rate=0.01 if self.model is None else pretrained)
        if self.baseline is None:
            self._set(baseline=self.model is None)

    def sample_rate(self, num_units: int) -> float:
        """Return the probability that a step samples a unit.

        `num_units` is used only if dataset_size is None.
        """
        return self.batch_size / (self.dataset_size or num_units)

    def num_steps(self, num_units: int) -> int:
        """Return the number of noisy steps; `num_units` is used only if dataset_size is None."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return epochs_to_steps(epochs=self.epochs, sample_rate=self.sample_rate(num_units))

    @property
    def noun(self) -> str:
        """The noun for a privacy unit, such as "file" or "patient"."""
        return noun_of(self.unit, self.unit_name)

    @property
    def document(self) -> str:
        """The noun for a document: "file" or "record"."""
        return "file" if self.unit in ("file", "folder") else "record"

    @property
    def units_in_memory(self) -> int | None:
        """The largest number of privacy units in a microbatch; None if documents are packed.

        A unit with several documents occupies examples_per_unit of the physical_batch_size rows.
        """
        if self.pack:
            return None
        return max(1, self.physical_batch_size // (self.examples_per_unit or 1))

    @property
    def holds_out(self) -> bool:
        """Whether there are documents for evaluation."""
        return self.eval_data is not None or bool(self.eval_fraction)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Parallelism:
    """Options that divide a job among ranks, see `dpflash train --help`; results do not change."""

    context_parallel: int = 1
    context_mode: str = "auto"
    sharding: str = "contiguous"
    shard_parameters: bool = False
    rank_timeout: float = 600.0
    heartbeat_timeout: float = 10.0

    def __post_init__(self) -> None:
        _validate.positive_int(context_parallel=self.context_parallel)
        _validate.one_of(
            context_mode=(self.context_mode, ("auto", "ring", "all_gather", "ulysses")),
            sharding=(self.sharding, ("contiguous", "zigzag")),
        )
        times = {"rank_timeout": self.rank_timeout, "heartbeat_timeout": self.heartbeat_timeout}
        _validate.positive(**times)
        _validate.finite(**times)

    def check(self, config: TrainingConfig) -> None:
        """Raise ValueError if the job cannot be divided, for example more ranks than tokens."""
        context = self.context_parallel
        if config.model is not None and self.shard_parameters:
            raise ValueError(
                f"shard_parameters=True is not supported with model={config.model!r}: ranks of a "
                "pretrained model divide documents and tokens only; drop shard_parameters"
            )
        if context > 1 and config.labels is not None:
            raise ValueError(
                f"context_parallel={context} with label_field={config.label_field!r}: ranks of a "
                "classifier divide the texts of a step only; drop context_parallel"
            )
        if context > 1 and config.pack and self.sharding != "contiguous":
            raise ValueError(
                f"sharding={self.sharding!r} with pack: each rank must have contiguous tokens of "
                "packed rows; drop sharding"
            )
        if context > config.seq_len:
            raise ValueError(
                f"context_parallel={context} with seq_len={config.seq_len}: a rank would have "
                "no token; lower context_parallel or raise seq_len"
            )
        heads = context if config.heads is None else config.heads  # None for a pretrained model
        if self.context_mode == "ulysses" and context > heads:
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
    coefficients: list[float]  # coefficients of the banded noise, one for each band
    init_seed: int
    window_key: bytes
    bits_before: float | None = None
    bits_after: float | None = None
    bits_nonprivate: float | None = None
    # accuracies of a classifier, with the keys "before", "after" and "nonprivate"
    accuracies: dict[str, float] = field(default_factory=dict)
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


@dataclass(frozen=True)
class Corpus:
    """The training documents and the held-out documents of a job."""

    train: ByteDocuments
    held_out: ByteDocuments  # for evaluation, never trained on; epsilon does not cover them
    left_out: str  # `ByteDocuments.left_out` of the training data
    digest: str  # digest of all names and contents, compared when the job is resumed

    @classmethod
    def read(cls, config: TrainingConfig) -> Corpus:
        """Read the corpus; raise if it has fewer training units than config.batch_size."""
        assert config.data is not None and config.eval_fraction is not None
        if config.unit in ("file", "folder") and Path(config.data).is_file():
            raise ValueError(
                f"unit={config.unit!r} with data={config.data!r}: the file would be the only "
                "privacy unit; pass unit='record' if each line is a unit, unit='field:NAME' if a "
                "field of the lines names the unit, or a folder"
            )
        documents = _read(config.data, config, config.suffixes)
        train, held_out = documents.split(config.eval_fraction)
        if config.eval_data is not None:
            held_out = _read(config.eval_data, config, None)
            # From `train`, not from `held_out`, which must not depend on the training data.
            train = train.without(held_out)
            if not train:
                raise ValueError(
                    f"eval_data={config.eval_data!r}: all documents to train on are in it; pass "
                    "other documents, or drop eval_data to hold out some of the training data"
                )
        if config.dataset_size is None and config.batch_size > train.num_units:
            raise PrivateRefusal(
                f"batch_size={config.batch_size}: {config.data} has fewer units for training; "
                "lower batch_size or add units",
                units=_validate.counted(train.num_units, config.noun),
            ) from None
        digest = blake2b(digest_size=16)
        parts = [documents] if config.eval_data is None else [documents, held_out]
        for part in parts:
            names = (part.paths,) if part.owners is None else (part.paths, part.owners)
            for *named, content in zip(*names, part.contents, strict=True):
                encoded = (name.encode(errors="surrogatepass") for name in named)
                for data in (*encoded, content):
                    digest.update(blake2b(data, digest_size=16).digest())
        return cls(train, held_out, documents.left_out, digest.hexdigest())


def _read(path: str, config: TrainingConfig, suffixes: Collection[str] | None) -> ByteDocuments:
    return ByteDocuments.read(
        path,
        unit=config.unit,
        field=config.field,
        label_field=config.label_field,
        labels=config.labels,
        suffixes=suffixes,
        max_total_bytes=config.max_total_bytes,
    )


def noise_for(
    config: TrainingConfig, num_units: int, state_memory: tuple[int, int] | None = None
) -> tuple[float, Banded]:
    """Return (noise multiplier, banded noise) of a job; independent noise has one band.

    Args:
        config: the job's configuration, with noise_multiplier or target_epsilon.
        num_units: the number of privacy units; used only if config.dataset_size is None.
        state_memory: (number of trained parameters, largest size of the noise's state in bytes);
            used only if config.bands is "auto".
    """
    size, noun = config.dataset_size or num_units, config.noun
    problem = _validate.large_delta(config.delta, size, noun)
    if problem is not None and not config.allow_large_delta and config.noise_multiplier != 0:
        raise ValueError(f"{problem}, or allow it with --allow-large-delta")
    steps = config.num_steps(num_units)
    if config.noise_multiplier is not None:
        assert isinstance(config.bands, int)
        return float(config.noise_multiplier), Banded.optimized(bands=config.bands, steps=steps)
    assert config.target_epsilon is not None
    parameters, memory = state_memory or (None, None)
    best, *_ = compare_bands(
        num_samples=size,
        batch_size=config.batch_size,
        epochs=steps / -(-size // config.batch_size),
        target_epsilon=config.target_epsilon,
        target_delta=config.delta,
        bands=None if config.bands == "auto" else [int(config.bands)],
        parameters=parameters,
        max_memory=memory,
        accountant=config.accountant,
    )
    return best.noise_multiplier, best.noise
