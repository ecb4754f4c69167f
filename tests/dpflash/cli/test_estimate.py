"""`dpflash estimate`: its figures add up and grow, and its refusals name the way out."""

import json
import re

import pytest

from dpflash import _validate
from dpflash.cli import estimate, main
from dpflash.cli.estimate import Subject, ceilings_of, cost_of, largest
from dpflash.clipping.device_speed import CPU_RULE
from dpflash.clipping.estimate import PARTS

H100 = ceilings_of("h100")
TINY = {"vocab_size": 64, "embed_dim": 32, "num_layers": 1, "num_heads": 2, "max_seq_len": 64}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture(scope="module")
def subject(config):
    return Subject(config, is_fake=True)


def _cost(subject, batch=4, tokens=64, **options):
    return cost_of(subject, H100, batch=batch, tokens=tokens, **options)


def test_parts_add_up_and_private_training_keeps_gradients_of_samples(subject):
    plain, private = (_cost(subject, tokens=8, mode=mode) for mode in (None, "instantiate"))
    count = sum(p.numel() for p in subject.model.parameters())
    for one in (plain, private):
        assert set(one.parts) == set(PARTS) and one.seconds > 0
        assert sum(one.parts.values()) == one.memory_bytes > 0
        assert one.parts["weights"] == 4 * count
        assert one.parts["optimizer state"] >= 8 * count
    assert plain.modes == {} and plain.parts["per-sample gradients"] == 0
    assert set(private.modes) == {"instantiate"}
    assert private.parts["per-sample gradients"] == 4 * 4 * count
    assert private.seconds > plain.seconds
    free, tight = (_cost(subject, memory=memory) for memory in (None, 4))
    assert not free.is_limited and "ghost" not in free.modes
    assert tight.is_limited and set(tight.modes) == {"ghost"}


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_private_step_takes_no_less_time_than_a_plain_step(norm, tmp_path):
    """Also if reading the output gradients for biases takes most of the time of gradients."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "norm": norm}))
    subject = Subject(str(tmp_path / "config.json"), is_fake=True)
    for microbatch in (None, 16):
        sizes = {"batch": 64, "tokens": 2048, "microbatch": microbatch}
        plain = cost_of(subject, CPU_RULE, mode=None, **sizes).seconds
        for mode in ("auto", "instantiate", "book_keeping", "ghost"):
            assert cost_of(subject, CPU_RULE, mode=mode, **sizes).seconds > plain, mode


@pytest.mark.cases(0)
def test_json_has_the_fields_that_scripts_rely_on(config, capsys):
    sizes = ["--seq-len", "64", "--batch-size", "4", "--memory", "4MB"]
    assert main(["estimate", "--model", config, *sizes, "--device", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for one in (found, found["plain"], *found["by_mode"].values()):
        assert sum(one["parts"].values()) == one["memory_bytes"] > 0
        assert one["step_seconds"] > 0
    checkpointed = found["with_checkpointing"]["private"]["parts"]
    assert 0 < checkpointed["activations"] < found["parts"]["activations"]
    assert found["fits"]["largest_batch_size"]["private"] >= 4
    assert found["fits"]["longest_seq_len"]["private"] >= 64
    assert found["memory_budget"] == 10**6 and found["modes_limited_by"] in ("memory", "time")


@pytest.mark.cases(0)
def test_memory_and_time_grow_with_tokens_and_batch_and_shrink_with_ranks(subject):
    first = _cost(subject)
    for larger in (_cost(subject, tokens=128), _cost(subject, batch=8)):
        assert larger.memory_bytes > first.memory_bytes and larger.seconds > first.seconds
    one, two, four = (_cost(subject, batch=2, tokens=2048, ranks=n) for n in (1, 2, 4))
    assert one.memory_bytes > two.memory_bytes > four.memory_bytes
    assert _cost(subject, microbatch=1).memory_bytes < first.memory_bytes


@pytest.mark.cases(0)
def test_deferred_pairs_are_smaller_and_two_backwards_slower(subject):
    stored, kept, ghost = (
        _cost(subject, tokens=8, mode=mode) for mode in ("instantiate", "book_keeping", "ghost")
    )
    most = stored.parts["per-sample gradients"]
    assert kept.parts["per-sample gradients"] < most / 4
    assert ghost.seconds > kept.seconds > stored.seconds


@pytest.mark.cases(0)
def test_a_sum_of_several_microbatches_is_in_float64(subject):
    whole, parts = (_cost(subject, tokens=8, mode="instantiate", microbatch=n) for n in (None, 2))
    count = sum(p.numel() for p in subject.model.parameters())
    assert whole.parts["clipped sums"] == 4 * count
    assert parts.parts["clipped sums"] == 8 * count


@pytest.mark.cases(0)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM"])
def test_models_of_transformers_are_estimated_with_and_without_adapters(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    kinds = {"LlamaForCausalLM": "Llama", "GPT2LMHeadModel": "GPT2", "BertForMaskedLM": "Bert"}
    config = getattr(transformers, f"{kinds[name]}Config")(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    whole, adapted = (Subject(str(tmp_path), rank, is_fake=True) for rank in (None, 4))
    assert type(whole.model).__name__ == name
    first, second = (_cost(one, batch=2, tokens=16) for one in (whole, adapted))
    assert second.parts["optimizer state"] < first.parts["optimizer state"]
    assert second.memory_bytes < first.memory_bytes


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("size", "limit", "first", "most"),
    [
        (lambda n: 1000 + 7 * n + n * n // 10**6, 10**6, 1, 12),
        (lambda n: max(14_400, 8_000 + 2 * n), 80_000, 1024, 5),  # other parts peak in small ones
    ],
)
def test_the_largest_number_that_fits_is_found_in_few_guesses(size, limit, first, most):
    guesses = []
    found = largest(lambda n: guesses.append(n) or size(n), limit, first=first)
    assert size(found) <= limit < size(round(1.02 * found)) and len(guesses) <= most
    assert largest(size, limit, first=8, most=100) == 100
    assert largest(size, 10, first=8) is None


def test_each_step_is_followed_once_and_shown_on_stderr(config, capsys, monkeypatch):
    followed = []

    def note(of, ceilings, **given):
        followed.append((id(of), *given.items()))
        return cost_of(of, ceilings, **given)

    monkeypatch.setattr(estimate, "cost_of", note)
    assert main(["estimate", "--model", config, "--device", "h100", "--memory", "1MB"]) == 0
    assert len(followed) == len(set(followed)) > 8
    printed, shown = capsys.readouterr()
    assert "longest sequence" in printed and "estimate: 1step" in shown


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("80GB", 80 * 10**9),
        ("512 MiB", 2**29),
        ("1.5tb", 1.5 * 10**12),
        ("7000", 7000),
        (1e3, 1000),
    ],
)
def test_bytes_are_understood_with_their_unit(value, expected):
    assert _validate.bytes_of(memory=value) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "missing"], "--model 'missing': there is no missing; pass the folder"),
        (["--seq-len", "0"], "--seq-len 0: expected an integer"),
        (["--seq-len", "2", "--ranks", "4"], "--ranks 4 for --seq-len 2: .*pass fewer ranks"),
        (["--memory", "80 apples"], "--memory '80 apples': expected bytes; .*'80GB'"),
        (["--memory", "80"], "--memory .80.: expected bytes; .*.80GB."),
        (
            ["--lora-rank", "4"],
            "--lora-rank 4 with --model .*: adapters are for models of transform",
        ),
    ],
)
def test_a_refusal_names_the_argument_its_value_and_the_way_out(config, capsys, options, message):
    given = options if "--model" in options else ["--model", config, *options]
    assert main(["estimate", *given, "--device", "h100"]) == 2
    assert re.search(message, capsys.readouterr().err)
