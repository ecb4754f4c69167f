"""The keys of the random streams, and the words that sampling draws."""

import contextlib
import copy
import math
import os
import pickle
import shutil

import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.distributed.mesh import Ranks
from dpflash.kernels.noise import keystream
from dpflash.privacy import keys as streams
from dpflash.privacy.keys import RunKeys, derive_key, master_key, uniform_words

KEY = bytes(range(32))


def test_purposes_do_not_share_words():
    seen = set()
    for key in (KEY, derive_key(KEY, "noise-0"), derive_key(KEY, "sampling-0")):
        for index in (0, 1, 2, 2**32, 2**40):
            seen |= set(uniform_words(key, index=index, count=64).tolist())
    assert len(seen) == 3 * 5 * 64


def test_the_keys_of_a_run_are_all_different():
    """Noise under the key of the draws would be known to whoever knows who was drawn."""
    for seed in (None, 0):
        keys = RunKeys(seed, Ranks())
        found = [keys.master, keys.noise, keys.sampling]
        keys.begin_model()
        found += [keys.master, keys.noise, keys.sampling]
        assert len(set(found)) == 6


def test_each_next_model_of_each_continuation_has_a_run_of_its_own():
    first, second = RunKeys(3, Ranks()), RunKeys(3, Ranks())
    state = {**first.state_dict(), "releases": 0, "ledger_releases": 0}
    names = [first.run]
    for keys in (first, second, second):
        if keys is second:
            keys.load_state_dict(state, ledger_releases=None)
        for _ in range(2):
            keys.begin_model()
            names.append(keys.run)
    assert len(set(names)) == 7 and {len(name) for name in names} == {64}


def test_keys_come_from_the_operating_system_and_from_a_seed_only_on_demand():
    assert master_key() != master_key()
    assert master_key(3) == master_key(3) != master_key(4)
    assert {len(master_key()), len(master_key(0)), len(derive_key(KEY, "a"))} == {32}
    assert derive_key(KEY, "a") != derive_key(KEY, "b") != derive_key(master_key(0), "b")


def test_words_agree_across_the_chunks_in_which_they_are_made(monkeypatch):
    whole = np.frombuffer(keystream(KEY, first=7, second=0, block=0, count=300), "<u8")
    assert np.array_equal(uniform_words(KEY, index=7, count=300), whole)
    monkeypatch.setattr(streams, "_CHUNK_WORDS", 64)
    assert np.array_equal(uniform_words(KEY, index=7, count=300), whole)
    assert uniform_words(KEY, index=7, count=0).size == 0


def test_uniform_words_are_uniform():
    words = uniform_words(KEY, index=0, count=200_000)
    assert words.dtype == np.dtype("<u8")
    assert scipy.stats.kstest(words / 2.0**64, "uniform").pvalue > 1e-3
    bits = np.unpackbits(words.view(np.uint8).reshape(-1, 8), axis=1).mean(0)
    assert np.abs(bits - 0.5).max() <= 5 * 0.5 / math.sqrt(words.size)


# Keys and draws that would be used twice


def run_of(folder, *, seed=None, ledger=True, **options):
    """An engine and what it made private; a step on losses of 0 releases noise alone."""
    engine = dpflash.PrivacyEngine(seed=seed, ledger=folder / "ledger" if ledger else None)
    model = nn.Linear(1, 40, bias=False)
    nn.init.zeros_(model.weight)
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(torch.arange(64.0)[:, None]), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )


def released(made, count):
    """(draw, noise) of so many releases."""
    engine, model, optimizer, loader = made
    found, rows, goal = [], set(), optimizer.releases + count
    while optimizer.releases < goal:
        for (x,) in loader:
            rows |= set(x[loader.is_real].flatten().tolist())
            engine.backward(model(x).sum(1) * 0)
            optimizer.step()
            if loader.is_last:
                found.append((frozenset(rows), tuple(model.weight.grad.flatten().tolist())))
                rows = set()
                optimizer.zero_grad()
            if optimizer.releases == goal:
                break
    return found


def saved(made, folder, how):
    if how == "state_dict":
        torch.save([m.state_dict() for m in made[:3]], folder / "c")
    else:
        made[0].save_checkpoint(folder / "c")


def loaded(made, folder, how):
    if how == "state_dict":
        states = torch.load(folder / "c", weights_only=True)
        for part, state in zip(made[:3], states, strict=True):
            part.load_state_dict(state)
    else:
        made[0].load_checkpoint(folder / "c")
    return made


def keys_of(made):
    keys = made[0]._keys
    return {keys.master, keys.noise, keys.sampling, made[3]._draws.key}


@pytest.mark.parametrize("how", ["file", "state_dict", "no_ledger"])
def test_a_folder_that_is_copied_and_continued_twice_shares_neither_noise_nor_draws(how, tmp_path):
    options = {"ledger": how != "no_ledger"}
    first, copied = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    made = run_of(first, **options)
    seen = released(made, 3)
    saved(made, first, how)
    shutil.copytree(first, copied)
    content = (first / "c").read_bytes()
    assert not any(k in content or k.hex().encode() in content for k in keys_of(made))
    keys = keys_of(made)
    for folder in (first, copied, copied):
        streams._claims.clear()  # as in another process
        made = loaded(run_of(folder, **options), folder, how)
        assert not keys & keys_of(made)
        keys |= keys_of(made)
        seen += released(made, 4)
    draws, noise = zip(*seen, strict=True)
    assert len(set(noise)) == len(set(draws)) == 15


def test_a_seeded_run_is_repeated_by_a_resume_until_the_ledger_is_ahead(tmp_path):
    made = run_of(tmp_path, seed=3)
    released(made, 3)
    saved(made, tmp_path, "state_dict")
    shutil.copytree(tmp_path, copied := tmp_path / "copied")
    going_on = released(made, 4)
    assert released(loaded(run_of(copied, seed=3), copied, "state_dict"), 4) == going_on
    seen = {element for pair in going_on for element in pair}
    # Behind the ledger, in another process, in the same one, and by a run of the same seed.
    behind = run_of(tmp_path, seed=3)
    for again in (
        lambda: loaded(behind, tmp_path, "state_dict"),
        lambda: loaded(behind, tmp_path, "state_dict"),
        lambda: run_of(tmp_path, seed=3),
    ):
        found = {element for pair in released(again(), 4) for element in pair}
        assert len(found) == 8 and not seen & found
        seen |= found


UNITS = {"unit_of": [i // 4 for i in range(64)], "examples_per_unit": 2}
SAMPLINGS = {"poisson": {}, "fixed_size": {"sampling": "fixed_size"}, "units": UNITS}
SET_BACK = {
    "earlier": lambda loader, states: loader.load_state_dict(states[0]),
    "of the first pass": lambda loader, states: loader.load_state_dict(states[1]),
    "old format": lambda loader, states: loader.load_state_dict({"next_draw": 1}),
    "sampler": lambda loader, states: loader.batch_sampler.resume(2),
}


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_loader_that_is_set_back_makes_other_draws(kind, seed, tmp_path):
    options = SAMPLINGS[kind]

    @torch.no_grad()
    def rows(loader):
        batches, current = [], []
        for (x,) in loader:
            current += x[loader.is_real].flatten().tolist()
            if loader.is_last:
                batches.append(tuple(sorted(current)))
                current = []
        return batches

    runs = []
    for _ in range(2):
        loader = run_of(tmp_path, seed=seed, ledger=False, **options)[3]
        states, drawn = [loader.state_dict()], rows(loader)
        states.append({**loader.state_dict(), "next_draw": 5})
        for set_back in (*SET_BACK.values(), SET_BACK["earlier"]):
            set_back(loader, states)
            drawn += rows(loader)
        runs.append(drawn)
        assert len(set(drawn)) == len(drawn) > 9
        # A process that goes on from here goes on with other draws too.
        state = loader.state_dict()
        resumed = run_of(tmp_path, seed=seed, ledger=False, **options)[3]
        resumed.load_state_dict({**state, "next_draw": 8})
        assert not set(rows(resumed)) & set(drawn)
    assert (runs[0] == runs[1]) == (seed is not None)


def test_a_pass_that_is_under_way_ends_where_the_loader_is_set_back(tmp_path):
    engine, model, optimizer, loader = run_of(tmp_path, seed=3)
    engine.save_checkpoint(tmp_path / "c")
    for set_back in (
        lambda: loader.load_state_dict({"next_draw": 0}),
        lambda: engine.load_checkpoint(tmp_path / "c"),
    ):
        batches = iter(loader)
        next(batches)
        set_back()
        with pytest.raises(RuntimeError, match="an earlier epoch"):
            next(batches)


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_holds_a_key_cannot_be_copied(copy_of, tmp_path):
    made = run_of(tmp_path)
    engine, _, optimizer, loader = made
    inner = [loader.batch_sampler, engine._keys]
    for held in (engine, optimizer, loader, *inner, iter(loader)):
        with pytest.raises(TypeError, match="cannot be copied or pickled|cannot pickle"):
            copy_of(held)
    # What DataLoader gives to a spawned worker.
    sent = pickle.dumps((loader.dataset, loader.collate_fn, loader._padded.collate_fn))
    assert not any(key in sent for key in keys_of(made))


@pytest.mark.parametrize(
    "spoil",
    [lambda made: copy.deepcopy(StepLR(made[2], 1)), lambda made: made[2].__setstate__({})],
    ids=["copy of a scheduler", "unpickling"],
)
def test_a_try_to_copy_an_optimizer_puts_no_hooks_around_the_steps_of_others(spoil, tmp_path):
    """PyTorch patches the class, and the hooks are the wrapped optimizer's."""
    runs = [run_of(tmp_path, ledger=False) for _ in range(2)]
    with contextlib.suppress(TypeError):
        spoil(runs[0])
    assert len(released(runs[1], 8)) == 8


@pytest.mark.parametrize("seed", [None, 3])
def test_a_forked_process_goes_on_under_keys_of_its_own(seed, tmp_path):
    made = run_of(tmp_path, seed=seed, ledger=False)
    for (x,) in made[3]:
        made[0].backward(made[1](x).sum(1) * 0)  # a draw under way
        break
    reader, writer = os.pipe()
    own = keys_of(made)
    if (child := os.fork()) == 0:
        found = b"".join(sorted(keys_of(made))) if made[3].tracker.current is None else b""
        os.write(writer, found)
        os._exit(0)
    os.waitpid(child, 0)
    found = os.read(reader, 128)
    assert len(found) == 96 and not any(key in found for key in own)
    assert keys_of(made) == own and len(own) == 3


def test_an_engine_is_stateful_for_distributed_checkpoints(tmp_path):
    made = run_of(tmp_path)
    released(made, 3)
    assert isinstance(made[0], Stateful)
    dcp.save({"engine": made[0], "model": made[1]}, checkpoint_id=tmp_path / "dcp")
    again = run_of(tmp_path)
    dcp.load({"engine": again[0], "model": again[1]}, checkpoint_id=tmp_path / "dcp")
    assert again[2].releases == 3 and again[3].state_dict() == made[3].state_dict()
    assert again[0]._keys.run == made[0]._keys.run
    for state in ({}, {"engine": 1}, [], made[1].state_dict()):
        with pytest.raises(ValueError, match="not that of an engine"):
            again[0].load_state_dict(state)
    other = run_of(tmp_path, dataset_size=128)
    with pytest.raises(ValueError, match="state_dict: the checkpoint .* the data loader"):
        other[0].load_state_dict(made[0].state_dict())
