"""A microbatch is tried with other contents in some of its samples, loop and model alike."""

import contextlib
import math
import random
import re
import weakref
from collections import defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.isolation.labels import ReplacedLabels
from dpflash.packing import Pairs
from dpflash.sampling import LogicalBatches

SAMPLES, WIDTH, CLASSES = 240, 8, 3


class Net(nn.Module):
    """Features and logits of each row."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        h = self.dropout(torch.tanh(self.body(x)))
        return h, self.head(h)


def _data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    return x, (x[:, 0] > 0.7).long() + (x[:, 1] > 1).long()


def _few(batch_size=6):
    """Arguments of `_made` for 60 samples."""
    return {"dataset": TensorDataset(*(t[:60] for t in _data())), "batch_size": batch_size}


def _of_pairs(entries):
    x, y = (torch.stack(column) for column in zip(*entries, strict=True))
    return {"x": torch.cat([x, x.flip(1)]), "y": y}


def _rows(batch):
    """The rows of a batch, and their labels."""
    if isinstance(batch, dict):
        return Pairs.rows(batch)["x"], batch["y"].repeat_interleave(2)
    return batch


# How samples lie in the batches of a loader, by the arguments of make_private.
LAYOUTS = {
    "rows": {},
    "few rows": {"physical_batch_size": 4},
    "shuffled": {"poisson_sampling": False},
    "per layer": {"clipping": "per_layer", "sampling": "fixed_size"},
    "ghost": {"grad_sample_mode": "ghost"},
    "users": {"unit_of": [i // 2 for i in range(SAMPLES)], "examples_per_unit": 2},
    "pairs": {"collate_fn": Pairs(_of_pairs)},
    "workers": {"num_workers": 1},
}


def _made(kind=Net, *given, batch_size=24, **options):
    torch.manual_seed(0)
    model, engine = kind(*given), dpflash.PrivacyEngine(seed=3)
    of_loader = {
        name: options.pop(name) for name in ("collate_fn", "num_workers") & options.keys()
    }
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(
            options.pop("dataset", TensorDataset(*_data())), batch_size, **of_loader
        ),
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options},
    )


def _train(made, losses_of, epochs=1):
    """A loop; a batch of pairs is used as its rows."""
    engine, model, optimizer, loader = made
    for _ in range(epochs):
        for batch in loader:
            losses = losses_of(model, *_rows(batch))
            losses.backward() if losses.ndim == 0 else engine.backward(losses)
            optimizer.step()
            optimizer.zero_grad()
    return engine


def _entropies(model, x, y):
    return F.cross_entropy(model(x)[1], y, reduction="none")


def _normalized_inputs(model, x, y):
    return _entropies(model, (x - x.mean(0)) / (x.std(0) + 1e-3), y)


def _advantages(model, x, y):
    rewards = (model(x)[1].argmax(1) == y).float()
    return _entropies(model, x, y) * (rewards - rewards.mean())


def _hard_triplets(model, x, y):
    h, _ = model(x)
    apart = torch.cdist(h.detach(), h.detach())
    hardest = (apart + 1e6 * (y[:, None] == y)).argmin(1)
    return F.relu(1.0 - (h - h.detach()[hardest]).square().sum(1)) + 0.1 * h.square().sum(1)


def _mixup(model, x, y):
    logits = model(x)[1]
    losses = [F.cross_entropy(logits, labels, reduction="none") for labels in (y, y.roll(1))]
    return 0.7 * losses[0] + 0.3 * losses[1]


def _other_targets(model, x, y):
    return F.mse_loss(model(x)[1][:, 0], x.flip(0)[:, 0], reduction="none")


def _negatives(model, x, y):
    h, logits = model(x)
    scores = h @ h.detach().T
    return F.cross_entropy(scores, torch.arange(len(h)), reduction="none") + logits.square().sum(1)


def _scaled(model, x, y):
    losses = _entropies(model, x, y)
    return losses / losses.detach().max()


def _scaled_gradient(model, x, y):
    """The losses keep their values."""
    losses = _entropies(model, x, y)
    return losses.detach() + (losses - losses.detach()) * losses.detach().mean()


def _queue():
    queue = deque(maxlen=2)

    def losses(model, x, y):
        h, logits = model(x)
        found = F.cross_entropy(logits, y, reduction="none")
        if queue:
            found = found + (h * queue[-1]).sum(1)
        queue.append(h.detach().mean(0))
        return found

    return losses


def _baseline():
    held = {}

    def losses(model, x, y):
        found = _entropies(model, x, y)
        before = held.get("mean", 0.0)
        held["mean"] = 0.9 * before + 0.1 * found.detach().mean()
        return found * (found.detach() - before)

    return losses


COUPLINGS = {
    "inputs": lambda: _normalized_inputs,
    "advantages": lambda: _advantages,
    "triplets": lambda: _hard_triplets,
    "mixup": lambda: _mixup,
    "targets": lambda: _other_targets,
    "negatives": lambda: _negatives,
    "scale": lambda: _scaled,
    "gradient": lambda: _scaled_gradient,
    "queue": _queue,
    "baseline": _baseline,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
def test_what_a_loop_makes_of_other_samples_is_refused(coupling, layout):
    made = _made(**layout)
    before = [p.detach().clone() for p in made[1].parameters()]
    with pytest.raises(
        dpflash.PrivateRefusal, match="as other samples|losses of others|of others"
    ):
        _train(made, coupling())
    if made[3].releases == 0:
        assert made[0].verified == "pending"
        assert all(map(torch.equal, before, made[1].parameters()))


def _example(layout, rows=32):
    """A made-up batch as the loader of a layout gives one."""
    x, y = torch.randn(rows, WIDTH), torch.arange(rows) % CLASSES
    collate = layout.get("collate_fn")
    return [x, y] if collate is None else collate(list(zip(x, y, strict=True)))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
def test_a_public_example_shows_couplings_before_the_first_draw(coupling, layout):
    made, losses = _made(**layout, example=_example(layout)), coupling()
    before = {name: value.clone() for name, value in made[1].state_dict().items()}
    for _ in range(2):  # a loop that catches the error meets it again
        with pytest.raises(ValueError, match=r"make_private\(example=\.\.\.\): "):
            _train(made, losses)
    assert made[3].releases == 0 == made[0].get_epsilon(1e-5)
    assert all(torch.equal(value, before[name]) for name, value in made[1].state_dict().items())


def test_an_example_says_which_loss_changed_from_what_to_what():
    given = []

    def losses(model, x, y):
        own = _entropies(model, x, y)
        given.append((own + own.detach().mean()).detach())
        return own + own.detach().mean()

    with pytest.raises(ValueError, match="the loss of sample") as caught:
        _train(_made(example=_example({})), losses)
    found = re.search(r"sample (\d+) is (\S+) in the example, and (\S+) if", str(caught.value))
    assert found is not None
    sample, now, before = int(found[1]), float(found[2]), float(found[3])
    ours = [float(x[sample]) for x in (given[-1], given[0])]
    assert [now, before] == pytest.approx(ours, rel=1e-4)


def test_an_example_names_the_layer_that_mixes_samples():
    class Mixing(Net):
        def forward(self, x):
            h, logits = super().forward(x)
            return h, logits + 0 * self.head(h - h.mean(0)).detach()

    with pytest.raises(ValueError, match="the input of layer 'head' changed"):
        _train(_made(Mixing, example=_example({})), _entropies)


def test_an_example_behind_private_batches_has_an_error_without_numbers():
    made = _made(example=_example({}))
    with torch.no_grad():
        assert sum(1 for _ in made[3])
    with pytest.raises(dpflash.PrivateRefusal, match=r"samples of make_private\(example"):
        _train(made, _scaled)


@pytest.mark.parametrize("leaves_out", ["the forward", "the backward"])
def test_a_loop_that_skips_the_example_is_refused(leaves_out):
    engine, model, optimizer, loader = _made(example=_example({}))
    with pytest.raises(ValueError, match="left out the backward of the example"):
        for x, y in loader:
            if loader.is_real.any() or leaves_out == "the backward":
                model(x)
            if loader.is_real.any():
                engine.backward(_entropies(model, x, y))


@pytest.mark.parametrize(
    "given, match",
    [
        ({"example": torch.randn(1, WIDTH)}, "example=Tensor: expected a public batch"),
        ({"example": {"names": "ab"}}, "example=dict: expected"),
        ({"example": [torch.randn(4, 2)], "verify_first_batch": False}, "leaves its trial out"),
    ],
)
def test_what_is_no_example_is_refused_at_once(given, match):
    with pytest.raises(ValueError, match=match):
        _made(**given)


@pytest.mark.parametrize("kept", ["queue", "baseline"])
def test_what_a_loop_keeps_of_single_samples_is_refused(kept):
    with pytest.raises(dpflash.PrivateRefusal, match="loss of a sample changed"):
        _train(_made(physical_batch_size=1), COUPLINGS[kept]())


class Memory(Net):
    """Adds what it has kept of the rows before; `of` says what that is."""

    def __init__(self, of):
        super().__init__()
        self.of, self.memory, self.calls = of, None, 0

    def forward(self, x):
        h = torch.tanh(self.body(x))
        memory, self.memory = self.memory, self.of(h.detach())
        self.calls += 1
        return h, self.head(h if memory is None else h + memory)


@pytest.mark.parametrize("rows", [1, 4, None])
def test_what_a_model_keeps_of_a_microbatch_is_refused_and_what_holds_no_data_is_let_be(rows):
    with pytest.raises(dpflash.PrivateRefusal, match="input of layer 'head' changed"):
        _train(_made(Memory, lambda h: h.mean(0), physical_batch_size=rows), _entropies)
    made = _made(Memory, lambda h: torch.arange(16.0), physical_batch_size=rows)
    assert _train(made, _entropies, epochs=2).verified is True


@pytest.mark.parametrize("kind", [{}, {"loss_reduction": "mean"}])
def test_a_loss_weighted_by_the_classes_of_the_batch_is_refused(kind):
    """`CrossEntropyLoss(weight=)` divides by the weights of the labels."""
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 2.0]))

    def losses(model, x, y):
        loss = criterion(model(x)[1], y)
        return loss if kind else loss * torch.ones(len(x))

    with pytest.raises(dpflash.PrivateRefusal):
        _train(_made(**kind), losses)


def test_a_criterion_is_taken_apart_into_losses_of_samples():
    weight = torch.tensor([1.0, 4.0, 2.0])
    criterion, made = nn.CrossEntropyLoss(weight=weight), (_made(), _made())
    engine, model, optimizer, loader = made[0]
    for x, y in loader:
        outputs = model(x)[1]
        losses = engine.backward(criterion, (outputs, y))
        expected = F.cross_entropy(outputs, y, weight, reduction="none")
        torch.testing.assert_close(losses, expected.detach())
        assert not losses.requires_grad
        optimizer.step()
    with pytest.raises(TypeError, match=r"engine.backward\(criterion, \(outputs, targets\)\)"):
        engine.backward(criterion, outputs, y)
    _train(made[1], lambda model, x, y: _entropies(model, x, y) * weight[y])
    assert engine.verified is True
    assert "losses, layers' inputs and gradients of half" in engine.trials
    for ours, other in zip(model.parameters(), made[1][1].parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize("layout", ["rows", "users"])
def test_no_draw_is_released_in_which_a_rare_class_weights_the_others(layout, seed):
    """Two entries of 240 are of the class, so it comes in draws that are not due."""
    torch.manual_seed(seed)
    y = torch.zeros(SAMPLES, dtype=torch.int64)
    y[:2] = 1
    model, engine = nn.Linear(WIDTH, 2), dpflash.PrivacyEngine(seed=seed)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(_data()[0], y), 16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **LAYOUTS[layout],
    )
    weights, weighted = torch.tensor([1.0, 9.0]), False
    with pytest.raises(dpflash.PrivateRefusal):
        while loader.releases < 500:
            for x, labels in loader:
                optimizer.zero_grad()
                losses = F.cross_entropy(model(x), labels, weight=weights, reduction="none")
                engine.backward(losses / weights[labels].mean())
                weighted |= loader.is_real.sum() > 1 and len(labels[loader.is_real].unique()) > 1
                assert not weighted
                optimizer.step()


@pytest.mark.parametrize("seed", range(3))
def test_a_weight_that_a_rare_class_has_by_its_own_number_is_refused(seed):
    """Losses of the other class stay as they are."""
    torch.manual_seed(seed)
    y = torch.arange(SAMPLES) % 10 == 0
    model, engine = nn.Linear(WIDTH, 2), dpflash.PrivacyEngine(seed=seed)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(_data()[0], y.long()), 32),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.raises(dpflash.PrivateRefusal, match="loss of a sample changed"):
        for x, labels in loader:
            losses = F.cross_entropy(model(x), labels, reduction="none")
            share = (labels == 1).float().mean().clamp(min=0.01)
            engine.backward(torch.where(labels == 1, losses / share, losses))
            optimizer.step()


def test_a_trial_that_compares_no_weights_does_not_count_for_a_label():
    labels, y, real = ReplacedLabels(), torch.tensor([1, 0, 0, 0]), torch.ones(4, dtype=torch.bool)
    for _ in range(6):
        labels.note(y, ~real, real, None)
    for row in (0, 1):
        labels.note(y[[row] * 4], torch.arange(4) > 0, real, None)
    assert labels.has_new(y, real, None)
    labels.note(y, torch.arange(4) == 3, real, None)
    assert labels.has_new(y, real, None)  # the first one was replaced, and never kept
    labels.note(y, torch.arange(4) == 0, real, None)
    assert not labels.has_new(y, real, None)


def test_a_loop_that_cuts_batches_to_their_longest_sample_is_named():
    x = _data()[0] * (torch.arange(WIDTH) < torch.arange(SAMPLES)[:, None] % WIDTH + 1)
    engine, model, _, loader = _made(nn.Linear, 1, 1, dataset=TensorDataset(x))
    with pytest.raises(dpflash.PrivateRefusal, match="shape .* to its longest sample"):
        for (x,) in loader:
            cut = x[:, : int((x != 0).sum(1).max())]
            engine.backward(model(cut[..., None]).sum((1, 2)))


@pytest.mark.parametrize("leaves_out", ["the forward", "the backward"])
def test_a_loop_that_skips_trials_is_refused(leaves_out):
    engine, model, optimizer, loader = _made()
    with pytest.raises(dpflash.PrivateRefusal, match="for each microbatch, trials too") as caught:
        for x, y in loader:
            if loader.is_real.any() or leaves_out == "the backward":
                losses = _entropies(model, x, y)
            if loader.is_real.any():
                engine.backward(losses)
            optimizer.step()
    assert "verify_first_batch" not in str(caught.value)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_loop_may_change_its_batches_in_place(rows):
    engine, model, optimizer, loader = _made(physical_batch_size=rows, **_few())
    for batch in loader:
        y, x = batch.pop(), batch.pop()
        engine.backward(_entropies(model, x.add_(1), y))
        optimizer.step()
    assert engine.verified is True


def test_a_learning_rate_schedule_by_iteration_is_that_without_trials():
    """Where a draw is one microbatch."""
    engine, model, optimizer, loader = _made(poisson_sampling=False)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(loader))
    for x, y in loader:
        engine.backward(_entropies(model, x, y))
        optimizer.step()
        schedule.step()
    assert schedule.last_epoch == len(loader) == loader.releases


def _of_group(name="lr"):
    def change(optimizer, value):
        optimizer.param_groups[0][name] = 0.1 * value

    return change


def _of_release(name):
    return lambda optimizer, value: setattr(optimizer, name, value)


OPTIONS = [
    _of_group(),
    _of_group("weight_decay"),
    *map(_of_release, ["noise_multiplier", "max_grad_norm"]),
]


def _counting(place, change, value):
    """A loop that sets an option, before or behind the step, to value(iterations, loader)."""
    engine, model, optimizer, loader = _made(Net, poisson_sampling=False)
    iterations, found = 0, []
    for _ in range(2):
        for x, y in loader:
            if place == "before":
                change(optimizer, value(iterations, loader))
            engine.backward(_entropies(model, x, y))
            optimizer.step()
            if loader.is_last:
                found.append((optimizer.param_groups[0]["lr"], optimizer.noise_multiplier))
            optimizer.zero_grad()
            iterations += 1
            if place == "behind":
                change(optimizer, value(iterations, loader))
    return found


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("change", OPTIONS)
def test_options_that_a_loop_sets_by_iterations_are_refused_with_one_microbatch_too(place, change):
    """Trials come for rare labels too, so one entry would alter the count."""
    with pytest.raises(dpflash.PrivateRefusal, match="(?s)counts iterations.*loader.releases"):
        _counting(place, change, lambda iterations, _: 1 + iterations / 60)


def test_a_learning_rate_in_a_tensor_is_scheduled_as_a_number_is():
    """Schedulers write into it."""

    def found(lr):
        torch.manual_seed(0)
        model, engine, rates = Net(), dpflash.PrivacyEngine(seed=3), []
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
            data_loader=DataLoader(TensorDataset(*_data()), 24),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for x, y in loader:
            engine.backward(_entropies(model, x, y))
            optimizer.step()
            if loader.is_last:
                rates.append(float(optimizer.param_groups[0]["lr"]))
            schedule.step()
        return rates

    assert found(torch.tensor(0.125)) == found(0.125) == [0.125 * 0.5**k for k in range(10)]


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("change", OPTIONS)
def test_options_that_a_loop_sets_by_releases_are_those_without_trials(place, change):
    found = _counting(place, change, lambda _, loader: 1 + loader.releases / 60)
    assert len(found) == len({*found}) or change not in (OPTIONS[0], OPTIONS[2])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_honest_loops_train_with_the_same_bits_as_without_trials(layout):
    """Random numbers of the model, of the global generators and of the loop's own repeat."""

    class Held:
        def __init__(self):
            self.rng = np.random.RandomState(4)

    Pair = namedtuple("Pair", ("normal", "others"))

    def found(**options):
        pair = Pair(np.random.default_rng(5).normal, defaultdict(None, rng=random.Random(6)))
        torch_rng, numpy_rng = torch.Generator().manual_seed(1), np.random.default_rng(2)
        python_rng, held, drawn = random.Random(3), Held(), []
        engine, model, optimizer, loader = _made(Net, 0.3, **layout, **options)
        for batch in loader:
            x, y = _rows(batch)
            x = x + 0.1 * torch.randn(x.shape) + 0.1 * torch.randn(x.shape, generator=torch_rng)
            x = x * (1 + numpy_rng.random()) + python_rng.random() + held.rng.rand()
            x = x + pair.normal() + pair.others["rng"].random()
            drawn.append(random.random())
            x = x + drawn[-1] + float(np.random.rand())
            engine.backward(_entropies(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
        assert loader.releases == len(loader)
        return [p.detach().clone() for p in model.parameters()], engine.verified, drawn

    tried, verified, drawn = found(example=_example(layout))
    untried, unverified, private = found(verify_first_batch=False)
    assert drawn[0] not in private and {*private} < {*drawn}  # an error tells the example's loss
    assert verified is True and unverified is False
    assert all(map(torch.equal, tried, untried))


def _draws_where_last(engine, loader, train):
    for batch in loader:
        if loader.is_last:
            torch.randn(3)  # of a GAN's generator, say
        train(batch)


def _draws_before_microbatches(engine, loader, train):
    for logical in LogicalBatches(loader):
        torch.randn(3)
        for x, y in logical:
            train((x + torch.randn(x.shape), y))


def _draws_of_public_data(engine, loader, train):
    for x, y in loader:
        if loader.is_last:
            with engine.public_data():
                torch.randn(3)
        train((x + torch.randn(x.shape), y))


@pytest.mark.parametrize(
    "loop", [_draws_where_last, _draws_before_microbatches, _draws_of_public_data]
)
def test_what_the_loop_draws_beside_a_microbatch_does_not_alter_its_trial(loop):
    def found(**options):
        engine, model, optimizer, loader = _made(Net, 0.3, physical_batch_size=16, **options)

        def train(batch):
            engine.backward(_entropies(model, *batch))
            optimizer.step()
            optimizer.zero_grad()

        loop(engine, loader, train)
        assert loader.releases == len(loader)
        return [p.detach().clone() for p in model.parameters()], engine.verified

    tried, verified = found()
    untried, _ = found(verify_first_batch=False)
    assert verified is True and all(map(torch.equal, tried, untried))


@pytest.mark.parametrize("options, last", [({}, 64), ({"sampling": "shuffled"}, 128)])
def test_trials_come_before_the_first_four_draws_and_then_at_powers_of_two(options, last):
    """Up to 64, and further where microbatches have several shapes."""
    engine, model, optimizer, loader = _made(
        batch_size=50, **{"sampling": "fixed_size", "physical_batch_size": None, **options}
    )
    tried = []
    while loader.releases < 130:
        for x, y in loader:
            if not loader.is_real.any():
                tried.append(1 + loader.releases)
            engine.backward(_entropies(model, x, y))
            optimizer.step()
    assert [*dict.fromkeys(tried)] == [1, 2, 3, *(2**k for k in range(2, 8) if 2**k <= last)]


@pytest.mark.parametrize("of_model", [False, True])
def test_new_operations_of_the_loop_or_of_the_model_are_tried_at_once(of_model):
    """In draw 5, which is not due."""

    class Centered(Net):
        is_late = False

        def forward(self, x):
            h, logits = super().forward(x)
            return h, logits * (1 + logits.detach().std()) if self.is_late else logits

    engine, model, optimizer, loader = _made(Centered, physical_batch_size=8)
    with pytest.raises(dpflash.PrivateRefusal):
        for x, y in loader:
            losses = _entropies(model, x, y)
            if loader.releases >= 4:
                losses = losses if of_model else losses * losses.detach().mean()
                model.is_late = of_model
            engine.backward(losses)
            optimizer.step()
    assert loader.releases == 4


class Masked(nn.Module):
    """Owns a parameter beside a layer, as attention with relative positions does."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(1, 4), nn.Parameter(torch.ones(4))

    def forward(self, x, mask=None):
        h = self.layer(x) * self.scale
        return h if mask is None else h * mask[:, 0, 0, :, None]


class Padded(nn.Module):
    """Has a mask where some sample is padded; WIDTH entries are as many tokens."""

    def __init__(self, shares):
        super().__init__()
        self.masked, self.head, self.shares = Masked(), nn.Linear(4, CLASSES), shares

    def forward(self, x):
        kept = x != 0
        kept = kept.all(0).expand_as(kept) if self.shares else kept
        mask = None if bool(kept.all()) else kept.float()[:, None, None]
        return x, self.head(self.masked(x[..., None], mask).sum(1))


@pytest.mark.parametrize("shares", [False, True])
def test_a_mask_may_be_left_out_where_no_sample_is_padded_but_not_be_shared(shares):
    x, y = _data()
    x[::6, 3:] = 0
    _, model, optimizer, loader = given = _made(
        Padded, shares, dataset=TensorDataset(x, y), physical_batch_size=4
    )
    with pytest.raises(dpflash.PrivateRefusal) if shares else contextlib.nullcontext():
        for x, y in loader:
            given[0].backward(_entropies(model, x, y))
            optimizer.step()
    assert shares or loader.releases == 10


class Difference(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return x, self.head(x) - self.head(x.flip(1))


def test_a_parameter_that_cancels_is_named_as_pending():
    engine = _train(_made(Difference), _entropies)
    assert engine.verified == "pending"
    assert "because the gradients of head.bias were zero" in engine.trials
    made = _made(Difference)
    assert "Too few samples were in one batch" in made[0].trials


def test_a_loop_that_leaves_a_trial_finds_the_model_as_it_was():
    engine, model, optimizer, loader = _made(Memory, lambda h: h.mean(0), foreign_batches=True)
    for x, _y in loader:
        model(x)
        assert model.calls == 1
        break
    assert (model.calls, model.memory) == (0, None)


def test_a_microbatch_that_cannot_be_altered_is_not_tried_and_verified_says_so():
    class Graph:
        def __init__(self, x, y):
            self.nodes, self.y = x, y

    data = [(torch.randn(5, WIDTH), torch.tensor(i % 2)) for i in range(SAMPLES)]

    def collate(entries):
        x, y = (torch.stack(column) for column in zip(*entries, strict=True))
        return [Graph(x, y)]

    class OfNodes(Net):
        def forward(self, nodes):
            return super().forward(nodes.mean(1))

    torch.manual_seed(0)
    model, engine = OfNodes(), dpflash.PrivacyEngine(seed=1)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, 24, collate_fn=collate),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for (graph,) in loader:
        engine.backward(F.cross_entropy(model(graph.nodes)[1], graph.y, reduction="none"))
        optimizer.step()
    assert engine.verified == "model" and "had no trials" in engine.trials


def _loss_of_sample(model, sample):
    x, y = sample
    return _entropies(model, (x - x.mean(0)) / (x.std(0, correction=0) + 1) + x, y)


@pytest.mark.parametrize("options", [{}, {"poisson_sampling": False}, {"clipping": "per_layer"}])
def test_samples_one_at_a_time_are_apart_by_construction(options):
    """A function that would normalize a batch gets one row of it; sums and draws are the same."""

    def trained(function):
        engine, model, optimizer, loader = _made(
            noise_multiplier=0.5, **options, **_few(batch_size=12)
        )
        for batch in loader:
            if function:
                engine.backward(_loss_of_sample, batch)
            else:
                engine.backward(_entropies(model, *batch))
            optimizer.step()
            optimizer.zero_grad()
        assert loader.releases == len(loader) == 5
        return [p.detach() for p in model.parameters()], engine

    alone, engine = trained(True)
    together, other = trained(False)
    assert engine.verified == "by construction"
    assert engine.trials.startswith(
        "In trials the losses and gradients of half of the samples were compared, up to"
    )
    assert engine.get_epsilon(1e-5) == other.get_epsilon(1e-5)
    for one, two in zip(alone, together, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def _mixed_before(x, y):
    return x - x.mean(0), y


def _shuffled(x, y):
    order = torch.randperm(len(x))
    return x[order], y[order]


def _one_row_of_others(x, y):
    """The other rows of one microbatch have what they had."""
    return torch.cat([x[:-1], x[-1:] + x.mean(0)]), y


def _not_finite_for_all(x, y):
    """Finite rows stay as they are."""
    return x + 0 * x.sum(), y


def test_what_a_function_keeps_of_a_row_is_refused():
    """The first row has the same loss in a trial."""
    engine, model, optimizer, loader = _made()
    with pytest.raises(
        dpflash.PrivateRefusal, match="for the next row or microbatch|or once an epoch"
    ):
        for batch in loader:
            held = []

            def loss(model, sample, held=held):
                held.append(_loss_of_sample(model, sample))
                return held[-1] * torch.stack(held).detach().mean()

            engine.backward(loss, batch)
            optimizer.step()


@pytest.mark.parametrize("example", [False, True])
def test_a_function_that_scales_gradients_by_the_batch_is_refused(example):
    """All losses stay as they were."""
    given = {"example": tuple(x[:6] for x in _data())} if example else {}
    engine, model, optimizer, loader = _made(**given)
    error = ValueError if example else dpflash.PrivateRefusal
    with pytest.raises(error, match="the gradient of layer '.*' for a sample changed"):
        for batch in loader:
            scale = 1 / (1 + batch[0].abs().sum())

            def loss(model, sample, scale=scale):
                own = _loss_of_sample(model, sample)
                return own.detach() + (own - own.detach()) * scale

            engine.backward(loss, batch)
            optimizer.step()
    assert loader.releases == 0


@pytest.mark.parametrize("by_loop", [True, False])
@pytest.mark.parametrize("rows", [4, None])
def test_one_row_that_is_not_finite_must_not_make_others_so(rows, by_loop):
    class Spread(torch.utils.data.TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return (x * math.inf if i < 60 else x), y

    engine, model, optimizer, loader = _made(
        physical_batch_size=rows, max_grad_norm=0.1, dataset=Spread(*_data())
    )
    with pytest.raises(dpflash.PrivateRefusal):
        for batch in loader:
            x, y = batch

            def loss(model, sample, x=x):
                return _loss_of_sample(model, sample) + (0.0 if by_loop else 0 * x.sum())

            engine.backward(loss, _not_finite_for_all(x, y) if by_loop else batch)
            optimizer.step()
    assert loader.releases == 0


def test_a_batch_that_changes_no_loss_yet_is_compared_too():
    """The head starts at zero, so all losses are equal."""
    engine, model, optimizer, loader = _made()
    nn.init.zeros_(model.head.weight), nn.init.zeros_(model.head.bias)
    with pytest.raises(dpflash.PrivateRefusal):
        for batch in loader:
            engine.backward(_loss_of_sample, _mixed_before(*batch))
            optimizer.step()
    assert loader.releases == 0


class Focal(nn.Module):
    def forward(self, logits, y):
        return F.cross_entropy(logits, y).exp()


@pytest.mark.parametrize(
    "given, match",
    [
        (lambda out, y: (nn.CrossEntropyLoss(), None), "expected the pair"),
        (lambda out, y: (nn.CrossEntropyLoss(), out), "expected the pair"),
        (lambda out, y: (nn.GaussianNLLLoss(), (out, y, y)), "Build this criterion"),
        (lambda out, y: (_loss_of_sample, None), "expected the loader's batch"),
        (lambda out, y: (F.cross_entropy, (out, y)), 'reduction="none".*object.*BCELoss'),
        (lambda out, y: (Focal(), (out, y)), "function or criterion of your own makes"),
    ],
)
def test_what_a_function_or_a_criterion_cannot_take_is_refused_by_name(given, match):
    engine, model, optimizer, loader = _made()
    for x, y in loader:
        with pytest.raises(ValueError, match=match):
            engine.backward(*given(model(x)[1], y))
        break


@pytest.mark.parametrize("change", [_mixed_before, _shuffled, _one_row_of_others])
@pytest.mark.parametrize("rows", [4, None])
def test_what_a_loop_makes_of_a_batch_before_it_is_taken_apart_is_refused(change, rows):
    engine, model, optimizer, loader = _made(physical_batch_size=rows)
    with pytest.raises(dpflash.PrivateRefusal):
        for batch in loader:
            engine.backward(_loss_of_sample, change(*batch))
            optimizer.step()
    assert loader.releases == 0


@pytest.mark.parametrize("rows", [4, None])
def test_a_batch_is_taken_apart_once(rows):
    engine, model, optimizer, loader = _made(physical_batch_size=rows, verify_first_batch=False)
    for batch in loader:
        engine.backward(_loss_of_sample, batch)
        with pytest.raises(RuntimeError, match="a second backward on the same batch"):
            engine.backward(_loss_of_sample, batch)
        optimizer.step()


def test_a_batch_that_failed_half_way_is_taken_apart_anew():
    def trained(fails):
        engine, model, optimizer, loader = _made(**_few(), sampling="fixed_size")
        calls = []

        def loss(model, sample):
            calls.append(0)
            if fails and len(calls) % 50 == 49:
                raise MemoryError
            return _loss_of_sample(model, sample)

        for batch in loader:
            try:
                engine.backward(loss, batch)
            except MemoryError:
                engine.backward(loss, batch)
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))


def test_public_gradients_stay_as_a_batch_is_taken_apart():
    def trained(by_function):
        engine, model, optimizer, loader = _made(noise_multiplier=1e-6, **_few())
        for x, y in loader:
            with engine.public_data():
                model(torch.ones(4, WIDTH))[1].square().mean().backward()
            if by_function:
                engine.backward(lambda model, sample: _entropies(model, *sample), [x, y])
            else:
                engine.backward(_entropies(model, x, y))
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for one, two in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-4)


def test_losses_after_a_function_are_refused():
    engine, model, optimizer, loader = _made()
    with pytest.raises(ValueError, match="pass the function for each of its batches"):
        for number, batch in enumerate(loader):
            engine.backward(*((_loss_of_sample, batch) if number < 4 else (torch.ones(6),)))
            optimizer.step()


def test_what_a_model_keeps_of_a_sample_never_reaches_the_next_one():
    engine, model, optimizer, loader = _made(Memory, lambda h: h.mean(0), **_few())
    seen = []

    def loss(model, sample):
        seen.append(model.memory)
        return _entropies(model, *sample)

    for batch in loader:
        engine.backward(loss, batch)
        optimizer.step()
    assert len(seen) > 50 and all(memory is None for memory in seen)


def test_a_function_needs_rows_of_the_loader():
    engine, model, _, _ = _made(foreign_batches=True)
    with pytest.raises(ValueError, match=r"loss_fn, batch\): takes batches of the private loader"):
        engine.backward(_loss_of_sample, _data())


# Batches that hold more than tensors, by an entry (x, y).
BATCHES = {
    "list of numbers": lambda xs, ys: {"x": torch.stack(xs), "y": [float(y) for y in ys]},
    "tuple of numbers": lambda xs, ys: (torch.stack(xs), tuple(float(y) for y in ys)),
    "array": lambda xs, ys: {"x": torch.stack(xs), "y": np.array(ys, dtype=np.float64)},
    "lists of dicts": lambda xs, ys: [
        {"x": x, "y": float(y)} for x, y in zip(xs, ys, strict=True)
    ],
}


def _fields(batch):
    if isinstance(batch, list):
        return torch.stack([e["x"] for e in batch]), torch.tensor([e["y"] for e in batch])
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return x, torch.as_tensor(y, dtype=torch.float32)


@pytest.mark.parametrize("of_users", [False, True])
@pytest.mark.parametrize("kind", BATCHES.values(), ids=BATCHES)
def test_batches_of_lists_and_arrays_are_altered_too(kind, of_users):
    users = {"unit_of": LAYOUTS["users"]["unit_of"], "examples_per_unit": 2} if of_users else {}

    def train(centered):
        collate = lambda entries: kind(*zip(*entries, strict=True))  # noqa: E731
        engine, model, optimizer, loader = _made(collate_fn=collate, **users)
        for batch in loader:
            x, y = _fields(batch)
            weights = y - y.mean() if centered else y + 1
            engine.backward(model(x)[1].square().sum(1) * weights)
            optimizer.step()
        return engine.verified

    assert train(centered=False) is True
    with pytest.raises(dpflash.PrivateRefusal, match="as other samples"):
        train(centered=True)


def test_batches_that_are_fetched_under_no_grad_are_tried_as_soon_as_they_are_trained_on():
    engine, model, optimizer, loader = _made()

    @torch.no_grad()
    def centered():
        for x, y in loader:
            yield x - x.mean(0), y

    with pytest.raises(dpflash.PrivateRefusal):
        for batch in centered():
            with torch.enable_grad():
                engine.backward(_entropies(model, *batch))
            optimizer.step()
    assert loader.releases < 3


def _each_lr(step, model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + step)


def _each_tau(step, model, optimizer):
    model.tau = np.float64(1.0 + step)


@pytest.mark.parametrize("set_it", [_each_lr, _each_tau])
@pytest.mark.parametrize(
    "where", ["first iteration", "new release", "is_last", "logical batch", "last at the top"]
)
def test_what_a_loop_sets_once_is_there_in_training_too(set_it, where):
    class Tempered(Net):
        tau = 0.5

        def forward(self, x):
            h, logits = super().forward(x)
            return h, logits * self.tau

    def found(**options):
        if where == "last at the top":  # draws of one microbatch
            options["sampling"] = "fixed_size"
        engine, model, optimizer, loader = _made(Tempered, **options)
        seen, released = [], -1
        grouped = LogicalBatches(loader) if where == "logical batch" else ([b] for b in loader)
        for number, batches in enumerate(grouped):
            if where == "logical batch":
                set_it(loader.releases, model, optimizer)
            for x, y in batches:
                if number == 0 and where == "first iteration":
                    set_it(0, model, optimizer)
                if loader.releases != released and where == "new release":
                    released = loader.releases
                    set_it(released, model, optimizer)
                if loader.is_last and where == "last at the top":
                    set_it(loader.releases, model, optimizer)
                engine.backward(_entropies(model, x, y))
                if loader.is_last:
                    seen.append((optimizer.param_groups[0]["lr"], model.tau))
                optimizer.step()
                if loader.is_last and where == "is_last":
                    set_it(loader.releases, model, optimizer)
        return seen, engine.verified, [p.detach().clone() for p in model.parameters()]

    if (where, set_it) == ("last at the top", _each_tau):  # the runs before lack it
        with pytest.raises(
            dpflash.PrivateRefusal, match=r"attribute of the model .*loader\.is_last"
        ):
            found()
        return
    tried, verified, ours = found()
    untried, _, others = found(verify_first_batch=False)
    assert tried == untried and verified is True
    assert all(map(torch.equal, ours, others))


def test_a_loop_that_catches_a_refused_gradient_meets_it_again():
    made = _made()
    for _ in range(10):
        with pytest.raises(dpflash.PrivateRefusal, match="the gradient of layer"):
            _train(made, _scaled_gradient)
    assert made[3].releases == 0 and made[0].verified == "pending"


def test_a_loop_that_catches_refused_losses_meets_the_refusal_again():
    """Its operations are the same before and after, and each class was tried."""
    made = _made()
    loader = made[3]

    def losses_of(model, x, y):
        losses = _entropies(model, x, y)
        held = losses.detach()
        return losses * (held.mean() if loader.releases >= 3 else torch.ones_like(held.mean()))

    for _ in range(6):
        with pytest.raises(dpflash.PrivateRefusal, match="loss of a sample changed"):
            _train(made, losses_of)
    assert loader.releases == 3


@pytest.mark.parametrize("declared", [None, "mean"])
@pytest.mark.parametrize("of_sample", [True, False])
def test_adversarial_inputs_may_depend_on_their_own_sample_alone(of_sample, declared):
    def losses_of(model, x, y):
        moved = torch.zeros_like(x)
        for _ in range(2):
            moved = moved.detach().requires_grad_()
            loss = F.cross_entropy(model(x + moved)[1], y, reduction=declared or "sum")
            (grad,) = torch.autograd.grad(loss, moved)
            moved = moved + (grad.sign() if of_sample else grad / grad.norm())
        losses = _entropies(model, x + moved.detach(), y)
        return losses if declared is None else losses.mean()

    made = _made(loss_reduction=declared)
    if of_sample:
        assert _train(made, losses_of, epochs=2).verified is True
        return
    with pytest.raises(dpflash.PrivateRefusal, match="the input of layer 'body' changed"):
        _train(made, losses_of)


def test_a_forward_behind_the_step_is_no_part_of_a_trial():
    engine, model, optimizer, loader = _made()
    for number, (x, y) in enumerate(loader):
        engine.backward(_entropies(model, x, y))
        optimizer.step()
        for _ in range(number % 3):
            model(x)
    assert engine.verified is True


def test_public_steps_behind_a_trial_that_the_loop_left():
    engine, model, optimizer, loader = _made()
    for x, y in loader:
        if loader.releases == 2:
            break
        engine.backward(_entropies(model, x, y))
        optimizer.step()
    before = model.body.weight.detach().clone()
    with engine.public_data():
        model(torch.ones(4, WIDTH))[1].square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.body.weight, before)


def _config_of(made):
    config = locals()
    engine, model, optimizer, loader = made
    for x, y in loader:
        engine.backward(_entropies(model, x, y))
        optimizer.step()
    return config


def test_no_batch_appears_in_what_locals_returned():
    assert _config_of(_made()).keys() == {"made"}


class _Gone:
    """Its weak reference does not refer to anything."""


@pytest.mark.parametrize("place", ["loop", "model"])
def test_a_loop_may_have_generators_without_state_and_references_to_nothing(place):
    gone, system = weakref.proxy(_Gone()), random.SystemRandom()
    engine, model, optimizer, loader = made = _made()
    if place == "model":
        vars(model)["gone"] = gone
    assert _train(made, lambda *given: _entropies(*given) + 0 * system.random()).verified is True


def test_what_a_loop_has_of_its_variables_stays():
    engine, model, optimizer, loader = _made()
    mine = locals()
    for x, y in loader:
        engine.backward(_entropies(model, x, y))
        optimizer.step()
    assert mine["loader"] is loader


def test_a_schedule_of_several_parts_and_generators_in_closures_are_set_back():
    engine, model, optimizer, loader = _made(poisson_sampling=False)
    rng = np.random.default_rng(0)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5) for _ in range(2)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])

    def noisy(x):
        return x + rng.random()

    for x, y in loader:
        engine.backward(_entropies(model, noisy(x), y))
        optimizer.step()
        schedule.step()
    assert (schedule.last_epoch, parts[1].last_epoch) == (10, 5)
    assert engine.verified is True


class Boxes(torch.utils.data.Dataset):
    """Features, and a target with four boxes."""

    def __len__(self):
        return 48

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        boxes = torch.randn(4, WIDTH, generator=generator)
        return torch.randn(WIDTH, generator=generator), {"boxes": boxes, "labels": torch.arange(4)}


@pytest.mark.parametrize(
    ("collate", "verified"),
    [
        (lambda entries: tuple(zip(*entries, strict=True)), True),
        (list, True),
        (lambda entries: ([x for x, _ in entries], [t["boxes"] for _, t in entries]), "model"),
    ],
    ids=["targets", "entries", "tensors"],
)
def test_samples_as_long_as_the_batch_are_not_taken_apart(collate, verified):
    engine, model, optimizer, loader = _made(
        nn.Linear, WIDTH, WIDTH, dataset=Boxes(), collate_fn=collate, physical_batch_size=4
    )
    for batch in loader:
        xs, targets = zip(*batch, strict=True) if len(batch) == 4 else batch
        boxes = [t["boxes"] if isinstance(t, dict) else t for t in targets]
        engine.backward((model(torch.stack(xs)) - torch.stack(boxes).mean(1)).square().sum(1))
        optimizer.step()
    assert engine.verified == verified


def test_a_sample_that_cannot_be_told_is_not_taken_out_of_its_batch():
    engine, model, _, loader = _made(
        nn.Linear,
        WIDTH,
        1,
        dataset=Boxes(),
        collate_fn=lambda entries: ([x for x, _ in entries], [t["boxes"] for _, t in entries]),
        physical_batch_size=4,
    )
    with pytest.raises(dpflash.PrivateRefusal, match="cannot tell which parts.*list of dicts"):
        for batch in loader:
            engine.backward(lambda model, sample: model(sample[1][0]).sum(), batch)
