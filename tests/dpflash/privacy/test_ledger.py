"""The ledger: what damages it is found, what is in it is counted, and kill -9 loses no step."""

import copy
import hashlib
import json
import math
import os
import re
import signal
import textwrap
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash import PrivacyEngine
from dpflash.accounting import (
    Composed,
    FixedSizeGaussian,
    Gaussian,
    PoissonGaussian,
    RDPAccountant,
    SelfComposed,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
    create_accountant,
)
from dpflash.privacy.ledger import Ledger
from dpflash.privacy.source import source_digest

DELTA = 1e-5
STEP = PoissonGaussian(relation="zero_out", noise_multiplier=1.0, sample_rate=0.25)
PASS = ShuffledGaussian(noise_multiplier=1.0)
FOREIGN = Gaussian(relation="zero_out", noise_multiplier=1.0)
TRUNCATED = TruncatedPoissonGaussian(
    noise_multiplier=1.0, sample_rate=0.1, max_batch_size=40, num_samples=100
)
pytestmark = pytest.mark.filterwarnings("ignore:a step was made on a batch that did not")


def line(first=1, last=None, event=STEP, **changes):
    record = {
        "steps": [first, first if last is None else last],
        "run": "a",
        "event": None if event is None else event.as_dict(),
        "epsilon": None,
        "delta": None,
        "accountant": "rdp",
        "unit": "sample",
        **changes,
        "digest": "",
    }
    return json.dumps(record) + "\n"


def write(path, text):
    """A ledger of these lines, whose empty digests are filled in, and its guard."""
    done, empty = b"", b', "digest": ""}\n'
    for raw in text.encode(errors="surrogateescape").splitlines(keepends=True):
        if raw.endswith(empty):
            covered = done + raw.removesuffix(empty) + b"}"
            digest = hashlib.blake2b(covered, digest_size=16).hexdigest()
            raw = raw.removesuffix(b'"}\n') + digest.encode() + b'"}\n'
        done += raw
        path.with_name(f"{path.name}.guard").write_bytes(raw)
    path.write_bytes(done)


def without(key):
    record = json.loads(line(2))
    del record[key]
    return json.dumps(record) + "\n"


def event_of(**changes):
    return line(2, event=None).replace(
        '"event": null', '"event": ' + json.dumps({**STEP.as_dict(), **changes})
    )


def train(engine, model, optimizer, loader, steps):
    done = 0
    while done < steps:
        for (x,) in loader:
            optimizer.zero_grad()
            engine.backward(model(x).square().mean(1))
            optimizer.step()
            done += loader.is_last
            if done == steps:
                break


@pytest.fixture
def made_of(private):
    """made_of(ledger=..., ...): a private run of four steps a pass on 16 samples."""
    return lambda **options: private(
        nn.Linear(3, 2), torch.ones(16, 3), **{"noise_multiplier": 1.0, **options}
    )


def epsilon_of(*events, relation="add_remove"):
    accountant = RDPAccountant(neighboring_relation=relation)
    for event, count in events:
        accountant.compose(event.convert(relation), count)
    return accountant.get_epsilon(DELTA)


# Damage: a good first line, then this.

DAMAGE = {
    "a_line_missing": (line(3), "line 2 .*step 3, expected 2"),
    "a_line_doubled": (line(2) + line(2), "line 3 .*step 2, expected 3"),
    "lines_exchanged": (line(3) + line(2), "line 2 .*step 3, expected 2"),
    "a_range_that_overlaps": (line(2, 5) + line(5), "line 3 .*step 5, expected 6"),
    "a_range_backwards": (line(2, 1), "line 2 .*before the first"),
    "an_empty_line": ("\n" + line(2), "line 2"),
    "an_empty_line_at_the_end": (line(2) + "\n", "line 3"),
    "no_json": ("x\n", "line 2"),
    "two_objects": (line(2)[:-1] + line(3), "line 2"),
    "no_event_key": (without("event"), "line 2 .*keys"),
    "no_epsilon_key": (without("epsilon"), "line 2 .*keys"),
    "a_key_more": (line(2, more=1), "line 2 .*keys"),
    "a_note_of_a_step": (line(2, note="x", event=None), "line 2 .*neither steps"),
    "a_note_with_an_event": (line(2, 1, note="x"), "line 2 .*nor an event"),
    "a_note_without_text": (line(2, 1, note=1, event=None), "line 2 .*note=1"),
    "a_note_that_takes_a_step_back": (line(2, 0, note="x", event=None), "line 2 .*neither"),
    "a_key_twice": (line(2)[:-2] + ', "run": "b"}\n', "line 2 .*duplicate key"),
    "steps_as_booleans": (line(2, steps=[True, True]), "line 2 .*whole numbers"),
    "one_step": (line(2, steps=[2]), "line 2 .*whole numbers"),
    "no_run": (line(2, run=""), "line 2 .*run="),
    "a_run_that_does_not_print": (line(2, run="a\x1b[2K"), "line 2 .*run="),
    "about_no_object": (line(2, about=1), "line 2 .*about=1"),
    "about_a_list": (line(2, about={"day": [1]}), "line 2 .*about="),
    "a_correction_of_a_step": (line(2, was="sample"), "line 2 .*a note can correct"),
    "accountant_null": (line(2, accountant=None), "line 2 .*accountant="),
    "epsilon_true": (line(2, epsilon=True, delta=0.1), "line 2 .*epsilon=True"),
    "epsilon_nan": (line(2, epsilon=math.nan, delta=0.1), "line 2 .*finite"),
    "epsilon_overflows": (line(2, epsilon=1.5).replace("1.5", "1e999"), "line 2 .*finite"),
    "epsilon_without_delta": (line(2, epsilon=1.0), "line 2 .*without a delta"),
    "delta_of_1": (line(2, delta=1), "line 2 .*delta=1"),
    "event_unknown": (event_of(event="Laplace"), "line 2 .*'Laplace'"),
    "event_unhashable": (event_of(event=["Gaussian"]), "line 2"),
    "event_empty": (line(2, event=None).replace("null", "{}", 1), "line 2"),
    "event_lacks_a_value": (
        line(2).replace('"noise_multiplier": 1.0, ', ""),
        "line 2 .*noise_multiplier",
    ),
    "event_has_one_more": (event_of(clip=3), "line 2 .*clip"),
    "noise_infinite": (event_of(noise_multiplier=math.inf), "line 2 .*finite"),
    "rate_above_1": (event_of(sample_rate=1.5), "line 2 .*sample_rate=1.5"),
    "relation_unknown": (event_of(relation="both"), "line 2 .*'both'"),
    "latin_1": (line(2, run="\u00e9").replace("\\u00e9", "\udce9"), "line 2 .*utf-8"),
    "null_after_a_poisson_step": (line(2, event=None), "line 2 .*event=null"),
    "null_after_another_run_s_pass": (
        line(2, event=PASS) + line(3, event=None, run="b"),
        "line 3 .*event=null",
    ),
    "null_after_another_run_s_foreign_batch": (
        line(2, event=PASS) + line(3, event=FOREIGN, run="b") + line(4, event=None),
        "line 4 .*event=null",
    ),
    "rate_0": (event_of(sample_rate=0), "line 2 .*costs nothing"),
    "count_0": (
        line(2, event=SelfComposed(relation="zero_out", event=STEP, count=0)),
        "line 2 .*costs nothing",
    ),
    "composed_of_none": (line(2, event=Composed(events=())), "line 2 .*costs nothing"),
    "noise_too_long": (event_of(noise_multiplier=10**400), "line 2 .*401 digits"),
    "steps_too_long": (line(2, 10**400), "line 2 .*401 digits"),
    "steps_too_many": (line(2, 10**15 + 1), "line 2 .*digits"),
    "num_samples_too_long": (
        line(2, event=TRUNCATED).replace("100,", f"{10**400},").replace("100}", f"{10**400}}}"),
        "line 2 .*401 digits",
    ),
    "deep": ("[" * 100_000 + "\n", "line 2"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_ledger_is_refused_with_the_line_and_left_as_it_is(kind, tmp_path):
    text, message = DAMAGE[kind]
    path = tmp_path / "ledger"
    write(path, line() + text)
    content = path.read_bytes()
    with pytest.raises(ValueError, match=rf"(?s)ledger .*{message}"):
        PrivacyEngine(ledger=path)
    assert path.read_bytes() == content


def test_a_folder_or_a_path_through_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "ledger"):
        with pytest.raises(ValueError, match="ledger='.*cannot be read .*pass the path of a file"):
            PrivacyEngine(ledger=path)


@pytest.mark.parametrize(
    "event",
    [
        STEP,
        Gaussian(relation="zero_out", noise_multiplier=2.0),
        ShuffledGaussian(noise_multiplier=2.0),
        FixedSizeGaussian(noise_multiplier=2.0, batch_size=3, num_samples=30),
        TRUNCATED,
    ],
    ids=lambda event: event.sampler,
)
def test_a_range_counts_its_event_once_for_each_step(event, tmp_path):
    ranges = line(1, 7, event) + line(8, 8, event)
    if event.sampler == "shuffled":
        ranges += line(9, 30, None)
    write(tmp_path / "ranges", ranges)
    write(tmp_path / "lines", "".join(line(n, n, event) for n in range(1, 9)))
    engines = [
        PrivacyEngine(accountant="rdp", ledger=tmp_path / name) for name in ("ranges", "lines")
    ]
    assert engines[0]._spending.ledger.releases == (30 if event.sampler == "shuffled" else 8)
    epsilons = [engine.get_epsilon(DELTA) for engine in engines]
    assert epsilons[0] == epsilons[1] == epsilon_of((event, 8), relation=event.relation)
    assert {engine.neighboring_relation for engine in engines} == {event.relation}


def test_a_range_of_a_billion_steps_is_counted_at_once(tmp_path):
    write(tmp_path / "l", line(1, 10**9))
    assert PrivacyEngine(ledger=tmp_path / "l").accountant.history == [(1.0, 0.25, 10**9)]


def test_a_line_tells_the_step_its_event_and_epsilon_at_the_targets_delta(made_of, tmp_path):
    path = tmp_path / "l"
    made = made_of(ledger=path)
    train(*made, 1)
    budget = dpflash.PrivacyBudget(50.0, DELTA)
    again = made_of(ledger=path, budget=budget)
    train(*again, 2)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [entry["steps"] for entry in lines] == [[1, 1], [2, 2], [3, 3]]
    assert [entry["epsilon"] for entry in lines] == [
        None,
        epsilon_of((STEP, 2)),
        epsilon_of((STEP, 3)),
    ]
    assert [entry["delta"] for entry in lines] == [None, DELTA, DELTA]
    assert all(entry["event"] == STEP.as_dict() for entry in lines)
    assert {entry["accountant"] for entry in lines} == {again[0].accountant.mechanism()}
    runs = [entry["run"] for entry in lines]
    assert runs[0] != runs[1] == runs[2]


def test_epsilon_of_a_target_is_in_the_ledger_too(tmp_path):
    engine = PrivacyEngine(accountant="rdp", ledger=tmp_path / "l")
    model = nn.Linear(3, 2)
    made = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.randn(16, 3)), batch_size=4
        ),
        target_epsilon=3.0,
        target_delta=DELTA,
        epochs=1,
        max_grad_norm=1.0,
    )
    train(engine, *made, 4)
    last = json.loads((tmp_path / "l").read_text().splitlines()[-1])
    assert last["epsilon"] == engine.get_epsilon(DELTA) and 2.99 < last["epsilon"] <= 3
    assert last["delta"] == DELTA


@pytest.mark.parametrize(
    ("first", "second", "relation"),
    [
        ({}, {}, "zero_out"),
        ({"dataset_size": 16}, {"dataset_size": 16}, "add_remove"),
        ({"dataset_size": 16}, {}, "zero_out"),
        ({}, {"sampling": "shuffled"}, "zero_out"),
        ({"sampling": "shuffled"}, {}, "zero_out"),
        ({"sampling": "fixed_size"}, {}, "zero_out"),
        ({"sampling": "fixed_size"}, {"sampling": "fixed_size"}, "replace_one"),
        ({"sampling": "fixed_size"}, {"sampling": "shuffled"}, "zero_out"),
        ({"max_batch_size": 15}, {}, "zero_out"),
    ],
    ids=str,
)
def test_runs_on_the_same_data_compose_in_one_ledger(first, second, relation, private, tmp_path):
    path, x = tmp_path / "l", torch.randn(16, 3)
    events = []
    for noise, options in ((2.0, first), (3.0, second)):
        made = private(nn.Linear(3, 2), x, noise_multiplier=noise, ledger=path, **options)
        train(*made, 8)
        count = 2 if made[3].sampler_name == "shuffled" else 8
        events.append((made[3].plan.event(noise), count))
    reopened = PrivacyEngine(accountant="rdp", ledger=path)
    for engine in (made[0], reopened):
        assert engine.neighboring_relation == relation == engine.accountant.neighboring_relation
        accountant = type(engine.accountant)(neighboring_relation=relation)
        for event, count in events:
            accountant.compose(event.convert(relation), count)
        assert engine.get_epsilon(DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)
    assert Ledger(path).releases == 16


def test_a_relation_for_which_a_ledger_has_no_guarantee_is_refused_by_name(private, tmp_path):
    for number, (event, sampler) in enumerate(
        [
            (ShuffledGaussian(noise_multiplier=1.0), "shuffled"),
            (FixedSizeGaussian(noise_multiplier=1.0, batch_size=2, num_samples=9), "fixed_size"),
            (Gaussian(relation="zero_out", noise_multiplier=1.0), "private loader"),
            (STEP, "poisson sampler counted the size"),
        ]
    ):
        path = tmp_path / str(number)
        write(path, line(event=event))
        with pytest.raises(ValueError, match=f"neighboring_relation='add_remove'.*{sampler}"):
            PrivacyEngine(ledger=path, neighboring_relation="add_remove")


# What is kept of a run


def test_a_run_is_recorded_with_the_day_the_code_the_data_and_the_bound(made_of, tmp_path):
    budget = {"budget": dpflash.PrivacyBudget(900, DELTA)}
    made = made_of(ledger=tmp_path / "l", run_name="first", data_name="ones", **budget)
    train(*made, 2)
    made[2].max_grad_norm = 0.5
    train(*made, 2)
    first, *others = [entry.about for entry in Ledger(tmp_path / "l").lines]
    assert others == [None, {**first, "max_grad_norm": 0.5}, None]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", first.pop("day"))
    assert first == {
        "name": "first",
        "version": dpflash.__version__,
        "source": source_digest(),
        "data": "ones",
        "seeded": "yes",
        "dataset_size": 16,
        "max_epsilon": 900,
        "at_delta": DELTA,
        "max_grad_norm": 1.0,
    }
    again = made_of(ledger=tmp_path / "l")
    train(*again, 1)
    about = Ledger(tmp_path / "l").lines[-1].about
    assert about["name"] is None and "max_epsilon" not in about
    for name in ("run_name", "data_name"):
        with pytest.raises(ValueError, match=f"{name}=.*expected a word"):
            dpflash.PrivacyConfig(1.0, **{name: "two\nlines"})


def test_what_is_kept_of_a_run_is_in_its_first_line_and_where_it_changes(tmp_path, monkeypatch):
    ledger, about = Ledger(tmp_path / "l"), {"day": "2026-11-30", "max_grad_norm": 1.0}

    def add(run, about, branch=""):
        ledger.append(run=run, event=STEP, accountant="rdp", branch=branch, about=about)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(ledger, "_store", raises(OSError("disk full")))
        add("a", about)
    runs = [("a", about)] * 2 + [("b", about), ("a", about), ("a", {**about, "max_grad_norm": 2})]
    for run, kept in runs:
        add(run, kept)
    add("a", {**about, "max_grad_norm": 2}, branch="c")
    found = [entry.about for entry in Ledger(ledger.path).lines]
    changed = {**about, "max_grad_norm": 2}
    assert found == [about, None, about, about, changed, changed]


def raises(error):
    def fail(*arguments):
        raise error

    return fail


# Writing


def test_the_line_is_flushed_before_append_returns_and_the_folder_with_a_new_file(
    tmp_path, monkeypatch
):
    seen = []
    plain = os.fsync

    def fsync(handle):
        seen.append(os.readlink(f"/proc/self/fd/{handle}"))
        plain(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    ledger = Ledger(tmp_path / "l")
    ledger.append(run="a", event=PASS, accountant="rdp")
    ledger.append(run="a", event=None, accountant="rdp", count=5)
    guard = str(tmp_path / "l.guard.tmp")
    assert seen == [guard, str(tmp_path), str(tmp_path / "l"), guard, str(tmp_path / "l"), guard]
    assert Ledger(tmp_path / "l").releases == ledger.releases == 6


def test_a_first_line_without_an_event_is_refused(tmp_path):
    write(tmp_path / "l", line(event=None))
    with pytest.raises(ValueError, match="damaged at line 1 .*event=null"):
        PrivacyEngine(ledger=tmp_path / "l")


def test_a_line_that_the_next_opening_would_refuse_is_not_written(tmp_path):
    ledger = Ledger(tmp_path / "l")
    free = PoissonGaussian(noise_multiplier=1.0, sample_rate=0.0)
    for event in (None, free):
        with pytest.raises(ValueError, match="event=null|costs nothing"):
            ledger.append(run="a", event=event, accountant="rdp")
    assert not ledger.path.exists() and ledger.releases == 0
    ledger.append(run="a", event=PASS, accountant="rdp")
    with pytest.raises(ValueError, match="event=null"):
        ledger.append(run="b", event=None, accountant="rdp")
    assert Ledger(ledger.path).releases == ledger.releases == 1


@pytest.mark.usefixtures("one_batch_a_draw")
def test_a_foreign_batch_within_a_paid_pass_leaves_a_ledger_that_can_be_read(made_of, tmp_path):
    made = made_of(
        poisson_sampling=False,
        verify_first_batch=False,
        ledger=tmp_path / "l",
    )
    engine, model, optimizer, loader = made
    for (x,) in loader:
        for _ in range(2):
            optimizer.zero_grad()
            engine.backward(model(x).square().mean(1))
            optimizer.step()
    events = [entry.event for entry in Ledger(tmp_path / "l").lines]
    assert events == [PASS, FOREIGN, None, FOREIGN, None, FOREIGN, None, FOREIGN]
    again = PrivacyEngine(ledger=tmp_path / "l")
    assert again.accountant.events == engine.accountant.events


@pytest.mark.parametrize("accountant", ["contour", "rdp"])
@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffled"])
@pytest.mark.parametrize("relation", [None, "replace_one"])
def test_a_digit_that_makes_the_events_cheaper_is_found(
    accountant, sampling, relation, private, tmp_path
):
    path = tmp_path / "l"
    model = nn.Linear(3, 2)
    engine = PrivacyEngine(accountant=accountant, ledger=path, neighboring_relation=relation)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=4),
        noise_multiplier=1.5,
        max_grad_norm=1.0,
        sampling=sampling,
        budget=dpflash.PrivacyBudget(500.0, DELTA),
    )
    train(engine, *made, 6)
    for name in ("contour", "rdp"):
        opened = PrivacyEngine(accountant=name, ledger=path)
        assert opened.neighboring_relation == engine.neighboring_relation
    records = [json.loads(text) for text in path.read_text().splitlines()]
    path.write_text(path.read_text().replace('"noise_multiplier": 1.5', '"noise_multiplier": 2.5'))
    with pytest.raises(ValueError, match="damaged at line 1 .*digest is wrong"):
        PrivacyEngine(accountant="rdp", ledger=path)

    # With digests made anew, it still tells epsilon.
    records[0]["event"]["noise_multiplier"] = 2.5
    write(path, "".join(json.dumps({**record, "digest": ""}) + "\n" for record in records))
    with pytest.raises(ValueError, match="up to line 6 give epsilon .*the file was changed"):
        PrivacyEngine(accountant="rdp", ledger=path)


def test_a_ledger_lacks_no_release_that_its_engines_accountant_counts(made_of, tmp_path):
    """Refused before there is an engine, and so before the first draw."""
    one, two = tmp_path / "one", tmp_path / "two"
    stepped, composed, shared = (create_accountant("rdp") for _ in range(3))
    stepped.step(noise_multiplier=1.0, sample_rate=0.25)
    composed.compose(Gaussian(noise_multiplier=1.0))
    made = made_of(accountant=shared, ledger=one)
    alone = PrivacyEngine(accountant="rdp").accountant
    for accountant, ledger, message in (
        (stepped, two, "already counted releases, and ledger='.*two'"),
        (composed, two, "already counted releases, and ledger='.*two'"),
        (copy.copy(stepped), one, "already counted releases, and ledger='.*one'"),
        (shared, two, "ledger='.*one' already uses .*ledger='.*two'"),
        (shared, one, "ledger='.*one' already uses .*ledger='.*one'"),
        (shared, None, "ledger='.*one' already uses .*ledger=None"),
        (alone, two, "ledger=None already uses .*ledger='.*two'"),
    ):
        before = accountant.state_dict()
        with pytest.raises(ValueError, match=f"accountant='rdp'.*{message}.*Pass the name"):
            PrivacyEngine(accountant=accountant, ledger=ledger)
        assert accountant.state_dict() == before
    # A ledger that is refused leaves an accountant as it was.
    mixed = Ledger(tmp_path / "mixed")
    for unit in ("sample", "document"):
        mixed.append(run="a", event=STEP, accountant="rdp", unit=unit)
    unused = create_accountant("rdp")
    before = unused.state_dict()
    with pytest.raises(ValueError, match="one epsilon cannot be for both"):
        PrivacyEngine(accountant=unused, ledger=mixed.path)
    assert unused.state_dict() == before
    assert PrivacyEngine(accountant=unused, ledger=two).accountant is unused
    train(*made, 2)
    assert Ledger(one).releases == 2 and not two.exists()
    assert PrivacyEngine(ledger=one).accountant.history == shared.history == [(1.0, 0.25, 2)]
    # Without a ledger releases add up in one object, also of a copy.
    free = copy.deepcopy(shared)
    assert PrivacyEngine(accountant=free).get_epsilon(DELTA) == made[0].get_epsilon(DELTA)
    assert PrivacyEngine(accountant=free).accountant is free


def test_an_accountant_counts_units_of_one_kind_and_an_old_engine_says_what_it_lacks(
    made_of, tmp_path
):
    shared = create_accountant("rdp")
    train(*made_of(accountant=shared), 1)
    users = {"unit_of": lambda entry: "one", "unit_name": "patient", "examples_per_unit": 1}
    with pytest.raises(ValueError, match="'user: patient' here, and a 'sample'"):
        made_of(accountant=shared, **users)
    older, newer = (made_of(ledger=tmp_path / "l") for _ in range(2))
    train(*newer, 1)
    with pytest.warns(UserWarning, match="later lines of another engine"):
        older[0].get_epsilon(DELTA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newer[0].get_epsilon(DELTA)


def test_a_checkpoint_goes_on_with_a_ledger_or_without_as_it_was_written(made_of, tmp_path):
    def build(ledger):
        return made_of(ledger=ledger, seed=None)

    with_ledger, without = build(tmp_path / "l"), build(None)
    train(*with_ledger, 1)
    train(*without, 1)
    with_ledger[0].save_checkpoint(tmp_path / "with")
    without[0].save_checkpoint(tmp_path / "without")
    with pytest.raises(ValueError, match="written with a ledger, and the engine has none"):
        build(None)[0].load_checkpoint(tmp_path / "with")
    with pytest.raises(ValueError, match="written without a ledger, and the engine has one"):
        build(tmp_path / "other")[0].load_checkpoint(tmp_path / "without")


def test_a_digest_covers_whole_lines_and_is_none_for_more_steps_than_there_are(tmp_path):
    write(tmp_path / "l", line(1, 4) + line(5))
    ledger = Ledger(tmp_path / "l")
    assert ledger.digest() == ledger.digest(5) != ledger.digest(4)
    assert ledger.digest(2) == ledger.digest(4) and ledger.digest(6) is None


# kill -9

CHILD = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import dpflash
from dpflash import step
from dpflash.privacy import ledger

point, folder = sys.argv[1:]

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def arm():
    if point == "before_the_line":
        ledger.Ledger.append = die
    elif point == "within_the_line":
        plain = os.write
        def half(handle, text):
            plain(handle, text[: len(text) // 2])
            die()
        os.write = half
    elif point == "before_the_flush":
        os.fsync = die
    elif point == "before_the_guard":
        os.replace = die
    elif point == "after_the_line":
        step.NoiseStream = die
    elif point == "after_the_noise":
        optimizer.original_optimizer.step = die

engine = dpflash.PrivacyEngine(accountant="rdp", ledger=folder + "/ledger")
model = nn.Linear(3, 2)
_, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(TensorDataset(torch.ones(16, 3)), batch_size=4),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    budget=dpflash.PrivacyBudget(float(BUDGET), 1e-5),
)
steps = 0
for _ in range(9):
    for (x,) in loader:
        if steps == 3:
            arm()
        optimizer.zero_grad()
        engine.backward(model(x).square().mean(1))
        optimizer.step()
        if not loader.is_last:
            continue
        steps += 1
        with open(folder + "/released", "w") as file:
            file.write(str(steps))
        if steps == 2:
            engine.save_checkpoint(folder + "/checkpoint")
        if steps == 4:
            die()
"""

# The steps that the ledger must hold.
POINTS = {
    "before_the_line": 3,
    "within_the_line": 3,
    "before_the_flush": 4,
    "before_the_guard": 4,
    "after_the_line": 4,
    "after_the_noise": 4,
    "after_the_step": 4,
}


@pytest.mark.parametrize("point", POINTS)
def test_kill_9_at_any_point_of_a_release_loses_no_step(point, made_of, forked, tmp_path):
    budget = epsilon_of((STEP, 6))
    code = textwrap.dedent(CHILD).replace("BUDGET", repr(budget))
    status, output = forked(code, point, str(tmp_path))
    assert status == -signal.SIGKILL, output
    path = tmp_path / "ledger"
    released = int((tmp_path / "released").read_text())
    expected = POINTS[point]
    assert path.read_bytes().endswith(b"\n") == (point != "within_the_line")

    # The step in flight may be counted too, and never one less than was released.
    made = made_of(
        ledger=path,
        seed=None,
        budget=dpflash.PrivacyBudget(budget, DELTA),
    )
    engine = made[0]
    assert engine.accountant.history == [(1.0, 0.25, expected)]
    assert released <= expected <= released + 1
    engine.load_checkpoint(tmp_path / "checkpoint")
    assert made[2].releases == 2 and engine.remaining_steps() == 6 - expected
    assert engine.get_epsilon(DELTA) == epsilon_of((STEP, expected))
    assert engine.get_epsilon(DELTA) >= epsilon_of((STEP, released))
    with pytest.raises(dpflash.BudgetSpent):
        train(*made, 99)
    assert engine.accountant.history == [(1.0, 0.25, 6)]
    assert [entry.first for entry in Ledger(path).lines] == [1, 2, 3, 4, 5, 6]
    assert {entry.run for entry in Ledger(path).lines} == {engine._keys.run}


def test_a_release_that_the_ledger_would_lack_is_not_counted(tmp_path):
    engine = PrivacyEngine(ledger=tmp_path / "ledger.jsonl")
    accountant, phase = engine.accountant, (1.0, 0.25, 3)
    other = accountant.for_trial()
    other.step(noise_multiplier=1.0, sample_rate=0.25)
    for count in (
        lambda: accountant.step(noise_multiplier=1.0, sample_rate=0.25),
        lambda: accountant.compose(Gaussian(noise_multiplier=1.0)),
        lambda: setattr(accountant, "history", [*accountant.history, phase]),
        lambda: setattr(accountant, "events", [(Gaussian(noise_multiplier=1.0), 1)]),
        lambda: accountant.load_state_dict(other.state_dict()),
    ):
        with pytest.raises(ValueError, match="would not know of this release"):
            count()
    assert engine.get_epsilon(DELTA) == 0
    PrivacyEngine().accountant.step(noise_multiplier=1.0, sample_rate=0.25)
