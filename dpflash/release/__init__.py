"""Trained models outside of their runs: loading, evaluation, generation, export."""

from .._lazy import lazy

__getattr__ = lazy(__name__)
