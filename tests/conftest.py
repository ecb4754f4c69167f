"""What holds for every test: GPU tests are skipped without a GPU, and time is not a failure."""

import hypothesis
import pytest
import torch

# A shared or busy machine makes any deadline fail now and then.
hypothesis.settings.register_profile("dpflash", deadline=None)
hypothesis.settings.load_profile("dpflash")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
