"""A draw is released whole or not at all, and whatever counts steps counts releases."""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.accounting import Gaussian
from dpflash.sampling import LogicalBatches

SIZE = 32


@pytest.fixture
def run(private):
    """run(...) -> (engine, model, optimizer, loader), of draws with several microbatches."""

    def make(rate=16, lr=0.1, **options):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        options = {"physical_batch_size": 4, "noise_multiplier": 0.5, **options}
        made = private(model, torch.randn(SIZE, 3), batch_size=rate, lr=0.1, **options)
        made[2].param_groups[0].update(lr=lr)
        return made

    return make


def losses_of(model, x):
    return model(x).square().mean(1)


def trains(engine, model, optimizer, batches):
    """The inputs of each microbatch."""
    seen = []
    for (x,) in batches:
        seen.append(x)
        engine.backward(losses_of(model, x))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def fail(grad):
    raise torch.cuda.OutOfMemoryError("out of memory")


def forgets_all(engine, model, optimizer, loader):
    for _ in loader:
        optimizer.step()


def guards_losses(engine, model, optimizer, loader, skipped=1):
    """The skipped microbatch has a loss that is not finite."""
    for number, (x,) in enumerate(loader):
        losses = losses_of(model, x) * (float("nan") if number == skipped else 1)
        if not torch.isfinite(losses).all():
            continue
        engine.backward(losses)
        optimizer.step()


def guards_inputs_and_steps_at_the_last(engine, model, optimizer, loader):
    for number, (x,) in enumerate(loader):
        if number != 1:
            engine.backward(losses_of(model, x))
        if loader.is_last:
            optimizer.step()


def leaves_out_empty(engine, model, optimizer, loader):
    for (x,) in loader:
        if loader.is_real.any():
            engine.backward(losses_of(model, x))
        optimizer.step()


def leaves_out_the_last(engine, model, optimizer, loader):
    for (x,) in loader:
        if not loader.is_last:
            engine.backward(losses_of(model, x))
        optimizer.step()


def catches(engine, model, optimizer, loader, failing=1):
    """One backward fails, and the loop goes on with the next microbatch."""
    for number, (x,) in enumerate(loader):
        outputs = model(x)
        if number == failing:
            outputs.register_hook(fail)
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            engine.backward(outputs.square().mean(1))
        optimizer.step()


def catches_and_tries_again(engine, model, optimizer, loader):
    """It tries the second microbatch again, but the sum of the first is dropped."""
    for number, (x,) in enumerate(loader):
        if number == 1:
            outputs = model(x)
            outputs.register_hook(fail)
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                engine.backward(outputs.square().mean(1))
        engine.backward(losses_of(model, x))
        optimizer.step()


def asks_ahead(engine, model, optimizer, loader):
    trains(engine, model, optimizer, list(loader))


def signals_a_release(engine, model, optimizer, loader):
    for (x,) in loader:
        engine.backward(losses_of(model, x))
        optimizer.signal_skip_step(False)
        optimizer.step()


@pytest.mark.parametrize(
    "loop",
    [
        forgets_all,
        guards_losses,
        guards_inputs_and_steps_at_the_last,
        leaves_out_empty,
        leaves_out_the_last,
        catches,
        catches_and_tries_again,
        asks_ahead,
        signals_a_release,
    ],
)
def test_a_sum_without_one_of_its_microbatches_is_never_released(run, loop):
    # With a tenth of a sample in a draw the first ones are empty.
    options = {"rate": 1, "dataset_size": 1000} if loop is leaves_out_empty else {}
    engine, model, optimizer, loader = run(**options, verify_first_batch=False)
    before = model.weight.detach().clone()
    with pytest.raises(dpflash.PrivateRefusal, match="lacks a microbatch") as refused:
        loop(engine, model, optimizer, loader)
    assert not any(letter.isdigit() for letter in str(refused.value))
    with contextlib.suppress(dpflash.PrivateRefusal):
        optimizer.step()
    assert torch.equal(model.weight, before) and optimizer.releases == 0
    for (x,) in loader:
        engine.backward(losses_of(model, x))
        optimizer.step()
        if loader.is_last:
            break
    assert optimizer.releases == 1


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("has_backward", [False, True])
def test_a_draw_without_a_release_is_reported_when_the_iterator_ends(run, shuffled, has_backward):
    """A loop of full batches, whose only draw is the last of its epoch."""
    options = {"sampling": "shuffled", "physical_batch_size": None} if shuffled else {}
    engine, model, optimizer, loader = run(rate=SIZE, **options)
    match = "was not released" if has_backward else "lacks a microbatch"
    with pytest.raises(dpflash.PrivateRefusal, match=match):
        for (x,) in loader:
            if has_backward or not loader.is_last:
                engine.backward(losses_of(model, x))


def test_a_loop_that_breaks_or_only_reads_is_no_mistake(run):
    engine, model, optimizer, loader = run(verify_first_batch=False)
    with torch.no_grad():
        for (x,) in loader:
            model(x)
    for (x,) in loader:
        engine.backward(losses_of(model, x))
        break
    with pytest.warns(dpflash.PrivateWarning, match="left its last logical batch") as caught:
        next(iter(loader))
    assert caught[0].filename == __file__
    for _ in range(2):
        trains(engine, model, optimizer, loader)
        with torch.no_grad():
            next(iter(loader))
    assert optimizer.releases == loader.releases == 2 * len(loader)


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_epoch_that_is_left_in_a_trial_has_trained_nothing_and_warns(run, goes_on):
    engine, model, _, loader = run()
    for (x,) in loader:
        engine.backward(losses_of(model, x))
        break
    with pytest.warns(dpflash.PrivateWarning, match="trained nothing.* loader.releases"):
        next(iter(loader)) if goes_on else engine.detach(model)


def fetched_without_gradients(loader, by):
    """Its batches, fetched under no_grad; the loop over them runs with gradients."""
    batches = iter(loader)
    with ThreadPoolExecutor(1) as thread:
        while True:
            if by == "a thread":
                batch = thread.submit(torch.no_grad()(next), batches, None).result()
            else:
                with torch.no_grad():
                    batch = next(batches, None)
            if batch is None:
                return
            yield batch


@pytest.mark.parametrize("by", ["the loop", "a thread"])
def test_batches_may_be_fetched_under_no_grad(run, by):
    engine, model, optimizer, loader = run()
    for (x,) in fetched_without_gradients(loader, by):
        engine.backward(losses_of(model, x))
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.releases == len(loader) and engine.verified


@pytest.mark.parametrize("trained", [0, 1, 2])
@pytest.mark.parametrize("steps", [True, False], ids=["stepping", "not stepping"])
def test_an_epoch_under_no_grad_is_trained_on_whole_or_only_read(run, trained, steps):
    """Of three draws and the rest of the epoch, which are of one microbatch each, one is used."""
    engine, model, optimizer, loader = run(rate=4, physical_batch_size=SIZE, max_batch_size=SIZE)
    with pytest.raises(dpflash.PrivateRefusal, match="An epoch that only reads the loader"):
        for number, (x,) in enumerate(fetched_without_gradients(loader, "the loop")):
            if number == trained:
                engine.backward(losses_of(model, x))
                if steps:
                    optimizer.step()
    assert optimizer.releases == (trained == 0)  # the one that has begun included


@pytest.mark.parametrize("at", ["the top", "the end"])
def test_zero_grad_in_each_microbatch_keeps_the_sum_of_the_draw(run, at):
    found = []
    for where in ("the last", at):
        engine, model, optimizer, loader = run()
        for (x,) in loader:
            if where == "the top":
                optimizer.zero_grad()
            engine.backward(losses_of(model, x))
            if loader.is_last:
                optimizer.step()
            if where == "the end" or loader.is_last:
                optimizer.zero_grad()
        found.append(model.weight.detach().clone())
    assert torch.equal(*found)


# Loops of Opacus' BatchMemoryManager


def managed(loader, optimizer):
    return BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer)


@pytest.mark.parametrize("is_taken", [True, False])
@pytest.mark.parametrize("poisson", [True, False])
def test_signals_on_a_foreign_loader_buy_no_cheap_epsilon(poisson, is_taken, run):
    options = {"physical_batch_size": None, "foreign_batches": is_taken}
    made = run(poisson_sampling=poisson, **options)
    texts = "the batch is not of the private loader|must follow every physical batch"
    refusal = pytest.raises(dpflash.PrivateRefusal, match=texts)
    for _ in range(3):
        plain = DataLoader(TensorDataset(torch.randn(SIZE, 3)), batch_size=16)
        with contextlib.nullcontext() if is_taken else refusal, managed(plain, made[2]) as parts:
            trains(*made[:3], parts)
    assert made[0].accountant.history == []
    foreign = Gaussian(relation="zero_out", noise_multiplier=0.5)
    assert made[0].accountant.events == ([(foreign, 6)] if is_taken else [])
    assert ("not from its loader" in made[0].sampler) == is_taken


def test_a_resumed_run_under_signals_draws_other_batches(run, tmp_path):
    sums = []
    for _ in range(2):
        engine, model, optimizer, loader = run(physical_batch_size=None)
        if sums:
            engine.load_checkpoint(tmp_path / "c")
        with managed(loader, optimizer) as parts:
            seen = trains(engine, model, optimizer, parts)
        sums.append({x.sum().item() for x in seen})
        assert engine.sampler == "poisson"
        engine.save_checkpoint(tmp_path / "c")
    assert not sums[0] & sums[1]


def test_a_managed_loop_is_told_where_its_releases_are_seen(run):
    engine, model, optimizer, loader = run(physical_batch_size=None)
    with (
        managed(loader, optimizer) as parts,
        pytest.raises(RuntimeError, match="step_was_skipped"),
    ):
        for (x,) in parts:
            engine.backward(model(x).square().sum(1))
            optimizer.step()
            assert optimizer.step_was_skipped or loader.is_last


def test_a_batch_that_a_managed_loop_skips_is_noticed(run):
    engine, model, optimizer, loader = run(physical_batch_size=None)
    with (
        managed(loader, optimizer) as parts,
        pytest.raises(RuntimeError, match="must follow every physical"),
    ):
        guards_losses(engine, model, optimizer, parts)


def test_a_failed_release_lets_no_further_samples_in(run, monkeypatch):
    engine, model, optimizer, loader = run(physical_batch_size=None)

    def full(*arguments, **options):
        raise OSError("no space left on device")

    with (
        managed(loader, optimizer) as parts,
        pytest.raises(RuntimeError, match="second backward|two logical batches"),
    ):
        for (x,) in parts:
            with monkeypatch.context() as patch, contextlib.suppress(OSError):
                patch.setattr(engine._spending, "charge", full)
                engine.backward(losses_of(model, x))
                optimizer.step()


# Learning rates and other options


def by_scheduler(kind, **options):
    return lambda optimizer: kind(optimizer, **options).step


def by_hand(**values):
    """Each call adds to an option of the optimizer or of its group."""

    def made(optimizer):
        def step():
            for name, value in values.items():
                if hasattr(type(optimizer), name):
                    setattr(optimizer, name, getattr(optimizer, name) + value)
                elif isinstance(optimizer.param_groups[0][name], torch.Tensor):
                    optimizer.param_groups[0][name].add_(value)
                else:
                    optimizer.param_groups[0][name] += value

        return step

    return made


CHANGES = {
    "LambdaLR": by_scheduler(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "OneCycleLR": by_scheduler(
        lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=99, cycle_momentum=False
    ),
    "lr": by_hand(lr=0.1),
    "tensor": by_hand(lr=0.1),
    "weight_decay": by_hand(weight_decay=0.1),
    "noise_multiplier": by_hand(noise_multiplier=0.1),
    "max_grad_norm": by_hand(max_grad_norm=0.1),
}


@pytest.mark.parametrize("at", ["the top", "behind step", "the release", "its closure"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_option_that_changes_inside_a_draw_is_refused(run, change, at):
    lr = torch.tensor(0.1) if change == "tensor" else 0.1
    engine, model, optimizer, loader = run(lr=lr)
    change_it = CHANGES[change](optimizer)
    before = model.weight.detach().clone()

    def backward():
        engine.backward(losses_of(model, x))
        if loader.is_last and at in ("the release", "its closure"):
            change_it()

    with pytest.raises(dpflash.PrivateRefusal, match=r"if loader\.is_last: scheduler\.step\(\)"):
        for (x,) in loader:  # noqa: B007
            if at == "the top":
                change_it()
            if at != "its closure":
                backward()
            optimizer.step(backward if at == "its closure" else None)
            if at == "behind step":
                change_it()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("change", CHANGES)
def test_an_option_may_change_with_each_release(run, change):
    lr = torch.tensor(0.1) if change == "tensor" else 0.1
    engine, model, optimizer, loader = run(lr=lr)
    step = CHANGES[change](optimizer)
    for (x,) in loader:
        optimizer.param_groups[0]["dampening"] = 0.1 * loader.releases  # the same in a draw
        engine.backward(losses_of(model, x))
        optimizer.step()
        optimizer.zero_grad()
        if loader.is_last:
            step()
    for batch in LogicalBatches(loader):
        for (x,) in batch:
            engine.backward(losses_of(model, x))
        optimizer.step()
        optimizer.zero_grad()
        step()
    assert optimizer.releases == loader.releases == 2 * len(loader)


def refused(match="be counted by"):
    return pytest.raises(dpflash.PrivateRefusal, match=match)


def test_another_optimizer_steps_only_at_the_end_of_a_draw(run):
    runs = [run(), run()]
    generator = nn.Linear(2, 3)
    other, steps = torch.optim.SGD(generator.parameters(), lr=0.1), 0
    first, second = (loader for *_, loader in runs)
    generator(torch.ones(1, 2)).sum().backward()
    kept = iter(first)
    next(kept)
    other.step(), other.step()  # the only ones that are free
    next(kept)
    with ThreadPoolExecutor(1) as another:
        another.submit(other.step).result()
    del kept
    for batches in zip(first, second, strict=False):
        for (x,), (engine, model, optimizer, loader) in zip(batches, runs, strict=True):
            engine.backward(losses_of(model, x))
            optimizer.step()
            optimizer.zero_grad()
            with engine.public_data():
                losses_of(model, generator(torch.ones(2, 2))).sum().backward()
            if first.is_last or second.is_last:
                other.step()
                steps += loader is first and first.is_last
                continue
            with refused():
                other.step()
            with refused("is_last"), engine.public_data():
                other.step()
    assert first.releases == steps > 1
    other.step()


@pytest.mark.parametrize("is_fresh", [False, True], ids=["generator", "perturbation"])
def test_an_optimizer_that_is_made_anew_steps_what_is_made_anew(run, is_fresh):
    engine, model, optimizer, loader = run()
    weight = torch.ones(2, requires_grad=True)
    with contextlib.nullcontext() if is_fresh else refused():
        for (x,) in loader:
            own = torch.ones(2, requires_grad=True) if is_fresh else weight
            own.sum().backward()
            torch.optim.SGD([own], lr=0.1).step()
            engine.backward(losses_of(model, x))
            optimizer.step()
            optimizer.zero_grad()
    assert loader.releases == (len(loader) if is_fresh else 0)


def another():
    """An optimizer whose parameter has its gradient."""
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    return torch.optim.SGD([weight], lr=0.1)


def test_one_step_in_each_loop_is_refused_from_the_second_loop_on(run):
    engine, model, optimizer, loader = run()
    other, epochs = another(), 0
    with refused():
        for _ in range(3):
            for number, (x,) in enumerate(loader):
                if number % 1000 == 0:
                    other.step()
                engine.backward(losses_of(model, x))
                optimizer.step()
                optimizer.zero_grad()
            epochs += 1
    assert epochs == 1


@pytest.mark.parametrize("logical", [False, True])
def test_another_optimizer_steps_before_and_behind_loops_and_where_they_failed(run, logical):
    engine, model, optimizer, loader = run()
    other, steps = another(), 0
    for epoch in range(3):
        other.step()
        for batch in LogicalBatches(loader) if logical else loader:
            for (x,) in batch if logical else [batch]:
                engine.backward(losses_of(model, x))
            optimizer.step()
            optimizer.zero_grad()
            if loader.is_last:
                other.step()
                steps += 1
        other.step()
        assert loader.releases == steps
        with contextlib.suppress(KeyError):
            for batch in LogicalBatches(loader) if logical else loader:
                for _ in batch if logical else [batch]:
                    raise KeyError(epoch)
        # The last LogicalBatch keeps the loader's iterator.
        other.step()
    with torch.no_grad():
        for batch in loader:
            model(batch[0])
    other.step()


def until_released(batches, loader):
    for batch in batches:
        yield batch
        if loader.is_last:
            return


@pytest.mark.parametrize("at", ["the draw's end", "a microbatch"])
@pytest.mark.parametrize("is_older", [True, False], ids=["older", "newer"])
def test_a_kept_iterator_of_another_loader_frees_no_steps(run, is_older, at):
    engine, model, optimizer, loader = run()
    kept_run, other = run(), another()
    kept, batches = iter(kept_run[3]), iter(loader)
    first = [] if is_older else [next(batches)]
    own = until_released(kept, kept_run[3])
    trains(*kept_run[:3], own if at == "the draw's end" else itertools.islice(kept, 1))
    assert kept_run[3].is_last == (at == "the draw's end")
    with refused():
        for (x,) in itertools.chain(first, batches):
            engine.backward(losses_of(model, x))
            optimizer.step()
            other.step()
    assert loader.releases == 0


@pytest.mark.parametrize("logical", [False, True])
def test_an_older_iterator_that_ends_frees_no_steps_in_a_newer_loop(run, logical):
    engine, model, optimizer, loader = run()
    other = another()
    kept = iter(next(iter(LogicalBatches(loader))) if logical else loader)
    next(kept)
    with refused():
        for batch in LogicalBatches(loader) if logical else loader:
            for (x,) in batch if logical else [batch]:
                kept = None
                other.step()
                engine.backward(losses_of(model, x))
            optimizer.step()
    assert kept is None and loader.releases == 0


def test_an_optimizer_of_another_engine_steps_only_by_its_own_loader(run):
    engine, model, optimizer, loader = run()
    engine2, model2, optimizer2, loader2 = run()

    def step_on_public_data():
        with engine2.public_data():
            losses_of(model2, torch.ones(2, 3)).sum().backward()
        optimizer2.step()
        optimizer2.zero_grad()

    for _ in range(2):
        for (x,), (y,) in zip(loader, loader2, strict=False):
            for e, m, o, z in (engine, model, optimizer, x), (engine2, model2, optimizer2, y):
                e.backward(losses_of(m, z))
                o.step()
                o.zero_grad()
            if loader2.is_last:
                step_on_public_data()
    assert loader.releases > 2 and loader2.releases > 2
    for (x,) in loader:
        engine.backward(losses_of(model, x))
        optimizer.step()
        optimizer.zero_grad()
        if loader.is_last:
            step_on_public_data()
    step_on_public_data()
    with refused():
        for (x,) in loader:
            engine.backward(losses_of(model, x))
            optimizer.step()
            optimizer.zero_grad()
            before = model2.weight.detach().clone()
            step_on_public_data()
    assert torch.equal(model2.weight, before)
    optimizer2.zero_grad()
    trains(engine2, model2, optimizer2, loader2)


@pytest.mark.parametrize("where", ["before", "inside"])
def test_another_optimizer_steps_once_a_logical_batch_also_with_a_closure(run, where):
    engine, model, optimizer, loader = run()
    weight = torch.ones(2, requires_grad=True)
    other, steps = torch.optim.SGD([weight], lr=0.1), 0

    def closure():
        weight.sum().backward()

    with refused() if where == "inside" else contextlib.nullcontext():
        for batch in LogicalBatches(loader):
            if where == "before":
                other.step(closure)
                steps += 1
            for (x,) in batch:
                if where == "inside":
                    other.zero_grad()
                    other.step(closure)
                engine.backward(losses_of(model, x))
            optimizer.step()
            optimizer.zero_grad()
    assert loader.releases == steps
