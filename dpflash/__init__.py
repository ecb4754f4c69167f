"""dpflash: differentially private training of long-context transformers."""

from . import accounting, losses, nn, sampling
from .engine import PrivacyEngine
from .functional import attention
from .optimizer import PrivateOptimizer

__version__ = "0.1.0"

__all__ = [
    "PrivacyEngine",
    "PrivateOptimizer",
    "__version__",
    "accounting",
    "attention",
    "losses",
    "nn",
    "sampling",
]
