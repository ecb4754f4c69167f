"""What tests of kernels share."""

import os
import platform
import sys
from pathlib import Path

import mpmath
import pytest
import torch

from dpflash.kernels import native as cpp

# As in tests/distributed; never `tests/` itself.
sys.path.insert(0, str(Path(__file__).parent))
FULL = os.environ.get("DPFLASH_FULL") == "1"
# Processors that this one can stand in for, as in test_native.py.
PROCESSORS = {"native": ("-march=native",)}
if FULL and platform.machine() in ("x86_64", "AMD64"):  # each takes 10 s to compile
    PROCESSORS["sse2"] = ("-march=x86-64",)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        PROCESSORS["avx2"] = ("-march=x86-64-v3",)


@pytest.fixture(params=PROCESSORS)
def processor(request, monkeypatch):
    """The C++ kernels with the vectors of each of these processors."""
    library = cpp.load(PROCESSORS[request.param])
    monkeypatch.setattr(cpp, "library", lambda: library)


@pytest.fixture
def digits():
    """mpmath computes with 256 bits."""
    with mpmath.workprec(256):
        yield


@pytest.fixture
def poisoned_memory():
    """What `torch.empty` gives is NaN, so that whoever reads it is found out."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)
