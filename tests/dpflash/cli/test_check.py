"""`dpflash check`: the file or module named, the report printed, the exit status."""

import json
import sys

import pytest

from dpflash.cli import main

SOURCE = """
import torch
from torch import nn
import dpflash

def loss_fn(model, batch):
    return dpflash.losses.cross_entropy(model(batch[0]), batch[1])

def made(*layers):
    model = nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 3))
    return model, (torch.randn(4, 4), torch.tensor([0, 1, 2, 0])), loss_fn

def good():
    return made(nn.ReLU())

def bad():
    return made(nn.BatchNorm1d(4))

def scalar():
    model, batch, loss = good()
    return model, batch, lambda m, b: loss(m, b).mean()

def one_sample():
    model, (x, y), loss = good()
    return model, (x[:1], y[:1]), loss

def broken():
    return {}["missing"]

def model_only():
    return nn.Linear(4, 3)

answer = 42
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "checked_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "checked_model", raising=False)
    return str(tmp_path / "checked_model.py")


def test_a_clean_model_exits_with_0_by_file_and_by_module(source, capsys):
    assert main(["check", f"{source}:good"]) == 0
    assert capsys.readouterr().out.startswith("no problem found")
    assert main(["check", "checked_model:good"]) == 0


def test_an_error_exits_with_1_and_is_named(source, capsys):
    assert main(["check", f"{source}:bad"]) == 1
    out = capsys.readouterr().out
    assert "BatchNorm1d" in out and "nn.GroupNorm" in out and "not a proof" in out


def test_json_is_the_report(source, capsys):
    assert main(["check", f"{source}:bad", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert {"kind", "where", "message", "remedy", "severity"} == set(report["problems"][0])


def test_a_declared_reduction_is_checked(source, capsys):
    assert main(["check", f"{source}:scalar", "--loss-reduction", "mean"]) == 0
    assert "as the mean of the single samples'" in " ".join(capsys.readouterr().out.split())
    assert main(["check", f"{source}:scalar", "--loss-reduction", "sum"]) == 1
    assert "declare loss_reduction='mean'" in " ".join(capsys.readouterr().out.split())
    assert main(["check", f"{source}:scalar"]) == 1
    assert "declare loss_reduction='mean' or 'sum'" in " ".join(capsys.readouterr().out.split())


REFUSED = {
    "no-function": ("{file}", "expected package.module:function"),
    "no-file": ("nowhere.py:good", "there is no such file"),
    "no-module": ("nowhere.at_all:good", "ModuleNotFoundError"),
    "no-such-name": ("{file}:goood", "it has loss_fn, made, good"),
    "not-callable": ("{file}:answer", "has no function 'answer'"),
    "not-a-triple": ("{file}:model_only", "it returned Linear; expected"),
    "raises": ("{file}:broken", "KeyError: 'missing'"),
    "one-sample": ("{file}:one_sample", "holds 1 sample"),
}


@pytest.mark.parametrize(("target", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_checked_exits_with_2_and_says_why(source, capsys, target, message):
    assert main(["check", target.format(file=source)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
