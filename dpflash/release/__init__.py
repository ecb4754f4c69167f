"""Loading, evaluating, generating with and exporting trained models."""

from .._lazy import lazy

__getattr__ = lazy(__name__)
