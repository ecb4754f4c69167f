"""Engine, model, optimizer, loader and data are freed when their user drops them."""

import contextlib
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import dpflash


class Net(nn.Module):
    """Layers of several rules, one of them checkpointed; it keeps some of what it computes."""

    def __init__(self):
        super().__init__()
        self.fails = False
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.second, self.last = nn.Linear(4, 4), dpflash.nn.LinearCrossEntropy(4, 2)

    def forward(self, x, y):
        self.kept = self.norm(self.first(x))
        if self.fails:
            raise ZeroDivisionError
        hidden = self.kept
        if self.training:
            # It holds the layer, as it does of a plain model.
            hidden = hidden + checkpoint(self.second, x, use_reentrant=False)
        return self.last(hidden[:, None], y[:, None])


def _fail(grad):
    raise ZeroDivisionError


def _train(engine, model, optimizer, loader, batches=None):
    for number, (x, y) in enumerate(loader):
        if number == batches:
            break
        engine.backward(model(x, y))
        optimizer.step()
        optimizer.zero_grad()


def _other(rows):
    return torch.randn(rows, 4), torch.zeros(rows, dtype=torch.long)


def _evaluate(engine, model, optimizer, loader):
    _train(engine, model, optimizer, loader)
    model.eval()
    model.outputs = model(*_other(5))


def _break_between_microbatches(engine, model, optimizer, loader):
    _train(engine, model, optimizer, loader, 1)
    engine.backward(model(*next(iter(loader))))
    model(*_other(5))


def _break_before_the_backward(engine, model, optimizer, loader):
    model.eval()
    model.outputs = model(*next(iter(loader))).sum()


def _fail_in_a_forward(engine, model, optimizer, loader):
    _train(engine, model, optimizer, loader, 2)
    model.fails = True
    with contextlib.suppress(ZeroDivisionError):
        _train(engine, model, optimizer, loader)


def _fail_in_a_backward(engine, model, optimizer, loader):
    losses = model(*next(iter(loader)))
    model.kept.register_hook(_fail)
    with contextlib.suppress(ZeroDivisionError):
        engine.backward(losses)


def _fail_in_a_backward_of_torch(engine, model, optimizer, loader):
    losses = model(*next(iter(loader)))
    model.kept.register_hook(_fail)
    with contextlib.suppress(ZeroDivisionError):
        losses.sum().backward()


def _keep_outputs(engine, model, optimizer, loader):
    model(*_other(5))
    return model.kept, model.last(model.kept[:, None])


def _detach(engine, model, optimizer, loader):
    _evaluate(engine, model, optimizer, loader)
    engine.detach(model)


def _public(engine, model, optimizer, loader):
    _evaluate(engine, model, optimizer, loader)
    with engine.public_data():
        model(*_other(5)).sum().backward()


RUNS = [
    (_evaluate, {}),
    (_evaluate, {"clipping": "per_layer", "loss_reduction": "mean"}),
    (_break_between_microbatches, {"grad_sample_mode": "ghost"}),
    (_break_between_microbatches, {"physical_batch_size": 2}),
    (_break_before_the_backward, {"loss_reduction": "mean"}),
    (_fail_in_a_forward, {}),
    (_fail_in_a_backward, {}),
    (_fail_in_a_backward_of_torch, {"loss_reduction": "sum", "grad_sample_mode": "book_keeping"}),
    (_keep_outputs, {}),
    (_detach, {}),
    (_public, {}),
    (_evaluate, {"optimize": "aggressive"}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("how", "options"), RUNS)
def test_all_objects_of_a_run_are_freed(how, options, monkeypatch):
    monkeypatch.setattr("dpflash.optimize.wrapper._BACKEND", "aot_eager")

    def run():
        torch.manual_seed(0)
        data = _data()
        made = _engine_with(Net(), data, **options)
        kept = how(*made)
        names = ("data", "engine", "model", "optimizer", "loader")
        objects = dict(zip(names, (data, *made), strict=True))
        return {name: weakref.ref(value) for name, value in objects.items()}, kept

    references, kept = run()
    gc.collect()
    assert [name for name, reference in references.items() if reference() is not None] == []


def _data():
    return TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))


def _engine_with(model, data=None, **options):
    engine = dpflash.PrivacyEngine(accountant="rdp", seed=0)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(data or _data(), batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    return engine, *made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", [_train, _break_between_microbatches, _fail_in_a_backward])
def test_a_model_whose_engine_is_gone_is_evaluated_given_back_and_taken_over(how):
    model = Net()
    for _ in range(3):
        engine, _, optimizer, loader = _engine_with(model, physical_batch_size=4)
        how(engine, model, optimizer, loader)
        del engine  # the optimizer and the loader live on
    model.eval()
    assert model(*_other(5)).shape == (5,) and model.state_dict()
    before = optimizer
    engine, _, optimizer, loader = _engine_with(model)
    with pytest.raises(RuntimeError, match="detached.*the last make_private returned"):
        before.step()
    _train(engine, model, optimizer, loader)
    with pytest.raises(ValueError, match="not the one that this engine made"):
        dpflash.PrivacyEngine().detach(model)
    del engine
    assert type(dpflash.PrivacyEngine().detach(model)) is Net
    assert type(model.first) is nn.Linear


def test_a_model_is_taken_from_a_living_engine_between_its_batches_alone():
    model = Net()
    engine, _, optimizer, loader = _engine_with(model, physical_batch_size=4)
    with pytest.raises(ValueError, match=r"released nothing yet.*engine\.detach\(model\)"):
        _engine_with(nn.Sequential(model))
    for x, y in loader:
        engine.backward(model(x, y))
        if optimizer.releases:
            break
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"a batch to release.*engine\.detach\(model\)"):
        _engine_with(model)
    with pytest.warns(UserWarning, match="its gradients are dropped"):
        next(iter(loader))
    with pytest.warns(UserWarning, match="does not count its releases.*ledger="):
        other, *made = _engine_with(model)
    with pytest.raises(RuntimeError, match="made private by another engine"):
        engine.backward(torch.zeros(4))
    assert engine.get_epsilon(1e-5) > 0
    _train(other, *made)


def test_a_model_that_was_given_back_tells_the_next_engine_that_it_was_trained():
    model = Net()
    engine, *_ = _engine_with(model)
    engine.detach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # It had no release.
        engine, *made = _engine_with(model)
    _train(engine, *made)
    engine.detach(model)
    with pytest.warns(UserWarning, match="does not count its releases.*ledger="):
        dpflash.PrivacyEngine().make_private(
            module=nn.Sequential(model),
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            data_loader=DataLoader(TensorDataset(*_other(8))),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_a_dataset_that_another_engine_trained_on_tells_the_next_engine():
    data = _data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # It had no release.
        _engine_with(Net(), data)
        engine, *made = _engine_with(Net(), data)
    _train(engine, *made)
    for _ in range(2):
        with pytest.warns(UserWarning, match="trained on this dataset.*ledger="):
            _engine_with(Net(), data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, *_ = made
        engine.detach(model)
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            data_loader=DataLoader(data, batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def _ranges(data, *ranges):
    return [Subset(data, range(*of)) for of in ranges]


@pytest.mark.parametrize("kind", ["other tensors", "folds", "nested", "part of a whole"])
def test_parts_of_a_dataset_with_common_entries_tell_the_next_engine(kind):
    data = _data()
    size = len(data)
    first, second, apart = {
        "other tensors": lambda: (data, TensorDataset(*data.tensors), None),
        "folds": lambda: _ranges(data, (0, 24), (8, size), (24, size)),
        "nested": lambda: (
            Subset(*_ranges(data, (8, size)), [*range(16)]),
            *_ranges(data, (8, 9), (24, size)),
        ),
        "part of a whole": lambda: (data, *_ranges(data, (0, 8)), None),
    }[kind]()
    engine, *made = _engine_with(Net(), first)
    _train(engine, *made)
    if apart is not None:  # a client of a federation, say
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _engine_with(Net(), apart)
    with pytest.warns(UserWarning, match="trained on this dataset.*ledger="):
        _engine_with(Net(), second)


class Named(Dataset):
    """Entries by name, or by pairs of numbers."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return 64

    def __getitem__(self, index):
        file, number = index if isinstance(index, tuple) else (0, int(index[:-4]))
        return tuple(x[32 * file + number] for x in self.tensors)


@pytest.mark.parametrize("name", ["{}.png".format, lambda i: (i // 32, i % 32)])
def test_parts_of_a_dataset_may_have_other_indices_than_numbers(name):
    data = Named(*_data().tensors)
    engine, *made = _engine_with(Net(), Subset(data, [name(i) for i in range(64)]))
    _train(engine, *made)
    with pytest.warns(UserWarning, match="trained on this dataset"):
        _engine_with(Net(), Subset(data, [name(i) for i in range(8, 40)]))
