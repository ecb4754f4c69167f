"""DPTrainer: parameters and epsilon of a plain loop, and nothing private in what it writes."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_runs import TINY, gpt2, largest_difference, llama, lora, quiet
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import dpflash
from dpflash.accounting import PoissonGaussian
from dpflash.privacy.ledger import Ledger, today

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

from dpflash.integrations import trainer as trainer_module  # noqa: E402
from dpflash.integrations.transformers import DPTrainer  # noqa: E402
from dpflash.release.export import export  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-3


def bert_config(**changes):
    return transformers.BertConfig(**TINY, **changes)


def bert():
    return transformers.BertForSequenceClassification(bert_config(num_labels=3))


def masked_bert():
    return transformers.BertForMaskedLM(bert_config())


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=23, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def prompted():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(gpt2(), config)


MODELS = {
    "llama": llama,
    "gpt2": gpt2,
    "llama-lora": lambda: lora(llama, "q_proj", "down_proj"),
    "gpt2-lora": lambda: lora(gpt2, "c_attn"),
    "bert": bert,
}


def built(name):
    torch.manual_seed(0)
    return MODELS[name]()


def next_tokens(logits, labels):
    return dpflash.losses.cross_entropy(logits[:, :-1], labels[:, 1:])


def samples(name, count=32):
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        tokens = torch.randint(1, 23, (8,), generator=generator)
        labels = tokens.clone()
        labels[: i % 4 + 1] = -100  # each sample has its own number of valid labels
        found.append({"input_ids": tokens, "labels": i % 3 if name == "bert" else labels})
    return found


def engine(tmp_path):
    return dpflash.PrivacyEngine(seed=0, ledger=tmp_path / "ledger")


def arguments(tmp_path, **changes):
    return transformers.TrainingArguments(**quiet(tmp_path, **changes))


def trainer(tmp_path, name="llama", physical_batch_size=None, privacy=None, args=None, **options):
    options.setdefault("engine", engine(tmp_path))
    return options.pop("kind", DPTrainer)(
        model=options.pop("model", None) or built(name),
        args=args or arguments(tmp_path),
        train_dataset=options.pop("train_dataset", None) or samples(name),
        privacy=privacy
        or dpflash.PrivacyConfig(target_epsilon=3.0, target_delta=DELTA, max_grad_norm=1.0),
        performance=dpflash.PerformanceConfig(physical_batch_size=physical_batch_size),
        **options,
    )


def plain_loop(name, physical_batch_size=None, autocast=False, steps=8, **units):
    """The model, optimizer and engine of a loop in plain PyTorch."""
    plain, private = built(name), dpflash.PrivacyEngine(seed=0)
    loader = DataLoader(samples(name), batch_size=8, collate_fn=transformers.default_data_collator)
    trained = [p for p in plain.parameters() if p.requires_grad]
    plain, optimizer, loader = private.make_private_with_epsilon(
        module=plain,
        optimizer=torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0),
        data_loader=loader,
        target_epsilon=3.0,
        target_delta=DELTA,
        max_grad_norm=1.0,
        physical_batch_size=physical_batch_size,
        steps=steps,
        **units,
    )
    scheduler = transformers.get_scheduler("linear", optimizer, 0, steps)
    loss = dpflash.losses.cross_entropy if name == "bert" else next_tokens
    plain.train()
    for _ in range(-(-steps // len(loader))):
        for batch in loader:
            if optimizer.releases == steps:
                break
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = plain(input_ids=batch["input_ids"]).logits
            private.backward(loss(logits.float(), batch["labels"]))
            optimizer.step()
            optimizer.zero_grad()
            if loader.is_last:
                scheduler.step()
    return plain, optimizer, private


class Broken(list):
    """Of the first entries some are bad, as are the last ones."""

    def __getitem__(self, index):
        entry = dict(super().__getitem__(index))
        kind = index % 16
        if kind == 1:
            raise KeyError(f"no record of patient {index}")
        if kind in (0, 4):
            entry["input_ids"] = entry["input_ids"].clone()
            entry["input_ids"][3] = (400, -7)[kind // 4]
        if kind == 2:
            entry["labels"] = entry["labels"] + 400
        return None if kind == 5 else entry


def user_of(entry):
    return f"user {entry['input_ids'][1]}"  # of entry 5 there is none


@pytest.mark.parametrize("name", ["gpt2", "llama-lora", "bert", "t5"])
@pytest.mark.parametrize("has_users", [False, True], ids=["entries", "users"])
def test_bad_entries_end_nothing(name, has_users, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(MODELS, "t5", t5)
    units = {"unit_of": user_of, "examples_per_unit": 4, "unit_name": "user"} if has_users else {}
    asked = {"noise_multiplier": 1.0, "target_delta": DELTA, "max_grad_norm": 1.0, **units}
    trained = trainer(
        tmp_path,
        name,
        train_dataset=Broken(samples(name, 64)),
        privacy=dpflash.PrivacyConfig(**asked),
        args=arguments(tmp_path, max_steps=5),
    )
    assert trained.train().global_step == 5
    found = trained.engine.diagnostics()
    assert found["bad_entries"] > 0 and found["nonfinite_samples"] > 0
    assert all(bool(p.isfinite().all()) for p in trained.model.parameters())
    assert "patient" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("physical", [None, 3], ids=["whole", "microbatches"])
@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_epsilon_are_those_of_a_plain_loop(
    name, physical, checkpointing, bf16, tmp_path
):
    args = arguments(tmp_path, bf16=bf16, gradient_checkpointing=checkpointing)
    trained = trainer(tmp_path, name, physical, args=args)
    assert trained.train().global_step == 8
    plain, optimizer, private = plain_loop(name, physical, autocast=bf16)
    assert optimizer.releases == trained.optimizer.releases == 8
    assert trained.get_epsilon() == private.get_epsilon(DELTA)
    assert 2.9 < trained.get_epsilon() <= 3.0
    assert largest_difference(plain, trained.model) <= 1e-6
    assert largest_difference(built(name), trained.model) > 1e-3


def vit():
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 16}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, num_labels=3))


def whisper():
    sizes = {"vocab_size": 23, "d_model": 16, "num_mel_bins": 4, "max_target_positions": 16}
    sizes |= {"max_source_positions": 8, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = transformers.WhisperConfig(**sizes, **tokens, decoder_ffn_dim=16)
    return transformers.WhisperForConditionalGeneration(config)


def seen(build):
    """What each kind of model takes in place of tokens."""
    shape = {vit: ("pixel_values", (3, 8, 8)), whisper: ("input_features", (4, 16))}.get(build)
    entries = samples("bert" if build is vit else "llama")
    if shape is not None:
        for entry in entries:
            del entry["input_ids"]
            entry[shape[0]] = torch.randn(shape[1])
    return entries


@pytest.mark.parametrize("build", [masked_bert, t5, prompted, vit, whisper])
def test_losses_of_other_heads_are_the_models_own_for_one_sample(build, tmp_path, monkeypatch):
    """The trainer compares them itself, which it is seen to do."""
    compared = []
    of_one = trainer_module.other_loss
    monkeypatch.setattr(
        trainer_module, "other_loss", lambda *x: compared.append(of_one(*x)) or compared[-1]
    )
    torch.manual_seed(0)
    args = arguments(tmp_path, max_steps=2)
    trained = trainer(tmp_path, model=build(), args=args, train_dataset=seen(build))
    assert trained.train().global_step == 2
    assert compared == [None, None]


def test_a_model_whose_own_loss_has_more_terms_is_refused(tmp_path):
    def forward(self, input_ids, labels=None):
        outputs = transformers.LlamaForCausalLM.forward(self, input_ids, labels=labels)
        if labels is not None:
            outputs["loss"] = outputs["loss"] + 0.1 * outputs["logits"].logsumexp(-1).mean()
        return outputs

    kind = type("LlamaForCausalLM", (transformers.LlamaForCausalLM,), {"forward": forward})
    with pytest.raises(ValueError, match="its own loss is .*, and the mean over that sample's"):
        trainer(tmp_path, model=kind(llama().config)).train()


def test_a_model_without_a_known_loss_needs_one(tmp_path):
    class Other(transformers.LlamaForCausalLM):
        pass

    config = llama().config
    with pytest.raises(ValueError, match="Other: its per-sample loss.*compute_loss_func"):
        trainer(tmp_path, model=Other(config))

    def loss(outputs, labels, num_items_in_batch=None):
        assert num_items_in_batch is None
        return next_tokens(outputs.logits, labels)

    torch.manual_seed(0)
    args = arguments(tmp_path, max_steps=2)
    trained = trainer(tmp_path, model=Other(config), compute_loss_func=loss, args=args)
    trained.train()
    assert largest_difference(plain_loop("llama", steps=2)[0], trained.model) <= 1e-6


def test_a_loss_over_the_batch_is_refused(tmp_path):
    calls = []

    def loss(outputs, labels, num_items_in_batch=None):
        calls.append(1)
        losses = next_tokens(outputs.logits, labels)
        return losses.mean() if len(calls) > most else losses

    for most, error, lines in ((0, ValueError, 0), (20, dpflash.PrivateRefusal, 1)):
        calls.clear()
        where = tmp_path / str(most)
        where.mkdir()
        text = "compute_loss_func returned something else"
        with pytest.raises(error, match=text):
            trainer(where, compute_loss_func=loss).train()
        notes = (where / "ledger").read_text() if lines else ""
        assert notes.count("ended by a private refusal") == lines


def divided(outputs, labels, num_items_in_batch=None):
    return next_tokens(outputs.logits, labels) / (labels != 3).sum()


def weighted(outputs, labels, num_items_in_batch=None):
    losses = next_tokens(outputs.logits, labels)
    return losses * losses.detach().softmax(0)


def refused_before_the_first_draw(match, tmp_path, **options):
    made = trainer(tmp_path, **options)
    before = [p.detach().clone() for p in made.model.parameters()]
    with pytest.raises(ValueError, match=match):
        made.train()
    assert made.get_epsilon() == 0 and not (tmp_path / "ledger").exists()
    assert all(map(torch.equal, before, made.model.parameters()))


@pytest.mark.parametrize("loss", [divided, weighted])
def test_a_loss_that_depends_on_the_other_samples_is_refused(loss, tmp_path):
    match = r"made-up entry is \S+ alone and \S+ in a batch with others, so it depends"
    refused_before_the_first_draw(match, tmp_path, compute_loss_func=loss)


class Normalized(DPTrainer):
    def compute_loss(self, *inputs, **named):
        losses = super().compute_loss(*inputs, **named)
        return losses / losses.detach().mean()


def test_an_overridden_loss_that_depends_on_the_other_samples_is_refused(tmp_path):
    match = r"make_private\(example=...\): the loss of sample . is"
    refused_before_the_first_draw(match, tmp_path, kind=Normalized)
    # An example of your own is kept, and without trials there is none.
    example = transformers.default_data_collator(samples("llama", 1) * 2)
    asked = {"target_delta": DELTA, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    own = dpflash.PrivacyConfig(**asked, example=example)
    with pytest.raises(dpflash.PrivateRefusal, match="the loss of a sample changed"):
        trainer(tmp_path, kind=Normalized, privacy=own).train()
    untried = dpflash.PrivacyConfig(**asked, verify_first_batch=False)
    trainer(tmp_path, kind=Normalized, privacy=untried).train()


class Tower(torch.nn.Module):
    """A model of the user, whose loss nobody knows."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        return {"logits": self.head(x)}


class OwnLoss(DPTrainer):
    has_super = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.has_super:
            return super().compute_loss(model, inputs)
        outputs = model(inputs["x"])
        losses = torch.nn.functional.cross_entropy(
            outputs["logits"], inputs["of"], reduction="none"
        )
        return (losses, outputs) if return_outputs else losses


class OwnStep(DPTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs)).mean()
        self.accelerator.backward(loss)
        return loss.detach()


class UnpreparedStep(DPTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return model(**inputs).logits.mean()


def test_a_loss_that_a_subclass_computes_needs_no_other(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tower", Tower)
    data = [{"x": torch.randn(8), "of": torch.tensor(i % 3)} for i in range(32)]
    args = arguments(tmp_path, max_steps=3, remove_unused_columns=False)
    made = {"args": args, "train_dataset": data}
    trained = trainer(tmp_path, "tower", kind=OwnLoss, **made)
    trained.train()
    assert trained.state.global_step == 3 and trained.engine.verified is not False
    monkeypatch.setattr(OwnLoss, "has_super", True)
    with pytest.raises(ValueError, match="loss is not known.*or override compute_loss"):
        trainer(tmp_path, "tower", kind=OwnLoss, **made).train()
    with pytest.raises(ValueError, match="loss is not known.*or override compute_loss"):
        trainer(tmp_path, "tower", **made)


def test_a_step_that_a_subclass_makes_is_refused_by_name(tmp_path):
    for kind in (OwnStep, UnpreparedStep):
        with pytest.raises(TypeError, match="calls compute_loss for each of them: override that"):
            trainer(tmp_path, kind=kind).train()


def big_bird():
    attention = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    sizes = {**TINY, "max_position_embeddings": 128}
    config = transformers.BigBirdConfig(**sizes, **attention, num_labels=3)
    return transformers.BigBirdForSequenceClassification(config)


@pytest.mark.parametrize("tries", [True, False])
def test_made_up_samples_leave_the_model_as_it_was(tries, tmp_path, monkeypatch):
    """Such a short batch has BigBird exchange its attention layers for good."""
    monkeypatch.setitem(MODELS, "big_bird", big_bird)
    data = [
        {"input_ids": torch.randint(1, 23, (64,)), "attention_mask": [1] * 64, "labels": i % 3}
        for i in range(32)
    ]
    asked = {"target_delta": DELTA, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    privacy = dpflash.PrivacyConfig(**asked, verify_first_batch=tries)
    args = arguments(tmp_path, max_steps=2)
    made = trainer(tmp_path, "big_bird", privacy=privacy, args=args, train_dataset=data)
    modules = list(made.model.modules())
    made.train()
    assert list(made.model.modules()) == modules
    assert made.model.bert.attention_type == "block_sparse"


class Seeing(DPTrainer):
    def compute_loss(self, model, inputs, *more, **named):
        self.rows = [*getattr(self, "rows", []), len(inputs["input_ids"])]
        return super().compute_loss(model, inputs, *more, **named)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "masked", "padded"])
def test_training_is_the_same_with_and_without_made_up_samples(name, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "t5", t5)
    monkeypatch.setitem(MODELS, "masked", masked_bert)

    def found(tries):
        given = unequal("right") if name == "padded" else {}
        where = tmp_path / str(tries)
        where.mkdir()
        asked = {"target_delta": DELTA, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
        trained = trainer(
            where,
            "gpt2" if name == "padded" else name,
            privacy=dpflash.PrivacyConfig(**asked, verify_first_batch=tries),
            args=arguments(where, max_steps=2),
            kind=Seeing,
            **given,
        )
        trained.train()
        return trained

    tried, untried = found(True), found(False)
    assert tried.rows[:3] == [4, 4, 4] and 4 not in untried.rows
    assert largest_difference(tried.model, untried.model) == 0
    assert tried.state.log_history == untried.state.log_history


def random_weights(outputs, labels, num_items_in_batch=None):
    losses = next_tokens(outputs.logits, labels)
    return losses * torch.rand(len(losses))


def test_losses_that_are_random_are_not_taken_for_coupled_ones(tmp_path):
    args = arguments(tmp_path, max_steps=1)
    trainer(tmp_path, compute_loss_func=random_weights, args=args).train()


def test_a_setting_that_uploads_the_noise_key_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("COMET_LOG_ASSETS", "True")
    with pytest.raises(ValueError, match="COMET_LOG_ASSETS='True': the tracker uploads all"):
        trainer(tmp_path)


def unequal(side):
    """Samples of several lengths, and a function that pads them to the longest."""
    data = [{"input_ids": torch.arange(4, 4 + n), "labels": torch.arange(4, 4 + n)} for n in LONG]

    def collate(entries):
        longest = max(len(entry["input_ids"]) for entry in entries)

        def padded(x, value):
            missing = longest - len(x)
            return F.pad(x, (missing, 0) if side == "left" else (0, missing), value=value)

        batch = {
            "input_ids": torch.stack([padded(e["input_ids"], 0) for e in entries]),
            "labels": torch.stack([padded(e["labels"], -100) for e in entries]),
        }
        return batch | {"attention_mask": (batch["labels"] != -100).long()}

    return {"train_dataset": data, "data_collator": collate}


LONG = [5, 8, 6, 4, 7, 5, 8, 6] * 3


def test_padding_that_shifts_positions_is_refused(tmp_path):
    with pytest.raises(ValueError, match="how far it is padded: padding on the left"):
        trainer(tmp_path, "gpt2", **unequal("left")).train()
    trainer(tmp_path, "gpt2", args=arguments(tmp_path, max_steps=1), **unequal("right")).train()


def test_entries_without_labels_are_refused(tmp_path):
    data = [{"input_ids": torch.arange(5)} for _ in range(24)]
    with pytest.raises(ValueError, match="no 'labels', only 'input_ids': add them, or pass"):
        trainer(tmp_path, train_dataset=data).train()


class Sees(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **options):
        next(model.parameters()).register_hook(lambda grad: None)


def test_a_hook_that_would_see_sums_without_noise_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="has a hook, which would see sums"):
        trainer(tmp_path, callbacks=[Sees()]).train()


def test_an_evaluation_of_the_training_data_is_refused(tmp_path):
    made = trainer(tmp_path)
    for method in (made.evaluate, made.predict):
        for part in (made.train_dataset, torch.utils.data.Subset(made.train_dataset, [5])):
            with pytest.raises(ValueError, match="dataset to evaluate on is train_dataset"):
                method(part)


@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize("copied", ["all", "one, shorter", "none"])
def test_metrics_of_copies_of_drawn_rows_are_private(copied, chooses, tmp_path):
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randperm(22, generator=generator)[:12] + 1 for _ in range(24)]
    data = [{"input_ids": row, "labels": row} for row in rows[:16]]
    others = rows[16:] if copied == "none" else [row.clone() for row in rows[:8]]
    if copied == "one, shorter":  # padding on the right makes rows of one length of it
        others = [F.pad(rows[0], (0, 4)), *[F.pad(row, (0, 4)) for row in rows[16:]]]
    evaluated = [{"input_ids": row, "labels": row} for row in others]
    chosen = {"metric_for_best_model": "loss"} if chooses else {}
    args = arguments(tmp_path, eval_strategy="epoch", num_train_epochs=4, **chosen)
    made = trainer(tmp_path, train_dataset=data, eval_dataset=evaluated, args=args)
    if chooses and copied != "none":
        refused = "metric_for_best_model would choose.*leave metric_for_best_model"
        with pytest.raises(dpflash.PrivateRefusal, match=refused):
            made.train()
    else:
        made.train()
    logged = {key for entry in made.state.log_history for key in entry}
    assert ("eval_loss" in logged) == (copied == "none") and "epsilon" in logged
    if not chooses:
        assert made.evaluate(evaluated)["eval_loss"] > 0


def test_no_private_method_of_trainer_is_replaced():
    """Another version of transformers may have another name for it, or none."""
    replaced = {name for name in vars(DPTrainer) if name in vars(transformers.Trainer)}
    assert not [name for name in replaced if name.startswith("_") and not name.endswith("__")]


@pytest.mark.cases(0)
def test_more_steps_than_the_target_was_for_are_refused_when_resumed(tmp_path):
    privacy = dpflash.PrivacyConfig(target_epsilon=3.0, target_delta=DELTA, max_grad_norm=1.0)
    saves = {"save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path, privacy=privacy, args=arguments(tmp_path, max_steps=4, **saves)).train()
    longer = trainer(tmp_path, privacy=privacy, args=arguments(tmp_path, max_steps=8, **saves))
    for again in (True, True, None):
        with pytest.raises(ValueError, match="target_epsilon=3.0 for all steps of args needs"):
            longer.train(resume_from_checkpoint=again)


class Stop(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **options):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def resumed(tmp_path, killed_at, saved_every, **options):
    args = arguments(tmp_path, save_strategy="steps", save_steps=saved_every, **options)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, args=args, physical_batch_size=3, callbacks=[Stop(killed_at)]).train()
    again = trainer(tmp_path, args=args, physical_batch_size=3)
    assert again.train(resume_from_checkpoint=True).global_step == 8
    return again


def test_users_are_those_of_a_plain_loop_and_named_in_the_card(tmp_path):
    units = {"unit_of": [i // 2 for i in range(32)], "examples_per_unit": 2}
    units["unit_name"] = "patient"
    given = {"target_epsilon": 3.0, "target_delta": DELTA, "max_grad_norm": 1.0}
    trained = trainer(tmp_path, privacy=dpflash.PrivacyConfig(**given, **units))
    assert trained.train().global_step == 4  # 16 users, 8 in a step
    plain, _, private = plain_loop("llama", steps=4, **units)
    assert trained.get_epsilon() == private.get_epsilon(DELTA)
    assert largest_difference(plain, trained.model) <= 1e-6
    trained.save_model(str(tmp_path / "saved"))
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "| user: patient (unit_of), of which each draw uses at most 2" in card
    assert trained.engine.privacy_unit == "user: patient"
    # Whether drawn samples differ in length is not covered by epsilon.
    assert "lengths" not in json.loads((tmp_path / "saved" / "report.json").read_text())["public"]


def test_a_card_is_not_made_for_weights_that_its_report_does_not_describe(tmp_path):
    trained = trainer(tmp_path, args=arguments(tmp_path, max_steps=1))
    trained.train()
    saved = tmp_path / "saved"
    trained.save_model(str(saved))
    trained.model.save_pretrained(saved)
    export(saved, tmp_path / "same")
    with torch.no_grad():
        next(trained.model.parameters()).add_(1)
    trained.model.save_pretrained(saved)
    with pytest.raises(ValueError, match="its weights are not those that its report.json"):
        export(saved, tmp_path / "other")


def test_a_checkpoint_that_no_callback_loads_is_refused(tmp_path):
    args = arguments(tmp_path, save_strategy="steps", save_steps=1, max_steps=1)
    trainer(tmp_path, args=args).train()
    again = trainer(tmp_path, args=arguments(tmp_path, max_steps=2))
    again.remove_callback(trainer_module._Checkpoints)
    with pytest.raises(ValueError, match="the checkpoint was not loaded"):
        again.train(resume_from_checkpoint=True)


def test_a_bound_of_trainer_that_is_set_late_is_refused(tmp_path):
    late = trainer(tmp_path)
    late.args.max_grad_norm = 1.0
    with pytest.raises(ValueError, match="args.max_grad_norm was set after the trainer was made"):
        late.train()


def test_a_function_names_users_by_a_column_that_the_model_does_not_take(tmp_path):
    entries = [{**entry, "patient": i // 2} for i, entry in enumerate(samples("llama"))]
    private = dpflash.PrivacyConfig(
        noise_multiplier=1.0,
        target_delta=DELTA,
        max_grad_norm=1.0,
        unit_of=lambda entry: entry["patient"],
        examples_per_unit=2,
        unit_name="patient",
    )
    trained = trainer(tmp_path, privacy=private, train_dataset=datasets.Dataset.from_list(entries))
    assert trained.train().global_step == 4  # 16 users, 8 in a step


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    # Step 3 is written before the run is killed in the callbacks of step 4.
    args = arguments(tmp_path, save_strategy="steps", save_steps=3)

    class StopAfterSaving(transformers.TrainerCallback):
        def on_save(self, args, state, control, **options):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, args=args, callbacks=[StopAfterSaving()]).train()
    again = trainer(tmp_path, args=args)
    again.train(resume_from_checkpoint=True)
    plain, _, private = plain_loop("llama")
    assert again.get_epsilon() == private.get_epsilon(DELTA)
    assert largest_difference(plain, again.model) <= 1e-6
    epochs = [log["epoch"] for log in again.state.log_history if "learning_rate" in log]
    assert epochs == pytest.approx([step / 4 for step in range(1, 9)])


@pytest.mark.cases(0)
def test_lost_steps_stay_counted_when_an_older_checkpoint_is_resumed(tmp_path):
    again = resumed(tmp_path, killed_at=5, saved_every=3, save_total_limit=1)
    _, optimizer, private = plain_loop("llama")
    # Steps 4 and 5 were made twice.
    accountant = type(private.accountant)(neighboring_relation=private.neighboring_relation)
    for _ in range(10):
        accountant.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=0.25)
    assert again.get_epsilon() == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)
    assert len((tmp_path / "ledger").read_text().splitlines()) == 10
    assert [p.name for p in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-8"]


@pytest.mark.cases(0)
def test_a_checkpoint_without_spent_privacy_is_not_resumed(tmp_path):
    args = arguments(tmp_path, save_strategy="epoch", save_only_model=True)
    trainer(tmp_path, args=args).train()
    with pytest.raises(ValueError, match="which is missing"):
        trainer(tmp_path, args=args).train(resume_from_checkpoint=True)


class Watch(transformers.TrainerCallback):
    """Keeps what a tracker gets."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **options):
        self.logs.append(dict(logs))


class Logs(DPTrainer):
    """Logs in each microbatch and in each step."""

    def compute_loss(self, model, *inputs, **named):
        if model.training:
            self.log({"term": 1.0})
            self.log({"learning_rate": 1.0, "eval_term": 1.0})
        return super().compute_loss(model, *inputs, **named)

    def training_step(self, *inputs):
        loss = super().training_step(*inputs)
        self.log({"term": float(loss)})
        self.log({"eval_term": float(loss), "test_term": float(loss)})
        return loss


def test_nothing_private_is_logged_or_written(tmp_path):
    watch = Watch()
    args = arguments(tmp_path, save_strategy="epoch", eval_strategy="epoch")
    options = {"kind": Logs, "callbacks": [watch], "eval_dataset": samples("llama", 36)[32:]}
    trained = trainer(tmp_path, args=args, **options)
    result = trained.train()
    trained.save_metrics("train", result.metrics)
    trained.create_model_card()
    state = json.loads((tmp_path / "out/checkpoint-8/trainer_state.json").read_text())
    card = (tmp_path / "out/README.md").read_text()
    of_training = [log for log in watch.logs if "eval_loss" not in log]
    assert all(log.keys() <= {"learning_rate", "epoch", "epsilon"} for log in of_training)
    kept = [log for log in state["log_history"] if "eval_loss" not in log]
    assert all(log.keys() <= {"learning_rate", "epoch", "epsilon", "step"} for log in kept)
    assert [log["epsilon"] for log in kept] == sorted(log["epsilon"] for log in kept)
    assert len(kept) == 8 and kept[-1]["epsilon"] == trained.get_epsilon()
    assert len(of_training) == 9 and of_training[-1].keys() == {"epoch", "epsilon"}
    assert state["total_flos"] == 0 and state["num_input_tokens_seen"] == 0
    assert math.isnan(result.training_loss) and result.metrics.keys() == {"epsilon"}
    assert json.loads((tmp_path / "out/train_results.json").read_text()).keys() == {"epsilon"}
    shown = float(re.search(r"\| epsilon \| ([0-9.]+) \|\n\| delta \| 0\.001 \|", card)[1])
    assert trained.get_epsilon() <= shown < trained.get_epsilon() + 1e-3
    assert "seeded" in card
    assert "Training Loss" not in card
    assert any("eval_loss" in log for log in state["log_history"])


@pytest.mark.cases(0)
def test_private_metrics_are_logged_on_request(tmp_path):
    trained = trainer(tmp_path, physical_batch_size=3, log_private_metrics=True)
    result = trained.train()
    losses = [log["loss"] for log in trained.state.log_history if "loss" in log]
    assert len(losses) == 8 and all(1 < loss < 5 for loss in losses)
    assert "grad_norm" in trained.state.log_history[0]
    assert result.training_loss == pytest.approx(sum(losses) / 8)
    assert largest_difference(plain_loop("llama", 3)[0], trained.model) <= 1e-6


def test_the_saved_model_is_a_plain_one(tmp_path):
    step = PoissonGaussian(relation="zero_out", noise_multiplier=2.0, sample_rate=0.5)
    Ledger(tmp_path / "ledger").append(run="before", event=step, accountant="rdp")
    trained = trainer(tmp_path, args=arguments(tmp_path, max_steps=1))
    trained.train()
    trained.save_model()
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in files
    path = tmp_path / "out/README.md"
    card = path.read_text()
    assert "| run before | 1 | sample | zero_out |" in card and "| all together | 2 |" in card
    assert re.search(rf"run \w{{12}}, {today()}, seeded, this run \| 1 \|", card)
    assert "Whoever knows the seed of a seeded run" in card
    weights = tmp_path / "out/model.safetensors"
    assert weights.stat().st_mode == path.stat().st_mode
    assert card.startswith("# Model card\n\n## Differential privacy\n\nThe weights are (")
    path.write_text(f"---\n# spec\n---\n{card}\n## Usage\n\nmine\n")
    trained.save_model()
    assert path.read_text() == f"---\n# spec\n---\n{card}\n## Usage\n\nmine\n"
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert largest_difference(plain, trained.model) == 0
    assert type(plain) is transformers.LlamaForCausalLM


@pytest.mark.cases(0)
def test_the_ledger_lies_beside_the_checkpoints(tmp_path):
    args = arguments(tmp_path, save_strategy="epoch", max_steps=4)
    first = trainer(tmp_path, args=args, engine=None)
    first.train()
    assert first.engine.ledger == Path(args.output_dir) / "ledger.jsonl"
    assert not list((tmp_path / "out").glob("checkpoint-*/ledger*"))
    key = first.engine._keys.master
    assert not any(key in path.read_bytes() for path in (tmp_path / "out").glob("checkpoint-*/*"))
    assert [path.name for path in (tmp_path / "out/_secret").iterdir()] == ["checkpoint-4.pt"]
    second = trainer(tmp_path, args=args, engine=None)  # another run on the same data
    assert second.get_epsilon() == first.get_epsilon()
    with pytest.warns(UserWarning, match="ledger.jsonl holds releases of earlier runs"):
        second.train()
    assert second.get_epsilon() > first.get_epsilon()


REFUSED = {
    "auto_find_batch_size": True,
    "gradient_accumulation_steps": 2,
    "train_sampling_strategy": "group_by_length",
    "dataloader_drop_last": True,
    "label_smoothing_factor": 0.1,
    "max_grad_norm": 0.5,
    "use_liger_kernel": True,
    "neftune_noise_alpha": 1.0,
    "include_num_input_tokens_seen": "all",
    "torch_empty_cache_steps": 3,
    "debug": "underflow_overflow",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_cannot_be_private_is_refused_by_name(name, tmp_path):
    value = REFUSED[name]
    args = arguments(tmp_path, **{name: value})
    with pytest.raises(ValueError, match=re.escape(f"args.{name}={getattr(args, name)!r}")):
        trainer(tmp_path, args=args)


@pytest.mark.parametrize(
    ("name", "value"),
    [("deepspeed", {}), ("n_gpu", 2), ("world_size", 2), ("fp16", True), ("torch_compile", True)]
    + [("parallel_mode", "distributed")],
)
def test_what_this_machine_cannot_ask_for_is_refused_too(name, value, tmp_path, monkeypatch):
    args = arguments(tmp_path)
    monkeypatch.setattr(type(args), name, value)
    args.__dict__.pop(name, None)
    with pytest.raises(ValueError, match=f"args.{name}={value!r}"):
        trainer(tmp_path, args=args)


class Stream(IterableDataset):
    def __iter__(self):
        yield from samples("llama")


def test_other_options_that_cannot_be_private_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="train_dataset=Stream"):
        trainer(tmp_path, train_dataset=Stream(), args=arguments(tmp_path, max_steps=2))
    data = samples("llama")
    with pytest.raises(ValueError, match="dataset to evaluate on is train_dataset"):
        trainer(tmp_path, train_dataset=data, eval_dataset={"same": data})
    with pytest.raises(ValueError, match="model_init"):
        trainer(tmp_path, model_init=llama)
    with pytest.raises(ValueError, match="target_delta=None"):
        noise = dpflash.PrivacyConfig(noise_multiplier=1.0, max_grad_norm=1.0)
        trainer(tmp_path, privacy=noise)
    with pytest.raises(ValueError, match="engine without a ledger"):
        saving = arguments(tmp_path, save_strategy="epoch")
        trainer(tmp_path, engine=dpflash.PrivacyEngine(), args=saving)
    with pytest.raises(ValueError, match="hub_strategy='checkpoint'"):
        pushing = arguments(tmp_path, push_to_hub=True, hub_strategy="checkpoint")
        trainer(tmp_path, args=pushing)
    with pytest.raises(ValueError, match="hyperparameter_search"):
        trainer(tmp_path).hyperparameter_search()


class OwnLoader(DPTrainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=8, collate_fn=self.data_collator)


class OwnSampler(DPTrainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.WeightedRandomSampler(torch.ones(32), 32)


class OwnOptimizer(DPTrainer):
    def create_optimizer(self, *_):
        """As in layer-wise learning rates: it makes one whenever it is called."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.0)
        return self.optimizer


def test_a_subclass_that_draws_batches_is_refused_and_one_that_makes_its_optimizer_trains(
    tmp_path,
):
    with pytest.raises(
        ValueError, match="OwnLoader.get_train_dataloader .* samples the batches itself"
    ):
        trainer(tmp_path, kind=OwnLoader).train()
    with pytest.raises(ValueError, match="OwnSampler._get_train_sampler: .* data_collator="):
        trainer(tmp_path, kind=OwnSampler).train()
    trained = trainer(tmp_path / "own", "bert", kind=OwnOptimizer)
    trained.train()
    plain, *_ = plain_loop("bert")
    assert largest_difference(plain, trained.model) <= 1e-6


def test_targets_may_stand_in_the_configuration():
    model = nn.Linear(4, 2)
    made = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(torch.randn(32, 4), batch_size=8),
    }
    target = dpflash.PrivacyConfig(target_epsilon=3.0, target_delta=DELTA, max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"privacy.target_epsilon=3\.0 with make_private"):
        dpflash.PrivacyEngine().make_private(**made, privacy=target)
    with pytest.raises(ValueError, match="target_epsilon=2.* in one of the two"):
        dpflash.PrivacyEngine().make_private_with_epsilon(
            **made, privacy=target, target_epsilon=2.0, epochs=1
        )
    with pytest.raises(ValueError, match="noise_multiplier=1.* conflicts with target_epsilon"):
        dpflash.PrivacyConfig(
            noise_multiplier=1.0, target_epsilon=3.0, target_delta=DELTA, max_grad_norm=1.0
        )
    with pytest.raises(TypeError, match="epochs=None, steps=None: .* needs one"):
        dpflash.PrivacyEngine().make_private_with_epsilon(**made, privacy=target)
    private = dpflash.PrivacyEngine()
    _, by_steps, _ = private.make_private_with_epsilon(**made, privacy=target, steps=8)
    private.detach(model)
    by_keywords = dpflash.PrivacyEngine()
    _, by_epochs, _ = by_keywords.make_private_with_epsilon(
        **made, target_epsilon=3.0, target_delta=DELTA, max_grad_norm=1.0, epochs=2
    )
    assert by_steps.noise_multiplier == by_epochs.noise_multiplier


def test_another_call_of_train_goes_on_and_says_that_it_spends_more(tmp_path):
    trained = trainer(tmp_path, args=arguments(tmp_path, max_steps=2))
    trained.train()
    spent, model = trained.get_epsilon(), trained.model
    with pytest.warns(UserWarning, match=r"calibrated for 2 releases.*target_epsilon=3\.0"):
        trained.train()
    assert trained.model is model and trained.optimizer.releases == 4
    assert trained.get_epsilon() > spent


@pytest.mark.cases(0)
def test_a_budget_ends_training(tmp_path):
    budget = dpflash.PrivacyBudget(epsilon=2.0, delta=DELTA, when_spent="stop")
    privacy = dpflash.PrivacyConfig(
        noise_multiplier=1.0, target_delta=DELTA, max_grad_norm=1.0, budget=budget
    )
    trained = trainer(tmp_path, privacy=privacy)
    assert 1 <= trained.train().global_step < 8
    assert 1.5 < trained.get_epsilon() <= 2.0
    spent = trained.get_epsilon()
    again = trainer(tmp_path, privacy=privacy)
    with pytest.warns(UserWarning, match="is spent, so training ends before its first step"):
        assert again.train().global_step == 0
    assert again.get_epsilon() == spent
