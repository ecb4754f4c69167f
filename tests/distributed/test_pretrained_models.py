"""Models of transformers whose tokens lie on two ranks are those of one process."""

import os
from importlib.util import find_spec
from pathlib import Path

import distributed_world
import pytest

FULL = os.environ.get("DPFLASH_FULL") == "1"
CASES = str(Path(__file__).with_name("pretrained_cases.py"))
pytestmark = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("peft")), reason="needs transformers and peft"
)


@pytest.fixture(scope="module")
def pair():
    with distributed_world.World(2) as world:
        yield world


MODELS = [
    {"kind": "llama", "sharding": "zigzag", "checkpointing": True},
    {"kind": "gpt2", "mode": "ulysses", "sharding": "zigzag"},
    {"kind": "mistral", "mode": "all_gather"},
    {"kind": "mistral", "sharding": "zigzag", "given": "positions"},
    {"kind": "qwen2", "given": "mask", "mode": "auto"},
    {"kind": "qwen3", "sharding": "zigzag", "lora": True},
    {"kind": "gpt2", "given": "positions"},
]


def test_a_model_over_its_context_is_that_of_one_process(pair):
    for options in MODELS:
        for errors in pair.run(CASES, "matches", 2, **options):
            assert errors["logits"] < 4e-6 and errors["gradients"] < 1e-5, (options, errors)


PRIVATE = [
    {"kind": "llama", "sharding": "zigzag", "lora": True, "checkpointing": True},
    {"kind": "gpt2", "verify_first_batch": False, "steps": 2},
    {"kind": "mistral", "sharding": "zigzag", "verify_first_batch": False},
    {"kind": "qwen3", "verify_first_batch": False, "wrapper": "fsdp", "grad_sample_mode": "ghost"},
]


def test_private_training_over_a_context_is_that_of_one_process(pair):
    for options in PRIVATE if FULL else PRIVATE[::3]:
        for error in pair.run(CASES, "private_matches", 2, **options):
            assert error < 1e-6, (options, error)


def test_noise_over_a_context_has_the_bits_of_one_process(pair):
    options = {"kind": "qwen2", "scale": 0.0, "verify_first_batch": False}
    assert pair.run(CASES, "private_matches", 2, **options) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        ({"context_parallel": 2, "context_mode": "ulysses"}, {"pack": True, "eval_windows": 4}),
        ({"context_parallel": 2, "sharding": "zigzag"}, {"lora_rank": 2}),
        ({}, {"eval_windows": 1, "baseline": True}),  # of which the second rank has none
    ],
)
def test_a_job_on_a_pretrained_model_is_that_of_one_process(pair, tmp_path, parallel, changes):
    options = {"folder": str(tmp_path), "parallel": parallel, **changes}
    for result in pair.run(CASES, "trained", 2, **options):
        assert result["parameters"] < 1e-6
        alone, together = result["reports"]
        assert together == pytest.approx(alone, abs=1e-5)


REFUSED = {
    "encoder": "the model itself is a BertModel",
    "classifier": "the model itself is a LlamaForSequenceClassification",
    "rotary": "rope_type='dynamic'",
    "two-sided": "attention over a context is causal",
    "attention of its own": "does not use transformers' attention interface",
    "cross attention": "add_cross_attention out",
    "twice": "context parallel already",
    "labels": "loss_weights(targets, mesh)",
    "labels of one rank": "loss_weights(targets, mesh)",
    "generation": "past_key_values with context_parallel",
    "embedded": "inputs_embeds with context_parallel",
    "by position": "by name",
    "mask of one rank": "given differs between ranks",
    "padding on the left": "pad on the right",
    "another mask": "attention_mask of shape (2, 1, 1, 4)",
    "borders": "pass position_ids that restart",
    "odd positions": "expected consecutive positions",
    "too long": "n_positions=7",
    "too far": "n_positions=7",
    "dropout": "dropout=0.1",
    "a shared config": "copy.deepcopy(config)",
    "prompts": "inputs_embeds with context_parallel",
    "samples": "samples differs between ranks",
}


def test_what_would_be_wrong_is_refused_by_name_on_all_ranks(pair):
    for said in pair.run(CASES, "refusals", 2):
        assert set(said) == set(REFUSED)
        for name, expected in REFUSED.items():
            assert expected in said[name], (name, said[name])
