"""The table of `quality`: what attention patterns cost in held-out loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .document import Column, Table, column, config


def _with_error(key: str, header: str) -> Column:
    def cell(row: Mapping[str, Any]) -> str | None:
        if row.get(key) is None:
            return None
        return f"{row[key]:.4f} ± {row[f'{key}_error']:.4f}"

    return header, cell


def _difference(key: str, header: str, factor: float = 1.0, digits: int = 4) -> Column:
    def cell(row: Mapping[str, Any]) -> str | None:
        if row.get(key) is None:
            return None
        low, high = (factor * end for end in row[f"{key}_ci95"])
        return f"{factor * row[key]:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"

    return header, cell


def _relative(row: Mapping[str, Any]) -> str | None:
    value = row.get("relative_difference")
    return None if value is None else f"{value:+.2%}"


QUALITY_TABLE = Table(
    "quality",
    "Quality: the same small language model, trained with each pattern",
    (
        column("what", "attention"),
        ("sparsity", lambda row: f"{max(0.0, row['sparsity']):.1%}"),
        ("epsilon", lambda row: row.get("epsilon")),
        _with_error("held_out_loss", "held-out loss, nats a byte"),
        column("baseline"),
        _difference("difference", "difference"),
        ("relative", _relative),
        _difference("accuracy_difference", "bytes guessed right, points", 100, 2),
        config("batch"),
        config("steps"),
        column("parameters"),
        column("correct"),
    ),
    "Bytes of Python's own library; one window of each held-out document. ± is the standard error "
    "over windows. Differences are taken window by window, with 95% intervals, which cover the "
    "choice of windows but not that of weights and batches: what *dense, another seed* and "
    "*dense, a third seed* differ by comes from those alone, and smaller differences tell "
    "nothing. *Two tokens* attends to the token itself and the one before, so it shows how much "
    "attention is worth at all to a model this small and so briefly trained. A pattern of near "
    "tokens may do better than dense here, which says nothing of models that have learnt to use "
    "far ones. Lengths of patterns are those timed at T = 8,192, over 16 (but adaptive's). "
    "Sparsity is over all causal pairs (a lower bound for adaptive). Noise drowns small batches, "
    "so private models take fewer steps of larger ones, and so does *dense, large batches*, the "
    "one without noise that they are compared with; their batches are Poisson draws of that size. "
    "Their fixed seed makes them repeatable, and unfit for release. torchbridge publishes losses "
    "of accuracy of less than 0.1, 0.5 and 1.0% at 50, 75 and 90% sparsity, and no "
    "code that trains anything.",
)
