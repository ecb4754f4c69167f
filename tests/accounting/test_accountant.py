"""The accountant's history and state, and its place in Opacus."""

import json
import math
from types import SimpleNamespace

import pytest

from dpflash.accounting import (
    ContourAccountant,
    GDPAccountant,
    Interval,
    PLDAccountant,
    PRVAccountant,
    RDPAccountant,
)

KINDS = (ContourAccountant, PLDAccountant, RDPAccountant, GDPAccountant, PRVAccountant)


def test_equal_steps_are_one_phase():
    accountant = RDPAccountant()
    for noise_multiplier, sample_rate in [(1.0, 0.1)] * 3 + [(2.0, 0.1)] * 2 + [(1.0, 0.1)]:
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    assert accountant.history == [(1.0, 0.1, 3), (2.0, 0.1, 2), (1.0, 0.1, 1)]
    assert len(accountant) == 3


class LastOnly(list):
    """A history of which only the last phase may be touched."""

    def __getitem__(self, index):
        assert index == -1
        return super().__getitem__(index)

    def pop(self, index=-1):
        assert index == -1
        return super().pop(index)

    def _refuse(self, *arguments):
        raise AssertionError("an earlier phase was touched")

    __iter__ = __reversed__ = __contains__ = __setitem__ = __delitem__ = _refuse
    index = count = insert = remove = sort = reverse = copy = __add__ = __mul__ = _refuse


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.mechanism())
def test_a_step_touches_no_phase_but_the_last(kind):
    accountant = kind()
    accountant.history = LastOnly((1.0 + k, 0.1, 1) for k in range(1000))
    for _ in range(3):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert type(accountant.history) is LastOnly
    assert len(accountant) == 1001
    assert accountant.history[-1] == (1.0, 0.1, 3)


MALFORMED = [
    [(1.0, 0.1)],
    [(1.0, 0.1, -1)],
    [(1.0, 0.1, 1.5)],
    [(1.0, 1.1, 1)],
    [(-1.0, 0.1, 1)],
    [(math.nan, 0.1, 1)],
    ["abc"],
    [None],
]


@pytest.mark.parametrize("history", MALFORMED, ids=repr)
def test_a_malformed_history_is_refused_on_loading_and_on_reading(history):
    accountant = RDPAccountant()
    accountant.history = [(1.0, 0.1, 1)]
    with pytest.raises(ValueError):
        accountant.load_state_dict({"history": history, "mechanism": "rdp"})
    assert accountant.history == [(1.0, 0.1, 1)]
    accountant.history = history
    with pytest.raises(ValueError):
        accountant.get_epsilon(1e-5)
    with pytest.raises(ValueError):
        accountant.get_delta(1.0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "expected the keys"),
        ({}, "expected the keys"),
        ({"history": []}, "no 'mechanism'"),
        ({"mechanism": "rdp"}, "no 'history'"),
        ({"history": [], "mechanism": "prv"}, "mechanism 'prv'"),
        ({"history": "abc", "mechanism": "rdp"}, "expected a list"),
        ({"history": None, "mechanism": "rdp"}, "expected a list"),
    ],
)
def test_a_bad_state_is_refused(state, message):
    with pytest.raises(ValueError, match=message):
        RDPAccountant().load_state_dict(state)


def test_a_state_survives_json_and_shares_nothing_with_its_accountant():
    accountant = RDPAccountant()
    accountant.history = [(1.0, 0.1, 10), (1.5, 0.1, 5)]
    state = accountant.state_dict()
    loaded = RDPAccountant()
    loaded.load_state_dict(json.loads(json.dumps(state)))
    accountant.step(noise_multiplier=1.5, sample_rate=0.1)
    assert state["history"] == loaded.history == [(1.0, 0.1, 10), (1.5, 0.1, 5)]
    loaded.step(noise_multiplier=1.5, sample_rate=0.1)
    assert loaded.history == accountant.history


def test_the_optimizer_hook_writes_accumulated_batches_as_one_step():
    accountant = RDPAccountant()
    hook = accountant.get_optimizer_hook_fn(sample_rate=0.125)
    hook(SimpleNamespace(noise_multiplier=1.5, accumulated_iterations=1))
    hook(SimpleNamespace(noise_multiplier=1.5, accumulated_iterations=2))
    assert accountant.history == [(1.5, 0.125, 1), (1.5, 0.25, 1)]


def test_rdp_knows_no_lower_end_of_epsilon():
    accountant = RDPAccountant()
    assert accountant.get_epsilon(1e-5, interval=True) == (0.0, 0.0)
    accountant.history = [(1.0, 0.1, 10)]
    for found in (
        accountant.get_epsilon(1e-5, interval=True),
        accountant.get_delta(1.0, interval=True),
    ):
        assert type(found) is Interval
        assert found.lower is None
    assert accountant.get_epsilon(1e-5, interval=True).upper == accountant.get_epsilon(1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.mechanism())
@pytest.mark.filterwarnings("ignore:accountant='gdp'")
def test_a_state_belongs_to_the_mechanism_that_wrote_it(kind):
    accountant = kind()
    accountant.history = [(1.0, 0.1, 10)]
    for other in KINDS:
        if other is kind:
            other().load_state_dict(accountant.state_dict())
        else:
            with pytest.raises(ValueError, match=f"mechanism '{kind.mechanism()}'"):
                other().load_state_dict(accountant.state_dict())


def test_calls_of_earlier_versions_of_opacus_are_refused_with_the_way_out():
    accountant = RDPAccountant()
    with pytest.raises(AttributeError, match=r"get_privacy_spent: call get_epsilon\(delta\)"):
        accountant.get_privacy_spent(delta=1e-5)
    with pytest.raises(TypeError, match=r"no argument 'alphas'.*write get_epsilon\(delta\)"):
        accountant.get_epsilon(1e-5, alphas=[2.0])
    assert not hasattr(accountant, "another")
