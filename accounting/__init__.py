"""Privacy accounting: epsilon and delta of noisy steps, and the noise that a target needs."""

from . import dp_events
from .accountant import Accountant, Interval
from .calibration import (
    epochs_to_steps,
    get_noise_multiplier,
    get_sample_rate,
    get_steps,
    noise_multiplier_for,
    remaining_steps,
)
from .contour import ContourAccountant
from .events import (
    Composed,
    CyclicPoissonGaussian,
    Event,
    FixedSizeGaussian,
    Gaussian,
    PoissonGaussian,
    RandomAllocationGaussian,
    SelfComposed,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
    UnitPoissonGaussian,
    event_from_dict,
    joint_noise_multiplier,
    truncation_probability,
)
from .gaussian import GaussianAccountant, gaussian_delta, gaussian_epsilon
from .gdp import GDPAccountant
from .pld import PLDAccountant
from .prv import PRVAccountant
from .rdp import RDPAccountant, compute_rdp
from .registry import create_accountant

__all__ = [
    "Accountant",
    "Composed",
    "ContourAccountant",
    "CyclicPoissonGaussian",
    "Event",
    "FixedSizeGaussian",
    "GDPAccountant",
    "Gaussian",
    "GaussianAccountant",
    "Interval",
    "PLDAccountant",
    "PRVAccountant",
    "PoissonGaussian",
    "RDPAccountant",
    "RandomAllocationGaussian",
    "SelfComposed",
    "ShuffledGaussian",
    "TruncatedPoissonGaussian",
    "UnitPoissonGaussian",
    "compute_rdp",
    "create_accountant",
    "dp_events",
    "epochs_to_steps",
    "event_from_dict",
    "gaussian_delta",
    "gaussian_epsilon",
    "get_noise_multiplier",
    "get_sample_rate",
    "get_steps",
    "joint_noise_multiplier",
    "noise_multiplier_for",
    "remaining_steps",
    "truncation_probability",
]
