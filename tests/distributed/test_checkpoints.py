"""Checkpoints of several ranks go on with any number of them, and never repeat noise."""

import os
from pathlib import Path

import distributed_world
import numpy as np
import pytest

from dpflash.accounting import PoissonGaussian, create_accountant
from dpflash.checkpoint import sharded as sharded_checkpoint

CASES = str(Path(__file__).with_name("checkpoint_cases.py"))
FULL = os.environ.get("DPFLASH_FULL") == "1"
WRITERS = ["plain-momentum", "fsdp-adamw"]
WRITERS += ["ddp-adamw", "fsdp-momentum", "plain-sgd"] if FULL else []
SAVED, STEPS = 3, 6


@pytest.fixture(scope="module")
def cases():
    return distributed_world.load(CASES)


@pytest.fixture(scope="module")
def of_size(worlds):
    """of_size(n): a world of n processes, the one of four shared with other files."""
    made = {}

    def get(size):
        if size == 4:
            return worlds.get()
        if size not in made or made[size].dead:
            made[size] = distributed_world.World(size)
        return made[size]

    yield get
    for one in made.values():
        one.close()


@pytest.fixture(scope="module")
def expected(cases):
    """expected(optimizer): what one process has that was never interrupted."""
    held = {}

    def get(optimizer, kind="net", steps=STEPS):
        key = (optimizer, kind, steps)
        if key not in held:
            held[key] = cases.Run("alone", optimizer=optimizer, kind=kind).train(steps).outcome()
        return held[key]

    return get


@pytest.fixture(scope="module")
def saved(cases, of_size, tmp_path_factory):
    """A folder of checkpoints of two ranks, of one process, and of runs without a step."""
    folder = tmp_path_factory.mktemp("checkpoints")
    of_size(2).run(CASES, "write", 2, folder=str(folder), names=WRITERS, after=SAVED)
    cases.write(None, folder=str(folder), names=["alone-adamw", "alone-momentum"], after=SAVED)
    (folder / "unstepped").mkdir()
    unstepped = str(folder / "unstepped")
    of_size(2).run(CASES, "write", 2, folder=unstepped, names=["fsdp-adamw"], after=0)
    cases.write(None, folder=unstepped, names=["alone-adamw"], after=0)
    return folder


def check_equal(found, wanted, name):
    assert np.abs(found["parameters"] - wanted["parameters"]).max() < 1.5e-7, name
    assert found["epsilon"] == wanted["epsilon"], name
    assert found["lrs"] == wanted["lrs"], name


@pytest.mark.cases(0)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_run_goes_on_with_another_number_of_ranks(size, saved, of_size, expected):
    names = [*WRITERS, "alone-adamw", "alone-momentum"]
    outcomes = of_size(size).run(
        CASES,
        "resume",
        size,
        folder=str(saved),
        names=names,
        wrappers=["fsdp", "ddp"] if size == 3 else ["fsdp", "plain"],
        steps=STEPS,
    )
    for rank in outcomes:
        assert len(rank) == 2 * len(names)
        for name, found in rank.items():
            check_equal(found, expected(name.split()[0].split("-")[1]), f"{name} of {size}")


@pytest.mark.cases(0)
def test_one_process_without_a_mesh_goes_on(saved, cases, expected):
    options = {"folder": str(saved), "names": WRITERS, "wrappers": ["alone"], "steps": STEPS}
    for name, found in cases.resume(None, **options).items():
        check_equal(found, expected(name.split()[0].split("-")[1]), name)


@pytest.mark.cases(0)
def test_a_run_without_a_step_goes_on(saved, cases, of_size, expected):
    options = {
        "folder": str(saved / "unstepped"),
        "names": ["fsdp-adamw", "alone-adamw"],
        "steps": 1,
    }
    outcomes = of_size(3).run(CASES, "resume", 3, wrappers=["fsdp", "plain"], **options)
    alone = cases.resume(None, wrappers=["alone"], **options)
    for rank in [*outcomes, alone]:
        for name, found in rank.items():
            check_equal(found, expected("adamw", steps=1), name)


@pytest.mark.cases(0)
def test_copies_of_shards_go_on_as_other_copies_shards_and_one_process(
    cases, of_size, expected, tmp_path
):
    name, wanted = "hsdp-adamw", expected("adamw")
    of_size(4).run(CASES, "write", 4, folder=str(tmp_path), names=[name], after=SAVED)
    again = {"folder": str(tmp_path), "names": [name], "steps": STEPS}
    outcomes = [
        *of_size(4).run(CASES, "resume", 4, wrappers=["hsdp", "fsdp"], **again),
        *of_size(2).run(CASES, "resume", 2, wrappers=["hsdp"], **again),
        cases.resume(None, wrappers=["alone"], **again),
    ]
    cases.write(None, folder=str(tmp_path), names=["alone-adamw"], after=SAVED)
    again["names"] = ["alone-adamw"]
    outcomes += of_size(4).run(CASES, "resume", 4, wrappers=["hsdp"], **again)
    for rank in outcomes:
        for case, found in rank.items():
            check_equal(found, wanted, case)


@pytest.mark.cases(0)
@pytest.mark.parametrize("wrapper", ["plain", "fsdp"])
def test_ranks_that_share_samples_save_and_go_on(wrapper, cases, of_size, expected, tmp_path):
    name = f"{wrapper}-adamw"
    folder = {"folder": str(tmp_path), "names": [name], "kind": "lm"}
    of_size(4).run(CASES, "write", 4, context=2, after=SAVED, **folder)
    again = {**folder, "steps": STEPS}
    outcomes = [
        *of_size(4).run(CASES, "resume", 4, context=2, wrappers=["plain", "fsdp"], **again),
        *of_size(2).run(CASES, "resume", 2, context=2, wrappers=["fsdp"], **again),
        cases.resume(None, wrappers=["alone"], **again),
    ]
    for rank in outcomes:
        for case, found in rank.items():
            check_equal(found, expected("adamw", "lm"), case)


def apart(one, other):
    """How far two steps' noisy gradients are from each other; the noise is almost all of them."""
    return np.linalg.norm(one - other) / np.linalg.norm(one)


@pytest.mark.parametrize("wrapper", ["plain", "fsdp"])
def test_lost_steps_stay_counted_and_their_noise_is_not_repeated(wrapper, of_size, tmp_path):
    outcomes = of_size(2).run(CASES, "lose_steps", 2, folder=str(tmp_path), wrapper=wrapper)
    accountant = create_accountant("contour")
    accountant.compose(PoissonGaussian(noise_multiplier=100.0, sample_rate=0.25), 8)
    for rank in outcomes:
        assert rank["lines"] == 8
        assert rank["resumed"]["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5))
        for lost in rank["lost"]["grads"]:
            for grad in rank["resumed"]["grads"]:
                assert apart(lost, grad) > 0.5
        assert np.array_equal(rank["resumed"]["parameters"], outcomes[0]["resumed"]["parameters"])


@pytest.mark.parametrize("wrapper", ["plain", "fsdp"])
def test_without_ledger_and_seed_all_ranks_leave_the_noise_together(wrapper, of_size, tmp_path):
    outcomes = of_size(2).run(CASES, "leave_noise", 2, folder=str(tmp_path), wrapper=wrapper)
    for rank in outcomes:
        assert rank["resumed"]["branch"]
        assert rank["resumed"]["branch"] == outcomes[0]["resumed"]["branch"]
        assert rank["lost"]["branch"] == ""
        assert np.array_equal(rank["resumed"]["parameters"], outcomes[0]["resumed"]["parameters"])
        for lost, grad in zip(rank["lost"]["grads"][3:], rank["resumed"]["grads"], strict=True):
            assert apart(lost, grad) > 0.5


def test_a_failure_on_one_rank_is_raised_on_all_and_keeps_the_checkpoint(of_size, tmp_path):
    for rank, outcome in enumerate(
        of_size(2).run(CASES, "survive_failures", 2, folder=str(tmp_path))
    ):
        assert outcome["unchanged"]
        assert len(outcome["messages"]) == 6
        wanted = ["No space", "No space", "be split", "No space", "No space", "is odd"]
        victims = [1, 0, 1, 0, 0, 1]
        for message, words, victim in zip(outcome["messages"], wanted, victims, strict=True):
            assert words in message
            assert rank == victim or str(tmp_path / "failing") in message
        before, after = outcome["before"], outcome["after"]
        assert before["modes"] == [0o700, 0o700, 0o600]
        assert after["modes"] == before["modes"]
        assert after["pointer"] != before["pointer"]
        for looked in (before, after):
            assert looked["names"] == ["current", looked["pointer"]]


def test_what_does_not_fit_is_refused_on_all_ranks(of_size, tmp_path):
    wanted = {
        "no pointer": ("no pointer", "no checkpoint was"),
        "odd pointer": ("odd pointer", "damaged"),
        "pointer to nothing": ("pointer to nothing", "missing or incomplete"),
        "part missing": ("part missing", "__1_0.distcp"),
        "part damaged": ("part damaged", "__1_0.distcp is damaged"),
        "engine damaged": ("engine damaged", "damaged"),
        "poisoned": ("poisoned", "getcwd"),
        "nothing": ("nothing", "no checkpoint there"),
        "save over a file": ("file", "is a file"),
        "other model": ("good", "first.weight"),
        "other data": ("good", "the data loader"),
        "with ledger": ("good", "ledger"),
        "file, other model": ("file", "first.weight"),
        "file, other data": ("file", "the data loader"),
        "file, with ledger": ("file", "ledger"),
        "spent": ("good", "spent privacy already"),
        "unreadable on one": ("", "Input/output error"),
        "paths differ": ("of-", "path differs"),
    }
    for said in of_size(2).run(CASES, "refusals", 2, folder=str(tmp_path)):
        assert said.pop("good").startswith("accepted")
        assert said.keys() == wanted.keys()
        for name, (path, words) in wanted.items():
            assert words in said[name], (name, said[name])
            assert path in said[name], (name, said[name])
            assert "(changed" not in said[name], (name, said[name])


def test_the_plain_state_of_either_kind_is_read_without_a_model(saved):
    for name in ("fsdp-adamw", "alone-adamw"):
        state = sharded_checkpoint.read_plain(saved / name)
        assert (state["extra"]["step"], state["releases"]) == (SAVED, SAVED)


def test_a_process_by_itself_does_not_write_over_a_folder(cases, saved):
    run = cases.Run("alone")
    with pytest.raises(ValueError, match="fsdp-adamw.*is a folder"):
        run.engine.save_checkpoint(saved / "fsdp-adamw")


@pytest.mark.parametrize(
    "size, at, victim", [(2, "data", 1), (1, "data", 0), (1, "engine", 0), (1, "pointer", 0)]
)
def test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before_it(
    size, at, victim, new_world, cases, expected, tmp_path
):
    path = tmp_path / "fsdp-adamw"
    answers = new_world(size, timeout=10.0).gather(
        CASES, "die_saving", size, folder=str(path), wrapper="fsdp", at=at, victim=victim
    )
    assert answers.pop(victim).kind == "Died"
    assert set(answers) <= {"RankError"}
    run = cases.Run("alone").load(path).train(STEPS)
    check_equal(run.outcome(), expected("adamw"), at)
