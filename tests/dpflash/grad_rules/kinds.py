"""Kinds of clipping, and what tests of layers of torch compare in each of them."""

import pytest
import torch

KINDS = [{"grad_sample_mode": mode} for mode in ("instantiate", "book_keeping", "ghost")]
KINDS.append({"clipping": "per_layer"})
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind.values())))


def scrambled(model):
    """With biases and norms that are neither 0 nor 1, in float64."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double()


def loss_of(model, *batch):
    return 5 * model(*batch).square().flatten(1).mean(1)
