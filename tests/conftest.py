"""What holds for every test: GPU tests are skipped without a GPU, and time is not a failure."""

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when it is imported whether kernels are compiled or interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

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


@pytest.fixture(scope="session", autouse=True)
def user_cache(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[None]:
    """No test reads or writes the user's cache, where measured ceilings decide how we clip."""
    own = tmp_path_factory.getbasetemp()
    # The workers of pytest-xdist share what one of them compiled.
    cache = (own.parent if hasattr(pytestconfig, "workerinput") else own) / "user-cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield
