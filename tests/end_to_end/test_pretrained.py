"""`dpflash train --model`: a causal language model of transformers, from folder to release."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import dpflash  # noqa: E402
from dpflash.cli import main  # noqa: E402
from dpflash.integrations.transformers import DPTrainer  # noqa: E402
from dpflash.privacy.spending import rounded_up  # noqa: E402
from dpflash.release.export import export  # noqa: E402
from dpflash.release.text_model import TextModel  # noqa: E402
from dpflash.train.config import Corpus, TrainingConfig  # noqa: E402
from dpflash.train.language_models import PretrainedModel, encode_texts  # noqa: E402
from dpflash.train.pretrained import CAUSAL, load_model  # noqa: E402
from dpflash.train.run import Interrupted, TrainingRun  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "empty_picture")
POSITIONS = 48


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama with a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("base") / "llama"
    level = tokenizers.pre_tokenizers.ByteLevel
    words = ["<s>", "</s>", *sorted(level.alphabet())]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{"vocab_size": len(words), "hidden_size": 16, "intermediate_size": 32},
            **{"num_hidden_layers": 1, "num_attention_heads": 2},
            **{"max_position_embeddings": POSITIONS, "bos_token_id": 0, "eos_token_id": 1},
        )
    ).save_pretrained(folder)
    return folder


@pytest.mark.cases(0)
@pytest.mark.parametrize("lora_rank", [2, None])
def test_a_pretrained_model_trains_on_packed_documents_and_goes_on(
    llama, notes, tmp_path, lora_rank
):
    config = TrainingConfig(
        **{"data": str(notes), "unit": "record", "model": str(llama), "lora_rank": lora_rank},
        **{"pack": True, "seq_len": 40, "physical_batch_size": 2, "batch_size": 6},
        **{"steps": 3, "delta": 1e-3, "accountant": "rdp", "checkpoint_every": 2, "seed": 5},
        **{"baseline": False},
    )
    whole = TrainingRun.start(config, tmp_path / "whole").run()
    calls = iter(range(9))
    with pytest.raises(Interrupted):
        TrainingRun.start(config, tmp_path / "cut").run(should_stop=lambda: next(calls) == 2)
    report = TrainingRun.resume(tmp_path / "cut").run()
    assert report["history"] == whole["history"]
    assert report["bits_per_token_after"] == whole["bits_per_token_after"]
    assert "packed" in report["privacy_unit"]


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "notes.jsonl"
    records = ({"text": f"note {i}: the fever is {36 + i % 5}"} for i in range(60))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def options(llama, notes, out, /, **changes):
    words = ["train", "--model", str(llama), "--data", str(notes), "--unit", "record"]
    words += ["--batch-size", "6", "--accountant", "rdp", "--delta", "1e-3", "--out", str(out)]
    for name, value in changes.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def test_lora_is_trained_killed_resumed_exported_loaded_and_generates(
    llama, notes, tmp_path, capsys, killed_after, monkeypatch
):
    run, out = tmp_path / "run", tmp_path / "out"
    sizes = {"lora_rank": 4, "steps": 8, "checkpoint_every": 2, "learning_rate": 0.05}
    killed_after(3, options(llama, notes, run, **sizes), run / "ledger.jsonl")
    before = len((run / "ledger.jsonl").read_text().splitlines())
    assert 3 <= before < 8
    assert main(["train", "--resume", str(run)]) == 0
    report = json.loads((run / "report.json").read_text())
    releases = len((run / "ledger.jsonl").read_text().splitlines())
    assert report["steps"] == 8 and releases == 8 + report["lost_steps"]
    words = ["epsilon", "--json", "--steps", str(releases), "--delta", "1e-3"]
    words += ["--accountant", "rdp", "--noise-multiplier", repr(report["noise_multiplier"])]
    capsys.readouterr()
    assert main([*words, "--sample-rate", repr(report["sample_rate"])]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == report["epsilon"]
    assert report["loss_per"] == "token" and report["bits_per_token_after"] is not None
    modes = {path.stat().st_mode for path in (run / "model").glob("adapter_*")}
    assert modes == {(run / "ledger.jsonl").stat().st_mode}
    assert main(["export", str(run), "--out", str(out)]) == 0
    assert "differentially private" in capsys.readouterr().out
    assert "(one record, a line of a JSONL file)" in (out / "README.md").read_text()
    # The adapters moved, and are in the weights of the export.
    tokens = torch.tensor([[0, 5, 6, 7]])
    plain, trained, merged = (
        model(input_ids=tokens).logits
        for model in (load_model(llama), dpflash.load(run), dpflash.load(out))
    )
    assert torch.allclose(trained, merged, atol=1e-5)
    assert (trained - plain).abs().max() > 1e-3
    for folder in (run, out):
        assert main(["generate", str(folder), "--prompt", "note ", "--max-new-tokens", "4"]) == 0
        assert capsys.readouterr().out.startswith("note ")
    ids = transformers.AutoTokenizer.from_pretrained(out)("note ", return_tensors="pt")
    model: Any = dpflash.load(out)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "dpflash", None)
        alone = transformers.AutoModelForCausalLM.from_pretrained(out)
    made = [one.generate(**ids, max_new_tokens=8, do_sample=False) for one in (model, alone)]
    assert torch.equal(*made)


@pytest.fixture(scope="module")
def trained(llama, tmp_path_factory):
    """The output_dir of a DPTrainer with adapters and two checkpoints, of two notes a patient."""
    peft = pytest.importorskip("peft")
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    data = [
        {"input_ids": ids, "labels": ids, "patient": number // 2}
        for number in range(24)
        for ids in [torch.tensor(tokenizer(f"note {number:02}: fever")["input_ids"])]
    ]
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    out = tmp_path_factory.mktemp("trained") / "out"
    trainer = DPTrainer(
        model=peft.get_peft_model(load_model(llama), adapters),
        args=transformers.TrainingArguments(
            **{"output_dir": str(out), "max_steps": 2, "save_strategy": "steps", "save_steps": 1},
            **{"per_device_train_batch_size": 4, "report_to": [], "use_cpu": True},
            **{"disable_tqdm": True, "learning_rate": 0.1},
        ),
        train_dataset=data,
        data_collator=transformers.default_data_collator,
        processing_class=tokenizer,
        privacy=dpflash.PrivacyConfig(
            **{"noise_multiplier": 1.0, "target_delta": 1e-3, "max_grad_norm": 1.0},
            **{"unit_of": lambda entry: entry["patient"], "examples_per_unit": 2},
            unit_name="patient",
        ),
    )
    trainer.train()
    return trainer


def test_what_a_trainer_wrote_is_exported_and_evaluated(trained, notes, tmp_path, capsys):
    out = Path(trained.args.output_dir)
    for number, keep in enumerate((False, True)):
        words = ["--keep-adapters"] if keep else []
        assert main(["export", str(out), "--out", str(tmp_path / str(number)), *words]) == 0
    names = {path.name for path in (tmp_path / "0").iterdir()}
    assert "model.safetensors" in names and not any("adapter" in name for name in names)
    names = {path.name for path in (tmp_path / "1").iterdir()}
    assert names - {"README.md", "tokenizer.json", "tokenizer_config.json"} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    card = (tmp_path / "0" / "README.md").read_text()
    assert (
        card.index("## ") == card.index("## Differential privacy")
        and "of a patient of the other" in card
    )
    assert "fine-tuned from llama" in card and str(tmp_path.parent) not in card
    assert f"| epsilon | {rounded_up(trained.get_epsilon())} |" in card
    tokens = torch.tensor([[0, 5, 6, 7]])
    expected = trained.model.eval()(input_ids=tokens).logits
    for folder in (out, out / "checkpoint-2", tmp_path / "0"):
        assert torch.allclose(dpflash.load(folder)(input_ids=tokens).logits, expected, atol=1e-5)
        words = ["evaluate", str(folder), "--data", str(notes), "--json"]
        capsys.readouterr()
        assert main(words) == 0 and json.loads(capsys.readouterr().out)["documents"] == 60


def test_an_older_checkpoint_is_not_exported_as_the_run(trained, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(trained.args.output_dir, out)
    shutil.rmtree(out / "checkpoint-2")
    with pytest.raises(ValueError, match="after 1 releases, and its ledger has 2; .*DPTrainer"):
        export(out, tmp_path / "release")
    export(out / "checkpoint-1", tmp_path / "release")  # asked for by name
    card = (tmp_path / "release" / "README.md").read_text()
    assert "| steps | 1 |" in card


@pytest.mark.cases(0)
def test_the_settings_of_a_trainer_are_audited(trained, tmp_path):
    out = tmp_path / "saved"
    trained.save_model(str(out))
    words = ["audit", "--run", str(out), "--canaries", "40", "--no-ranks", "--seed", "0"]
    assert main(words) == 0
    settings = json.loads((out / "audit.json").read_text())["settings"]
    assert settings["steps"] == 2 and settings["sample_rate"] == 4 / 12
    assert "user: patient" in settings["privacy_unit"] and settings["clipping"] == "flat"
    card = (export(out, tmp_path / "release") / "README.md").read_text()
    assert "### Audit" in card and "nothing refuted the claim" in card


def test_all_parameters_are_trained_without_lora_and_windows_fit_the_model(
    llama, notes, tmp_path, capsys
):
    folder = tmp_path / "long"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"{number} " * 40)
    words = options(llama, folder, tmp_path / "run", steps=2, learning_rate=0.01)
    words[words.index("record")] = "file"
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert f"windows of {POSITIONS} tokens (not 2048: the model takes no more)" in shown
    before, after = load_model(llama).state_dict(), dpflash.load(tmp_path / "run").state_dict()
    assert not [name for name in before if torch.equal(before[name], after[name])]
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Bytes are tokens here, and each document has an end token.
    assert found["tokens"] == sum(p.stat().st_size + 1 for p in folder.iterdir())
    assert found["bits_per_byte"] > found["bits_per_token"]


def test_adapters_are_exported_as_they_are_if_asked(llama, notes, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(options(llama, notes, run, lora_rank=2, steps=1)) == 0
    assert main(["export", str(run), "--out", str(out), "--keep-adapters"]) == 0
    assert not (out / "model.safetensors").exists()
    # No path of this machine.
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == (
        "llama"
    )
    with pytest.raises(ValueError, match="the adapters belong to the model in 'llama', which is"):
        dpflash.load(out)


def test_tokens_of_a_text_stand_between_start_and_end(llama):
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    (ids,) = encode_texts(tokenizer, [b"ab"], 300)
    assert ids[0] == 0 and ids[-1] == 1 and len(ids) == 4
    # A tokenizer without such tokens: the first token of the text is never a target.
    tokenizer.bos_token = tokenizer.eos_token = None
    (ids,) = encode_texts(tokenizer, [b"ab"], 300)
    assert len(ids) == 2
    with pytest.raises(dpflash.PrivateRefusal, match="not one of the model.s 8 tokens; pass"):
        encode_texts(tokenizer, [b"ab"], 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "nowhere"}, "no such folder; nothing is downloaded"),
        ({"tokenizer": "nowhere"}, "tokenizer='.*nowhere': no such folder"),
        ({"lora_rank": 0}, "lora_rank=0"),
        ({"heads": 2}, "heads=2 with model="),
        ({"pattern": "dense"}, "pattern='dense' with model="),
        ({"model": None, "lora_rank": 2}, "lora_rank=2 needs model"),
        ({"model": None, "tokenizer": "x"}, "tokenizer='x' needs model"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_the_model_are_refused(changes, message, llama, notes, tmp_path):
    given = {"model": str(llama), "data": str(notes), "unit": "record", "batch_size": 6}
    with pytest.raises(ValueError, match=message):
        TrainingRun.start(TrainingConfig(**{**given, **changes}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_of_an_empty_folder_is_refused(llama, notes, tmp_path):
    with pytest.raises(ValueError, match=r"the folder has no config\.json"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="max_new_tokens=99 after a prompt of 2 tokens"):
        TextModel(llama).generate("a", max_new_tokens=99)


def test_a_folder_of_adapters_is_no_model_to_train(llama, tmp_path):
    adapted = tmp_path / "adapted"
    shutil.copytree(llama, adapted)
    (adapted / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds LoRA adapters. Merge them into their model"):
        PretrainedModel(TrainingConfig(model=str(adapted)))


def test_evaluation_documents_do_not_train(llama, notes, tmp_path):
    given = {"model": str(llama), "data": str(notes), "unit": "record", "batch_size": 6}
    first, *others = notes.read_text().splitlines(keepends=True)
    (tmp_path / "some.jsonl").write_text(first + json.dumps({"text": "another note"}) + "\n")
    documents = Corpus.read(TrainingConfig(**given, eval_data=str(tmp_path / "some.jsonl")))
    # What is evaluated does not depend on what trains.
    assert documents.held_out.contents == (json.loads(first)["text"].encode(), b"another note")
    assert documents.train.contents == tuple(json.loads(x)["text"].encode() for x in others)
    (tmp_path / "copy.jsonl").write_text(notes.read_text())
    with pytest.raises(ValueError, match="all documents to train on are in it"):
        Corpus.read(TrainingConfig(**given, eval_data=str(tmp_path / "copy.jsonl")))


def test_temperature_0_takes_the_likeliest_token_whatever_the_model_s_own_settings(
    llama, tmp_path
):
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    settings = {"num_beams": 3, "repetition_penalty": 5.0, "do_sample": True, "eos_token_id": 1}
    (other / "generation_config.json").write_text(json.dumps(settings))
    given = {"prompt": "note", "max_new_tokens": 12, "temperature": 0.0}
    assert TextModel(other).generate(**given) == TextModel(llama).generate(**given)


def test_the_space_between_prompt_and_continuation_is_kept(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "words")
    words = {"<s>": 0, "</s>": 1} | {f"\u2581w{number}": number for number in range(2, 258)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(tmp_path / "words")
    text = TextModel(tmp_path / "words").generate("w7 w8", max_new_tokens=3, seed=0)
    assert re.fullmatch(r"w7 w8( w\d+){1,3}", text), text


def test_bits_per_byte_need_a_prediction_of_every_byte(llama, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    tokenizer.bos_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(other)
    assert TextModel(llama).evaluate([b"a note"]).bits_per_byte is not None
    assert TextModel(other).evaluate([b"a note"]).bits_per_byte is None


@pytest.mark.parametrize("library", ["transformers", "peft"])
def test_a_missing_library_is_named(library, llama, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ValueError, match=rf"needs {library}; pip install 'dpflash\[transformers\]'"
    ):
        PretrainedModel(TrainingConfig(model=str(llama), lora_rank=2))


def test_an_encoder_is_refused_as_a_model_to_train(llama, tmp_path):
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
    for kind, config in (
        (transformers.BertForMaskedLM, transformers.BertConfig),
        (transformers.RobertaForMaskedLM, transformers.RobertaConfig),
    ):
        folder = tmp_path / kind.__name__
        kind(config(**sizes)).save_pretrained(folder)
        with pytest.raises(ValueError, match="sees later tokens"):
            load_model(folder, head=CAUSAL)
        kind(config(**sizes, is_decoder=True)).save_pretrained(folder)
        load_model(folder, head=CAUSAL)
