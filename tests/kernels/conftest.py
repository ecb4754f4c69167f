"""What tests of kernels share."""

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """What `torch.empty` gives is NaN, so that whoever reads it is found out."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)
