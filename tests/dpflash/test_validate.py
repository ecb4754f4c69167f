import math

import numpy as np
import pytest

from dpflash import _validate

NUMBER_CHECKS = [
    _validate.positive,
    _validate.non_negative,
    _validate.finite,
    _validate.probability,
    _validate.positive_int,
]


@pytest.mark.parametrize("check", NUMBER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("value", [math.nan, True, False, None, "1", np.float32("nan")], ids=repr)
def test_no_number_check_accepts_nan_booleans_or_other_things(check, value):
    with pytest.raises(ValueError, match="^some_argument="):
        check(some_argument=value)


@pytest.mark.parametrize(
    ("check", "accepted", "refused"),
    [
        (_validate.positive, [1e-300, 1, math.inf, np.float32(2)], [0, -1.0, -math.inf]),
        (_validate.non_negative, [0, 0.0, 3, math.inf], [-1e-300, -math.inf]),
        (_validate.finite, [0, -1.5, 1e308], [math.inf, -math.inf]),
        (_validate.probability, [1e-15, 0.5, 1 - 1e-15], [0, 1, 0.0, 1.0, -0.1, 1.1, math.inf]),
        (
            _validate.positive_int,
            [1, 7, np.int64(3), 2**63 - 1],
            [0, -1, 1.0, 2.5, math.inf, 2**63, 10**5000],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_checks_accept_exactly_their_range(check, accepted, refused):
    for value in accepted:
        check(value=value)
    for value in refused:
        with pytest.raises(ValueError):
            check(value=value)


@pytest.mark.parametrize("check", NUMBER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_beyond_floats_range_is_refused_by_name(check, sign):
    with pytest.raises(ValueError, match=r"^some_argument[:=]"):
        check(some_argument=sign * 10**400)


@pytest.mark.parametrize(
    ("bound", "noise"),
    [(1e-30, 1.0), (1e30, 1.0), (1e30, 16383.0), (1e-30, 16383.0), (1.0, 2.0**-30), (1, 10)]
    + [(bound, 0.0) for bound in (1e-300, 1e38, 1e300, math.inf)]
    + [(np.float32(1e20), np.float32(1e4))],
    ids=str,
)
def test_a_bound_and_noise_that_float32_holds_are_accepted(bound, noise):
    _validate.noise_fits(max_grad_norm=bound, noise_multiplier=noise)


@pytest.mark.parametrize(
    ("bound", "noise", "named"),
    [
        (9e-31, 1.0, "max_grad_norm=9e-31 with noise"),
        (1.1e30, 1.0, r"max_grad_norm=1\.1e\+30 with noise"),
        (1e38, 10.0, r"max_grad_norm=1e\+38 with noise"),
        (math.inf, 1e-3, "max_grad_norm=inf with noise.*noise_multiplier=0"),
        (1.0, 16384.0, r"noise_multiplier=16384\.0: expected less than 16384"),
        (1e-30, 1e300, r"noise_multiplier=1e\+300: expected less than 16384"),
        (1.0, 9e-10, "noise_multiplier=9e-10: expected 0 or at least"),
        (1.0, 1e-320, "noise_multiplier=1e-320: expected 0 or at least"),
        (0.0, 0.0, r"max_grad_norm=0\.0: expected a number > 0"),
        (math.nan, 0.0, "max_grad_norm=nan"),
        (1.0, math.nan, "noise_multiplier=nan"),
        (1.0, math.inf, "noise_multiplier=inf"),
        (1.0, -1.0, r"noise_multiplier=-1\.0"),
    ],
    ids=str,
)
def test_a_bound_and_noise_beyond_float32_are_refused(bound, noise, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        _validate.noise_fits(max_grad_norm=bound, noise_multiplier=noise)


def test_a_choice_is_no_array_that_compares_element_by_element():
    for value in (np.array([1.0, 2.0]), np.array("flat"), ["flat"], b"flat", True):
        with pytest.raises(ValueError, match="^clipping="):
            _validate.one_of(clipping=(value, (None, "flat")))
    _validate.one_of(clipping=(np.str_("flat"), (None, "flat")))


def test_the_message_names_the_argument_its_value_and_what_is_accepted():
    with pytest.raises(ValueError, match=r"^delta=1\.5: expected 0 < delta < 1; pass"):
        _validate.probability(epsilon_share=0.5, delta=1.5)


def test_one_of_lists_the_allowed_values():
    _validate.one_of(clipping=("flat", ("flat", "per_layer")))
    with pytest.raises(ValueError, match=r"^clipping='fat': expected one of 'flat', 'per_layer'"):
        _validate.one_of(clipping=("fat", ("flat", "per_layer")))


def test_a_large_delta_is_one_that_lets_one_of_the_things_be_published():
    assert _validate.large_delta(0.0999, 10, "document") is None
    assert "not below 1 / 10 documents," in _validate.large_delta(0.1, 10, "document")
    assert "not below 1 / 1 document," in _validate.large_delta(1.0, 1, "document")
