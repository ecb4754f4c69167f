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
        (_validate.positive_int, [1, 7, np.int64(3)], [0, -1, 1.0, 2.5, math.inf]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_checks_accept_exactly_their_range(check, accepted, refused):
    for value in accepted:
        check(value=value)
    for value in refused:
        with pytest.raises(ValueError):
            check(value=value)


def test_the_message_names_the_argument_its_value_and_what_is_accepted():
    with pytest.raises(ValueError, match=r"^delta=1\.5: expected 0 < delta < 1; pass"):
        _validate.probability(epsilon_share=0.5, delta=1.5)


def test_one_of_lists_the_allowed_values():
    _validate.one_of(clipping=("flat", ("flat", "per_layer")))
    with pytest.raises(ValueError, match=r"^clipping='fat': expected one of 'flat', 'per_layer'"):
        _validate.one_of(clipping=("fat", ("flat", "per_layer")))
