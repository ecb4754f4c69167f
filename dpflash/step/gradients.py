"""Gradients: sets `.grad` of the trained parameters, which is None before a release."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dpflash.kernels.layout import in_dtypes

from ..distributed.fsdp import as_grad, is_sharded, local_rows
from ..privacy.public_data import PublicGradients
from ..refusal import PrivateRefusal


class Gradients:
    """Sets `.grad` of the trained parameters, and refuses gradients that other code writes to it.

    Args:
        trained: the parameters with private gradients.
        names: dotted name of each parameter.
        public: gradients of public data, which are not clipped.
        padding_rows: the index of each embedding table's padding row, which must not change.
    """

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        names: dict[nn.Parameter, str],
        public: PublicGradients,
        padding_rows: Mapping[nn.Parameter, int],
    ):
        self._trained = dict.fromkeys(trained)
        self._names = names
        self._public = public
        self._padding_rows = padding_rows
        self._hooks: list[RemovableHandle] = []

    def watch(self, dropping: Callable[[], AbstractContextManager[None]]) -> None:
        """From now on, refuse gradients that reach a parameter without being clipped.

        Args:
            dropping: a context manager that drops the logical batch if its body raises.
        """
        # Weak references: a hook that referenced the step would make a reference cycle.
        refuse = functools.partial(
            _refuse_past_gate, weakref.ref(self), weakref.WeakMethod(dropping)
        )
        whole = (p for p in self._trained if not is_sharded(p))
        self._hooks = [p.register_post_accumulate_grad_hook(refuse) for p in whole]

    def unwatch(self) -> None:
        """Stop refusing gradients that reach the parameters."""
        for hook in self._hooks:
            hook.remove()

    def set(self, parameters: Sequence[nn.Parameter], means: Sequence[Tensor]) -> None:
        """Set `.grad` to the released means, in tensors that nothing else references.

        The gradient of an embedding table's padding row is set to 0, without noise.
        """
        grads = in_dtypes(means, [p.dtype for p in parameters])
        for parameter, grad in zip(parameters, grads, strict=True):
            if parameter in self._padding_rows:
                first = local_rows(parameter)[0] if is_sharded(parameter) else 0
                row = self._padding_rows[parameter] - first
                grad[max(0, row) : max(0, row + 1)] = 0
            parameter.grad = as_grad(grad, parameter)

    def drop(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Set `.grad` of parameters to None, by default of all trained parameters."""
        for parameter in self._trained if parameters is None else parameters:
            parameter.grad = None

    def refuse_frozen(self, optimizer: Optimizer) -> None:
        """Refuse `.grad` of a parameter without a private gradient: the optimizer would use it."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if not parameter.requires_grad:
                parameter.grad = None
            elif parameter not in self._trained and parameter.grad is not None:
                name = self._names.get(parameter, "(added later)")
                parameter.grad = None
                raise PrivateRefusal(
                    f"parameter '{name}' was frozen when the model was made private and has a "
                    "gradient now, so nothing was released; call engine.detach(model), then "
                    "make_private again"
                ) from None

    def refuse_cleared(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse a step on a release whose `.grad` was cleared."""
        if parameters and all(p.grad is None for p in parameters):
            raise RuntimeError(
                "every .grad was cleared between the last backward of a logical batch and "
                "optimizer.step(), so its release is lost: call model.zero_grad() after step()"
            )

    def refuse_hooks(self) -> None:
        """Refuse hooks on the parameters' gradients, which would never run in private training.

        Raises:
            RuntimeError: a parameter has a hook; the message names the first one.
        """
        own = {hook.id for hook in self._hooks}
        for parameter in self._trained:
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            if parameter._backward_hooks or not hooks.keys() <= own:
                name = self._names[parameter]
                raise RuntimeError(
                    f"parameter '{name}' has a hook on its gradient, which would "
                    "not run in private training: remove it, and read .grad after the last "
                    "engine.backward of a logical batch"
                )

    def refuse_written(self) -> None:
        """Refuse a `.grad` that other code wrote before the release, since it is not private."""
        for parameter in self._trained:
            if parameter.grad is not None:
                parameter.grad = None
                name = self._names[parameter]
                raise PrivateRefusal(
                    f".grad of parameter '{name}' was written before the release "
                    "of the logical batch, so nothing was released: do not write .grad from the "
                    "first to the last backward of a logical batch. Run the backward of a public "
                    "loss inside engine.public_data()"
                ) from None


def _refuse_past_gate(
    gradients: weakref.ref[Gradients],
    dropping: weakref.WeakMethod[Callable[[], AbstractContextManager[None]]],
    parameter: nn.Parameter,
) -> None:
    """Refuse a gradient that reached a parameter without being clipped."""
    own, drop = gradients(), dropping()
    if own is None or drop is None or own._public.is_inside or parameter.grad is None:
        return
    parameter.grad = None
    name = own._names[parameter]
    with drop():
        raise PrivateRefusal(
            f"parameter '{name}' got a gradient past its private layer, which is neither clipped "
            "nor noised, so nothing was released. If this is the backward of a public loss, or "
            "of a penalty on weights, run it inside engine.public_data() too (or use "
            "weight_decay). Otherwise the parameter is used outside of its own module. If the "
            "loss needs it, as a temperature, use it in the forward of the module that owns it. "
            "If two modules share it, tie them (lm_head.weight = embedding.weight), or put it "
            "into one module that uses it twice, as in a tied autoencoder"
        ) from None
