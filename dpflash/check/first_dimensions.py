"""Checks, for several batch sizes B, that the first dimension of each layer's input is B.

The layers run in a private copy of the model, which treats three cases as private training does:
layers below a module that runs sample by sample, flattened tokens, and shared positions.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..grad_rules.embedding import PrivateEmbedding
from ..isolation.forward_rows import ForwardRows
from .private import PrivateCopy
from .report import ITSELF, Findings, message_and_remedy

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
    "its indices have one dimension, and training treats them as positions that all samples "
    "share. It refuses such indices if the first batch has as many samples as positions"
)


def check_first_dimensions(private: PrivateCopy, sizes: list[int], findings: Findings) -> None:
    """Report layers that refuse their inputs, and inputs whose first dimension is not B."""
    refused: dict[str, tuple[int, Exception]] = {}
    seen: dict[str, dict[int, set[int]]] = {}
    for size in sizes:
        for name, dims in _first_dimensions(private, size, refused).items():
            seen.setdefault(name, {})[size] = dims
    findings.checked.append(
        f"first dimension of the inputs of trained layers, B = {', '.join(map(str, sizes))}"
    )
    for name, (size, error) in refused.items():
        is_embedding = isinstance(private.modules[name], nn.Embedding)
        message, remedy = message_and_remedy(error)
        kind = "first_dimension" if is_embedding else "unsupported"
        findings.add(kind, name, f"{message} (B = {size})", remedy)
    for name, found in seen.items():
        module = private.modules[name]
        remedy = _INDICES_REMEDY if isinstance(module, nn.Embedding) else _BATCH_FIRST_REMEDY
        if name in refused:
            continue
        if not all(map(_fits, found, found.values())):
            shown = (f"{'/'.join(map(str, sorted(d)))} for B={size}" for size, d in found.items())
            findings.add(
                "first_dimension",
                name,
                f"the first dimension of its input is not the batch: {', '.join(shown)}. If it "
                "happened to equal B, clipping would use norms of something other than samples",
                remedy,
            )
        if isinstance(module, PrivateEmbedding) and module._dpflash.has_positions:
            findings.add("first_dimension", name, _POSITIONS, remedy, "warning")


def _first_dimensions(
    private: PrivateCopy, size: int, refused: dict[str, tuple[int, Exception]]
) -> dict[str, set[int]]:
    """Return the first dimensions of each layer's inputs in a forward of `size` samples.

    A layer that raises an error is added to `refused` and frozen, so that later layers run.
    """
    while True:
        inputs = _Inputs()
        private.backward.forward.record(inputs)
        try:
            private.subject.losses(private.subject.pick(range(size)))
        except Exception as error:
            name = private.named_in(error)
            is_consequence = not all(_fits(size, dims) for dims in inputs.dims.values())
            if is_consequence or name in refused:
                return inputs.dims
            refused[name] = size, error
            for parameter in private.modules[name].parameters(recurse=False):
                parameter.requires_grad_(False)
        else:
            return inputs.dims
        finally:
            private.backward.forward.record(None)


def _fits(size: int, dims: set[int]) -> bool:
    """Return whether each first dimension is the batch size, or 1 for a shared input."""
    return dims <= {size, 1}


class _Inputs(ForwardRows):
    """Records the first dimensions of the inputs of private layers."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: dict[str, set[int]] = {}

    def note(self, name: str, x: Tensor, *, padded_to: int | None = None) -> None:
        self.dims.setdefault(name or ITSELF, set()).add(x.shape[0])
