"""Modules for long-context transformers; private training can clip each of their parameters.

A parameter is used only in the forward of the `Linear`, `Embedding` or norm that owns it. So the
per-sample gradient rules of these layers cover every parameter of a model.
"""

from .attention import MultiheadAttention
from .language_model import LongContextLM
from .linear_cross_entropy import LinearCrossEntropy
from .transformer import TransformerBlock

__all__ = ["LinearCrossEntropy", "LongContextLM", "MultiheadAttention", "TransformerBlock"]
