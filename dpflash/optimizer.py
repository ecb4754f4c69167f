"""PrivateOptimizer: releases the logical batch's noisy gradient and steps on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from dpflash.kernels import refuse_capture

from .optim import AdamBC
from .privacy.keys import Uncopied
from .refusal import PrivateRefusal
from .sampling.other_steps import refuse_counted_step, wrapped_optimizers
from .sampling.prepared import Prepared, refuse_lightning, wrapper_of
from .step import CAPTURED, PrivateStep, Turns
from .verification.settable import OnlySettable

_NAMED = 3  # largest number of parameters that an error names; further ones are counted
_OF_OPTIMIZERS = ("param_groups", "defaults", "state", "_optimizer_step_pre_hooks")
_MADE_BY = "pass it to make_private, after engine.detach(model) if a model is private already"


def _of_original(name: str) -> Any:
    def put(self: PrivateOptimizer, value: Any) -> None:
        setattr(self.original_optimizer, name, value)

    return property(lambda self: getattr(self.original_optimizer, name), put)


class PrivateOptimizer(Prepared, Uncopied, OnlySettable, torch.optim.Optimizer):
    """Wraps a torch optimizer, so that its `step` releases one logical batch.

    Args:
        optimizer: the wrapped optimizer.
        step: holds the logical batch that `step()` releases.
        turns: decides which gradient each of several optimizers steps on.
        loss_reduction: "mean" or "sum" if the loop computes a scalar loss, else None. Opacus'
            tools read this attribute.

    Attributes:
        original_optimizer: the wrapped optimizer, whose state and parameter groups are used.
        noise_multiplier: the noise's standard deviation divided by max_grad_norm, >= 0. If it is
            0, epsilon is inf from the next release on.
        max_grad_norm: L2 bound of one sample's contribution, > 0 and finite. If it is set, the
            bound of each clipping group changes by the same factor.
        expected_batch_size: the public divisor of the noisy sum, > 0 and finite; never the actual
            batch size. Setting it rescales the released gradient; sampling and epsilon do not
            change. It cannot be set with loss_reduction="sum", which does not divide.
        releases: number of noisy steps, including a step that has begun. Each has its own noise.

    noise_multiplier, max_grad_norm and expected_batch_size may be set between steps, before the
    backward of the next logical batch; each release is accounted for with the values that it used.
    The wrapped optimizer's properties (param_groups, state, defaults) may be set too. Setting any
    other public name raises an AttributeError.

    Guarantees:
        The wrapped optimizer receives the gradient (clipped sum + N(0, (noise_multiplier *
        max_grad_norm)^2)) / expected_batch_size on every coordinate of every trainable parameter,
        also of parameters without a gradient, plus the gradient of public data computed inside
        `engine.public_data()`. A step releases nothing and costs no epsilon if all its gradients
        are public, or if more microbatches of its logical batch follow. `dpflash.step` adds the
        noise and charges the accountant.
    """

    no_copy = (
        "a copy would release with the same noise, uncharged; copy state_dict() instead, or "
        "call engine.save_checkpoint(path) to continue later"
    )
    replaceable_methods = ("step",)
    instead_of_setting = {
        "original_optimizer": _MADE_BY,
        "loss_reduction": _MADE_BY,
        "sample_rate": f"it follows from the data loader: {_MADE_BY}",
        "batch_size": f"it is the data loader's: {_MADE_BY}",
        "lr": "set it in optimizer.param_groups",
        "generator": "noise comes from a keyed stream, which PrivacyEngine(seed=...) reproduces",
        "secure_mode": "noise always comes from ChaCha20, keyed by the operating system",
        "step_hook": "call attach_step_hook(fn)",
    }

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: PrivateStep,
        turns: Turns,
        *,
        loss_reduction: str | None,
    ):
        # The wrapped optimizer holds groups and state; Optimizer.__init__ would create others.
        self._original = optimizer
        self._loss_reduction = loss_reduction
        self._step = step
        self._turns = turns
        self._step_hooks: list[Callable[[PrivateOptimizer], None]] = []
        self._releasing = self._is_closed = False
        self._is_resumed = _has_stepped(optimizer)
        self._guard = optimizer.register_step_pre_hook(self._refuse_other_steps)
        wrapped_optimizers.add(optimizer)

    def _patch_step_function(self) -> None:
        """Do nothing, so that PyTorch does not run the wrapped optimizer's step hooks in `step`.

        PyTorch calls this when an optimizer is unpickled. PyTorch's method would wrap the `step`
        of the whole class, and the hook `_refuse_other_steps` would then refuse steps.
        """

    def _refuse_other_steps(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if not self._releasing:
            raise RuntimeError(
                "step() of the optimizer that was passed to make_private: it would apply "
                "gradients without noise. Call step() of the optimizer that make_private returned"
            )

    def release_original(self) -> torch.optim.Optimizer:
        """Allow step() of the wrapped optimizer again, and return it; engine.detach calls this."""
        self._guard.remove()
        wrapped_optimizers.discard(self.original_optimizer)
        self._is_closed = True
        return self.original_optimizer

    @property
    def original_optimizer(self) -> torch.optim.Optimizer:
        return self._original

    @property
    def loss_reduction(self) -> str | None:
        return self._loss_reduction

    # Opacus' BatchMemoryManager and schedulers use the following methods.

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Declare whether the next `step` call ends a microbatch, but not the logical batch."""
        if self._step.sums.ranks.everyone is not None:
            raise RuntimeError(
                "signal_skip_step (BatchMemoryManager) with a mesh: ranks would split their parts "
                "of a logical batch into unequal numbers of microbatches. Pass "
                "physical_batch_size= to make_private instead"
            )
        self._step.tracker.signal(do_skip)

    def attach_step_hook(self, fn: Callable[[PrivateOptimizer], None]) -> None:
        """Call fn(optimizer) at each release, after noise is added; repeated calls add hooks."""
        self._step_hooks.append(fn)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raise if GradScaler.step reads this, since losses were then scaled before clipping."""
        # Lightning reads this too, before it clips gradients.
        if not sys._getframe(1).f_globals["__name__"].startswith("torch."):
            return False
        raise RuntimeError(
            "GradScaler.step(optimizer) with a private optimizer: per-sample gradients of scaled "
            "losses are clipped at that scale, which clips nearly all of them. Call "
            "engine.backward(losses) and optimizer.step() without the scaler, and use bfloat16"
        )

    @property
    def accumulated_iterations(self) -> int:
        return 1

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that a step changes."""
        return self._step.parameters_of(self._original)

    @property
    def noise_multiplier(self) -> float:
        return self._step.options.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._step.options.set_noise_multiplier(value)

    @property
    def max_grad_norm(self) -> float:
        return self._step.options.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._step.options.set_max_grad_norm(value)

    @property
    def expected_batch_size(self) -> float:
        return self._step.options.expected_batch_size

    @expected_batch_size.setter
    def expected_batch_size(self, value: float) -> None:
        self._step.options.set_expected_batch_size(value)

    @property
    def _is_last_step_skipped(self) -> bool:
        """Whether the last step ended a microbatch, but not the logical batch (Opacus' name)."""
        return self._step.tracker.skipped_last_step

    # Accelerate's schedulers use these.

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step released nothing, so that a scheduler must not step either."""
        return self._is_last_step_skipped

    @property
    def optimizer(self) -> PrivateOptimizer:
        return self

    @property
    def releases(self) -> int:
        return self._step.releases

    # State and parameter groups are those of the wrapped optimizer.

    param_groups: list[dict[str, Any]] = _of_original("param_groups")
    state: Any = _of_original("state")
    defaults: dict[str, Any] = _of_original("defaults")

    def __getattr__(self, name: str) -> Any:
        if name == "_original":
            raise AttributeError(name)
        return getattr(self.original_optimizer, name)

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.original_optimizer!r})"

    def state_dict(self) -> dict[str, Any]:
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict)
        self._is_resumed = True  # plain SGD's state does not show earlier steps

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError(
            "add_param_group on a private optimizer: its parameters would be trained without "
            "privacy. Call engine.detach(model), extend the plain optimizer, then make_private"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear private and public gradients, except within an unfinished logical batch.

        Raises:
            PrivateRefusal: step() has not applied the last noisy gradient, which would be lost.
        """
        self._step.public.refuse_inside("optimizer.zero_grad()")
        if self._step.released is not None:
            with self._step.noting_refusals():  # a loss may have decided that step() was skipped
                raise PrivateRefusal(
                    "optimizer.zero_grad() between the last backward of a logical batch and "
                    "optimizer.step() would drop the released gradient. Call zero_grad() after "
                    "step(), and call step() in each iteration, whatever the losses are"
                ) from None
        if self._is_last_step_skipped or self._step.tracker.is_within_draw:
            return
        self._turns.zero_grad(self._original)
        self.original_optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Release the noisy gradient of the logical batch and step on it.

        If microbatches of the logical batch are still to come, do nothing. Gradients of
        `engine.public_data()` are added to the noisy gradient. Between private batches the step
        uses public gradients alone, without noise and without charge.

        Args:
            closure: a function that computes the losses and calls engine.backward; called once.

        Returns:
            The value that closure returned; None without closure.

        Raises:
            RuntimeError: a CUDA stream is capturing; nothing is released.
            PrivateRefusal: a microbatch of the logical batch had no backward, the learning rate or
                another option changed since the first backward, or code other than the private
                layers wrote `.grad`; nothing is released.
        """
        refuse_capture(CAPTURED)
        refuse_lightning(closure, is_inside=self._step.tracker.is_inside)
        self._step.public.refuse_inside("optimizer.step()")
        if self._is_closed:
            raise RuntimeError(
                "the model of this optimizer was detached, so it releases nothing more: it would "
                "repeat the noise of the engine's next model. Use the optimizer that the last "
                "make_private returned"
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        with self._step.noting_refusals():
            kind = self._turns.take(self._original)
        if kind == "microbatch":
            return result
        if kind == "release":
            if self._is_resumed:
                self._is_resumed = False
                self._step.charge.warn_of_forgotten_releases()
            for hook in self._step_hooks:
                hook(self)
        else:
            # This step may be in the loop over another private loader.
            refuse_counted_step(self.original_optimizer)
        self._releasing = True
        try:
            if isinstance(self.original_optimizer, AdamBC):
                std = self._step.released_std if kind == "release" else 0.0
                self.original_optimizer.step(noise_std=std)
            else:
                self.original_optimizer.step()
        finally:
            self._releasing = False
        return result


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    return any(float(s["step"]) > 0 if "step" in s else bool(s) for s in optimizer.state.values())


def listed(optimizer: object) -> list[Any]:
    """Return the argument optimizer= of make_private as a list."""
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def joined(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return one optimizer with the groups of several; never call its `step`."""
    return optimizers[0] if len(optimizers) == 1 else _Joined(optimizers)


class _Joined(torch.optim.Optimizer):
    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict that one optimizer with all these groups would have."""
        groups: list[dict[str, Any]] = []
        state: dict[int, Any] = {}
        for own in (optimizer.state_dict() for optimizer in self._optimizers):
            first = sum(len(group["params"]) for group in groups)
            state |= {first + i: values for i, values in own["state"].items()}
            groups += [
                {**g, "params": [first + i for i in g["params"]]} for g in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = iter(state_dict["param_groups"])
        for optimizer in self._optimizers:
            own = list(islice(groups, len(optimizer.param_groups)))
            held = [i for group in own for i in group["params"]]
            state = {i: state_dict["state"][i] for i in held if i in state_dict["state"]}
            optimizer.load_state_dict({"state": state, "param_groups": own})


def trained_parameters(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> list[nn.Parameter]:
    """Return the model's trainable parameters, in the model's order.

    Raises:
        ValueError: a parameter is in no optimizer or in two, or an optimizer or a parameter is not
            supported.
    """
    names = {p: n for n, p in module.named_parameters()}
    held: set[nn.Parameter] = set()
    if not optimizers:
        raise ValueError("optimizer=[]: expected a torch.optim.Optimizer, or a list of several")
    for own in (_held(optimizer, names) for optimizer in optimizers):
        shared = next((n for p, n in names.items() if p in own & held), None)
        if shared is not None:
            raise ValueError(
                f"parameter '{shared}' is in two optimizers, which would both apply its gradient: "
                "leave the parameter out of one of the optimizers"
            )
        held |= own
    trained = {p: n for p, n in names.items() if p.requires_grad}
    left = [name for parameter, name in trained.items() if parameter not in held]
    if left:
        first, listing = left[0], _listing(left)
        raise ValueError(
            f"no optimizer holds {listing}, which require grad, so these parameters would never "
            "change: put them into the optimizer, or into a second optimizer, "
            "make_private(optimizer=[first, second]); or freeze each before make_private, "
            f"module.get_parameter('{first}').requires_grad_(False)"
        )
    for parameter, name in trained.items():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter '{name}' has a hook on its gradient, and the hook would see or change "
                "it before noise is added; remove the hook"
            )
        if not parameter.is_floating_point():
            way_out = "use a float"
            if parameter.is_complex():
                way_out += " parameter [..., 2], and torch.view_as_complex of it in the forward"
            raise ValueError(f"parameter '{name}' is {parameter.dtype}; {way_out}")
    return list(trained)


def _listing(names: Sequence[str]) -> str:
    listing = ", ".join(f"'{name}'" for name in names[:_NAMED])
    return f"{listing} and {len(names) - _NAMED} more" if len(names) > _NAMED else listing


def _held(optimizer: object, names: dict[nn.Parameter, str]) -> set[nn.Parameter]:
    """Return the optimizer's parameters; raise ValueError if it cannot be made private."""
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, PrivateOptimizer):
        raise ValueError(
            f"optimizer={type(optimizer).__name__}: expected a plain torch.optim.Optimizer, or a "
            "list of them (such as PrivateOptimizer.original_optimizer)"
        )
    library = wrapper_of(optimizer)
    if library is not None:
        raise ValueError(
            f"optimizer={type(optimizer).__name__} of {library}, which skips steps: pass the "
            "optimizer that it wraps to make_private, and the objects that make_private returns "
            "to accelerator.prepare or the like"
        )
    if type(optimizer).__module__.startswith("opacus."):
        raise ValueError(
            f"optimizer={type(optimizer).__name__} of Opacus, which clips and adds noise itself: "
            "pass its original_optimizer"
        )
    if not all(hasattr(optimizer, name) for name in _OF_OPTIMIZERS):
        raise ValueError(
            f"optimizer={type(optimizer).__name__}: its __init__ does not call "
            "torch.optim.Optimizer.__init__, which makes hooks and groups. Pass the optimizer "
            "that it wraps, say base, or let its __init__ call super().__init__("
            "base.param_groups, base.defaults)"
        )
    held = [p for g in optimizer.param_groups for p in g["params"]]
    foreign = [p for p in held if p not in names]
    if foreign:
        raise ValueError(
            f"optimizer holds {len(foreign)} parameter(s) that are not the module's (the first "
            f"has shape {tuple(foreign[0].shape)}); build it from module.parameters(), after "
            "fully_shard if that is used. To train task weights or a temperature, make them "
            "parameters of the module, and use them in its forward"
        )
    if not any(p.requires_grad for p in held):
        raise ValueError(
            "optimizer holds no trainable parameter of the module; check requires_grad and build "
            "it from module.parameters()"
        )
    if isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "second_step"):  # SAM's
        raise ValueError(
            f"optimizer={type(optimizer).__name__}: it evaluates a batch several times in a step, "
            "and each evaluation would be a release; use a first-order optimizer such as AdamW"
        )
    return set(held)
