"""make_private(optimizer=[a, b]): one release a logical batch, applied once by each of them."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))


class Run:
    """A run of two linear layers, whose biases and matrices have groups of their own.

    Args:
        shape: of the optimizers: "one" with two groups, "two", or "turned", the two in the other
            order.
        kinds: of the two optimizers.
        options: of make_private.
    """

    def __init__(self, shape="two", kinds=(torch.optim.AdamW, torch.optim.AdamW), **options):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        vectors, matrices = [model[0].bias, model[2].bias], [model[0].weight, model[2].weight]
        groups = [{"params": vectors, "lr": 0.1}, {"params": matrices, "lr": 0.01}]
        made = [kind([group]) for kind, group in zip(kinds, groups, strict=True)]
        optimizers = {"one": [kinds[0](groups)], "two": made, "turned": made[::-1]}[shape]
        self.engine = dpflash.PrivacyEngine(seed=0)
        self.model, self.optimizers, self.loader = self.engine.make_private(
            module=model,
            optimizer=optimizers,
            data_loader=DataLoader(TensorDataset(X.clone()), batch_size=4),
            max_grad_norm=1.0,
            **{"noise_multiplier": 1.0, "physical_batch_size": 3, **options},
        )

    def backward(self, x):
        self.engine.backward(self.model(x).square().mean(1))

    def until_released(self):
        """Go on to the end of a logical batch, whose release waits for its step."""
        for (x,) in self.loader:
            self.backward(x)
            if self.loader.is_last:
                return
            self.step()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self, releases=5, schedulers=(), clear=None):
        clear = clear or (lambda: [optimizer.zero_grad() for optimizer in self.optimizers])
        while True:
            for (x,) in self.loader:
                self.backward(x)
                is_last = self.loader.is_last
                self.step()
                clear()
                if is_last:
                    [scheduler.step() for scheduler in schedulers]
                if is_last and self.loader.releases == releases:
                    return self

    @property
    def values(self):
        return [p.detach().clone() for p in self.model.parameters()]

    @property
    def charged(self):
        return sum(steps for *_, steps in self.engine.accountant.history)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("shape", ["two", "turned"])
@pytest.mark.parametrize("options", [{}, {"physical_batch_size": None}, {"clipping": "per_layer"}])
def test_two_optimizers_are_one_of_two_groups_bit_for_bit(shape, options):
    one, two = Run("one", **options).train(), Run(shape, **options).train()
    assert same(one.values, two.values)
    assert one.engine.get_epsilon(1e-5) == two.engine.get_epsilon(1e-5) and two.charged == 5
    assert [o.releases for o in two.optimizers] == [5, 5]


def test_optimizers_of_two_kinds_each_step_on_their_own_parameters():
    run = Run(kinds=(torch.optim.AdamW, torch.optim.SGD))
    before = run.values
    run.until_released()
    run.optimizers[1].step()
    names = [n for n, _ in run.model.named_parameters()]
    moved = [n for n, a, b in zip(names, before, run.values, strict=True) if not torch.equal(a, b)]
    assert moved == ["0.weight", "2.weight"]
    assert {n for n, p in run.model.named_parameters() if p.grad is not None} == set(names)
    run.optimizers[0].step()
    assert not any(map(torch.equal, before, run.values)) and run.charged == 1


def test_a_second_step_of_one_of_them_is_refused_as_of_one_optimizer():
    for which in (0, 1):
        run = Run()
        run.until_released()
        run.step()
        values = run.values
        with pytest.raises(RuntimeError, match="called again, with no engine.backward"):
            run.optimizers[which].step()
        assert same(values, run.values) and run.charged == 1


def test_an_optimizer_that_leaves_out_a_release_steps_on_the_next_one_alone():
    run = Run()
    first, second = run.optimizers
    for number in range(4):
        run.until_released()
        held = run.model[0].weight.grad.clone()
        first.step(), first.zero_grad()
        assert torch.equal(run.model[0].weight.grad, held) and run.model[0].bias.grad is None
        if number % 2:
            before = run.values[0]
            second.step()
            assert not torch.equal(before, run.values[0])
    assert run.charged == 4


@pytest.mark.parametrize("way", ["zero_grad", "model.zero_grad"])
def test_a_release_that_was_dropped_before_the_second_step_is_not_stepped_on(way):
    run = Run()
    run.until_released()
    with pytest.raises(RuntimeError, match="before|between"):
        run.optimizers[1].zero_grad()
    run.optimizers[0].step()
    (run.optimizers[1] if way == "zero_grad" else run.model).zero_grad()
    with pytest.raises(RuntimeError, match="lost|called again"):
        run.optimizers[1].step()


@pytest.mark.parametrize("shape", ["one", "two", "turned"])
def test_a_run_that_resumes_equals_the_uninterrupted_one(shape, tmp_path):
    straight, stopped = Run("two").train(6), Run("two").train(3)
    stopped.engine.save_checkpoint(tmp_path / "c", optimizer=stopped.optimizers)
    resumed = Run("two" if shape == "turned" else shape)
    resumed.engine.load_checkpoint(tmp_path / "c", optimizer=resumed.optimizers)
    assert same(straight.values, resumed.train(6).values)
    if shape == "turned":
        other = Run("two", kinds=(torch.optim.SGD, torch.optim.AdamW))
        with pytest.raises(ValueError, match="options differ"):
            other.engine.load_checkpoint(tmp_path / "c")
        with pytest.raises(ValueError, match="optimizer="):
            other.engine.save_checkpoint(tmp_path / "d", optimizer=other.optimizers[:1])


def test_schedulers_and_options_of_each_are_watched():
    ends = []
    for shape in ("one", "two"):
        run = Run(shape)
        made = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in run.optimizers]
        ends.append(run.train(4, made).values)
    assert same(*ends)
    run = Run(verify_first_batch=False)
    for (x,) in run.loader:
        run.backward(x)
        if not run.loader.is_last:
            break
        run.step()
    run.optimizers[1].param_groups[0]["lr"] *= 2
    with pytest.raises(dpflash.PrivateRefusal, match=r"param_groups\[1\]\['lr'\] changed"):
        run.optimizers[0].step()


def test_public_gradients_are_stepped_on_once_by_each():
    ends = []
    for shape in ("one", "two"):
        run = Run(shape, noise_multiplier=0.0)
        for releases in (1, 2):
            with run.engine.public_data():
                run.model(X[:2]).sum().backward()
            run.step()
            with run.engine.public_data():
                run.model(X[2:5]).sum().backward()
            run.train(releases)
        ends.append(run.values)
    assert same(*ends)
    with run.engine.public_data():
        run.model(X[:2]).sum().backward()
    run.optimizers[0].zero_grad()
    before = run.values
    run.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, run.values, strict=True)]
    assert changed == [True, False, True, False]


def test_batches_of_another_loader_are_released_by_the_first_step():
    ends = []
    for shape in ("one", "turned"):
        run = Run(shape, foreign_batches=True)
        for _ in range(3):
            for skips in (True, False):
                run.optimizers[0].signal_skip_step(skips)
                run.backward(X[:4])
                run.step()
        ends.append(run.values)
        assert run.optimizers[0].releases == 3
    assert same(*ends)


def test_one_optimizer_alone_of_a_list_is_a_list_of_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Run("one")
    assert isinstance(run.optimizers, list) and len(run.optimizers) == 1
    model = run.engine.detach(run.model)
    with pytest.raises(RuntimeError, match="detached"):
        run.step()
    run.optimizers[0].original_optimizer.step()
    assert model is run.model


def turns(choose, *, releases=6, physical_batch_size=1):
    """Train with those of two optimizers that `choose(loader, iteration)` numbers."""
    run = Run(physical_batch_size=physical_batch_size)
    iteration = 0
    while run.loader.releases < releases:
        for (x,) in run.loader:
            run.backward(x)
            for number in choose(run.loader, iteration):
                run.optimizers[number].step()
            for optimizer in run.optimizers:
                optimizer.zero_grad()
            iteration += 1
    return run


@pytest.mark.parametrize(
    "choose",
    [
        lambda loader, i: [0, 1] if i % 5 == 0 else [0],
        lambda loader, i: [i % 2],
        lambda loader, i: [0, 1] if loader.is_real.sum() else [0],
    ],
    ids=["every fifth", "in turn", "by rows"],
)
def test_optimizers_that_take_turns_by_microbatch_are_refused(choose):
    with pytest.raises(dpflash.PrivateRefusal, match="stepped in some microbatches"):
        turns(choose)


@pytest.mark.parametrize(
    "choose",
    [
        lambda loader, i: [0, 1] if loader.is_last else [0],
        lambda loader, i: [0, 1] if loader.is_last else [],
        lambda loader, i: [1, 0] if loader.releases % 3 == 2 else [0],
    ],
    ids=["at the last", "both at the last", "by releases"],
)
def test_optimizers_that_take_turns_by_release_are_not_refused(choose):
    assert turns(choose).loader.releases >= 6
