"""Trains a private language model on documents, in a job that can be resumed.

The engine handles privacy; this file adds evaluations, checkpoints, metrics and a non-private run
for comparison. If a job has several ranks, every rank makes the same calls.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from tqdm import tqdm

from ..checkpoint import sharded as sharded_checkpoint
from ..clipping.planner import clipping_for, default_memory_budget
from ..engine import PrivacyEngine
from ..noise import Banded
from ..optimize.levels import Optimization
from ..packing import PackedBatch
from ..privacy.budget import PrivacyBudget
from ..privacy.keys import derive_key, master_key
from ..privacy.ledger import Ledger
from ..privacy.ledger_runs import alone, lines_of
from ..privacy.spending import Spending, rounded_up
from ..refusal import PrivateWarning, warn
from ..sampling import synthetic
from .config import Corpus, TrainingConfig, TrainingState, noise_for
from .data import IGNORE_INDEX, Tokens, num_targets
from .language_models import PRETRAINED, WEIGHTS, language_model
from .launch import Launch
from .metrics import append_metrics
from .packed import WholeDocuments, pack_of
from .ranks import Team
from .report import make_report, num_trained, peak_memory_mb, write_report

# A single process writes its checkpoint to a file, several ranks write theirs to a folder. Both
# can exist at once, so that an old one is removed only after the new one is complete on disk.
CHECKPOINT = "checkpoint.pt"
CHECKPOINT_FOLDER = "checkpoint"
_REPLACED = ".replaced"
LEDGER = "ledger.jsonl"

# Adam's beta2 is 0.95 instead of 0.999, so that the second moment adapts within a short run.
_BETAS = (0.9, 0.95)
_MAX_EPSILON_POINTS = 200
# Accountants fast enough (milliseconds) to write epsilon to the metrics at each step.
_FAST_ACCOUNTANTS = ("contour", "rdp")
_EVALUATION_BATCH = 8


class Interrupted(Exception):
    """The job has stopped and written its checkpoint, since `should_stop` returned True."""


class TrainingRun:
    """A training job in a folder. Create it with `start` or `resume`, then call `run`.

    Attributes:
        lost_steps: number of noisy steps of a process that died before its next checkpoint;
            epsilon counts these steps, but the model does not contain them.
        ledger: the file that records the noisy steps; other runs may write to the same file.
        left_out: text with the number of data files left out for each reason.
        shortened: text with the reason why windows have fewer tokens than seq_len.
        total_steps: the planned number of noisy steps.
    """

    def __init__(
        self,
        config: TrainingConfig,
        folder: Path,
        state: TrainingState,
        corpus: Corpus,
        team: Team,
    ) -> None:
        self.config = config
        self.folder = folder
        self.state = state
        self.lost_steps = 0
        self.is_first = team.is_first
        self.left_out = corpus.left_out
        self.ranks = team.as_dict()
        self.ledger = folder / LEDGER if config.ledger is None else Path(config.ledger)
        self.checkpoint = folder / (CHECKPOINT if team.mesh is None else CHECKPOINT_FOLDER)
        self.noise = Banded(bands=len(state.coefficients), coefficients=tuple(state.coefficients))
        self._team = team
        team.ranks.agree(
            "dpflash train",
            {
                "the folder of the run": str(folder),
                "the documents": corpus.digest,
                "the configuration": {**config.as_dict(), "data": None},
                "parallelism": team.parallel,
            },
        )
        self._lm = language_model(config)
        self.token, self.released = self._lm.token, folder / self._lm.released
        self._held_out = self._lm.encode(corpus.held_out.contents)
        documents = self._lm.encode(corpus.train.contents)
        self.num_documents, self.num_held_out = len(documents), len(self._held_out)
        self.window_len = self._fitting_length(documents)
        team.parallel.check(replace(config, seq_len=self.window_len))
        self.num_units = corpus.train.num_units
        self.num_held_out_units = corpus.held_out.num_units
        self.total_steps = config.num_steps(self.num_units)
        self._documents_at_once = corpus.train.documents_at_once(config.examples_per_unit)
        self.pack = pack_of(config, self.window_len)
        kind, length = self._lm.windows, self.window_len
        if self.pack is not None:
            kind, length = WholeDocuments, self.pack.tokens - 1
        self._windows = kind(documents, length, key=state.window_key, padding=self._lm.padding)
        model = team.shard_parameters(self._initial_model())
        self._engine = PrivacyEngine(
            accountant=config.accountant,
            seed=config.seed,
            ledger=self.ledger,
            mesh=team.mesh,
        )
        budget = None
        if config.max_epsilon is not None:
            budget = PrivacyBudget(config.max_epsilon, config.delta, when_spent="stop")
        default_clipping = clipping_for(config.optimize, None, config.grad_sample_mode)
        self.model, self._optimizer, self._loader = self._engine.make_private(
            module=model,
            optimizer=self._adam(model),
            data_loader=DataLoader(
                self._windows, batch_size=config.batch_size, collate_fn=self.pack
            ),
            noise_multiplier=state.noise_multiplier,
            noise_mechanism=None if self.noise.bands == 1 else self.noise,
            sampling="poisson" if self.noise.bands == 1 else "cyclic_poisson",
            budget=budget,
            max_grad_norm=config.max_grad_norm,
            clipping=None if config.clipping == default_clipping else config.clipping,
            grad_sample_mode=config.grad_sample_mode,
            optimize=config.optimize,
            attention_backend=config.attention_backend,
            cuda_graph=config.cuda_graph,
            fp8=config.fp8,
            physical_batch_size=config.units_in_memory,
            dataset_size=config.dataset_size,
            unit_of=corpus.train.owners,
            examples_per_unit=config.examples_per_unit,
            unit_name=None if corpus.train.owners is None else config.noun,
            run_name=_printable(folder.resolve().name),
            data_name=_printable(os.path.basename(config.data or "")),
            public_length=None if config.pack else self.window_len,
            example=self._example(),
        )

    @classmethod
    def start(
        cls,
        config: TrainingConfig,
        folder: str | os.PathLike[str],
        launch: Launch | None = None,
    ) -> TrainingRun:
        """Create a new job in a folder that all ranks share. Nothing is written before `run`.

        `launch` is this process's rank in the job; None for a single process.
        """
        folder = Path(folder)
        launch = launch or Launch()
        if holds_a_run(folder):
            raise ValueError(
                f"out={str(folder)!r}: holds a run already, and its ledger must not be "
                f"overwritten; continue the run with --resume {folder}, or choose another folder"
            )
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"out={str(folder)!r}: is a file; choose another name")
        corpus = Corpus.read(config)
        state_memory = None
        if config.bands == "auto":
            memory = default_memory_budget(torch.device(config.device))
            state_memory = num_trained(language_model(config).build()), memory
        noise_multiplier, noise = noise_for(config, corpus.train.num_units, state_memory)
        values = [
            noise_multiplier,
            noise.coefficients,
            secrets.randbits(62) if config.seed is None else config.seed,
            derive_key(master_key(config.seed), "windows").hex(),
        ]
        team = launch.connect(config)
        noise_multiplier, coefficients, init_seed, window_key = json.loads(
            team.ranks.broadcast_from_first(json.dumps(values).encode(), "the keys of the run")
        )
        state = TrainingState(
            config=config.as_dict(),
            data_digest=corpus.digest,
            noise_multiplier=noise_multiplier,
            coefficients=coefficients,
            init_seed=init_seed,
            window_key=bytes.fromhex(window_key),
        )
        job = cls(config, folder, state, corpus, team)
        job._refuse_spent_ledger()
        return job

    @classmethod
    def resume(
        cls,
        folder: str | os.PathLike[str],
        given: Mapping[str, Any] | None = None,
        launch: Launch | None = None,
    ) -> TrainingRun:
        """Continue the job in a folder from its last checkpoint, with any number of ranks.

        The fields in `given` must have the values of the job's configuration. Only `data`,
        `eval_data` and `ledger` may differ, because files may have moved.
        """
        folder = Path(folder)
        launch = launch or Launch()
        path = checkpoint_of(folder)
        if path is None:
            raise FileNotFoundError(
                f"resume={str(folder)!r}: the folder has no {CHECKPOINT}; pass the folder of a "
                "run, or start one with --out"
            )
        given = given or {}
        saved = sharded_checkpoint.read_plain(path).get("extra", {})
        names = {f.name for f in fields(TrainingState)}
        if saved.keys() != names:
            raise ValueError(
                f"resume={str(folder)!r}: the checkpoint was not written by a training job; pass "
                "the folder of a `dpflash train` run"
            )
        before = saved["config"]
        config = TrainingConfig(**{**before, **given})
        for name in given.keys() - {"data", "eval_data", "ledger"}:
            expected = before.get(name)  # missing in checkpoints of earlier versions
            if getattr(config, name) != expected:
                raise ValueError(
                    f"{name}={given[name]!r}: the run to resume has {name}={expected!r}; leave "
                    "the option out, or start a new run in another folder"
                )
        corpus = Corpus.read(config)
        if corpus.digest != saved["data_digest"]:
            raise ValueError(
                f"data={config.data!r}: the documents changed after the run began, so epsilon "
                "would hold for neither version; restore them, or start a new run"
            )
        team = launch.connect(config)
        team.ranks.agree("dpflash train", {"the checkpoint to resume": path.name})
        job = cls(config, folder, TrainingState(**saved), corpus, team)
        job.state = TrainingState(**job._engine.load_checkpoint(path))
        job.lost_steps = job._own_releases() - job.step
        if job.lost_steps:
            warn(
                f"{job.lost_steps} step(s) were released after the last checkpoint and are lost; "
                "epsilon counts these steps, and the run repeats them with new noise",
            )
        return job

    def _fitting_length(self, documents: Sequence[Tokens]) -> int:
        """Return the least of seq_len, the model's limit and the longest document, in tokens.

        With a declared dataset_size the documents' lengths are private, and not considered.
        """
        config = self.config
        self.shortened = "the model takes no more"
        fitting = min(config.seq_len, self._lm.max_tokens or config.seq_len)
        if config.pack:
            return fitting
        longest = max(max(map(num_targets, documents)), 1)
        if config.dataset_size is None and longest < fitting:
            self.shortened = f"no {config.document} has more"
            return longest
        if longest < fitting:
            warn(
                f"seq_len={config.seq_len}: each {config.document} is shorter, so that part of "
                "every window is padding, which costs time; lower seq_len if the length of the "
                "longest document may be public",
                PrivateWarning,
            )
        return fitting

    @property
    def step(self) -> int:
        """The number of noisy steps in the model."""
        return self._optimizer.releases

    @property
    def optimization(self) -> Optimization:
        """The changes by the optimization level; its str() has one sentence for each change."""
        return self._engine.optimization

    @property
    def epsilon(self) -> float:
        """Epsilon of all noisy steps in the ledger so far, including lost steps."""
        return self._engine.get_epsilon(self.config.delta)

    @property
    def is_spent(self) -> bool:
        """Whether max_epsilon allows no further step."""
        return self._engine.remaining_steps() == 0

    def _refuse_spent_ledger(self) -> None:
        """Raise if a new run and the earlier runs of its ledger together exceed max_epsilon."""
        config, left = self.config, self._engine.remaining_steps()
        if config.ledger is None or left is None or left >= self.total_steps:
            return
        raise ValueError(
            f"max_epsilon={config.max_epsilon!r}: of the run's {self.total_steps} steps it allows "
            f"only {left}, since ledger={config.ledger!r} already has epsilon "
            f"{rounded_up(self.epsilon)}; lower target_epsilon or steps, or raise noise_multiplier"
        )

    def shares_ledger(self) -> bool:
        """Return whether other runs may use the ledger: it was passed, or has their lines."""

        def read() -> bytes:
            runs = {line.run for line in Ledger(self.ledger).lines}
            return b"x" * (not runs <= {self._engine.ledger_run})

        return self.config.ledger is not None or bool(
            self._team.ranks.run_on_first("reading the ledger", read)
        )

    def epsilon_alone(self) -> float:
        """Return the epsilon of this run's steps alone, without other runs of the ledger."""

        def read() -> bytes:
            ledger = Ledger(self.ledger)
            spending = Spending(self.config.accountant, ledger=ledger)
            own = alone(lines_of(ledger, self._engine.ledger_run), spending)
            return str(own.epsilon(self.config.delta).upper).encode()

        return float(self._team.ranks.run_on_first("reading the ledger", read))

    def _own_releases(self) -> int:
        def read() -> bytes:
            lines = lines_of(Ledger(self.ledger), self._engine.ledger_run)
            return str(sum(line.steps for line in lines)).encode()

        return int(self._team.ranks.run_on_first("reading the ledger", read))

    def run(
        self, *, should_stop: Callable[[], bool] = lambda: False, progress: bool = False
    ) -> dict[str, Any]:
        """Run the rest of the job, and return the report, as in report.json.

        `should_stop` is called after each step; if it returns True on any rank, all ranks stop and
        raise `Interrupted`. Raises RankError if another rank is lost.

        Guarantees:
            A stopped and resumed job has the same epsilon as an uninterrupted job, and with a seed
            the same parameters, bit for bit on the same machine with the same ranks. With other
            ranks and a seed the noise is the same, but sums are rounded in another order.
        """
        progress = progress and self.is_first
        state = self.state
        if state.finished:
            return self._written_report()
        self._save()
        if state.bits_before is None:
            state.bits_before = self._evaluate(self.model, "before")
        self._stop_if(should_stop)
        self._train(should_stop, progress)
        if state.bits_after is None:
            peak = self._team.greatest(peak_memory_mb(self.config.device), "peak memory")
            state.peak_memory_mb = max(state.peak_memory_mb, peak)
            state.bits_after = self._evaluate(self.model, "after")
            self._release()
        # The non-private run does not support sharded parameters.
        has_baseline = self.config.baseline and not self._team.parallel.shard_parameters
        if has_baseline and state.bits_nonprivate is None:
            self._stop_if(should_stop)
            self._train_baseline(should_stop, progress)
        report = self._written_report()
        state.finished = True
        state.baseline = None
        self._save()
        return report

    def _train(self, should_stop: Callable[[], bool], progress: bool) -> None:
        state, total = self.state, self.total_steps
        with _bar("private training", self.step, total, progress) as bar:
            while self.step < total:
                if self.is_spent:
                    state.stopped = (
                        f"stopped after step {self.step} of {total}: one more would exceed "
                        f"max_epsilon={self.config.max_epsilon:g} at delta={self.config.delta:g}"
                    )
                    if state.history:
                        state.history[-1]["epsilon"] = self.epsilon
                    break
                figures = _Figures()
                start = time.perf_counter()
                self._windows.set_step(self._next_draw())
                for batch in self._loader:
                    before = self.step
                    self._physical_batch(batch, figures)
                    # Set the step before the loader fetches the next batch, at the next iteration.
                    self._windows.set_step(self._next_draw())
                    if self.step == before:
                        continue
                    figures.seconds = time.perf_counter() - start
                    state.verified = self._engine.verified
                    rounded = {*state.rounded_sums, *self._engine.rounded_sums}
                    state.rounded_sums = sorted(rounded)
                    state.history.append(self._entry(figures))
                    bar.set_postfix(_postfix(state.history[-1]), refresh=False)
                    bar.update()
                    self._stop_if(should_stop)
                    if self.step == total:
                        break
                    if self.step % self.config.checkpoint_every == 0:
                        self._save()
                    figures, start = _Figures(), time.perf_counter()
        self._save()

    def _losses(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if isinstance(batch, PackedBatch):
            batch = self._team.own_packed(batch).to(self.config.device)
            return self._lm.packed_losses(model, batch), batch.targets
        inputs, targets = map(self._own_tokens, batch)
        return self._lm.losses(model, inputs, targets), targets

    def _physical_batch(self, batch: Any, figures: _Figures) -> None:
        """Run forward, clipped backward and optimizer for one microbatch, and add its figures.

        Rows that hold no sampled document are not counted.
        """
        real = self._loader.is_real
        sample_losses, targets = self._losses(self.model, batch)
        self._engine.backward(sample_losses)
        # Of the ranks that share a window, only one counts the window's document.
        documents = int(real.sum()) if self._team.counts_documents else 0
        if documents and self.config.clipping == "flat":
            norms = self._engine.diagnostics()["per_sample_norms"]
            figures.clipped += int((norms > self.config.max_grad_norm).sum())
            figures.seen += len(norms)
        self._optimizer.step()
        self._optimizer.zero_grad()
        figures.documents += documents
        if real.any():
            # Packed rows have no targets outside of sampled documents.
            counted = targets if isinstance(batch, PackedBatch) else targets[real]
            figures.tokens += int((counted != IGNORE_INDEX).sum())
        figures.bits += float(sample_losses.detach()[real].sum()) / math.log(2)

    def _entry(self, figures: _Figures) -> dict[str, Any]:
        """Return the history entry of a step; its loss is None if no document was sampled."""
        state = self.state
        own = astuple(figures if self.is_first else replace(figures, seconds=0.0))
        total = self._team.total(own, "the figures of a step")
        bits, documents, tokens, clipped, seen, seconds = total
        state.tokens += int(tokens)
        state.clipped_samples += int(clipped)
        state.seen_samples += int(seen)
        state.seconds += seconds
        every = -(-self.total_steps // _MAX_EPSILON_POINTS)
        is_point = self.step % every == 0 or self.step == self.total_steps
        is_fast = self.config.accountant in _FAST_ACCOUNTANTS
        epsilon = self.epsilon if is_point or is_fast else None
        loss = bits / documents if documents else None
        if self.is_first:
            append_metrics(
                self.folder,
                step=self.step,
                epsilon=epsilon,
                delta=self.config.delta,
                loss=loss,
                tokens_per_second=tokens / seconds if seconds else None,
            )
        return {"step": self.step, "loss": loss, "epsilon": epsilon if is_point else None}

    def _own_tokens(self, x: Tensor) -> Tensor:
        return self._team.own_tokens(x).to(self.config.device)

    def _train_baseline(self, should_stop: Callable[[], bool], progress: bool) -> None:
        """Train without privacy, with the same initial weights, number of steps and batch size."""
        config, state = self.config, self.state
        model = self._initial_model()
        optimizer = self._adam(model)
        if state.baseline is not None:
            model.load_state_dict(state.baseline["model"])
            optimizer.load_state_dict(state.baseline["optimizer"])
        total = self.step
        with _bar("non-private training", len(state.baseline_losses), total, progress) as bar:
            for step in range(len(state.baseline_losses), total):
                loss = self._baseline_step(model, optimizer, step)
                state.baseline_losses.append(loss)
                bar.set_postfix(_postfix({"loss": loss}), refresh=False)
                bar.update()
                state.baseline = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                self._stop_if(should_stop)
                if (step + 1) % config.checkpoint_every == 0:
                    self._save()
        state.bits_nonprivate = self._evaluate(model, "nonprivate")

    def _baseline_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
    ) -> float:
        config = self.config
        # Seed by the step, so that a resumed run samples the same documents.
        rng = np.random.default_rng([self.state.init_seed, step])
        # Use the mean number of documents of a private step.
        share = config.batch_size / self.num_units
        size = min(round(share * self._documents_at_once), len(self._windows))
        rows = rng.choice(len(self._windows), size, replace=False)
        own = rows[self._team.ranks.data_rank :: self._team.ranks.data_size]
        bits = 0.0
        for batch in self._plain_batches(own.tolist(), step):
            loss = self._losses(model, batch)[0].sum() / len(rows)
            loss.backward()
            bits += loss.item() / math.log(2)
        self._team.add_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        return self._team.total([bits], "the loss of the non-private run")[0]

    def _plain_batches(self, drawn: list[int], step: int) -> Iterator[Any]:
        """Yield microbatches of a non-private step, with the same sizes as in private steps."""
        if self.pack is not None:
            documents = [self._windows.tokens(index, step) for index in drawn]
            for numbers in self.pack.microbatches([len(tokens) for tokens in documents]):
                yield self.pack([documents[number] for number in numbers])
            return
        size = self.config.physical_batch_size
        for start in range(0, len(drawn), size):
            pairs = [self._windows.window(index, step) for index in drawn[start : start + size]]
            yield [torch.stack(column) for column in zip(*pairs, strict=True)]

    def _evaluate(self, model: nn.Module, when: str) -> float | None:
        config, team = self.config, self._team
        if not self._held_out:
            return None
        nats, count, correct = 0.0, 0, 0
        model.eval()
        with torch.no_grad():
            for inputs, targets in self._lm.held_out_batches(
                self._held_out,
                self.window_len,
                config.eval_windows,
                batch_size=_EVALUATION_BATCH,
                padding=self._lm.padding,
            ):
                inputs = self._own_tokens(team.own_documents(inputs))
                targets = self._own_tokens(team.own_documents(targets))
                # With sharded parameters a rank without documents must call the model. Otherwise
                # the rank must not, since models of transformers do not accept an empty batch.
                if not len(inputs) and not team.parallel.shard_parameters:
                    continue
                logits = self._lm.logits(model, inputs)
                nats += summed_loss(logits, targets)
                count += int((targets != IGNORE_INDEX).sum())
                if config.labels is not None:
                    correct += int((logits.argmax(-1) == targets).sum())
        model.train()
        nats, total, right = team.total([nats, count, correct], "an evaluation")
        if config.labels is not None and total:
            self.state.accuracies[when] = right / total
        return nats / total / math.log(2) if total else None

    def _initial_model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.state.init_seed)
            model = self._lm.build()
        model = model.to(self.config.device)
        return self._team.split_context(model)

    def _example(self) -> Any:
        """Return the synthetic batch of `make_private(example=)`, the same on all ranks."""
        if self.config.optimize == "aggressive":  # the model would be compiled for its shape too
            return None
        ranks = self._team.parallel.context_parallel
        tokens, vocabulary = min(self.window_len, ranks * synthetic.TOKENS), self._lm.vocabulary
        if self.pack is not None:
            return synthetic.packing(tokens)(synthetic.documents(vocabulary, tokens))
        made = synthetic.documents(vocabulary, tokens + 1)
        documents = [own.numpy() for own in made]
        if self.config.labels is not None:
            for number, own in enumerate(documents):
                own[0] = number % len(self.config.labels)
        key, padding = self.state.window_key, self._lm.padding
        windows = self._lm.windows(documents, tokens, key=key, padding=padding)
        return default_collate([windows[number] for number in range(len(windows))])

    def _adam(self, model: nn.Module) -> torch.optim.Adam:
        assert self.config.learning_rate is not None
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.Adam(trained, lr=self.config.learning_rate, betas=_BETAS)

    def _next_draw(self) -> int:
        return self._loader.state_dict()["next_draw"]

    def _stop_if(self, should_stop: Callable[[], bool]) -> None:
        if self._team.greatest(bool(should_stop()), "whether to stop"):
            self._save()
            if self.step:
                self._release()
                self._written_report()
            raise Interrupted(f"stopped at step {self.step}")

    def _release(self) -> None:
        """Write the model after the steps so far, without keys or diagnostics."""
        weights = self._team.whole_state(self.model)
        if self.is_first:
            self._lm.save(self.model, weights, self.folder)

    def _save(self) -> None:
        self._engine.save_checkpoint(self.checkpoint, extra=dict(vars(self.state)))
        if self.is_first:
            _remove_others(self.folder, self.checkpoint.name)

    def _written_report(self) -> dict[str, Any]:
        report = make_report(self, self._engine)
        if self.is_first:
            write_report(report, self.folder)
        return report


@dataclass
class _Figures:
    bits: float = 0.0
    documents: int = 0
    tokens: int = 0
    clipped: int = 0
    seen: int = 0
    seconds: float = 0.0


def holds_a_run(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder contains files of a job."""
    names = (LEDGER, CHECKPOINT, CHECKPOINT_FOLDER, WEIGHTS, PRETRAINED)
    return any((Path(folder) / name).exists() for name in names)


def checkpoint_of(folder: str | os.PathLike[str]) -> Path | None:
    """Return the path of the checkpoint in a job's folder; None if the folder has no checkpoint.

    If a process died after writing a checkpoint and before removing the other, both exist; the
    checkpoint with more steps is returned.
    """
    path, several = Path(folder) / CHECKPOINT, Path(folder) / CHECKPOINT_FOLDER
    found = [
        p for p in (path, several) if p.is_file() or (p / sharded_checkpoint.POINTER).exists()
    ]
    if len(found) > 1:
        found.sort(key=lambda p: sharded_checkpoint.read_plain(p)["releases"])
    return found[-1] if found else None


def _remove_others(folder: Path, kept: str) -> None:
    """Remove the checkpoint that is not `kept`, and leftovers of an interrupted removal."""
    for name in (CHECKPOINT, CHECKPOINT_FOLDER):
        replaced = folder / (name + _REPLACED)
        _delete(replaced)
        if name != kept and (folder / name).exists():
            # Rename first, since a partly removed folder must not look like a checkpoint.
            os.replace(folder / name, replaced)
            _delete(replaced)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def summed_loss(logits: Tensor, targets: Tensor) -> float:
    """Return the cross-entropy summed over all targets of a batch, in nats."""
    return nn.functional.cross_entropy(
        logits.flatten(0, -2).float(),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    ).item()


def _printable(name: str) -> str | None:
    return "".join(filter(str.isprintable, name)).strip() or None


def _bar(name: str, done: int, total: int, progress: bool) -> Any:
    return tqdm(initial=done, total=total, desc=name, unit="step", disable=not progress)


def _postfix(entry: Mapping[str, Any]) -> dict[str, str]:
    return {k: f"{entry[k]:.3f}" for k in ("loss", "epsilon") if entry.get(k) is not None}
