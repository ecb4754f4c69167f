"""Optimizers that use the standard deviation of the noise in their gradients."""

from .adam_bc import AdamBC

__all__ = ["AdamBC"]
