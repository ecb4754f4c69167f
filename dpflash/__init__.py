"""dpflash: differentially private training of long-context transformers."""

from . import accounting, distributed, losses, nn, patterns, sampling
from .boundary import Boundary, private_boundary
from .budget import BudgetSpent, PrivacyBudget
from .engine import PrivacyEngine
from .functional import attention
from .optimizer import PrivateOptimizer
from .recommend import recommend

__version__ = "0.1.0"

__all__ = [
    "Boundary",
    "BudgetSpent",
    "PrivacyBudget",
    "PrivacyEngine",
    "PrivateOptimizer",
    "__version__",
    "accounting",
    "attention",
    "distributed",
    "losses",
    "nn",
    "patterns",
    "private_boundary",
    "recommend",
    "sampling",
]
