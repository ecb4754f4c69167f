"""A training job: a language model on a folder of text, private, resumable and compared.

What happens to the privacy budget is the engine's business; here stands what a job needs around
it: the corpus, the model, evaluations, checkpoints and the non-private run to compare with.
"""

from __future__ import annotations

import math
import os
import secrets
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from dpflash.accounting import create_accountant, get_noise_multiplier

from . import _validate, checkpoint, losses
from .corpus import (
    IGNORE_INDEX,
    VOCAB_SIZE,
    ByteDocuments,
    TrainWindows,
    default_data_dir,
    held_out_batches,
)
from .engine import PrivacyEngine
from .ledger import Ledger
from .nn import LongContextLM
from .report import make_report, peak_memory_mb, write_report
from .streams import derive_key, master_key

__all__ = ["Interrupted", "TrainingConfig", "TrainingRun", "holds_a_run"]

CHECKPOINT = "checkpoint.pt"
LEDGER = "ledger.jsonl"
WEIGHTS = "model.pt"

# The second moment follows the noisy gradients within a short run.
_BETAS = (0.9, 0.95)
_MAX_EPSILON_POINTS = 200


class Interrupted(Exception):
    """The job stopped because it was asked to; its checkpoint is written."""


@dataclass(frozen=True)
class TrainingConfig:
    """What decides a training job.

    Attributes:
        data: folder of text files; None for the sources of Python's standard library.
        suffixes: endings of the files to take; None for all (with data=None: ".py").
        max_total_bytes: the most bytes of documents that are held in memory.
        seq_len: tokens of a window; a draw of a document trains on one window of it.
        batch_size: expected documents of a step.
        physical_batch_size: the most documents in memory at once.
        steps: noisy steps.
        target_epsilon: epsilon after all steps; None where noise_multiplier is given.
        noise_multiplier: noise standard deviation over max_grad_norm; 0 for no privacy.
        delta: of the guarantee.
        accountant: its name.
        clipping, way, max_grad_norm: as in `PrivacyEngine.make_private`.
        learning_rate: of Adam.
        embed_dim, layers, heads: of the model.
        eval_windows: held-out windows of an evaluation.
        baseline: whether the same run without privacy follows.
        checkpoint_every: steps between checkpoints.
        seed: makes the run repeatable, and so not fit for release; None for a fresh key.
        device: where to compute.

    Raises:
        ValueError: naming the argument, its value and the way out.
    """

    data: str | None = None
    suffixes: Collection[str] | None = None
    max_total_bytes: int = 512 * 2**20
    seq_len: int = 2048
    batch_size: int = 64
    physical_batch_size: int = 16
    steps: int = 24
    target_epsilon: float | None = 8.0
    noise_multiplier: float | None = None
    delta: float = 1e-5
    accountant: str = "rdp"
    clipping: str = "flat"
    way: str = "auto"
    max_grad_norm: float = 1.0
    learning_rate: float = 0.01
    embed_dim: int = 64
    layers: int = 2
    heads: int = 1
    eval_windows: int = 64
    baseline: bool = True
    checkpoint_every: int = 20
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
        _validate.probability(delta=self.delta)
        _validate.positive(learning_rate=self.learning_rate, max_grad_norm=self.max_grad_norm)
        _validate.finite(learning_rate=self.learning_rate)
        if self.target_epsilon is not None and self.noise_multiplier is not None:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier!r} beside target_epsilon="
                f"{self.target_epsilon!r}: the target decides the noise; give one of them"
            )
        if self.target_epsilon is not None:
            _validate.positive(target_epsilon=self.target_epsilon)
            _validate.finite(target_epsilon=self.target_epsilon)
        elif self.noise_multiplier is not None:
            _validate.non_negative(noise_multiplier=self.noise_multiplier)
            _validate.finite(noise_multiplier=self.noise_multiplier)
        else:
            raise ValueError("target_epsilon=None: give it, or a noise_multiplier")
        data = default_data_dir() if self.data is None else Path(self.data)
        suffixes = (".py",) if self.data is None and self.suffixes is None else self.suffixes
        object.__setattr__(self, "data", os.fspath(data.absolute()))
        object.__setattr__(self, "suffixes", None if suffixes is None else tuple(suffixes))


@dataclass
class TrainingState:
    """What a checkpoint holds beside the engine's own state."""

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
    finished: bool = False


class TrainingRun:
    """One job in one folder; made by `start` or `resume`, done by `run`.

    Attributes:
        config: what decides the job.
        folder: where its files go.
        state: how far it is.
        lost_steps: releases of a process that died before its next checkpoint. Epsilon counts
            them; the model does not have them.
    """

    def __init__(
        self, config: TrainingConfig, folder: Path, state: TrainingState, corpus: _Corpus
    ) -> None:
        self.config = config
        self.folder = folder
        self.state = state
        self._held_out = corpus.held_out
        self._windows = TrainWindows(corpus.train.contents, config.seq_len, key=state.window_key)
        model = self._initial_model()
        self._engine = PrivacyEngine(
            accountant=config.accountant, seed=config.seed, ledger=folder / LEDGER
        )
        self.model, self._optimizer, self._loader = self._engine.make_private(
            module=model,
            optimizer=self._adam(model),
            data_loader=DataLoader(self._windows, batch_size=config.batch_size),
            noise_multiplier=state.noise_multiplier,
            max_grad_norm=config.max_grad_norm,
            clipping=config.clipping,
            way=config.way,
            physical_batch_size=config.physical_batch_size,
        )

    @classmethod
    def start(cls, config: TrainingConfig, folder: str | os.PathLike[str]) -> TrainingRun:
        """A new job. Nothing is written before `run`.

        Raises:
            FileNotFoundError, ValueError: for data, a folder or a value that cannot be used.
        """
        folder = Path(folder)
        if holds_a_run(folder):
            raise ValueError(
                f"out={str(folder)!r}: holds a run already, whose spent privacy must not be "
                f"forgotten; go on with it by --resume {folder}, or choose another folder"
            )
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"out={str(folder)!r}: is a file; choose another name")
        create_accountant(config.accountant)
        corpus = _read_corpus(config)
        state = TrainingState(
            config={f.name: getattr(config, f.name) for f in fields(config)},
            data_digest=corpus.digest,
            noise_multiplier=_noise_multiplier(config, len(corpus.train)),
            init_seed=secrets.randbits(62) if config.seed is None else config.seed,
            window_key=derive_key(master_key(config.seed), "windows"),
        )
        return cls(config, folder, state, corpus)

    @classmethod
    def resume(
        cls, folder: str | os.PathLike[str], given: Mapping[str, Any] | None = None
    ) -> TrainingRun:
        """The job of a folder, as its last checkpoint has it.

        Args:
            folder: of a job that was started.
            given: values of the config that the caller believes in; data may have moved.

        Raises:
            FileNotFoundError: without a checkpoint there.
            ValueError: for a damaged one, other data, or a given value that is not the job's.
        """
        folder = Path(folder)
        if not (folder / CHECKPOINT).is_file():
            raise FileNotFoundError(
                f"resume={str(folder)!r}: no {CHECKPOINT} there; pass the folder of a run, or "
                "start one with --out"
            )
        given = dict(given or {})
        saved = checkpoint.read(folder / CHECKPOINT).get("extra", {})
        if not saved.keys() >= {f.name for f in fields(TrainingState)}:
            raise ValueError(f"resume={str(folder)!r}: its checkpoint is not one of a training job")
        moved = {"data": given.pop("data")} if given.get("data") is not None else {}
        for name, value in given.items():
            own = saved["config"].get(name)
            if _plain(value) != _plain(own):
                raise ValueError(
                    f"{name}={value!r}: the run to resume has {name}={own!r}; drop the option, or "
                    "start a new run in another folder"
                )
        config = TrainingConfig(**{**saved["config"], **moved})
        corpus = _read_corpus(config)
        if corpus.digest != saved["data_digest"]:
            raise ValueError(
                f"data={config.data!r}: its documents are not those that the run began with, and "
                "epsilon would be for neither; restore them, or start a new run"
            )
        job = cls(config, folder, TrainingState(**saved), corpus)
        job.state = TrainingState(**job._engine.load_checkpoint(folder / CHECKPOINT))
        if job.lost_steps:
            warnings.warn(
                f"{job.lost_steps} step(s) were released after the last checkpoint and are lost; "
                "they stay counted in epsilon and are made again with other noise",
                stacklevel=2,
            )
        return job

    @property
    def step(self) -> int:
        """Noisy steps that the model has."""
        return self._optimizer.releases

    @property
    def lost_steps(self) -> int:
        return Ledger(self.folder / LEDGER).releases - self.step

    @property
    def epsilon(self) -> float:
        """Spent so far, lost steps included."""
        return self._engine.get_epsilon(self.config.delta)

    def run(
        self, *, should_stop: Callable[[], bool] = lambda: False, progress: bool = False
    ) -> dict[str, Any]:
        """Do what is left of the job.

        Args:
            should_stop: asked after each step; True ends the job there.
            progress: whether bars are drawn on stderr.

        Returns:
            The report, as in report.json.

        Raises:
            Interrupted: where should_stop said so.

        Guarantees:
            A stopped and resumed job has the parameters, and the epsilon, of one that was not
            stopped, bit for bit on the same machine.
        """
        state = self.state
        if state.finished:
            return self._report()
        self._save()
        if state.bits_before is None:
            state.bits_before = self._evaluate(self.model)
        self._stop_if(should_stop)
        self._train(should_stop, progress)
        if state.bits_after is None:
            state.peak_memory_mb = max(state.peak_memory_mb, peak_memory_mb(self.config.device))
            state.bits_after = self._evaluate(self.model)
            _save_weights(self.model, self.folder / WEIGHTS)
        if self.config.baseline and state.bits_nonprivate is None:
            self._stop_if(should_stop)
            self._train_baseline(should_stop, progress)
        report = self._report()
        write_report(report, self.folder)
        state.finished = True
        state.baseline = None
        self._save()
        return report

    def _train(self, should_stop: Callable[[], bool], progress: bool) -> None:
        """The private steps that are left; they may span passes over the loader."""
        state, total = self.state, self.config.steps
        with _bar("private", self.step, total, progress) as bar:
            while self.step < total:
                batch_losses: list[float] = []
                begun = time.perf_counter()
                self._windows.set_step(self._next_draw())
                for inputs, targets in self._loader:
                    # The loader fetches the next batch when it is asked for it, after this line.
                    self._windows.set_step(self._next_draw())
                    before = self.step
                    batch_losses += self._physical_batch(inputs, targets)
                    if self.step == before:
                        continue
                    state.seconds += time.perf_counter() - begun
                    state.history.append(self._entry(batch_losses))
                    bar.set_postfix(_postfix(state.history[-1]), refresh=False)
                    bar.update()
                    self._stop_if(should_stop)
                    if self.step == total:
                        break
                    if self.step % self.config.checkpoint_every == 0:
                        self._save()
                    batch_losses, begun = [], time.perf_counter()
        self._save()

    def _physical_batch(self, inputs: Tensor, targets: Tensor) -> list[float]:
        """Forward, clipped backward and step of one part; its losses in bits per byte."""
        state = self.state
        inputs, targets = inputs.to(self.config.device), targets.to(self.config.device)
        sample_losses = losses.cross_entropy(self.model(inputs), targets)
        self._engine.backward(sample_losses)
        if len(inputs) and self.config.clipping == "flat":
            norms = self._engine.diagnostics()["per_sample_norms"]
            state.clipped_samples += int((norms > self.config.max_grad_norm).sum())
            state.seen_samples += len(inputs)
        self._optimizer.step()
        self._optimizer.zero_grad()
        state.tokens += int((targets != IGNORE_INDEX).sum())
        return (sample_losses.detach() / math.log(2)).tolist()

    def _entry(self, batch_losses: list[float]) -> dict[str, Any]:
        """What the history keeps of a step; the loss is None where nothing was drawn."""
        every = -(-self.config.steps // _MAX_EPSILON_POINTS)
        is_point = self.step % every == 0 or self.step == self.config.steps
        return {
            "step": self.step,
            "loss": float(np.mean(batch_losses)) if batch_losses else None,
            "epsilon": self.epsilon if is_point else None,
        }

    def _train_baseline(self, should_stop: Callable[[], bool], progress: bool) -> None:
        """The same steps from the same weights on batches of the same size, without privacy."""
        config, state = self.config, self.state
        model = self._initial_model()
        optimizer = self._adam(model)
        if state.baseline is not None:
            model.load_state_dict(state.baseline["model"])
            optimizer.load_state_dict(state.baseline["optimizer"])

        def keep() -> None:
            state.baseline = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

        with _bar("non-private", len(state.baseline_losses), config.steps, progress) as bar:
            for step in range(len(state.baseline_losses), config.steps):
                loss = self._baseline_step(model, optimizer, step)
                state.baseline_losses.append(loss)
                bar.set_postfix(_postfix({"loss": loss}), refresh=False)
                bar.update()
                if should_stop() or (step + 1) % config.checkpoint_every == 0:
                    keep()
                    self._save()
                self._stop_if(should_stop)
        state.bits_nonprivate = self._evaluate(model)

    def _baseline_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
    ) -> float:
        config = self.config
        # A function of the step alone, so that a resumed run draws the same documents.
        rng = np.random.default_rng([self.state.init_seed, step])
        rows = rng.choice(len(self._windows), config.batch_size, replace=False)
        total = 0.0
        for start in range(0, len(rows), config.physical_batch_size):
            part = rows[start : start + config.physical_batch_size]
            pairs = [self._windows.window(int(row), step) for row in part]
            inputs = torch.stack([pair[0] for pair in pairs]).to(config.device)
            targets = torch.stack([pair[1] for pair in pairs]).to(config.device)
            loss = losses.cross_entropy(model(inputs), targets).sum() / len(rows)
            loss.backward()
            total += loss.item() / math.log(2)
        optimizer.step()
        optimizer.zero_grad()
        return total

    def _evaluate(self, model: nn.Module) -> float:
        """Bits per byte of the held-out documents' fixed windows."""
        config = self.config
        nats, count = 0.0, 0
        model.eval()
        with torch.no_grad():
            for inputs, targets in held_out_batches(
                self._held_out.contents, config.seq_len, config.eval_windows
            ):
                logits = model(inputs.to(config.device)).flatten(0, 1)
                nats += nn.functional.cross_entropy(
                    logits,
                    targets.to(config.device).flatten(),
                    ignore_index=IGNORE_INDEX,
                    reduction="sum",
                ).item()
                count += int((targets != IGNORE_INDEX).sum())
        model.train()
        return nats / count / math.log(2)

    def _initial_model(self) -> LongContextLM:
        config = self.config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.state.init_seed)
            model = LongContextLM(
                VOCAB_SIZE,
                config.embed_dim,
                config.layers,
                config.heads,
                max_seq_len=config.seq_len,
            )
        return model.to(config.device)

    def _adam(self, model: nn.Module) -> torch.optim.Adam:
        return torch.optim.Adam(model.parameters(), lr=self.config.learning_rate, betas=_BETAS)

    def _next_draw(self) -> int:
        return self._loader.state_dict()["next_draw"]

    def _stop_if(self, should_stop: Callable[[], bool]) -> None:
        if should_stop():
            self._save()
            raise Interrupted(f"stopped at step {self.step}")

    def _save(self) -> None:
        extra = {f.name: getattr(self.state, f.name) for f in fields(self.state)}
        self._engine.save_checkpoint(self.folder / CHECKPOINT, extra=extra)

    def _report(self) -> dict[str, Any]:
        return make_report(
            self.config,
            self.state,
            epsilon=self.epsilon,
            lost_steps=self.lost_steps,
            sampler=self._engine.sampler,
            neighboring_relation=self._engine.neighboring_relation,
            num_documents=len(self._windows),
            num_parameters=sum(p.numel() for p in self.model.parameters()),
        )
