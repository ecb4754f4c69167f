"""PrivacyEngine: wires model, optimizer, loader and accountant together."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
import os
import secrets
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpflash.accounting import Accountant, create_accountant, get_noise_multiplier

from . import checkpoint
from ._validate import finite, non_negative, one_of, positive, positive_int, probability
from .attach import attach, check_model, detach, owners, tileable
from .check import CheckReport, run_check
from .clipping import Group, flat_groups, per_block_groups, per_layer_groups
from .explain import ClippingGroups, ClippingPlan, describe_groups, explain_plan
from .gate import PrivateBackward
from .ledger import Ledger
from .optimizer import PrivateOptimizer
from .planner import WAYS, default_memory_budget
from .sampling import BatchTracker, PrivateDataLoader, check_loader
from .streams import derive_key, master_key

CLIPPINGS = ("flat", "per_layer", "per_block")
CLIP_FUNCTIONS = ("hard", "automatic")

_numbers = itertools.count()
_engines: weakref.WeakSet[PrivacyEngine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in _engines:
        engine._leave_noise()


os.register_at_fork(after_in_child=_after_fork)

# Arguments of peers that have no counterpart here.
_REFUSED = {
    "secure_mode": "noise always comes from ChaCha20, keyed by the operating system",
    "criterion": "losses are computed by the caller, one per sample (dpflash.losses)",
    "batch_first": "the batch is always the first dimension",
    "noise_generator": "noise comes from a keyed stream; PrivacyEngine(seed=...) reproduces it",
    "grad_sample_mode": "clipping happens inside backward(); choose clipping= and way= instead",
    "wrap_model": "the model is never wrapped; it comes back as the same object",
    "rand_on_empty": "empty batches are yielded with zero samples",
    "max_batch_size": "truncating a Poisson draw changes its guarantee and is not accounted for "
    "yet; physical_batch_size= bounds the memory without touching the draw",
}


class PrivacyEngine:
    """Trains a model with differential privacy (DP-SGD).

    Args:
        accountant: name of the accountant ("rdp"), or an object with its interface.
        seed: derives all private randomness from this number, for reproducible research. Whoever
            knows the seed can subtract the noise, so results are not for release. By default
            keys come from the operating system.
        ledger: path of a file that gets one line for each release, before it leaves.

    Guarantees:
        The sequence of parameter values after each optimizer.step() is (epsilon, delta)-DP for
        epsilon = get_epsilon(delta), for the neighbouring relation that `neighboring_relation`
        names. Not covered: losses, per-sample norms, drawn batch sizes, gradients before the
        step, and a choice among several runs.
    """

    def __init__(
        self,
        *,
        accountant: str | Accountant = "rdp",
        seed: int | None = None,
        ledger: str | os.PathLike[str] | None = None,
        **unknown: Any,
    ):
        if unknown:
            _refuse_keywords(unknown, PrivacyEngine)
        self.accountant: Accountant = (
            create_accountant(accountant) if isinstance(accountant, str) else accountant
        )
        self.seed = seed
        self._key = master_key(seed)
        self._incarnation = 0
        # Where nothing else tells two processes apart that go on from one state.
        self._branch = ""
        self._run = secrets.token_hex(16)
        self._number = next(_numbers)
        self._restored = False
        self._twin_warned = False
        self._noiseless = False
        self._unamplified = False
        self._pass_noise = math.inf
        self._ledger = None if ledger is None else Ledger(ledger)
        if self._ledger is not None:
            for noise_multiplier, sample_rate in self._ledger.read():
                self._account(noise_multiplier, sample_rate)
        self._model: nn.Module | None = None
        self._backward: PrivateBackward | None = None
        self._optimizer: PrivateOptimizer | None = None
        self._loader: PrivateDataLoader | None = None
        self._clipping = "flat"
        self._tracker = BatchTracker()
        _engines.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a copy of an engine would draw the same noise; build another PrivacyEngine"
        )

    def __copy__(self) -> NoReturn:
        self.__deepcopy__({})

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__({})

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: float,
        clipping: str = "flat",
        way: str = "auto",
        clip_function: str = "hard",
        poisson_sampling: bool = True,
        physical_batch_size: int | None = None,
        loss_reduction: str | None = None,
        memory_budget: int | None = None,
        **unknown: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateDataLoader]:
        """Make a model, its optimizer and its data loader private.

        Args:
            module: the model; its layers are changed in place and keep their state_dict keys.
            optimizer: any torch optimizer over parameters of the model.
            data_loader: DataLoader(dataset, batch_size=...); one entry of the dataset is one
                privacy unit, batch_size the expected batch size.
            noise_multiplier: noise standard deviation over max_grad_norm; 0 for none (no epsilon).
            max_grad_norm: L2 bound C of one sample's gradient over all parameters.
            clipping: "flat" (one norm over all parameters), "per_layer" (one a module, each with
                an equal share of C^2) or "per_block" (one a 128 x 128 tile of a linear layer's
                weight, and one a parameter elsewhere, C^2 shared by number of elements).
            clip_function: "hard", c_i = min(1, C / n_i), or "automatic", c_i = C / (n_i + 0.01).
            way: how flat clipping gets its norms: "auto", "stored", "book_keeping", "two_pass".
            poisson_sampling: draw batches by Poisson sampling. False keeps the loader's own
                passes over the data and accounts for them without amplification.
            physical_batch_size: upper bound of a batch that the loader yields; logical batches
                above it come in parts and step() waits for the last.
            loss_reduction: "mean" or "sum" where the training loop calls loss.backward() on a
                scalar that is that reduction over samples; None for engine.backward(losses).
            memory_budget: bytes that stored gradients of physical_batch_size samples (None: of
                the expected batch) may take; default a quarter of the device's.

        Returns:
            (module, optimizer, data_loader): the same model object, the wrapped optimizer, and
            a loader that draws as the accountant assumes.

        Raises:
            ValueError: naming the argument, its value and the way out; nothing is changed then.
            TypeError: for an unknown keyword.
        """
        if unknown:
            _refuse_keywords(unknown, self.make_private)
        non_negative(noise_multiplier=noise_multiplier)
        finite(noise_multiplier=noise_multiplier)
        if isinstance(max_grad_norm, list | tuple):
            raise ValueError(
                f"max_grad_norm={max_grad_norm!r}: expected one number; clipping='per_layer' "
                "gives each layer an equal share of it"
            )
        positive(max_grad_norm=max_grad_norm)
        if noise_multiplier > 0:
            finite(max_grad_norm=max_grad_norm)
        one_of(clipping=(clipping, CLIPPINGS))
        one_of(way=(way, ("auto", *WAYS)))
        one_of(loss_reduction=(loss_reduction, (None, "mean", "sum")))
        one_of(clip_function=(clip_function, CLIP_FUNCTIONS))
        if clip_function == "automatic" and (clipping == "per_block" or math.isinf(max_grad_norm)):
            raise ValueError(
                f"clip_function='automatic' with clipping={clipping!r} and max_grad_norm="
                f"{max_grad_norm}: it needs a finite bound and flat or per_layer clipping; pass "
                "clip_function='hard' here"
            )
        if clipping != "flat" and way != "auto":
            raise ValueError(f"way={way!r}: ways belong to clipping='flat'; leave way='auto' here")
        if way == "two_pass" and loss_reduction is not None:
            raise ValueError(
                "way='two_pass' weights the losses of the samples, so it needs them one by one; "
                "leave loss_reduction=None and call engine.backward(losses)"
            )
        if physical_batch_size is not None:
            positive_int(physical_batch_size=physical_batch_size)
            if not poisson_sampling:
                raise ValueError(
                    f"physical_batch_size={physical_batch_size} with poisson_sampling=False: the "
                    "loader's own batches are kept whole; give the loader a smaller batch_size"
                )
        if memory_budget is not None:
            positive_int(memory_budget=memory_budget)
        if self._model is not None:
            raise ValueError("this engine has a model already; call engine.detach(model) first")
        check_model(module)
        trained = _trained_parameters(module, optimizer)
        tracker = BatchTracker()
        loader = PrivateDataLoader(
            data_loader,
            tracker,
            poisson=poisson_sampling,
            key=self._sampling_key(),
            physical_batch_size=physical_batch_size,
        )
        groups = _make_groups(module, trained, clipping)
        backward = PrivateBackward(
            groups,
            names={p: n for n, p in module.named_parameters()},
            way=way,
            memory_budget=memory_budget or default_memory_budget(trained[0].device),
            public_batch_size=physical_batch_size or math.ceil(loader.expected_batch_size),
            loss_reduction=loss_reduction,
            clip_function=clip_function,
            flat=clipping == "flat",
        )
        private_optimizer = PrivateOptimizer(
            optimizer,
            backward=backward,
            tracker=tracker,
            noise_multiplier=float(noise_multiplier),
            max_grad_norm=float(max_grad_norm),
            expected_batch_size=loader.expected_batch_size,
            parameter_ids={p: i for i, p in enumerate(trained)},
            noise_key=self._noise_key(),
            charge=self._charge,
        )
        backward.bound_source = lambda: private_optimizer.max_grad_norm
        backward.before_backward = tracker.before_backward
        backward.begin_release = private_optimizer.begin_release

        def abandon() -> None:
            private_optimizer.forget_signals()
            backward.discard()

        queue = private_optimizer._step_skip_queue
        tracker.unstepped = lambda: len(queue)
        tracker.fetched_ahead = loader.num_workers > 0
        tracker.has_sums = lambda: bool(backward.sums)
        tracker.abandon = abandon
        tracker.on_batch = backward.begin_batch
        for parameter in trained:
            parameter.grad = None
        attach(module, backward)
        self._model, self._backward, self._tracker = module, backward, tracker
        self._clipping = clipping
        self._optimizer, self._loader = private_optimizer, loader
        return module, private_optimizer, loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        clipping: str = "flat",
        way: str = "auto",
        clip_function: str = "hard",
        poisson_sampling: bool = True,
        physical_batch_size: int | None = None,
        loss_reduction: str | None = None,
        memory_budget: int | None = None,
        **unknown: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateDataLoader]:
        """`make_private` with the noise that spends target_epsilon after `epochs` passes.

        Args:
            target_epsilon: epsilon > 0 at the end of training.
            target_delta: delta in (0, 1), well below 1 / len(dataset).
            epochs: passes over the loader, >= 1.

        The other arguments, the result and the errors are those of `make_private`.
        """
        if "noise_multiplier" in unknown:
            raise ValueError(
                f"noise_multiplier={unknown['noise_multiplier']!r} beside a target epsilon: the "
                "target decides the noise. Drop it, or call make_private"
            )
        if unknown:
            _refuse_keywords(unknown, self.make_private_with_epsilon)
        positive(target_epsilon=target_epsilon)
        finite(target_epsilon=target_epsilon)
        probability(target_delta=target_delta)
        positive_int(epochs=epochs)
        num_samples, batch_size = check_loader(data_loader, poisson=poisson_sampling)
        steps = epochs * -(-num_samples // batch_size) if poisson_sampling else epochs
        if target_delta >= 1 / num_samples:
            warnings.warn(
                f"target_delta={target_delta!r} is not below 1 / {num_samples} entries of the "
                "data: releasing one of them outright would be allowed; choose it well below",
                stacklevel=2,
            )
        if len(self.accountant.history):
            warnings.warn(
                "the accountant has spent privacy already; target_epsilon covers the coming "
                "epochs alone, get_epsilon the sum",
                stacklevel=2,
            )
        noise_multiplier = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=min(1.0, batch_size / num_samples) if poisson_sampling else 1.0,
            steps=steps,
            accountant=type(self.accountant).mechanism(),
        )
        return self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            clipping=clipping,
            way=way,
            clip_function=clip_function,
            poisson_sampling=poisson_sampling,
            physical_batch_size=physical_batch_size,
            loss_reduction=loss_reduction,
            memory_budget=memory_budget,
        )

    def backward(self, losses: Tensor) -> None:
        """Add the clipped gradients of a batch to the logical batch's sum.

        Args:
            losses: [B], one number per sample, computed from that sample alone. A scalar only
                where make_private got loss_reduction.

        Raises:
            ValueError: for another shape, or a number of losses that is not the batch's.
            RuntimeError: for losses that reached no private layer, or a second call on a batch.

        Guarantees:
            Each sample changes the sum by at most max_grad_norm in L2, over all parameters
            together, whatever its loss; one with a NaN or Inf gradient changes it by nothing.
        """
        backward = self._attached()
        if not isinstance(losses, Tensor):
            raise ValueError(f"losses={type(losses).__name__}: expected a tensor [B]")
        scalar_allowed = backward.loss_reduction is not None
        if losses.ndim != 1 and not (scalar_allowed and losses.ndim == 0):
            scalar = (
                "; a scalar is taken only where it is a reduction over samples, declared by "
                "make_private(loss_reduction=...); Hugging Face's own loss, over tokens, is not"
            )
            raise ValueError(
                f"losses has shape {tuple(losses.shape)}: expected one loss per sample, [B]. Use "
                "dpflash.losses, or reduction='none' and a mean over each sample's own elements"
                + ("" if losses.ndim else scalar)
            )
        if losses.ndim == 1 and losses.shape[0] == 0:
            self._tracker.before_backward(0)
            return
        if not losses.requires_grad:
            raise RuntimeError(
                "losses do not require grad, so they reach no private layer: compute them from "
                "the model's output outside of torch.no_grad() and without detach()"
            )
        if losses.ndim == 1:
            self._tracker.before_backward(losses.shape[0])
        nonfinite = backward.nonfinite_samples
        try:
            backward.backward(losses)
        except BaseException:
            # Its sums are dropped, so the batch may be tried again.
            self._tracker.dropped()
            raise
        if backward.nonfinite_samples > nonfinite:
            warnings.warn(
                f"{backward.nonfinite_samples - nonfinite} sample(s) of a batch had a NaN or Inf "
                "gradient and contributed zero (their number is private: do not release it)",
                stacklevel=2,
            )

    def get_epsilon(self, delta: float) -> float:
        """Epsilon spent so far at delta; inf once a step was released without noise.

        Args:
            delta: in (0, 1).
        """
        probability(delta=delta)
        if self._noiseless:
            return math.inf
        return float(self.accountant.get_epsilon(delta)) if len(self.accountant.history) else 0.0

    @property
    def sampler(self) -> str:
        """How the batches of the releases were drawn, as accounted for."""
        name = "none" if self._loader is None else self._loader.sampler_name
        return f"{name}, some batches not from its loader" if self._unamplified else name

    @property
    def neighboring_relation(self) -> str:
        """What epsilon is for: "add_remove" one sample, or "zero_out" one (size public)."""
        if self._unamplified or self._loader is None or self._loader.sampler_name != "poisson":
            return "zero_out"
        return "add_remove"

    def check(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        *,
        loss_reduction: str | None = None,
    ) -> CheckReport:
        """Try on one batch whether losses[i] and its gradient depend on sample i alone.

        Args:
            model: plain or private; the check works on a plain copy and changes nothing.
            batch: what loss_fn takes: a tensor, a tuple or a dict of tensors whose first
                dimension is the batch, of two samples or more. Four to eight are enough. The
                report is not covered by epsilon, so rather use data that are nobody's.
            loss_fn: loss_fn(model, batch) -> losses [B]; it calls the model that it is given.
            loss_reduction: "mean" or "sum" as declared to make_private; loss_fn then returns a
                scalar, and what is tried is whether the scalar of several batches, and its
                gradient, is that reduction of what their samples give alone.

        Returns:
            A CheckReport: `.ok`, `.problems`, and as text what was and was not checked. It is a
            test on this batch, not a proof.

        Raises:
            ValueError: for a batch that holds no tensor, one sample, or samples of unequal number,
                and for another loss_reduction than None, "mean" and "sum".
        """
        return run_check(model, batch, loss_fn, loss_reduction=loss_reduction)

    def groups(self) -> ClippingGroups:
        """The clipping groups of the private model: their parameters, bounds and sensitivity.

        Returns:
            A sequence of `GroupInfo`, with the sensitivity of the whole; as text, a table.

        Raises:
            ValueError: no model is private.
        """
        backward, optimizer = self._require_private("groups")
        return describe_groups(backward.groups, backward.names, optimizer.max_grad_norm)

    def plan(self) -> ClippingPlan:
        """How each matrix parameter's clipped gradient is computed, and why.

        Costs are those of the last forward pass's shapes, so run the model once before.

        Returns:
            A sequence of `PlannedUse`; as text, a table.

        Raises:
            ValueError: no model is private, or it has not run since it is.
        """
        backward, _ = self._require_private("plan")
        return explain_plan(backward)

    def _require_private(self, method: str) -> tuple[PrivateBackward, PrivateOptimizer]:
        if self._backward is None or self._optimizer is None:
            raise ValueError(f"{method}() before make_private: there is no private model yet")
        return self._backward, self._optimizer

    def prepare(self, batch_size: int) -> None:
        """Get a torch.compile'd model ready for a batch that did not come from the loader."""
        positive_int(batch_size=batch_size)
        self._attached().prepare(batch_size)

    def detach(self, model: nn.Module) -> nn.Module:
        """Give the plain model back; it keeps its parameters, the engine its spent privacy."""
        if model is not self._model:
            raise ValueError("model is not the one that this engine made private")
        self._attached().discard()
        detach(model)
        assert self._optimizer is not None
        self._optimizer.release_original()
        # The next model starts counting at 0 again; under the old keys it would repeat the noise.
        self._key = derive_key(self._key, "next model")
        self._model = self._backward = None
        return model

    def save_checkpoint(
        self, path: str | os.PathLike[str], *, extra: dict[str, Any] | None = None
    ) -> None:
        """Write everything a later process needs to go on.

        Parameters, optimizer, spent privacy, noise counter and the loader's position, in one
        atomic write. The clipped sum of an unfinished logical batch is left out: the batch is
        drawn again.

        Args:
            path: the file. It holds the noise key: keep it as secret as the data, and release
                model.state_dict() instead.
            extra: plain values (numbers, strings, lists, tensors) that load_checkpoint returns.

        Raises:
            ValueError: extra holds what could not be read again.
        """
        backward = self._attached()
        assert self._model is not None and self._optimizer is not None
        assert self._loader is not None
        checkpoint.check_extra(extra)
        checkpoint.write(
            path,
            {
                "module": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "accountant": self.accountant.state_dict(),
                "key": self._key,
                "incarnation": self._incarnation,
                "run": self._run,
                "branch": self._branch,
                "releases": self._optimizer.releases,
                "ledger_releases": None if self._ledger is None else self._ledger.releases,
                "ledger_digest": None if self._ledger is None else self._ledger.digest(),
                "noise_multiplier": self._optimizer.noise_multiplier,
                "max_grad_norm": self._optimizer.max_grad_norm,
                "loader": self._loader.state_dict(),
                "sampling": self._sampling(),
                "clipping": self._clipping,
                "clip_function": backward.clip_function,
                "noiseless": self._noiseless,
                "unamplified": self._unamplified,
                "seed": self.seed,
                "extra": extra or {},
            },
        )

    def load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Go on from a checkpoint, after the same make_private call.

        With a seed or a ledger the run goes on bit for bit as if it had not stopped; else it draws
        the same batches with noise under a new key, since the run that wrote the checkpoint may
        have gone on with the old one. Where the ledger has releases that the checkpoint does not
        know, they stay counted, and noise and sampling both go on under new keys.

        Returns:
            What save_checkpoint got as `extra`.

        Raises:
            FileNotFoundError, ValueError: for a missing, damaged or mismatched file; nothing is
                changed then.
            RuntimeError: where steps were released already and no ledger remembers them.
        """
        backward = self._attached()
        assert self._model is not None and self._optimizer is not None
        assert self._loader is not None
        state = checkpoint.read(path)
        self._check_fits(path, state)
        here = (self._key, self._incarnation, self._optimizer.releases)
        there = (state["key"], state["incarnation"], state["releases"])
        spent = bool(self.accountant.history) or self._noiseless or self._optimizer.releases
        if self._ledger is None and spent and here != there:
            raise RuntimeError(
                f"path={os.fspath(path)!r}: this engine has spent privacy already, and loading "
                "would forget it. Load into a new engine, right after make_private; to go back "
                "within a run use PrivacyEngine(ledger=...)"
            )
        for name in ("noise_multiplier", "max_grad_norm"):
            if getattr(self._optimizer, name) != state[name]:
                warnings.warn(
                    f"{name} is {state[name]!r} from the checkpoint now, not "
                    f"{getattr(self._optimizer, name)!r}; set optimizer.{name} to change it",
                    stacklevel=2,
                )
        here_clips = {"clipping": self._clipping, "clip_function": backward.clip_function}
        for name, value in here_clips.items():
            if value != state[name]:
                warnings.warn(
                    f"{name} was {state[name]!r} in the checkpoint's run and is {value!r} now, as "
                    "make_private was told",
                    stacklevel=2,
                )
        self._model.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._key = state["key"]
        self._incarnation = state["incarnation"]
        self._run = state["run"]
        self._optimizer.releases = state["releases"]
        self._optimizer.noise_multiplier = state["noise_multiplier"]
        self._optimizer.max_grad_norm = state["max_grad_norm"]
        self._noiseless |= state["noiseless"]
        self._unamplified |= state["unamplified"]
        self.seed = state["seed"]
        self._branch = state["branch"]
        if self._ledger is None:
            self._restored = True
            self._leave_noise()
            self.accountant.history = [tuple(p) for p in state["accountant"]["history"]]
        elif self._ledger.releases != state["ledger_releases"]:
            # The accountant already holds the whole ledger.
            # Each release has lengthened it, so no other branch of this key has its number.
            self._incarnation = self._ledger.releases
        self._optimizer._noise_key = self._noise_key()
        self._loader.set_key(self._sampling_key())
        self._loader.load_state_dict(state["loader"])
        self._attached().discard()
        return dict(state["extra"])

    def diagnostics(self) -> dict[str, Any]:
        """Numbers for the eyes of who trains. PRIVATE: no epsilon covers them; do not release.

        Returns:
            per_sample_norms: [B] of the last backward (of the last group when per_layer);
            clip_fraction and nonfinite_samples: over all samples so far.
        """
        backward = self._attached()
        squares = backward.squared_norms
        return {
            "per_sample_norms": None if squares is None else squares.sqrt(),
            "clip_fraction": backward.clipped_samples / max(backward.seen_samples, 1),
            "nonfinite_samples": backward.nonfinite_samples,
        }

    def _attached(self) -> PrivateBackward:
        if self._backward is None:
            raise RuntimeError("no model is private yet; call engine.make_private first")
        return self._backward

    def _noise_key(self) -> bytes:
        return derive_key(self._key, f"noise-{self._incarnation}{self._branch}")

    def _leave_noise(self) -> None:
        """Noise of its own from now on, whoever else holds the key. A seed's noise stays."""
        if self.seed is None:
            self._branch = f"-{secrets.token_hex(32)}"
        if self._optimizer is not None:
            self._optimizer._noise_key = self._noise_key()

    def _sampling_key(self) -> bytes:
        return derive_key(self._key, f"sampling-{self._incarnation}")

    def _sampling(self) -> dict[str, Any]:
        assert self._loader is not None
        return {
            "sampler": self._loader.sampler_name,
            "num_samples": len(self._loader.dataset),  # type: ignore[arg-type]
            "expected_batch_size": self._loader.expected_batch_size,
        }

    def _check_fits(self, path: str | os.PathLike[str], state: dict[str, Any]) -> None:
        assert self._model is not None and self._optimizer is not None
        where = f"path={os.fspath(path)!r}: the checkpoint does not fit"
        if state["sampling"] != self._sampling():
            raise ValueError(
                f"{where} the data loader: saved with {state['sampling']}, now "
                f"{self._sampling()}. Call make_private with the same data and batch size"
            )
        own = {k: tuple(v.shape) for k, v in self._model.state_dict().items()}
        saved = {k: tuple(v.shape) for k, v in state["module"].items()}
        if own != saved:
            different = sorted(k for k in own.keys() | saved.keys() if own.get(k) != saved.get(k))
            raise ValueError(
                f"{where} the model: {', '.join(different[:5])} differ. Build the model as it was"
            )
        sizes = [len(g["params"]) for g in self._optimizer.param_groups]
        if sizes != [len(g["params"]) for g in state["optimizer"]["param_groups"]]:
            raise ValueError(f"{where} the optimizer's parameter groups. Build it as it was")
        if state["accountant"]["mechanism"] != type(self.accountant).mechanism():
            raise ValueError(
                f"{where} the accountant: saved with {state['accountant']['mechanism']!r}"
            )
        # Schedulers add keys to the groups, so only the optimizer's own options must be there.
        options = set(self._optimizer.defaults)
        if any(not options <= set(g) for g in state["optimizer"]["param_groups"]):
            raise ValueError(f"{where} the optimizer: its options differ. Build it as it was")
        ledger = state["ledger_releases"]
        if (self._ledger is None) != (ledger is None):
            raise ValueError(
                f"{where} the engine: one of them keeps a ledger and the other does not, so "
                "releases would be lost. Build PrivacyEngine(ledger=...) as it was"
            )
        if self._ledger is None:
            return
        if self._ledger.digest(ledger) not in (state["ledger_digest"], None):
            raise ValueError(
                f"{where} the ledger {self._ledger.path}: it is of another run. Use its own"
            )
        if self._ledger.releases < ledger:
            raise ValueError(
                f"{where} the ledger {self._ledger.path}: it has {self._ledger.releases} "
                f"releases, the checkpoint {ledger}. Restore it; epsilon is unknown without it"
            )

    def _charge(self, noise_multiplier: float, signalled: bool) -> None:
        """Pay for a release before it is made."""
        assert self._loader is not None and self._optimizer is not None
        if self._ledger is None and noise_multiplier > 0:
            self._claim(self._optimizer.releases)
        drawn = self._tracker.came_from_loader(signalled)
        rate: float | None
        if not drawn:
            # A batch of unknown origin: no amplification can be claimed for it.
            if not self._unamplified and noise_multiplier > 0:
                warnings.warn(
                    "a step was made on a batch that did not come from the private loader; it is "
                    "accounted for without amplification by sampling, and epsilon is for zero_out "
                    "from now on. Iterate over the loader that make_private returned",
                    stacklevel=4,
                )
            self._unamplified = True
            rate = 1.0
        elif self._loader.sample_rate is not None:
            rate = self._loader.sample_rate
        else:
            # Batches of a pass are disjoint, so the step with the least noise pays for all.
            paid = math.inf if self._tracker.first_of_pass else self._pass_noise
            rate = 1.0 if noise_multiplier < paid else None
            self._pass_noise = min(noise_multiplier, paid)
        if self._ledger is not None:
            self._ledger.append(noise_multiplier=noise_multiplier, sample_rate=rate)
        self._account(noise_multiplier, rate)

    def _claim(self, step: int) -> None:
        """Without a ledger only this process can tell whether noise is used twice."""
        place = (self._run, self._incarnation, step, self._number)
        if checkpoint.claim(*place, restored=self._restored) and not self._twin_warned:
            self._twin_warned = True
            if self.seed is None:
                warnings.warn(
                    "the engine that wrote this run's checkpoint and one restored from it both go "
                    "on in this process: the epsilon of neither covers the other's steps. Release "
                    "the results of one of them, or use PrivacyEngine(ledger=...)",
                    stacklevel=4,
                )

    def _account(self, noise_multiplier: float, sample_rate: float | None) -> None:
        if noise_multiplier == 0:
            self._noiseless = True
        elif sample_rate is not None:
            self.accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)


def _trained_parameters(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The model's trainable parameters that the optimizer holds, in the model's order."""
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, PrivateOptimizer):
        raise ValueError(
            f"optimizer={type(optimizer).__name__}: expected a plain torch.optim.Optimizer "
            "(PrivateOptimizer.original_optimizer is one)"
        )
    held = {id(p): p for g in optimizer.param_groups for p in g["params"]}
    own = {id(p): n for n, p in module.named_parameters()}
    foreign = [p for i, p in held.items() if i not in own]
    if foreign:
        raise ValueError(
            f"optimizer holds {len(foreign)} parameter(s) that are not the module's (the first "
            f"has shape {tuple(foreign[0].shape)}); build it from module.parameters()"
        )
    trained = [p for p in module.parameters() if p.requires_grad and id(p) in held]
    if not trained:
        raise ValueError(
            "optimizer holds no trainable parameter of the module; check requires_grad and build "
            "it from module.parameters()"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer=LBFGS: it evaluates a batch several times in a step, each a release of its "
            "own; use a first-order optimizer such as AdamW"
        )
    for parameter in trained:
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter '{own[id(parameter)]}' has a post-accumulate-grad hook, which would "
                "see its gradient before the noise; remove the hook"
            )
        if not parameter.is_floating_point():
            raise ValueError(f"parameter '{own[id(parameter)]}' is {parameter.dtype}; use a float")
    return trained


def _make_groups(module: nn.Module, trained: list[nn.Parameter], clipping: str) -> list[Group]:
    if clipping == "flat":
        return flat_groups(trained)
    if clipping == "per_layer":
        return per_layer_groups(owners(module, trained))
    names = {p: n for n, p in module.named_parameters()}
    return per_block_groups(trained, names, tileable(module))


def _refuse_keywords(unknown: dict[str, Any], method: Any) -> NoReturn:
    name = next(iter(unknown))
    if name in _REFUSED:
        raise TypeError(f"{method.__name__} has no argument {name!r}: {_REFUSED[name]}")
    known = [p for p in inspect.signature(method).parameters if p != "unknown"]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
    raise TypeError(f"{method.__name__} got an unknown argument {name!r}; {hint}")
