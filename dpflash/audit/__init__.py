"""Audits of the library: tests whether its releases keep the privacy that they claim."""

from .._lazy import lazy

__getattr__ = lazy(__name__)
