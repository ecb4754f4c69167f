"""Optimizers with hooks on modules, which keep statistics of private activations, are refused."""

import functools
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.grad_rules.convert import check_model

HOOKS = {
    "method": lambda owner: owner.save,
    "partial": lambda owner: functools.partial(functools.partial(owner.save), key=1),
    "lambda": lambda owner: owner.made(),
}
REGISTER = ["register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"]


class _Kept:
    """What K-FAC keeps of activations."""

    def save(self, module, *values, key=None):
        self.kept = values

    def made(self):
        return lambda module, *values: self.save(module, *values)


class KFAC(_Kept, torch.optim.SGD):
    """As kfac-pytorch was and other optimizers are."""


class Preconditioner(_Kept):
    """As kfac-pytorch is now, beside an optimizer."""

    def step(self):
        pass

    def load_state_dict(self, state_dict):
        pass


class Logger(_Kept):
    """Keeps activations, and moves nothing."""

    def step(self):
        pass


def small():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def private(model, optimizer=None):
    engine = dpflash.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    return engine, model, optimizer, loader


@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("hook", HOOKS)
def test_an_optimizer_with_a_hook_is_refused_by_name(hook, register):
    model = small()
    optimizer = KFAC(model.parameters(), lr=0.1)
    getattr(model[2], register)(HOOKS[hook](optimizer))
    with pytest.raises(ValueError, match="KFAC has a hook on module '2'.*public data"):
        private(model, optimizer)


def test_a_preconditioner_beside_the_optimizer_is_refused():
    model = small()
    model[0].register_forward_pre_hook(Preconditioner().save)
    with pytest.raises(ValueError, match="Preconditioner has a hook on module '0'"):
        check_model(model)


def test_hooks_of_others_are_accepted():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].register_forward_hook(Logger().save)
    model[0].register_forward_hook(Logger().made())
    model[0].register_forward_hook(lambda *_: optimizer.param_groups[0]["lr"] and None)
    model[0].register_forward_hook(weakref.WeakMethod(Logger().save))
    check_model(model)


def test_a_hook_that_comes_later_is_refused_until_it_is_removed():
    engine, model, optimizer, loader = private(small())
    x = next(iter(loader))[0]
    engine.backward(model(x).square().sum(1))
    optimizer.step()
    handle = model[0].register_forward_hook(KFAC(model.parameters(), lr=0.1).save)
    for _ in range(2):
        with pytest.raises(dpflash.PrivateRefusal, match="KFAC has a hook on module '0'"):
            model(x)
    handle.remove()
    model(x)
