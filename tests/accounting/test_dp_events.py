"""Events to and from dp_accounting's DpEvents."""

import math
import sys

import attr
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NeighboringRelation,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SampledWithReplacementDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    UnsupportedDpEvent,
)
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpflash.accounting import (
    Composed,
    CyclicPoissonGaussian,
    FixedSizeGaussian,
    Gaussian,
    PoissonGaussian,
    RDPAccountant,
    SelfComposed,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
    UnitPoissonGaussian,
    compute_rdp,
)
from dpflash.accounting.dp_events import from_dp_event, to_dp_event

POISSON = PoissonGaussian(noise_multiplier=1.1, sample_rate=0.02)
TRUNCATED = TruncatedPoissonGaussian(
    noise_multiplier=1.1, sample_rate=0.02, max_batch_size=40, num_samples=1000
)
FIXED = FixedSizeGaussian(noise_multiplier=2.0, batch_size=10, num_samples=1000)


def replaced(event):
    return event.convert("replace_one")


EVENTS = {
    "gaussian": Gaussian(noise_multiplier=3.0),
    "poisson": POISSON,
    "poisson-rate-1": PoissonGaussian(noise_multiplier=1.1, sample_rate=1.0),
    "truncated": TRUNCATED,
    "fixed-size": FIXED,
    "fixed-size-zero-out": FIXED.convert("zero_out"),
    "gaussian-replace-one": replaced(Gaussian(noise_multiplier=3.0)),
    "poisson-replace-one": replaced(POISSON),
    "poisson-zero-out": POISSON.convert("zero_out"),
    "self-composed": SelfComposed(event=POISSON, count=7),
    "nested": Composed(
        events=(
            SelfComposed(event=Composed(events=(POISSON, TRUNCATED)), count=3),
            Gaussian(noise_multiplier=2.0),
            Composed(events=()),
        )
    ),
}


@pytest.mark.parametrize("reading", ["bound", "sensitivity"])
@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS.keys())
def test_an_event_survives_the_round_trip(event, reading):
    exported = to_dp_event(event, noise_relative_to=reading)
    found = from_dp_event(exported, neighboring_relation=event.relation, noise_relative_to=reading)
    assert found == event


def test_events_become_the_events_of_their_name():
    assert to_dp_event(POISSON) == PoissonSampledDpEvent(0.02, GaussianDpEvent(1.1))
    assert to_dp_event(TRUNCATED) == TruncatedSubsampledGaussianDpEvent(1000, 0.02, 40, 1.1)
    assert to_dp_event(FIXED, noise_relative_to="sensitivity") == SampledWithoutReplacementDpEvent(
        1000, 10, GaussianDpEvent(1.0)
    )
    assert to_dp_event(FIXED, noise_relative_to="bound") == SampledWithoutReplacementDpEvent(
        1000, 10, GaussianDpEvent(2.0)
    )


def test_a_unit_becomes_a_mixture_of_gaussians_and_comes_back():
    event = UnitPoissonGaussian(noise_multiplier=2.5, sample_rate=0.5, examples_per_unit=2)
    exported = to_dp_event(event)
    assert exported == MixtureOfGaussiansDpEvent(2.5, [0.0, 1.0, 2.0], [0.25, 0.5, 0.25])
    assert from_dp_event(exported, neighboring_relation="zero_out") == event.convert("zero_out")
    for rate, examples in ((1e-4, 64), (0.013, 17), (0.999, 3), (1.0, 4), (0.3, 1)):
        event = UnitPoissonGaussian(
            noise_multiplier=2.5, sample_rate=rate, examples_per_unit=examples
        )
        found = from_dp_event(to_dp_event(event))
        assert isinstance(found, UnitPoissonGaussian)
        assert (found.noise_multiplier, found.examples_per_unit) == (2.5, examples)
        assert found.sample_rate == pytest.approx(rate, rel=1e-14)


@pytest.mark.parametrize(
    ("sensitivities", "probabilities"),
    [
        ([0.0, 1.0, 2.0], [0.25, 0.4, 0.35]),
        ([0.0, 2.0, 4.0], [0.25, 0.5, 0.25]),
        ([1.0, 2.0], [0.5, 0.5]),
        ([0.0, 1.0, 2.0], [0.2500001, 0.4999998, 0.2500001]),
        ([0.0], [1.0]),
    ],
)
def test_other_mixtures_are_refused(sensitivities, probabilities):
    with pytest.raises(ValueError, match="MixtureOfGaussiansDpEvent with"):
        from_dp_event(MixtureOfGaussiansDpEvent(1.0, sensitivities, probabilities))


def test_an_accountant_is_the_composition_of_its_history_and_events():
    accountant = RDPAccountant()
    accountant.history = [(1.0, 0.01, 1000), (2.0, 0.02, 0), (1.5, 0.5, 3)]
    accountant.compose(Gaussian(noise_multiplier=4.0), 2)
    assert to_dp_event(accountant) == ComposedDpEvent(
        [
            SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), 1000),
            SelfComposedDpEvent(PoissonSampledDpEvent(0.5, GaussianDpEvent(1.5)), 3),
            SelfComposedDpEvent(GaussianDpEvent(4.0), 2),
        ]
    )
    assert to_dp_event(RDPAccountant()) == ComposedDpEvent([])


# Whole orders: at fractional ones their series stops early.
ORDERS = [2, 3, 5, 8, 16, 32, 64, 128]


def test_the_exported_history_has_our_rdp_at_every_order_there():
    phases = [(1.0, 0.01, 1000), (0.7, 0.001, 50), (3.0, 0.5, 20), (5.0, 1.0, 4)]
    accountant = RDPAccountant()
    accountant.history = phases
    theirs = RdpAccountant(ORDERS)
    theirs.compose(to_dp_event(accountant))
    ours = sum(
        steps * compute_rdp(noise_multiplier=noise, sample_rate=rate, orders=ORDERS)
        for noise, rate, steps in phases
    )
    assert theirs.rdp == pytest.approx(ours, rel=1e-9)


@pytest.mark.parametrize(
    ("reading", "make"), [("bound", PLDAccountant), ("sensitivity", RdpAccountant)]
)
def test_where_samples_are_replaced_each_reader_is_given_its_own_noise(reading, make):
    # Under replace_one a Gaussian of noise 4 per bound is one of noise 2 per sensitivity.
    event = Gaussian(noise_multiplier=4.0, relation="replace_one")
    theirs = make(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    theirs.compose(to_dp_event(event, noise_relative_to=reading))
    plain = make()
    plain.compose(GaussianDpEvent(2.0))
    assert theirs.get_epsilon(1e-5) == pytest.approx(plain.get_epsilon(1e-5), rel=1e-6)


def test_a_round_of_cyclic_draws_has_no_event_of_theirs():
    with pytest.raises(ValueError, match="CyclicPoissonGaussian has no DpEvent"):
        to_dp_event(CyclicPoissonGaussian(noise_multiplier=1.0, sample_rate=0.1, bands=4))


@pytest.mark.parametrize("event", [replaced(POISSON), FIXED, FIXED.convert("zero_out")])
def test_replaced_samples_need_to_be_told_in_what_noise_is_counted(event):
    with pytest.raises(ValueError, match="^noise_relative_to=None"):
        to_dp_event(event)
    with pytest.raises(ValueError, match="^noise_relative_to=None"):
        from_dp_event(
            to_dp_event(event, noise_relative_to="bound"), neighboring_relation=event.relation
        )
    with pytest.raises(ValueError, match="^noise_relative_to='both'"):
        to_dp_event(event, noise_relative_to="both")


def test_truncated_batches_count_noise_in_bounds_only():
    event = replaced(TRUNCATED)
    exported = to_dp_event(event, noise_relative_to="bound")
    assert exported.noise_multiplier == event.noise_multiplier
    with pytest.raises(ValueError, match="^noise_relative_to='sensitivity'"):
        to_dp_event(event, noise_relative_to="sensitivity")
    with pytest.raises(ValueError, match="^noise_relative_to='sensitivity'"):
        from_dp_event(
            exported, neighboring_relation="replace_one", noise_relative_to="sensitivity"
        )


def test_a_shuffled_pass_is_refused_unless_it_may_be_a_gaussian():
    event = ShuffledGaussian(noise_multiplier=1.5)
    with pytest.raises(ValueError, match="shuffled_as_gaussian=True"):
        to_dp_event(event)
    assert to_dp_event(event, shuffled_as_gaussian=True) == GaussianDpEvent(1.5)


def test_several_gaussians_on_one_poisson_batch_become_one():
    batch = ComposedDpEvent([GaussianDpEvent(3.0), SelfComposedDpEvent(GaussianDpEvent(8.0), 4)])
    found = from_dp_event(PoissonSampledDpEvent(0.1, batch))
    assert found == PoissonGaussian(noise_multiplier=found.noise_multiplier, sample_rate=0.1)
    assert found.noise_multiplier == pytest.approx(2.4)


def test_nothing_and_no_privacy_have_their_events():
    accountant = RDPAccountant()
    accountant.compose(from_dp_event(NoOpDpEvent()))
    assert accountant.get_epsilon(1e-5) == 0
    accountant.compose(from_dp_event(NonPrivateDpEvent()))
    assert accountant.get_epsilon(1e-5) == math.inf


@attr.s(frozen=True)
class ForeignGaussian(GaussianDpEvent):
    pass


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (LaplaceDpEvent(1.0), "LaplaceDpEvent"),
        (UnsupportedDpEvent(), "UnsupportedDpEvent"),
        (ForeignGaussian(1.0), "ForeignGaussian"),
        (SampledWithReplacementDpEvent(10, 2, GaussianDpEvent(1.0)), "SampledWithReplacement"),
        (PoissonSampledDpEvent(0.1, LaplaceDpEvent(1.0)), "LaplaceDpEvent on a sampled batch"),
        (
            PoissonSampledDpEvent(0.1, PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))),
            "PoissonSampledDpEvent on a sampled batch",
        ),
        (ComposedDpEvent([GaussianDpEvent(1.0), LaplaceDpEvent(1.0)]), "LaplaceDpEvent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_counterpart_is_refused_by_name(event, name):
    with pytest.raises(ValueError, match=name):
        from_dp_event(event)


def test_an_event_without_a_guarantee_for_the_relation_is_refused():
    event = SampledWithoutReplacementDpEvent(1000, 10, GaussianDpEvent(1.0))
    with pytest.raises(ValueError, match="^relation='add_remove'"):
        from_dp_event(event, noise_relative_to="bound")


@pytest.mark.parametrize("value", [None, "GaussianDpEvent", POISSON])
def test_what_is_no_dp_event_is_refused(value):
    with pytest.raises(ValueError, match="^dp_event="):
        from_dp_event(value)


def test_what_is_no_event_is_refused():
    with pytest.raises(ValueError, match="^source="):
        to_dp_event(GaussianDpEvent(1.0))


def test_a_bad_parameter_of_theirs_is_refused_by_name():
    with pytest.raises(ValueError, match="^sample_rate="):
        from_dp_event(PoissonSampledDpEvent(1.5, GaussianDpEvent(1.0)))


def test_without_dp_accounting_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match="pip install dp-accounting"):
        to_dp_event(POISSON)
    with pytest.raises(ImportError, match="pip install dp-accounting"):
        from_dp_event(None)
