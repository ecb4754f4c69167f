"""dpflash: differentially private training of long-context transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import accounting, distributed, losses, nn, patterns, sampling
    from .attn.boundary import Boundary, private_boundary
    from .attn.functional import attention
    from .config import PerformanceConfig, PrivacyConfig
    from .engine import PrivacyEngine
    from .optimizer import PrivateOptimizer
    from .privacy.budget import BudgetSpent, PrivacyBudget
    from .recommender import recommend
    from .refusal import PrivateRefusal, PrivateWarning
    from .release.load import load

__version__ = "0.1.0"

__all__ = [
    "Boundary",
    "BudgetSpent",
    "PerformanceConfig",
    "PrivacyBudget",
    "PrivacyConfig",
    "PrivacyEngine",
    "PrivateOptimizer",
    "PrivateRefusal",
    "PrivateWarning",
    "__version__",
    "accounting",
    "attention",
    "distributed",
    "load",
    "losses",
    "nn",
    "patterns",
    "private_boundary",
    "recommend",
    "sampling",
]

# The module that has a name. It is imported when the name is first used, so that commands which
# need no torch start without it.
_MODULES = {
    "Boundary": "attn.boundary",
    "BudgetSpent": "privacy.budget",
    "PerformanceConfig": "config",
    "PrivacyBudget": "privacy.budget",
    "PrivacyConfig": "config",
    "PrivacyEngine": "engine",
    "PrivateOptimizer": "optimizer",
    "PrivateRefusal": "refusal",
    "PrivateWarning": "refusal",
    "attention": "attn.functional",
    "load": "release.load",
    "private_boundary": "attn.boundary",
    "recommend": "recommender",
}
_SUBMODULES = {
    *("accounting", "distributed", "integrations", "kernels"),
    *("losses", "nn", "patterns", "sampling"),
}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
