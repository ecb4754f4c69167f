"""Integrations with Opacus, transformers, TRL and Lightning; each module needs its library."""

from .._lazy import lazy

__getattr__ = lazy(__name__)
