"""PrivacyEngine: the public interface of a private run; it holds the keys and the ledger."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from dpflash.accounting import Accountant, Interval

from ._validate import probability
from .audit.engine import audit as audit_engine
from .build import Given, build, calibrated, memory_of_states, sampling_plan
from .check import run_check
from .check.compatible import get_compatible_module, is_compatible, validate
from .config import (
    AUTO,
    FIELDS,
    TARGETS,
    PerformanceConfig,
    PrivacyConfig,
    configs_of,
    refuse_noise_multiplier,
    resolved,
    take_targets,
    takes_fields,
)
from .distributed.mesh import Ranks
from .distributed.validate import open_ledger
from .opacus_calls import refuse_keywords_of
from .optimize.levels import Optimization
from .privacy.card import with_epsilon, write_card_and_report
from .privacy.keys import RunKeys, Uncopied
from .privacy.privacy_unit import SAMPLE
from .privacy.public_facts import PublicFacts
from .privacy.spending import DEFAULT_ACCOUNTANT, Spending
from .refusal import TOGETHER, PrivateRefusal, warn
from .run import OF_STEPS, Attachment, LossFunction, PrivateRun, attachments_of
from .sampling.loader import PrivateDataLoader
from .sampling.plan import SamplingPlan
from .step import PrivateStep
from .verification.settable import OnlySettable

_P = ParamSpec("_P")
_R = TypeVar("_R")
_engines: weakref.WeakSet[PrivacyEngine] = weakref.WeakSet()

_OF_ENGINE = ("accountant", "seed", "ledger", "mesh", "neighboring_relation")
_NOT_PRIVATE = (
    "this engine has no private model: make_private was not called, or the model was detached or "
    "made private by another engine since. Call engine.make_private first"
)


def _after_fork() -> None:
    for engine in _engines:
        # A forked child process is not a rank of the job.
        engine._ranks = Ranks()
        engine._keys.leave_ranks()
        if engine._run is not None:
            engine._run.leave_ranks()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


def _of_run(
    method: Callable[Concatenate[PrivateRun, _P], _R], *, by_name: bool = False
) -> Callable[Concatenate[PrivacyEngine, _P], _R]:
    """Forward a method of the engine to its run.

    Args:
        method: a method of PrivateRun.
        by_name: whether the error for a missing private model names the method.
    """

    @functools.wraps(method)
    def of_run(self: PrivacyEngine, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        run = self._described(method.__name__) if by_name else self._running()
        return method(run, *args, **kwargs)

    return of_run


def _with_usage(usage: str, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap the function: a TypeError for wrong arguments shows `usage`."""

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{usage}: {error}") from None
        return function(*args, **kwargs)

    return checked


class PrivacyEngine(Uncopied, OnlySettable):
    """Trains a model with differential privacy (DP-SGD).

    Args:
        accountant: name of the accountant, such as "contour", or an accountant object of
            `dpflash.accounting` or of Opacus. Releases that the object has already counted are
            included in epsilon. With a ledger, pass a name, or an object of dpflash that has
            counted no release yet and that no other engine uses.
        seed: number from which all private randomness is derived, for reproducible research.
            Whoever knows the seed can subtract the noise, so do not release the results. By
            default the operating system supplies the keys.
        ledger: path of a file to which one line is written before each release. Lines already in
            the file are counted too, so that several runs on the same data compose in one ledger.
        mesh: a `DeviceMesh` of all ranks that train one model together. Its dimensions are "data"
            (ranks have different samples), "context" (ranks have different tokens of the same
            samples, see `dpflash.distributed.context_parallel`), or both; or torchtitan's
            "dp_replicate" and "dp_shard" (both like "data") and "cp" (like "context"). Every rank
            must make the same calls on the same dataset (make_private compares some entries).
            None for a single process.
        neighboring_relation: the relation that epsilon is computed for: "add_remove", "zero_out"
            or "replace_one". None for the sampler's default: "add_remove" for Poisson sampling
            with a public dataset_size; "zero_out" for Poisson sampling without dataset_size, for
            shuffled or foreign batches and for mixtures; "replace_one" for fixed-size batches.

    Guarantees:
        The sequence of parameter values after each optimizer.step() is (epsilon, delta)-DP for
        epsilon = get_epsilon(delta), for the neighboring relation that `neighboring_relation`
        names. Epsilon does not cover losses, per-sample norms, the sizes of logical batches,
        gradients before the step, or a choice among several runs. With a mesh the guarantee is the
        same as with one process: whole samples are clipped, and noise is added once to the sum
        over all ranks.
    """

    no_copy = "it would draw the same noise; build another PrivacyEngine"
    instead_of_setting = {
        **{name: f"set {name} of the optimizer that make_private returned" for name in OF_STEPS},
        **dict.fromkeys(FIELDS - {*OF_STEPS, *TARGETS}, "pass it to make_private"),
        **dict.fromkeys(TARGETS, "pass it to make_private_with_epsilon"),
        **dict.fromkeys(_OF_ENGINE, "pass it to PrivacyEngine(...)"),
    }

    def __init__(
        self,
        *,
        accountant: str | Accountant = DEFAULT_ACCOUNTANT,
        seed: int | None = None,
        ledger: str | os.PathLike[str] | None = None,
        mesh: DeviceMesh | None = None,
        neighboring_relation: str | None = None,
        **unknown: Any,
    ):
        refuse_keywords_of(PrivacyEngine, unknown)
        self._ranks = Ranks.of(mesh)
        self._has_mesh = mesh is not None
        self._is_warned = False
        self._warn_without_mesh()
        own = open_ledger(ledger, self._ranks)
        self._spending = self._ranks.run_on_all(
            "PrivacyEngine",
            lambda: Spending(accountant, relation=neighboring_relation, ledger=own),
        )
        self._ranks.agree(
            "PrivacyEngine",
            {"seed": seed, "accountant": self._spending.state_dict(), "ledger": ledger is None},
        )
        self._keys = RunKeys(seed, self._ranks, ledger_releases=own.releases if own else 0)
        self._run: PrivateRun | None = None
        # (Report of the last detached model, why the model must not be released), or None.
        self._detached: tuple[dict[str, Any], str | None] | None = None
        self._sampler = "none"
        _engines.add(self)

    @property
    def seed(self) -> int | None:
        """The seed of all private randomness; None if the operating system supplied the keys."""
        return self._keys.seed

    @property
    def ledger(self) -> Path | None:
        """Path of the ledger, the file with one line for each release; None without a ledger."""
        ledger = self._spending.ledger
        return None if ledger is None else ledger.path

    @property
    def ledger_head(self) -> str | None:
        """SHA-256 of the ledger, to save elsewhere and detect changes. None without a ledger."""
        ledger = self._spending.ledger
        return None if ledger is None else ledger.head

    @property
    def ledger_run(self) -> str:
        """The random name by which a ledger's lines identify this engine's run."""
        return self._keys.run

    get_compatible_module = staticmethod(get_compatible_module)
    validate = staticmethod(validate)
    is_compatible = staticmethod(is_compatible)

    @takes_fields(*TARGETS)
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        data_loader: DataLoader,
        privacy: PrivacyConfig | None = None,
        performance: PerformanceConfig | None = None,
        **keywords: Any,
    ) -> tuple[nn.Module, Any, PrivateDataLoader]:
        """Make a model, its optimizer and its data loader private.

        Args:
            module: the model; its layers are changed in place and keep their state_dict keys.
            optimizer: a torch optimizer, or a list of several, over all trained parameters.
            data_loader: DataLoader(dataset, batch_size=...). One entry of the dataset is one
                privacy unit; batch_size is the expected batch size over all ranks together. Each
                row of a batch must be computed from one entry alone. A collate_fn that visibly
                mixes entries (mixup) is refused; a __getitem__ that mixes them is not detected.
            privacy: the arguments that determine epsilon, see `dpflash.PrivacyConfig`; its fields
                can be passed as keywords instead.
            performance: the arguments that determine time and memory, see
                `dpflash.PerformanceConfig`; its fields can be passed as keywords instead.
            poisson_sampling: Opacus' keyword; False means sampling="shuffled".

        Before some microbatches the loader yields an additional batch for an isolation test (a
        trial), which tests that model and loop compute each sample by itself, see `verified`.
        Every batch has the same public number of rows; padding rows (`~loader.is_real`) have
        weight 0. Losses must be in the loader's order of rows. docs/guarantees.md lists the
        outputs that epsilon does not cover.

        Returns:
            (module, optimizer, data_loader): the same model object, the wrapped optimizer (for
            a list, a list in the same order), and a loader that samples as the accountant
            assumes.

        Raises:
            ValueError: names the argument, its value and what to do; nothing has been changed.
            TypeError: a keyword is unknown.
        """
        asked = configs_of(self.make_private, privacy, performance, keywords)
        return self._make_private(Given(module, optimizer, data_loader), *asked)

    def _make_private(
        self,
        given: Given,
        asked: PrivacyConfig,
        performance: PerformanceConfig,
        plan: SamplingPlan | None = None,
        delta: float | None = None,
    ) -> tuple[nn.Module, Any, PrivateDataLoader]:
        if not isinstance(module := given.module, nn.Module):
            raise ValueError(f"module={type(module).__name__}: expected a torch.nn.Module")
        settings = resolved(asked, performance)
        self._warn_without_mesh()  # the process group may have been created since `__init__`
        self._ranks.run_on_all("make_private", self._refuse_second_model)
        self._run = run = build(
            given,
            settings,
            plan,
            keys=self._keys,
            spending=self._spending,
            ranks=self._ranks,
            # A mesh of one rank writes a folder too, so that more ranks can resume from it.
            as_folder=self._has_mesh,
            delta=delta,
        )
        self._sampler = run.loader.sampler_name
        run.backward.attach(Attachment(run, self.detach))
        several = isinstance(given.optimizer, (list, tuple))
        return run.model, list(run.optimizers) if several else run.optimizers[0], run.loader

    def _warn_without_mesh(self) -> None:
        if self._has_mesh or self._is_warned or not dist.is_initialized():
            return
        if dist.get_world_size() > 1:
            self._is_warned = True
            warn(
                f"PrivacyEngine without mesh in one of {dist.get_world_size()} ranks: each rank "
                "trains its own model, and its epsilon does not cover the other ranks' releases. "
                "Pass mesh=init_device_mesh(..., mesh_dim_names=('data',))",
            )

    def _refuse_second_model(self) -> None:
        if self._run is not None:
            raise ValueError(
                f"this engine has a model already; call engine.detach(model) first. {TOGETHER}"
            )

    @takes_fields(*TARGETS, "noise_multiplier")
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        data_loader: DataLoader,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        privacy: PrivacyConfig | None = None,
        performance: PerformanceConfig | None = None,
        **keywords: Any,
    ) -> tuple[nn.Module, Any, PrivateDataLoader]:
        """Call `make_private` with the noise that spends target_epsilon in `epochs` or `steps`.

        Args:
            target_epsilon: epsilon > 0 at the end of training; or set this field of `privacy`.
            target_delta: delta in (0, 1), well below 1 / size of the dataset; or set this field
                of `privacy`.
            epochs: number of epochs of the loader, >= 1.
            steps: number of logical batches, >= 1, in place of epochs; for a shuffled loader,
                an incomplete last epoch counts as a whole epoch.
            budget: a limit on the epsilon of past and future releases together, whereas
                target_epsilon is the epsilon of the coming epochs or steps alone.

        The other arguments, the return value and the errors are the same as `make_private`'s.
        """
        refuse_noise_multiplier(privacy, keywords)
        method = self.make_private_with_epsilon
        asked, performance = configs_of(method, privacy, performance, keywords)
        asked, target_epsilon, target_delta = take_targets(asked, target_epsilon, target_delta)
        if (epochs is None) == (steps is None):
            raise TypeError(
                f"epochs={epochs!r}, steps={steps!r}: make_private_with_epsilon needs one of these"
            )
        plan = sampling_plan(data_loader, asked)
        given = Given(module, optimizer, data_loader)
        memory = memory_of_states(given, performance) if asked.noise_mechanism == AUTO else None
        plan, steps, noise = calibrated(
            plan, self._spending, self._ranks, epochs=epochs, steps=steps,
            epsilon=target_epsilon, delta=target_delta, state_memory=memory,
        )  # fmt: skip
        asked = replace(
            asked, noise_multiplier=noise, noise_mechanism=plan.mechanism, sampling=plan.sampling
        )
        made = self._make_private(given, asked, performance, plan, target_delta)
        self._running().step.charge.expect(steps, target_epsilon=target_epsilon)
        return made

    def backward(
        self, losses: Tensor | LossFunction, batch: Any = None, *others: Any
    ) -> Tensor | None:
        """Add the clipped gradients of a batch to the logical batch's sum.

        `backward(loss_fn, batch)` runs the loader's batch row by row: `loss_fn(model, sample)`
        gets one row, `[1, ...]` of each tensor, and returns its loss, a tensor of one number. The
        modules' state is reset before each row, so model and loss cannot mix samples. Trials still
        compare losses and gradients, since the loop may have mixed the samples before this call. A
        batch of B rows takes as long as B batches of one row, so physical_batch_size=1 is best.

        `backward(criterion, (outputs, targets))` takes a criterion object of torch, such as
        CrossEntropyLoss(weight=...), and computes the loss of each sample with the criterion, see
        `dpflash.losses.of_criterion`.

        Args:
            losses: [B], one loss for each row of the batch in the loader's order, computed from
                that row alone; losses of padding rows have weight 0. If units have several rows
                (unit_of, `dpflash.packing.Pairs`), a unit's loss is the mean over its rows; for
                pairs you may also pass one loss for each pair. For packed documents
                [max_documents], one loss for each document. A scalar is accepted only if
                make_private got loss_reduction. Or a function or a criterion, see above.
            batch: the loader's batch for a function; (outputs, targets) for a criterion.

        Returns:
            None; for a function or a criterion the losses `[B]` without a graph, which are
            private like all losses.

        Raises:
            PrivateRefusal: losses is not one loss for each sample of the batch, or reached no
                private layer; or a trial has shown that samples depend on each other.
            RuntimeError: this batch already had its backward.
            ValueError: a function was passed with loss_reduction, with a batch that is not the
                loader's, or with a batch whose samples are not rows.

        Guarantees:
            Each sample changes the sum by at most max_grad_norm in L2, over all parameters
            together, whatever its loss; a sample with a NaN or Inf gradient does not change the
            sum. In a batch without a public number of rows the bound holds up to rounding.
        """
        if others:
            raise TypeError(
                "engine.backward takes at most two arguments: pass engine.backward(criterion, "
                "(outputs, targets)), or engine.backward(loss_fn, batch)"
            )
        return self._running().run_backward(losses, batch)

    @contextmanager
    def public_data(self) -> Iterator[None]:
        """Train on public data in a with block; gradients are not clipped, noised or counted.

        ::

            with engine.public_data():
                F.cross_entropy(model(x_public), y_public).backward()  # any scalar loss
            optimizer.step()

        Inside the with block the model behaves as if it were not private: its layers do not clip,
        batches have any size, and losses are ordinary scalars, whose backward also runs in the
        block. `.grad` of the trained parameters holds the gradients of the block alone (you may
        clip them by `clip_grad_norm_`, or unscale them) and is restored afterwards. Public
        gradients add up over blocks until the next step; `optimizer.zero_grad()` drops them.
        Checkpoints do not contain them.

        `optimizer.step()` adds public gradients to the gradient of the private batch: (clipped sum
        + noise) / expected_batch_size + public gradient, so scale the public loss to weight it.
        Between private batches (after a step, before the next batch of the loader) the step uses
        public gradients alone, without noise, charge, ledger line or step hook, even if the budget
        is spent. With a mesh, public gradients are averaged over the ranks with different samples.

        Raises:
            RuntimeError: the engine, step, zero_grad or the private loader is used in the block;
                a backward in the block reaches a forward outside of it; the model got rows of the
                private loader's batch (if they can be recognized); or a buffer or a frozen
                parameter changed, see make_private(allow_buffers=). The gradients are dropped.
            ValueError: fully_shard is used with a context dimension, or on some ranks alone.

        Guarantees:
            Sums, noise and charge of private batches are bit-equal with and without public
            batches. Epsilon covers the private data alone. Epsilon holds if the public data, its
            order, weights and losses were chosen without the private data. They may depend on
            released parameters, but on no other value computed from private data. Public data is
            not protected.
        """
        run = self._running()
        run.step.public.refuse_ranks(self._ranks)
        with run.step.public.collected(), run.wrapper.plain(), run.loader.drawing_apart():
            yield

    @overload
    def get_epsilon(self, delta: float, interval: Literal[False] = False) -> float: ...

    @overload
    def get_epsilon(self, delta: float, interval: Literal[True]) -> Interval: ...

    def get_epsilon(self, delta: float, interval: bool = False) -> float | Interval:
        """Return epsilon spent so far at delta; inf if any step was released without noise.

        Args:
            delta: in (0, 1).
            interval: whether to return an `Interval` with a lower bound of epsilon too, if the
                accountant knows one.
        """
        probability(delta=delta)
        ledger = self._spending.ledger
        if ledger is not None and ledger.has_grown:
            warn(
                f"ledger={str(ledger.path)!r} has later lines of another engine or process, which "
                "this epsilon does not count: call get_epsilon of the newest engine, or run "
                "`dpflash budget`"
            )
        found = self._spending.epsilon(delta)
        return found if interval else found.upper

    def remaining_steps(self) -> int | None:
        """Return how many more steps at the present noise the budget allows; None without budget.

        With a shuffled loader, count the rest of a charged epoch, and then whole epochs only.
        """
        return None if self._run is None else self._run.remaining_steps()

    @property
    def accountant(self) -> Accountant:
        """The accountant, which counts the releases."""
        return self._spending.accountant

    @property
    def sampler(self) -> str:
        """The sampling scheme that the accountant assumes."""
        others = ", some batches not from its loader" * self._spending.has_foreign_batches
        return self._sampler + others

    @property
    def neighboring_relation(self) -> str:
        """The neighboring relation of epsilon: "add_remove", "zero_out" or "replace_one"."""
        return self._spending.relation

    @property
    def privacy_unit(self) -> str:
        """The privacy unit in which neighboring datasets differ.

        "sample", "document", "preference pair", "user" or "user, fixed graph" (see
        `dpflash.PrivacyConfig`), followed by unit_name if there is one, as in "user: patient".
        """
        return self._spending.unit or SAMPLE

    def save_model_card(
        self,
        folder: str | os.PathLike[str],
        *,
        delta: float,
        description: str | None = None,
        base: str | None = None,
    ) -> Path:
        """Write a model card, README.md, into the folder of a saved model.

        The card's first section states epsilon, the privacy unit that it protects, and the outputs
        that it does not cover. The same facts are written to report.json, which `dpflash audit
        --run` reads. The card describes this engine's private model, or the model that was
        detached last if there is none. With a mesh, call this on one rank.

        Args:
            folder: an existing folder that `save_pretrained` or `torch.save` wrote the model to.
                A section on privacy in its README.md is replaced; other sections are kept.
            delta: in (0, 1), well below 1 / size of the dataset.
            description: text that introduces the model if the folder has no README.md.
            base: name of the pretrained model that was fine-tuned.

        Returns:
            The path of the card.

        Raises:
            FileNotFoundError: the folder does not exist.
            ValueError: this engine has made no model private.
            PrivateRefusal: a buffer or a frozen parameter changed, see
                make_private(allow_buffers=), so the model is not for release.
        """
        probability(delta=delta)
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"folder={str(folder)!r}: no such folder; save the model there first"
            )
        if self._run is not None:
            assert self._run.wrapper.unchanged is not None
            found, refusal = self._run.report(), self._run.wrapper.unchanged.leaving()
        elif self._detached is not None:
            found, refusal = self._detached
        else:
            raise ValueError("save_model_card: this engine has made no model private")
        if refusal is not None:
            raise PrivateRefusal(f"no model card is written: {refusal}") from None
        self.get_epsilon(delta)  # warns if another engine has added to the ledger
        report = with_epsilon(
            found,
            self._spending,
            delta,
            run=found.get("ledger_run", self.ledger_run),
            seeded=self.seed is not None,
            base=base and Path(base).name,
        )
        return write_card_and_report(folder, report, description)

    check = staticmethod(
        _with_usage("engine.check(model, batch, loss_fn, *, loss_reduction=None)", run_check)
    )
    audit = audit_engine
    groups = _of_run(PrivateRun.groups, by_name=True)
    plan = _of_run(PrivateRun.plan, by_name=True)
    prepare = _of_run(PrivateRun.prepare)
    diagnostics = _of_run(PrivateRun.diagnostics)
    save_checkpoint = _of_run(PrivateRun.save_checkpoint)
    load_checkpoint = _of_run(PrivateRun.load_checkpoint)
    state_dict = _of_run(PrivateRun.state_dict)
    load_state_dict = _of_run(PrivateRun.load_state_dict)

    @property
    def optimization(self) -> Optimization:
        """The changes made by the optimization level; str() returns one sentence for each."""
        return self._described("optimization").wrapper.optimization

    @property
    def verified(self) -> bool | str:
        """Whether isolation tests (trials) have shown that samples do not depend on each other.

        PRIVATE, like `trials`: the value depends on the numbers of samples in logical batches.

        - True: 16 samples were compared, and every layer that ran had nonzero gradients.
        - "pending": fewer samples were compared so far.
        - False: make_private(verify_first_batch=False) turned the tests off.
        - "by construction": the loop passes `backward` a function of one sample.
        - "model": the model was tested, but the loop was not, since a batch holds no tensor or
          list with an entry for each sample, is foreign, or comes from BatchMemoryManager.
        - "gradients": like "model", but only the backward was tested, since the test found no call
          of the model in which it could replace samples. The loop calls the layers one by one, or
          the model went through your own torch.compile, or an argument that differs between calls
          is neither a tensor with the samples first nor a list with an element for each sample.
        - "forward": like "model", but only the forward was tested, since it returns a scalar loss.
        """
        return self._described("verified").verified

    @property
    def trials(self) -> str:
        """Text on the trials so far: what was compared, with which tolerance, and what was not."""
        return self._described("trials").trials

    @property
    def public(self) -> PublicFacts:
        """Public facts: rows per batch, lengths, dataset size. str() has one fact per line."""
        return self._described("public").public

    @property
    def rounded_sums(self) -> tuple[str, ...]:
        """Names of the parameters whose sums were rounded in float32 in some batch so far.

        The sums of all other parameters were exact: in real arithmetic, one sample changes each of
        them by at most its bound, whatever the order of the samples.
        """
        return tuple(sorted(self._described("rounded_sums").step.sums.rounded))

    def detach(self, model: nn.Module) -> nn.Module:
        """Make the model's layers ordinary again and return it; the engine keeps its epsilon.

        Any engine can detach a model whose own engine no longer exists. With a mesh, all ranks
        must call detach before the next make_private; after training, one rank may do so alone.
        """
        if self._run is None or model is not self._run.model:
            attachments = attachments_of(model)
            if not attachments or not all(a.is_orphan for a in attachments):
                raise ValueError("model is not the one that this engine made private")
            for attachment in attachments:
                attachment.give_back()
            return model
        own = self._running().backward.attachment
        assert isinstance(own, Attachment)
        report = {**self._run.report(), "ledger_run": self.ledger_run}
        self._detached = report, own.give_back()
        # The next model's steps are counted from 0, so the old keys would repeat the noise.
        self._keys.begin_model()
        self._spending.set_budget(None)
        self._run = None
        return model

    def _described(self, method: str) -> PrivateRun:
        """Return the run, for a method that only reports."""
        if self._run is None:
            raise ValueError(f"{method}: {_NOT_PRIVATE}, and ask before engine.detach(model)")
        return self._run

    def _running(self) -> PrivateRun:
        """Return the run, for a method that changes it."""
        if self._run is None:
            raise RuntimeError(_NOT_PRIVATE)
        self._run.step.public.refuse_inside("a call of the engine")
        return self._run

    @property
    def _step(self) -> PrivateStep:
        return self._described("_step").step
