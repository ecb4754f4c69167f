"""The report of `engine.plan` about the modes of clipping."""

import pytest
import torch
from torch import nn

from dpflash.clipping.device_speed import CPU_RULE
from dpflash.clipping.planner import LinearShape, cost


class Model(nn.Module):
    def __init__(self, names=("first", "second"), width=24):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(width, width))

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


def planned(private, model=None, tokens=40, width=24, **options):
    engine, model, *_ = private(model or Model(width=width), **options)
    model(torch.ones(3, tokens, model.first.in_features))
    return engine.plan()


def test_figures_are_those_of_the_cost_model(private):
    first, second = planned(private, grad_sample_mode="book_keeping")
    expected = cost([LinearShape(3, 40, 24, 24)], "book_keeping", CPU_RULE)
    assert (first.flops, first.moved_bytes, first.memory_bytes, first.seconds) == (
        expected.flops,
        expected.moved,
        expected.kept,
        expected.seconds,
    )
    assert first.share == second.share == 0.5


def test_matrices_without_a_plan_are_named(private):
    model = Model()
    model.second = nn.Conv1d(40, 40, 1)
    plan = planned(private, model)
    assert [use.parameter for use in plan] == ["first.weight"]
    assert plan.unplanned == ("second.weight",) and "without a plan: second.weight\n" in str(plan)


@pytest.mark.parametrize(
    ("options", "mode", "why"),
    [
        ({"width": 256, "tokens": 128}, "instantiate", "book_keeping takes 2."),
        ({"width": 512, "tokens": 2}, "book_keeping", "instantiate takes"),
        (
            {"grad_sample_mode": "instantiate"},
            "instantiate",
            "you asked for it",
        ),
        ({"memory_budget": 1}, "ghost", "memory budget is too small"),
        ({"memory_budget": 1, "loss_reduction": "sum"}, "instantiate", "book_keeping takes"),
        ({"clipping": "per_layer"}, "instantiate", "book_keeping takes"),
    ],
    ids=str,
)
def test_the_reason_is_told_in_words(options, mode, why, private):
    for use in planned(private, **options):
        assert use.grad_sample_mode == mode
        assert use.why.startswith(why)


def test_what_the_budget_costs_is_told(private):
    found = planned(private, width=512, tokens=200, memory_budget=1, loss_reduction="sum")
    for use in found:
        assert use.grad_sample_mode == "book_keeping"
        assert use.why.startswith("memory budget; instantiate is 1.")


def test_an_empty_batch_has_a_plan_too(private):
    engine, model, *_ = private(Model())
    model(torch.ones(0, 5, 24))
    assert [use.share for use in engine.plan()] == [0.5, 0.5]


def test_the_table_has_whole_names_and_a_legend(private):
    name = "a_layer_whose_name_is_longer_than_any_table_should_have_room_for_" * 2
    text = str(planned(private, Model(("first", name))))
    assert f"\n{name}.weight " in text and "kept MiB: memory until gradients are clipped" in text
