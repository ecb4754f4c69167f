"""Modules for long-context transformers whose every parameter private training can clip.

Each parameter is used inside the forward of the `Linear`, `Embedding` or norm that owns it, and
nowhere else, so that the gradient rules of those layers cover whole models.
"""

from .attention import MultiheadAttention
from .language_model import LongContextLM
from .linear_cross_entropy import LinearCrossEntropy
from .transformer import TransformerBlock

__all__ = ["LinearCrossEntropy", "LongContextLM", "MultiheadAttention", "TransformerBlock"]
