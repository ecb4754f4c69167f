"""Privacy accounting: from noisy steps to epsilon and delta, and back to the noise they need."""

from .accountant import Accountant
from .calibration import create_accountant, epochs_to_steps, get_noise_multiplier
from .gaussian import gaussian_delta, gaussian_epsilon
from .rdp import RDPAccountant, compute_rdp
from .truncated_poisson import truncated_poisson_epsilon, truncation_probability

__all__ = [
    "Accountant",
    "RDPAccountant",
    "compute_rdp",
    "create_accountant",
    "epochs_to_steps",
    "gaussian_delta",
    "gaussian_epsilon",
    "get_noise_multiplier",
    "truncated_poisson_epsilon",
    "truncation_probability",
]
