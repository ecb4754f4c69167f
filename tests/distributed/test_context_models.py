"""Models and modules whose tokens lie on several ranks are those of one process."""

from pathlib import Path

import distributed_world
import numpy as np
import pytest

CASES = str(Path(__file__).with_name("context_cases.py"))


@pytest.fixture(scope="module")
def pair():
    with distributed_world.World(2) as world:
        yield world


@pytest.fixture(scope="module")
def three():
    with distributed_world.World(3) as world:
        yield world


MODELS = [
    pytest.param({}, "ring", "contiguous", id="rotary-ring"),
    pytest.param({"positions": "learned"}, "ulysses", "zigzag", id="learned-ulysses-zigzag"),
    pytest.param(
        {"positions": "alibi", "attention_sinks": True}, "all_gather", "zigzag", id="alibi-gather"
    ),
    pytest.param({"window": True, "chunked_loss": True}, "auto", "contiguous", id="window-auto"),
]


@pytest.mark.parametrize("tokens", [23, 32])
@pytest.mark.parametrize(("model", "mode", "sharding"), MODELS)
def test_a_model_over_its_context_is_that_of_one_process(three, model, mode, sharding, tokens):
    options = {"tokens": tokens, "model": model, "mode": mode, "sharding": sharding}
    for errors in three.run(CASES, "model_matches", 3, **options):
        assert max(errors) < 4e-6, errors


@pytest.mark.parametrize("mesh_as", ["mesh", "parallel"])
def test_a_module_takes_a_mesh_or_what_was_made_of_one(pair, mesh_as):
    for error in pair.run(CASES, "module_matches", 2, mesh_as=mesh_as):
        assert error < 1e-6


def test_loss_weights_are_shares_of_the_valid_targets(pair):
    first, second = pair.run(CASES, "sample_numbers", 2)
    np.testing.assert_allclose(first, [1 / 3, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(second, [2 / 3, 0, 0], rtol=1e-6)


REFUSED = {
    "torch attention": "'parts.0' is a MultiheadAttention",
    "recurrent": "'parts.0' is a LSTM",
    "convolution": "'parts.0' is a Conv1d",
    "batch norm": "'parts.0' is a BatchNorm1d",
    "group norm": "'parts.0' is a GroupNorm",
    "pooling": "'parts.0' is a AvgPool1d",
    "cross attention": "'parts.0' is a MultiheadAttention: keys of another source",
    "dropout": "dropout=0.1",
    "no attention": "model=Linear has no attention",
    "mode": "mode='star'",
    "sharding": "sharding='stripes'",
    "no mesh": "mesh=str",
    "no context": "expected one named 'context'",
    "twice": "context parallel already",
    "dropout in module": "dropout=0.1",
    "dropout in model": "'blocks.0.attention' is a MultiheadAttention: dropout=0.1",
    "dropout in a model's own": "'blocks.0.attention' is a MultiheadAttention: dropout=0.1",
    "padding": "key_padding_mask with context_parallel",
    "mask": "attn_mask with context_parallel",
    "mask of one": "attn_mask with context_parallel",
    "samples": "samples differs between ranks",
    "shards": "shard_sequence",
    "context of another call": "context is of another number of tokens",
    "too long": "max_seq_len=7",
}


def test_what_would_be_wrong_is_refused_by_name_on_all_ranks(pair):
    for said in pair.run(CASES, "refusals", 2):
        assert set(said) == set(REFUSED)
        for name, expected in REFUSED.items():
            assert expected in said[name], (name, said[name])


def test_uncut_inputs_and_a_missing_mesh_are_told(pair):
    for said in pair.run(CASES, "looks", 2):
        assert len(said["copies"]) == 1 and "context_parallel.shard(x)" in said["copies"][0]
        assert said["shards"] == []
        assert said["no mesh"] == {"before": True, "after": True}  # once, naming the caller
        assert said["own model"] == "zigzag"


def test_the_plan_tells_the_mode_of_attention_and_what_others_cost(pair):
    for table, lines in pair.run(CASES, "plan", 2):
        header, *rows = table.splitlines()
        assert header.split()[:4] == ["attention", "mode", "MiB", "sent"]
        assert [row.split()[-6 - row.count("(taken)")] for row in rows[1:-1]] == [
            "ulysses",
            "all_gather",
        ]
        assert rows[0].split()[:2] == ["Dense", "ring"] and table.count("(taken)") == 1
        assert set(table.splitlines()) <= set(lines)
