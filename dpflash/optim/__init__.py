"""Optimizers that know the noise in their gradients."""

from .adam_bc import AdamBC

__all__ = ["AdamBC"]
