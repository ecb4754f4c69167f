"""Audits of the library: does what it releases keep the privacy that it claims?"""

from .._lazy import lazy

__getattr__ = lazy(__name__)
