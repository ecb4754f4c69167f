"""Attachment: what make_private put on a model, until the model is given back."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Protocol

from torch import nn

from ..distributed.validate import release_ranks
from ..grad_rules import PrivateModule
from ..grad_rules.convert import detach
from ..optimizer import PrivateOptimizer
from ..refusal import PrivateWarning
from ..step import PrivateStep
from .wrapper import ForwardWrapper


class Detaches(Protocol):
    """The part of an engine that an attachment uses."""

    def detach(self, model: nn.Module) -> Any:
        """Make the model plain; see `PrivacyEngine.detach`."""


class Attachment:
    """A private model's wrapper, optimizer and step, and its engine while that lives.

    Args:
        engine: that made the model private. The model does not keep it alive.
        module: the model.
        wrapper: its wrapped forward.
        optimizer: the private one.
        step: of the optimizer.
    """

    def __init__(
        self,
        engine: Detaches,
        module: nn.Module,
        wrapper: ForwardWrapper,
        optimizer: PrivateOptimizer,
        step: PrivateStep,
    ) -> None:
        self._engine = weakref.ref(engine)
        self._module = module
        self._wrapper = wrapper
        self._optimizer = optimizer
        self._step = step

    @property
    def is_orphan(self) -> bool:
        """Whether the engine is gone."""
        return self._engine() is None

    def give_back(self) -> None:
        """Make the model plain, drop an open batch, and refuse further releases."""
        self._step.discard()
        assert self._wrapper.unchanged is not None
        refusal = self._wrapper.unchanged.leaving()
        if refusal is not None:
            warnings.warn(
                f"the model that is given back is not for release: {refusal}",
                PrivateWarning,
                stacklevel=3,
            )
        self._wrapper.remove()
        detach(self._module)
        _releases[self._module] = _releases.get(self._module, 0) + self._step.releases
        release_ranks(self._module)
        self._optimizer.release_original()
        self._step.close()

    def refuse_use(self) -> None:
        """Refuse another engine while this one uses the model.

        Raises:
            ValueError: the engine lives, and has released nothing yet or has an open batch.
        """
        if not self.is_orphan and (self._step.is_open or not self._step.releases):
            raise ValueError(
                "module is private already: another PrivacyEngine uses it, which has "
                + ("a batch to release" if self._step.is_open else "released nothing yet")
                + ". Call engine.detach(model) of that engine first"
            )

    def hand_over(self) -> None:
        """Give the model back for another engine; its own, if it lives, has none then."""
        engine = self._engine()
        if engine is None:
            self.give_back()
        else:
            engine.detach(self._module)


def attachments_of(module: nn.Module) -> list[Attachment]:
    """The attachments of all private layers of a model; none for a plain one."""
    layers = (m for m in module.modules() if isinstance(m, PrivateModule))
    found = dict.fromkeys(layer._dpflash.backward.attachment for layer in layers)
    return [attachment for attachment in found if isinstance(attachment, Attachment)]


def take_over(module: nn.Module) -> int:
    """Make a model plain if it is private, and return how many releases it has had so far.

    Raises:
        ValueError: one of them still uses it; nothing is changed then.
    """
    attachments = attachments_of(module)
    for attachment in attachments:
        attachment.refuse_use()
    for attachment in attachments:
        attachment.hand_over()
    return sum(_releases.get(m, 0) for m in module.modules())


# The releases of models that were given back.
_releases: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
