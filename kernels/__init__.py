"""Per-sample gradient operations: each once, the tensor's device chooses how it is computed."""

from .reference import (
    clip_reduce,
    clipped_grad,
    embedding_clipped_grad,
    embedding_grad_inner,
    embedding_grad_norm,
    embedding_per_sample_grad,
    grad_inner,
    grad_magnitude,
    grad_norm,
    layer_norm_backward,
    normals_from_bits,
    per_sample_grad,
    rms_norm_backward,
    squared_norm,
)

__all__ = [
    "clip_reduce",
    "clipped_grad",
    "embedding_clipped_grad",
    "embedding_grad_inner",
    "embedding_grad_norm",
    "embedding_per_sample_grad",
    "grad_inner",
    "grad_magnitude",
    "grad_norm",
    "layer_norm_backward",
    "normals_from_bits",
    "per_sample_grad",
    "rms_norm_backward",
    "squared_norm",
]
