"""Per-sample gradients, noise and rotary positions, dispatched by the tensors' device."""

from .capture import Kept, refuse_capture
from .float8 import ScaledRows, multiplies_float8, scaled_product, scaled_rows
from .grads import (
    clip_factors,
    clip_reduce,
    clip_reduce_all,
    clipped_grad,
    embedding_clipped_grad,
    embedding_grad_norm,
    embedding_per_sample_grad,
    grad_norm,
    layer_norm_backward,
    per_sample_bias_grad,
    per_sample_grad,
    products_are_separate,
    rms_norm_backward,
    span_sum,
    squared_norm,
)
from .grid import exact_slots, grid_of
from .noise import NoiseStream, add_noise_, gaussian_noise_, settle_noise
from .reference import (
    bound_share,
    embedding_grad_inner,
    grad_inner,
)
from .rotary import apply_rotary

__all__ = [
    "Kept",
    "NoiseStream",
    "ScaledRows",
    "add_noise_",
    "apply_rotary",
    "bound_share",
    "clip_factors",
    "clip_reduce",
    "clip_reduce_all",
    "clipped_grad",
    "embedding_clipped_grad",
    "embedding_grad_inner",
    "embedding_grad_norm",
    "embedding_per_sample_grad",
    "exact_slots",
    "gaussian_noise_",
    "grad_inner",
    "grad_norm",
    "grid_of",
    "layer_norm_backward",
    "multiplies_float8",
    "per_sample_bias_grad",
    "per_sample_grad",
    "products_are_separate",
    "refuse_capture",
    "rms_norm_backward",
    "scaled_product",
    "scaled_rows",
    "settle_noise",
    "span_sum",
    "squared_norm",
]
