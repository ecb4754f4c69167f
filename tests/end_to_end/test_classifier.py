"""`dpflash train --label-field`: a classifier of texts, from folder to release."""

import json
import math
import re
import shutil

import pytest
import torch

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

import dpflash  # noqa: E402
from dpflash.cli import main  # noqa: E402
from dpflash.release.text_classifier import TextClassifierModel  # noqa: E402
from dpflash.train.config import Parallelism, TrainingConfig  # noqa: E402
from dpflash.train.data import ByteDocuments, LabelledTexts  # noqa: E402
from dpflash.train.language_models import TextClassifier  # noqa: E402
from dpflash.train.run import Interrupted, TrainingRun  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "empty_picture")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "fever", "none", "today", "note"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A tiny BERT without a head, and a tokenizer of words."""
    folder = tmp_path_factory.mktemp("base") / "bert"
    numbers = {word: number for number, word in enumerate(WORDS)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 12, "vocab_size": len(WORDS)}
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    """Two notes of each patient, and a line with a label that nobody named."""
    path = tmp_path_factory.mktemp("data") / "notes.jsonl"
    records = [
        {"text": f"note {'fever' if i % 3 else 'none'} " + "today " * (i % 12)}
        | {"label": "ill" if i % 3 else True, "patient_id": f"p{i // 2}"}
        for i in range(120)
    ]
    records.append({"text": "note", "label": "rare", "patient_id": "p0"})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def given(bert, notes, **changes):
    return {
        **{"data": str(notes), "unit": "field:patient_id", "model": str(bert), "delta": 1e-3},
        **{"label_field": "label", "labels": ["true", "ill"], "batch_size": 10, "steps": 3},
        **{"accountant": "rdp", "examples_per_unit": 2, "seed": 1, **changes},
    }


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_classifier_is_trained_evaluated_exported_and_loaded(
    lora_rank, bert, notes, tmp_path, capsys
):
    run, out = tmp_path / "run", tmp_path / "out"
    words = ["train", "--data", str(notes), "--unit", "field:patient_id", "--model", str(bert)]
    words += ["--label-field", "label", "--labels", "true", "ill", "--batch-size", "30"]
    words += ["--steps", "60" if lora_rank else "30", "--noise-multiplier", "0.01"]
    words += ["--delta", "1e-3", "--no-baseline"]
    words += ["--accountant", "rdp", "--lr", "0.02", "--seed", "1", "--out", str(run)]
    assert main([*words, *(["--lora-rank", "2"] if lora_rank else [])]) == 0
    shown = capsys.readouterr().out
    left_out = "left out: 1 with a label in 'label' that is none of the labels"
    assert left_out in shown and re.search(r"\d records? of \d+ other patient_ids? held", shown)
    assert re.search(r"texts of 12 tokens .*, Adam with learning rate 0.02\n", shown)
    assert "held-out accuracy after private training" in shown and "texts per second" in shown
    assert f"next: dpflash evaluate {run} --data FILE --label-field label, or" in shown
    assert not (run / "model" / "README.md").exists()  # PEFT's template
    report = json.loads((run / "report.json").read_text())
    assert report["accuracy_after"] == 1 and report["bits_per_text_after"] < 0.1
    assert "the label and the first tokens of each, clipped as one" in report["privacy_unit"]
    assert main(["evaluate", str(run), "--data", str(notes), "--label-field", "label"]) == 0
    shown = capsys.readouterr().out
    assert f"data           {notes}" in shown and "accuracy       1.0000" in shown
    assert "true   4      1.0000  1.0000" in shown and "do not publish them" in shown
    assert main(["evaluate", str(run), "--data", str(notes), "--unit", "record"]) == 2
    assert (
        "to evaluate a text classifier pass --label-field NAME to dpflash evaluate"
        in capsys.readouterr().err
    )
    assert main(["export", str(run), "--out", str(out)]) == 0
    card = (out / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "AutoModelForSequenceClass" in card
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    texts = tokenizer(
        ["note fever", "note none today today today"], padding=True, return_tensors="pt"
    )
    found = model(**texts).logits
    assert [model.config.id2label[int(n)] for n in found.argmax(-1)] == ["ill", "true"]
    assert torch.allclose(dpflash.load(run)(**texts).logits, found, atol=1e-5)


def test_recall_and_precision_of_a_label_count_its_texts_and_its_predictions(bert, tmp_path):
    """All texts are predicted as "no"; no text is predicted as "yes", and none is "rare"."""
    head = {"num_labels": 3, "id2label": {0: "no", 1: "yes", 2: "rare"}}
    model = transformers.BertForSequenceClassification.from_pretrained(bert, **head)
    torch.nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data = torch.tensor([1.0, 0.0, 0.0])
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    found = TextClassifierModel(tmp_path).evaluate([b"no\0fever", b"yes\0none", b"no\0today"])
    assert found.accuracy == 2 / 3 and found.by_label == {
        "no": {"texts": 2, "recall": 1.0, "precision": 2 / 3},
        "yes": {"texts": 1, "recall": 0.0, "precision": None},
        "rare": {"texts": 0, "recall": None, "precision": None},
    }


def test_class_weights_multiply_the_losses_of_a_step_and_are_recorded(bert, tmp_path):
    """All texts are in the step, so its loss and its gradient can be computed by hand."""
    base, data = tmp_path / "base", tmp_path / "notes.jsonl"
    shutil.copytree(bert, base)
    config = json.loads((base / "config.json").read_text())
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (base / "config.json").write_text(json.dumps({**config, **no_dropout}))
    texts = ["note " + "today " * i for i in range(8)]
    rows = [{"text": t, "label": ["true", "ill"][i < 2]} for i, t in enumerate(texts)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = given(base, data, unit="record", examples_per_unit=None, eval_fraction=0.0)
    options |= {"batch_size": 8, "steps": 1, "target_epsilon": None, "noise_multiplier": 0}
    options |= {"max_grad_norm": 100.0, "class_weights": (0.25, 3)}
    job = TrainingRun.start(TrainingConfig(**options), tmp_path / "run")
    kind = TextClassifier(job.config)
    plain = kind.build()
    plain.load_state_dict(job.model.state_dict())
    report = job.run()
    documents = kind.encode([f"{row['label']}\0{row['text']}".encode() for row in rows])
    windows = LabelledTexts(documents, 12, key=bytes(16), padding=-1)
    inputs, labels = map(torch.stack, zip(*(windows[i] for i in range(8)), strict=True))
    each = torch.nn.functional.cross_entropy(kind.logits(plain, inputs), labels, reduction="none")
    loss = (each * torch.tensor([3.0] * 2 + [0.25] * 6)).sum() / 8
    assert report["history"][0]["loss"] == pytest.approx(loss.item() / math.log(2), rel=1e-4)
    loss.backward()
    found = job._optimizer.state[job.model.classifier.weight]["exp_avg"] / 0.1
    assert torch.allclose(found, plain.classifier.weight.grad, rtol=1e-3, atol=1e-5)
    assert report["config"]["class_weights"] == [0.25, 3.0]
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| class weights | true: 0.25, ill: 3, stated as public |" in card
    with pytest.raises(ValueError, match=r"the run to resume has class_weights=\[0.25, 3.0\]"):
        TrainingRun.resume(tmp_path / "run", {"class_weights": [1, 3]})


@pytest.mark.cases(0)
def test_a_resumed_classifier_is_the_uninterrupted_one(bert, notes, tmp_path):
    config = TrainingConfig(**given(bert, notes, steps=2, checkpoint_every=1))
    whole = TrainingRun.start(config, tmp_path / "whole")
    report = whole.run()
    calls = iter(range(9))
    with pytest.raises(Interrupted):
        TrainingRun.start(config, tmp_path / "cut").run(should_stop=lambda: next(calls) == 1)
    resumed = TrainingRun.resume(tmp_path / "cut")
    again = resumed.run()
    assert again["history"] == report["history"]
    assert again["accuracy_after"] == report["accuracy_after"]
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


def test_padding_does_not_reach_a_text(bert, notes):
    """The loss of a text is the same alone and padded, and the tokens are the tokenizer's."""
    kind = TextClassifier(TrainingConfig(**given(bert, notes)))
    (document,) = kind.encode([b"ill\0note fever"])
    assert document.tolist() == [1, 2, 7, 4, 3]
    model = kind.build().eval()
    for parameter in model.parameters():
        parameter.data.normal_()
    losses = []
    for length in (4, 9):
        inputs, label = LabelledTexts([document], length, key=bytes(16), padding=-1)[0]
        assert inputs.tolist() == [2, 7, 4, 3, *[-1] * (length - 4)] and label == 1
        losses.append(kind.losses(model, inputs[None], label[None]))
    assert torch.allclose(*losses, rtol=1e-4, atol=1e-4)


def test_equal_texts_with_two_labels_are_two_documents(notes):
    lines = [{"text": "a", "of": x, "label": y} for x, y in (("p", 0), ("p", 1), ("q", 0))]
    path = notes.with_name("equal.jsonl")
    lines += [lines[0], {"text": "a", "of": "p"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = ByteDocuments.read(path, unit="field:of", label_field="label", labels=["0", "1"])
    assert found.contents == (b"0\0a", b"1\0a", b"0\0a") and found.owners == ("p", "p", "q")
    assert found.left_out == "1 duplicate, 1 without a label in 'label'"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "a classifier needs the field of the label, and the names of all"),
        ({"labels": ["a"]}, "expected at least two"),
        ({"labels": ["a", "a"]}, "none of them twice"),
        ({"model": None}, "is fine-tuned on records, each with a text and a label"),
        ({"unit": "folder"}, "pass model, unit='record' or 'field:NAME', and no pack"),
        ({"pack": True}, "and no pack"),
        (
            {"class_weights": [1, 2], "labels": None, "label_field": None},
            r"class_weights=\[1, 2\] needs labels",
        ),
        ({"class_weights": [1]}, r"class_weights=\[1\] with labels=.* one number for each label"),
        ({"class_weights": [0, 0]}, "the largest of them from 1e-30"),
        ({"class_weights": [1, 1e39]}, "the largest of them from 1e-30"),
        ({"class_weights": {1, 3}}, "expected a list, in the labels' order"),
        ({"class_weights": [1, -1]}, "class_weights=-1: expected a number >= 0"),
        ({"class_weights": [1, math.nan]}, "class_weights=nan: expected a number"),
        ({"class_weights": [1, math.inf]}, "class_weights=inf: expected a finite number"),
    ],
    ids=str,
)
def test_options_that_make_no_classifier_are_refused(changes, message, bert, notes):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**given(bert, notes, **changes))


def test_a_context_is_refused_for_a_classifier(bert, notes):
    with pytest.raises(ValueError, match="context_parallel=2 with label_field='label'"):
        Parallelism(context_parallel=2).check(TrainingConfig(**given(bert, notes)))
