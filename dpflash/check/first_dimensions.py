"""Checks what the layers of a private copy get and refuse, for several batch sizes B.

Training's own layers decide: those below a module that runs sample by sample, tokens and shared
positions are taken as training takes them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..grad_rules.embedding import PrivateEmbedding
from ..isolation.forward_rows import ForwardRows
from .batch import pick
from .private import made_private, named_in
from .report import ITSELF, LOSS_FN, Findings, error_text, message_and_remedy
from .subject import Subject, Trial

_BATCH_FIRST_REMEDY = (
    "make the batch the first dimension (batch_first=True, x.transpose(0, 1), [B, T] flattened "
    "right before the layer), or freeze the layer with requires_grad_(False)"
)
_INDICES_REMEDY = (
    "if all samples share its indices, such as positions, pass indices.expand(B, -1); if there is "
    "one index per sample, write embedding(indices[:, None]).squeeze(1); do not flatten [B, T]; "
    "or freeze the layer with requires_grad_(False)"
)

_POSITIONS = (
    "its indices have one dimension, and training takes them for positions that all samples "
    "share. It refuses them where its first batch has as many samples as there are positions"
)


def check_first_dimensions(trial: Trial, model: nn.Module, batch: Any, findings: Findings) -> None:
    """Report layers that refuse their inputs, and inputs whose first dimension is not B.

    Args:
        trial: the trial of the other checks.
        model: a plain copy of the model, in its own dtype; becomes private.
        batch: the batch, in its own dtype.
        findings: receives the result.
    """
    unsupported = {p.where for p in findings.problems if p.kind == "unsupported"}
    for name, module in model.named_modules():
        if (name or ITSELF) in unsupported:
            module.eval().requires_grad_(False)
    copied = _PrivateCopy(model, trial)
    seen: dict[int, dict[str, set[int]]] = {}
    for size in sorted({trial.size, trial.size - 1, 1}, reverse=True):
        if _runs(trial, size, findings):
            seen[size] = copied.first_dimensions(pick(batch, range(size)), size)
    findings.checked.append(
        f"first dimension of the inputs of trained layers, B = {', '.join(map(str, seen))}"
    )
    for name, (size, error) in copied.refusals.items():
        kind = "first_dimension" if copied.is_embedding(name) else "unsupported"
        message, remedy = message_and_remedy(error)
        findings.add(kind, name, f"{message} (B = {size})", remedy)
    for name in {n: None for found in seen.values() for n in found}:
        if name not in copied.refusals:
            found = {size: of_layers.get(name, set()) for size, of_layers in seen.items()}
            remedy = _INDICES_REMEDY if copied.is_embedding(name) else _BATCH_FIRST_REMEDY
            _report(name, found, remedy, findings)
    for name in copied.with_positions():
        findings.add("first_dimension", name, _POSITIONS, _INDICES_REMEDY, "warning")


def _runs(trial: Trial, size: int, findings: Findings) -> bool:
    """Whether the plain model takes so many samples."""
    try:
        losses = trial.subject.losses(trial.pick(range(size)))
        expected = trial.losses_shape(size)
        if tuple(losses.shape) != expected:
            raise ValueError(f"losses has shape {tuple(losses.shape)}, expected {list(expected)}")
    except Exception as error:
        findings.add(
            "batch_size",
            LOSS_FN,
            f"{size} sample(s) alone raise {error_text(error)}",
            "private training varies the batch size: make the model independent of it",
        )
        return False
    return True


def _report(name: str, found: dict[int, set[int]], remedy: str, findings: Findings) -> None:
    if all(_fits(size, dims) for size, dims in found.items()):
        return
    shown = ", ".join(
        f"{'/'.join(map(str, sorted(dims))) or 'not called'} for B={size}"
        for size, dims in found.items()
    )
    findings.add(
        "first_dimension",
        name,
        f"the first dimension of its input is not the batch: {shown}. If it happened to equal "
        "B, clipping would use norms of something other than samples",
        remedy,
    )


def _fits(size: int, dims: set[int]) -> bool:
    """Whether these are the batch, or a 1 that all samples share."""
    return dims <= {size, 1}


class _Inputs(ForwardRows):
    """The first dimensions of the inputs of private layers, as training takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: dict[str, set[int]] = {}

    def note(self, name: str, x: Tensor, *, padded_to: int | None = None) -> None:
        self.dims.setdefault(name or ITSELF, set()).add(x.shape[0])


class _PrivateCopy:
    """A private copy of the model, and what its layers have refused.

    Attributes:
        refusals: the number of samples at which a layer raised, and what, by its name. It is
            frozen then, so that those after it run.
    """

    def __init__(self, model: nn.Module, trial: Trial):
        self.refusals: dict[str, tuple[int, Exception]] = {}
        self._subject = Subject(model, trial.subject.loss_fn)
        self._backward = None
        if self._subject.trained:
            self._backward = made_private(self._subject, trial.loss_reduction)
        self._modules = {n or ITSELF: m for n, m in model.named_modules()}

    def first_dimensions(self, batch: Any, size: int) -> dict[str, set[int]]:
        """The first dimensions of each layer's inputs in a forward of so many samples."""
        while self._backward is not None:
            inputs = _Inputs()
            self._backward.forward.record(inputs)
            try:
                self._subject.losses(batch)
            except Exception as error:
                name = named_in(error, self._subject.model)
                is_consequence = not all(_fits(size, dims) for dims in inputs.dims.values())
                if is_consequence or name in self.refusals:
                    return inputs.dims
                self.refusals[name] = size, error
                for parameter in self._modules[name].parameters(recurse=False):
                    parameter.requires_grad_(False)
            else:
                return inputs.dims
        return {}

    def is_embedding(self, name: str) -> bool:
        return isinstance(self._modules[name], nn.Embedding)

    def with_positions(self) -> list[str]:
        """Embeddings that took indices `[T]` for positions that all samples share."""
        return [
            name
            for name, module in self._modules.items()
            if isinstance(module, PrivateEmbedding)
            and module._dpflash.has_positions
            and name not in self.refusals
        ]
