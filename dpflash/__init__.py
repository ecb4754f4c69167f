"""dpflash: differentially private training of long-context transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lazy import lazy

if TYPE_CHECKING:
    from . import accounting, distributed, losses, nn, noise, optim, patterns, sampling
    from .attn.backend import attention_backend
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
    "attention_backend",
    "distributed",
    "load",
    "losses",
    "nn",
    "noise",
    "optim",
    "patterns",
    "private_boundary",
    "recommend",
    "sampling",
]

# Public name -> the module that defines it. A module is imported when a name is first used, so
# that commands that do not need torch start without importing it.
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
    "attention_backend": "attn.backend",
    "load": "release.load",
    "private_boundary": "attn.boundary",
    "recommend": "recommender",
}
__getattr__ = lazy(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
