"""What events say of themselves, and how accountants keep them."""

import json
import math
from collections import Counter

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant as OpacusRDPAccountant

from dpflash.accounting import (
    Composed,
    ContourAccountant,
    CyclicPoissonGaussian,
    Event,
    FixedSizeGaussian,
    Gaussian,
    PoissonGaussian,
    RandomAllocationGaussian,
    RDPAccountant,
    SelfComposed,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
    UnitPoissonGaussian,
    event_from_dict,
    joint_noise_multiplier,
    truncation_probability,
)
from dpflash.accounting.pairs import Pair, canonical

RELATIONS = ("add_remove", "zero_out", "replace_one")
ANY = {
    Gaussian: {"noise_multiplier": 2.0},
    ShuffledGaussian: {"noise_multiplier": 2.0},
    PoissonGaussian: {"noise_multiplier": 2.0, "sample_rate": 0.1},
    RandomAllocationGaussian: {"noise_multiplier": 2.0, "steps": 30, "participations": 2},
    UnitPoissonGaussian: {"noise_multiplier": 2.0, "sample_rate": 0.1, "examples_per_unit": 3},
    TruncatedPoissonGaussian: {
        "noise_multiplier": 2.0,
        "sample_rate": 0.1,
        "max_batch_size": 20,
        "num_samples": 100,
    },
    CyclicPoissonGaussian: {"noise_multiplier": 2.0, "sample_rate": 0.1, "bands": 4},
    FixedSizeGaussian: {"noise_multiplier": 2.0, "batch_size": 10, "num_samples": 100},
}
HOLDS = {
    Gaussian: RELATIONS,
    ShuffledGaussian: ("zero_out", "replace_one"),
    PoissonGaussian: RELATIONS,
    RandomAllocationGaussian: ("add_remove", "zero_out"),
    UnitPoissonGaussian: ("add_remove", "zero_out"),
    TruncatedPoissonGaussian: RELATIONS,
    CyclicPoissonGaussian: RELATIONS,
    FixedSizeGaussian: ("zero_out", "replace_one"),
}
many = settings(max_examples=100, derandomize=True, deadline=None)

noises = st.one_of(st.just(0.0), st.floats(0.1, 1e3), st.just(math.inf))
rates = st.floats(0, 1)


@st.composite
def simple_events(draw, relation):
    kinds = [kind for kind in ANY if relation in HOLDS[kind]]
    kind = draw(st.sampled_from(kinds))
    arguments: dict = {"relation": relation, "noise_multiplier": draw(noises)}
    if issubclass(kind, PoissonGaussian):
        arguments["sample_rate"] = draw(rates)
    if kind in (TruncatedPoissonGaussian, FixedSizeGaussian):
        arguments["num_samples"] = draw(st.integers(1, 10**6))
    if kind is UnitPoissonGaussian:
        arguments["examples_per_unit"] = draw(st.integers(1, 1000))
    if kind is CyclicPoissonGaussian:
        arguments["bands"] = draw(st.integers(1, 100))
    if kind is RandomAllocationGaussian:
        arguments["steps"] = draw(st.integers(1, 10**6))
        arguments["participations"] = draw(st.integers(1, arguments["steps"]))
    if kind is TruncatedPoissonGaussian:
        arguments["max_batch_size"] = draw(st.integers(1, 10**6))
    if kind is FixedSizeGaussian:
        arguments["batch_size"] = draw(st.integers(1, arguments["num_samples"]))
    return kind(**arguments)


def nested(relation):
    return st.recursive(
        simple_events(relation),
        lambda inner: st.one_of(
            st.builds(
                SelfComposed, relation=st.just(relation), event=inner, count=st.integers(0, 1000)
            ),
            st.builds(
                Composed,
                relation=st.just(relation),
                events=st.lists(inner, max_size=3).map(tuple),
            ),
        ),
        max_leaves=5,
    )


events = st.sampled_from(RELATIONS).flatmap(nested)


def expanded(event):
    """How often each simple event happens."""
    leaves: Counter[Event] = Counter()
    if isinstance(event, SelfComposed):
        for leaf, count in expanded(event.event).items():
            leaves[leaf] += count * event.count
    elif isinstance(event, Composed):
        for part in event.events:
            leaves += expanded(part)
    else:
        leaves[event] = 1
    return +leaves  # without those of count 0


def of(kind, *composed, relation="add_remove"):
    accountant = kind(neighboring_relation=relation)
    for event in composed:
        accountant.compose(event)
    return accountant


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("kind", ANY, ids=lambda kind: kind.__name__)
def test_an_event_holds_for_its_relations_and_refuses_the_others(kind, relation):
    first = kind(**{"relation": HOLDS[kind][0], **ANY[kind]})
    if relation in HOLDS[kind]:
        converted = first.convert(relation)
        assert converted == kind(**{"relation": relation, **ANY[kind]})
        assert converted.convert(first.relation) == first
    else:
        message = f"^relation={relation!r}: {kind.__name__} has no guarantee for it"
        with pytest.raises(ValueError, match=message):
            kind(**{"relation": relation, **ANY[kind]})
        with pytest.raises(ValueError, match=message):
            first.convert(relation)
        with pytest.raises(ValueError, match=message):
            SelfComposed(relation=first.relation, event=first, count=2).convert(relation)
        with pytest.raises(ValueError, match=message):
            Composed(relation=first.relation, events=(first,)).convert(relation)


def test_the_default_relation_is_one_that_the_event_holds_for():
    for kind, arguments in ANY.items():
        assert kind(**arguments).relation in HOLDS[kind]
    assert PoissonGaussian(**ANY[PoissonGaussian]).relation == "add_remove"
    assert ShuffledGaussian(**ANY[ShuffledGaussian]).relation == "zero_out"
    assert FixedSizeGaussian(**ANY[FixedSizeGaussian]).relation == "replace_one"


@pytest.mark.parametrize("kind", ANY, ids=lambda kind: kind.__name__)
def test_an_unknown_relation_is_refused(kind):
    for relation in ("replace", "", None, "ADD_REMOVE"):
        with pytest.raises(ValueError, match="^relation="):
            kind(**{"relation": relation, **ANY[kind]})


@pytest.mark.parametrize("kind", ANY, ids=lambda kind: kind.__name__)
def test_an_event_is_frozen_and_takes_keywords_only(kind):
    event = kind(**ANY[kind])
    with pytest.raises(AttributeError):
        event.noise_multiplier = 1.0  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        kind(*ANY[kind].values())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("event", "pairs"),
    [
        (Gaussian(noise_multiplier=2.0), [(Pair(2.0, 1.0), 1)]),
        (Gaussian(relation="zero_out", noise_multiplier=2.0), [(Pair(2.0, 1.0), 1)]),
        # One sample goes and another comes: the sum moves by two bounds.
        (Gaussian(relation="replace_one", noise_multiplier=2.0), [(Pair(1.0, 1.0), 1)]),
        (ShuffledGaussian(noise_multiplier=2.0), [(Pair(2.0, 1.0), 1)]),
        (ShuffledGaussian(relation="replace_one", noise_multiplier=2.0), [(Pair(1.0, 1.0), 1)]),
        (PoissonGaussian(noise_multiplier=2.0, sample_rate=0.1), [(Pair(2.0, 0.1), 1)]),
        (
            PoissonGaussian(relation="zero_out", noise_multiplier=2.0, sample_rate=0.1),
            [(Pair(2.0, 0.1), 1)],
        ),
        (
            PoissonGaussian(relation="replace_one", noise_multiplier=2.0, sample_rate=0.1),
            [(Pair(1.0, 0.1, True), 1)],
        ),
        (PoissonGaussian(noise_multiplier=2.0, sample_rate=0.0), []),
        (
            UnitPoissonGaussian(noise_multiplier=2.0, sample_rate=0.1, examples_per_unit=3),
            [(Pair(2.0, 0.1, examples=3), 1)],
        ),
        (
            UnitPoissonGaussian(noise_multiplier=2.0, sample_rate=0.1, examples_per_unit=1),
            [(Pair(2.0, 0.1), 1)],
        ),
        (UnitPoissonGaussian(noise_multiplier=2.0, sample_rate=0.0, examples_per_unit=3), []),
        (
            FixedSizeGaussian(noise_multiplier=2.0, batch_size=10, num_samples=100),
            [(Pair(1.0, 0.1, True), 1)],
        ),
        (
            FixedSizeGaussian(
                relation="zero_out", noise_multiplier=2.0, batch_size=10, num_samples=100
            ),
            [(Pair(1.0, 0.1, True), 1)],
        ),
    ],
    ids=repr,
)
def test_events_are_dominated_by_their_pairs(event, pairs):
    assert event.pairs() == pairs


@given(events)
@many
def test_as_dict_is_json_and_has_its_event(event):
    assert event_from_dict(event.as_dict()) == event
    assert event_from_dict(json.loads(json.dumps(event.as_dict()))) == event


@given(events)
@many
def test_composed_events_are_their_expansion(event):
    leaves = expanded(event)
    assert canonical(event.pairs()) == canonical(
        (pair, times * count) for leaf, times in leaves.items() for pair, count in leaf.pairs()
    )
    failures = math.fsum(leaf.failure() * n for leaf, n in leaves.items())
    assert event.failure() == pytest.approx(failures, rel=1e-12)
    samplers = {sampler for leaf in leaves for sampler in [leaf.sampler]}
    assert samplers <= set(event.sampler.split(", "))


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_history_under_a_relation_is_its_events_under_it(relation):
    stepped = ContourAccountant(neighboring_relation=relation)
    stepped.history = [(2.0, 0.05, 60)]
    event = PoissonGaussian(noise_multiplier=2.0, sample_rate=0.05).convert(relation)
    composed = of(ContourAccountant, *[event] * 60, relation=relation)
    assert composed.events == [(event, 60)]
    assert stepped.get_epsilon(1e-6) == composed.get_epsilon(1e-6)
    plain = ContourAccountant()
    plain.history = [(2.0, 0.05, 60)]
    if relation == "replace_one":
        assert stepped.get_epsilon(1e-6) > 1.5 * plain.get_epsilon(1e-6)
    else:
        assert stepped.get_epsilon(1e-6) == plain.get_epsilon(1e-6)


def test_parts_of_a_composition_share_its_relation():
    zero_out = Gaussian(relation="zero_out", noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"no common guarantee.*event.convert\('add_remove'\)"):
        SelfComposed(event=zero_out, count=2)
    with pytest.raises(ValueError, match="no common guarantee"):
        Composed(events=(Gaussian(noise_multiplier=1.0), zero_out))
    both = Composed(
        events=(
            SelfComposed(event=Gaussian(noise_multiplier=1.0), count=3),
            Gaussian(noise_multiplier=2.0),
        )
    )
    converted = both.convert("replace_one")
    assert {leaf.relation for leaf in expanded(converted)} == {"replace_one"}
    assert converted.events[0].relation == "replace_one"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "^event=None: expected one of 'Gaussian'"),
        ({"event": "Laplace"}, "^event='Laplace': expected one of"),
        ({"event": "Gaussian"}, "^Gaussian cannot be made of"),
        ({"event": "Gaussian", "noise_multiplier": 1.0, "sigma": 1.0}, "^Gaussian cannot be made"),
        ({"event": "Gaussian", "noise_multiplier": -1.0}, "^noise_multiplier="),
        ({"event": "Gaussian", "noise_multiplier": 1.0, "relation": "any"}, "^relation="),
    ],
)
def test_values_of_no_event_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        event_from_dict(values)


BAD_NUMBERS = [-1.0, math.nan, "1", None, True]


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=repr)
@pytest.mark.parametrize("kind", ANY, ids=lambda kind: kind.__name__)
def test_a_bad_noise_is_refused_by_name(kind, value):
    with pytest.raises(ValueError, match="^noise_multiplier="):
        kind(**{**ANY[kind], "noise_multiplier": value})


@pytest.mark.parametrize("value", [*BAD_NUMBERS, 1.1, math.inf], ids=repr)
@pytest.mark.parametrize("kind", [PoissonGaussian, TruncatedPoissonGaussian, UnitPoissonGaussian])
def test_a_bad_rate_is_refused_by_name(kind, value):
    with pytest.raises(ValueError, match="^sample_rate="):
        kind(**{**ANY[kind], "sample_rate": value})


@pytest.mark.parametrize("value", [-1, 0, 2.0, math.nan, "1", None, True], ids=repr)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (TruncatedPoissonGaussian, "max_batch_size"),
        (TruncatedPoissonGaussian, "num_samples"),
        (FixedSizeGaussian, "batch_size"),
        (FixedSizeGaussian, "num_samples"),
        (UnitPoissonGaussian, "examples_per_unit"),
    ],
)
def test_a_bad_size_is_refused_by_name(kind, name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        kind(**{**ANY[kind], name: value})


def test_a_batch_is_no_larger_than_the_data():
    with pytest.raises(ValueError, match="^batch_size=101: expected at most num_samples=100"):
        FixedSizeGaussian(noise_multiplier=1.0, batch_size=101, num_samples=100)
    whole = FixedSizeGaussian(noise_multiplier=2.0, batch_size=100, num_samples=100)
    gaussian = Gaussian(relation="replace_one", noise_multiplier=2.0)
    relation = {"relation": "replace_one"}
    ours = of(ContourAccountant, whole, **relation).get_epsilon(1e-5)
    assert ours == of(ContourAccountant, gaussian, **relation).get_epsilon(1e-5)


@pytest.mark.parametrize("count", [-1, 1.5, 2.0, math.nan, "1", True, None], ids=repr)
def test_a_bad_count_is_refused_by_name_and_leaves_no_trace(count):
    event = Gaussian(noise_multiplier=1.0)
    accountant = RDPAccountant()
    with pytest.raises(ValueError, match="^count="):
        SelfComposed(event=event, count=count)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^count="):
        accountant.compose(event, count)  # type: ignore[arg-type]
    assert accountant.events == []


def test_a_truncated_batch_fails_as_often_as_it_may_exceed_its_cap():
    event = TruncatedPoissonGaussian(**ANY[TruncatedPoissonGaussian])
    assert event.failure() == truncation_probability(100, 0.1, 20) > 0
    assert event.pairs() == PoissonGaussian(**ANY[PoissonGaussian]).pairs()
    with mpmath.workdps(30):
        rate = mpmath.mpf(0.1)
        chances = [
            mpmath.binomial(100, k) * rate**k * (1 - rate) ** (100 - k) for k in range(20, 101)
        ]
        assert event.failure() == pytest.approx(float(mpmath.fsum(chances)), rel=1e-10)
    wide = TruncatedPoissonGaussian(**{**ANY[TruncatedPoissonGaussian], "max_batch_size": 101})
    assert wide.failure() == 0
    twice = SelfComposed(event=Composed(events=(event, wide, event)), count=7)
    assert twice.failure() == pytest.approx(14 * event.failure(), rel=1e-12)
    assert Gaussian(noise_multiplier=1.0).failure() == 0


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=10))
@many
def test_joint_noise_is_that_of_one_gaussian_over_all_groups(noise):
    joint = joint_noise_multiplier(noise)
    with mpmath.workdps(30):
        truth = mpmath.fsum(mpmath.mpf(s) ** -2 for s in noise) ** -0.5
    assert joint == pytest.approx(float(truth), rel=1e-13)
    assert joint <= min(noise)
    assert joint == pytest.approx(joint_noise_multiplier(noise[::-1]), rel=1e-15)


def test_joint_noise_at_the_edges():
    assert joint_noise_multiplier([2.0]) == 2.0
    assert joint_noise_multiplier([2.0, math.inf]) == 2.0
    assert joint_noise_multiplier([math.inf, math.inf]) == math.inf
    assert joint_noise_multiplier([0.0, 1.0, math.inf]) == 0.0
    assert joint_noise_multiplier([1e-200, 1e200]) == 1e-200
    assert joint_noise_multiplier([1e200] * 4) == pytest.approx(5e199)
    with pytest.raises(ValueError, match="^noise_multipliers="):
        joint_noise_multiplier([])
    with pytest.raises(ValueError, match="^noise_multiplier=-1.0"):
        joint_noise_multiplier([1.0, -1.0])
    with pytest.raises(ValueError, match="^noise_multiplier=nan"):
        joint_noise_multiplier([math.nan])


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("other", RELATIONS)
def test_an_event_of_another_relation_is_refused_with_the_way_out(relation, other):
    accountant = RDPAccountant(neighboring_relation=relation)
    event = Gaussian(relation=other, noise_multiplier=1.0)
    if relation == other:
        accountant.compose(event)
        assert accountant.events == [(event, 1)]
        return
    with pytest.raises(
        ValueError, match=rf"^event.relation='{other}'.*event.convert\('{relation}'"
    ):
        accountant.compose(event)
    assert accountant.events == []


@pytest.mark.parametrize("event", [None, 1.0, "Gaussian", {"event": "Gaussian"}, Gaussian])
def test_what_is_no_event_is_refused(event):
    accountant = RDPAccountant()
    with pytest.raises(ValueError, match="^event="):
        accountant.compose(event)  # type: ignore[arg-type]
    assert accountant.events == []


def test_equal_events_in_a_row_are_counted_together():
    first, second = Gaussian(noise_multiplier=1.0), Gaussian(noise_multiplier=2.0)
    accountant = RDPAccountant()
    for event, count in ((first, 2), (first, 1), (second, 0), (second, 4), (first, 1)):
        accountant.compose(event, count)
    assert accountant.events == [(first, 3), (second, 4), (first, 1)]


def test_an_accountant_is_converted_as_a_whole_or_not_at_all():
    accountant = ContourAccountant(neighboring_relation="zero_out")
    accountant.history = [(2.0, 0.1, 5)]
    poisson = PoissonGaussian(relation="zero_out", noise_multiplier=2.0, sample_rate=0.1)
    accountant.compose(poisson, 3)
    accountant.compose(ShuffledGaussian(noise_multiplier=4.0), 2)
    before = accountant.state_dict()
    epsilon = accountant.get_epsilon(1e-5)
    with pytest.raises(ValueError, match="ShuffledGaussian has no guarantee"):
        accountant.convert("add_remove")
    with pytest.raises(ValueError, match="^neighboring_relation='any'"):
        accountant.convert("any")
    assert accountant.state_dict() == before
    assert accountant.get_epsilon(1e-5) == epsilon
    accountant.convert("replace_one")
    assert accountant.neighboring_relation == "replace_one"
    assert [event.relation for event, _ in accountant.events] == ["replace_one"] * 2
    assert [count for _, count in accountant.events] == [3, 2]
    assert accountant.get_epsilon(1e-5) > epsilon
    accountant.convert("zero_out")
    assert accountant.state_dict() == before


def test_a_state_keeps_the_count_of_an_event_beside_the_accountants():
    event = SelfComposed(event=Gaussian(noise_multiplier=3.0), count=5)
    accountant = RDPAccountant()
    accountant.compose(event, 2)
    loaded = RDPAccountant()
    loaded.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    assert loaded.events == [(event, 2)]


@given(
    # A SelfComposed of its own is in the test above.
    events.map(lambda event: Composed(relation=event.relation, events=(event,))),
    st.integers(0, 1000),
    st.lists(st.tuples(rates, st.integers(0, 9)), max_size=3),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_a_state_with_events_survives_json(event, count, phases):
    accountant = RDPAccountant(neighboring_relation=event.relation)
    accountant.history = [(1.0, rate, steps) for rate, steps in phases]
    accountant.compose(event, count)
    state = accountant.state_dict()
    assert "history" not in state
    loaded = RDPAccountant()
    loaded.load_state_dict(json.loads(json.dumps(state)))
    assert loaded.state_dict() == state
    assert loaded.events == accountant.events
    assert loaded.neighboring_relation == event.relation
    assert loaded._pairs() == accountant._pairs()
    # A plain state resets what was there.
    loaded.load_state_dict(RDPAccountant().state_dict())
    assert (loaded.history, loaded.events) == ([], [])
    assert loaded.neighboring_relation == "add_remove"


def test_opacus_refuses_what_it_would_take_for_less():
    accountant = RDPAccountant()
    accountant.history = [(1.0, 0.1, 10)]
    theirs = OpacusRDPAccountant()
    theirs.load_state_dict(accountant.state_dict())
    assert theirs.history == [(1.0, 0.1, 10)]
    composed = RDPAccountant()
    composed.history = [(1.0, 0.1, 10)]
    composed.compose(Gaussian(noise_multiplier=1.0))
    replaced = RDPAccountant(neighboring_relation="replace_one")
    replaced.history = [(1.0, 0.1, 10)]
    for ours in (composed, replaced):
        with pytest.raises(ValueError, match="`history`"):
            OpacusRDPAccountant().load_state_dict(ours.state_dict())


def test_a_history_goes_to_opacus_and_back():
    ours, theirs, back = RDPAccountant(), OpacusRDPAccountant(), RDPAccountant()
    for noise in (1.0, 1.0, 1.5):
        ours.step(noise_multiplier=noise, sample_rate=0.1)
    theirs.load_state_dict(ours.state_dict())
    theirs.step(noise_multiplier=1.5, sample_rate=0.1)
    ours.step(noise_multiplier=1.5, sample_rate=0.1)
    back.load_state_dict(theirs.state_dict())
    assert back.history == ours.history == [(1.0, 0.1, 2), (1.5, 0.1, 2)]
    assert back.get_epsilon(1e-5) == ours.get_epsilon(1e-5)
    assert ours.get_epsilon(1e-5) <= theirs.get_epsilon(1e-5) * (1 + 1e-9)


@pytest.mark.parametrize(
    "change",
    [
        {"neighboring_relation": "any"},
        {"events": [{"event": "Laplace", "count": 1}]},
        {"events": [{"event": "Gaussian", "noise_multiplier": 1.0, "count": -1}]},
        {"events": [{"event": "Gaussian", "noise_multiplier": -1.0, "count": 1}]},
        {"steps": [(1.0, 2.0, 1)]},
        {"steps": None},
        {"mechanism": "pld"},
    ],
    ids=repr,
)
def test_a_bad_state_with_events_leaves_the_present_one(change):
    accountant = RDPAccountant()
    accountant.history = [(1.0, 0.1, 10)]
    accountant.compose(Gaussian(noise_multiplier=1.0))
    state = accountant.state_dict()
    present = RDPAccountant()
    present.compose(Gaussian(noise_multiplier=3.0), 2)
    before = present.state_dict()
    with pytest.raises(ValueError):
        present.load_state_dict({**state, **change})
    for key in ("events", "neighboring_relation", "mechanism", "steps"):
        with pytest.raises(ValueError, match=f"no '{'history' if key == 'steps' else key}'"):
            present.load_state_dict({k: v for k, v in state.items() if k != key})
    assert present.state_dict() == before
