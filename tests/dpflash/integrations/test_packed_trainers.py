"""DPTrainer and DPSFTTrainer on packed documents: parameters and epsilon of a plain loop."""

import math

import pytest
import torch
from small_runs import largest_difference, quiet, quiet_trl, tokenizer
from small_runs import llama as small_llama
from torch.utils.data import DataLoader

import dpflash
from dpflash.packing import PackTo

transformers = pytest.importorskip("transformers")

from dpflash.integrations.transformers import DPTrainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DELTA = 1e-3
PACK = PackTo(tokens=32, max_documents=6, rows=2)


def llama():
    torch.manual_seed(0)
    return small_llama(initializer_range=0.2)


def documents(count=32):
    """The longest is of both rows of a microbatch."""
    generator = torch.Generator().manual_seed(1)
    lengths = [24 if i == 5 else 3 + i % 7 for i in range(count)]
    return [{"input_ids": torch.randint(3, 23, (n,), generator=generator)} for n in lengths]


def trainer(tmp_path, *, model=None, dataset=None, args=None, **more):
    return DPTrainer(
        model=model or llama(),
        args=transformers.TrainingArguments(
            **quiet(tmp_path, **{"num_train_epochs": 1, **(args or {})})
        ),
        train_dataset=dataset or documents(),
        data_collator=PACK,
        privacy=dpflash.PrivacyConfig(target_epsilon=3.0, target_delta=DELTA, max_grad_norm=1.0),
        engine=dpflash.PrivacyEngine(seed=0, ledger=tmp_path / "ledger"),
        **more,
    )


def plain_loop(dataset, pack, steps=4):
    model, engine = llama(), dpflash.PrivacyEngine(seed=0)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0),
        data_loader=DataLoader(dataset, batch_size=8, collate_fn=pack),
        target_epsilon=3.0,
        target_delta=DELTA,
        max_grad_norm=1.0,
        steps=steps,
    )
    scheduler = transformers.get_scheduler("linear", optimizer, 0, steps)
    for batch in loader:
        logits = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        losses = dpflash.losses.causal_lm(
            logits,
            batch.labels,
            sample_index=batch.sample_index,
            num_samples=batch.max_documents,
        )
        engine.backward(losses)
        optimizer.step()
        optimizer.zero_grad()
        if loader.is_last:
            scheduler.step()
    assert optimizer.releases == steps
    return model, engine


def test_parameters_and_epsilon_of_packed_documents_are_those_of_a_plain_loop(tmp_path):
    trained = trainer(tmp_path)
    # A cache would have documents see each other.
    trained.model.config.use_cache = True
    assert trained.train().global_step == 4
    plain, engine = plain_loop(documents(), PACK)
    assert trained.get_epsilon() == engine.get_epsilon(DELTA)
    assert largest_difference(plain, trained.model) <= 1e-6
    assert largest_difference(llama(), trained.model) > 1e-3


class StopAfterSaving(transformers.TrainerCallback):
    def on_save(self, args, state, control, **options):
        raise KeyboardInterrupt


@pytest.mark.cases(0)
def test_a_resumed_run_of_packed_documents_is_the_uninterrupted_one(tmp_path):
    args = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, args=args, callbacks=[StopAfterSaving()]).train()
    again = trainer(tmp_path, args=args)
    assert again.train(resume_from_checkpoint=True).global_step == 4
    plain, engine = plain_loop(documents(), PACK)
    assert again.get_epsilon() == engine.get_epsilon(DELTA)
    assert largest_difference(plain, again.model) <= 1e-6


def test_the_evaluation_of_packed_documents_is_the_mean_over_documents(tmp_path):
    given = documents(9)
    trained = trainer(tmp_path, eval_dataset=given)
    found = trained.evaluate()["eval_loss"]
    model, total = trained.model.eval(), 0.0
    with torch.no_grad():
        for document in given:
            nats, count = 0.0, 0
            for part in document["input_ids"].split(16):
                logits = model(part[None], use_cache=False).logits[0, :-1]
                nats += float(torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
                count += len(part) - 1
            total += nats / count
    assert math.isclose(found, total / len(given), rel_tol=1e-5)


class Mixing(transformers.LlamaForCausalLM):
    """A model that does not pass on where documents begin."""

    def forward(self, input_ids, position_ids=None, labels=None, use_cache=None):
        return super().forward(input_ids, labels=labels)


Mixing.__name__ = "LlamaForCausalLM"


def test_a_model_that_mixes_packed_documents_is_refused_before_training(tmp_path):
    made = trainer(tmp_path, model=Mixing(llama().config))
    with pytest.raises(ValueError, match="the model does not keep them apart"):
        made.train()
    assert made.get_epsilon() == 0


def test_packed_documents_with_another_loss_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"PackTo\(...\) with LlamaForCausalLM and compute_loss"):
        trainer(tmp_path, compute_loss_func=lambda *given, **named: None)


def _sft(tmp_path, **changes):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from dpflash.integrations.trl import DPSFTTrainer

    texts = [
        {"prompt": " ".join(f"w{t}" for t in tokens[:2]) + " ", "completion": " ".join(
            f"w{t}" for t in tokens[2:]
        )}
        for tokens in ([3 + (i * k) % 20 for k in range(1, 5 + i % 5)] for i in range(32))
    ]  # fmt: skip
    args = quiet_trl(tmp_path, num_train_epochs=1, max_length=12, **changes)
    return DPSFTTrainer(
        model=llama(),
        args=trl.SFTConfig(**args),
        train_dataset=datasets.Dataset.from_list(texts),
        processing_class=tokenizer(),
        privacy=dpflash.PrivacyConfig(target_epsilon=3.0, target_delta=DELTA, max_grad_norm=1.0),
        performance=dpflash.PerformanceConfig(physical_batch_size=2),
        engine=dpflash.PrivacyEngine(seed=0, ledger=tmp_path / "ledger"),
    )


@pytest.mark.parametrize("name", ["packing", "padding_free"])
def test_packing_of_sft_packs_each_entry_as_one_document(name, tmp_path):
    trained = _sft(tmp_path, **{name: True})
    pack = trained.data_collator
    assert (pack.tokens, pack.rows, len(trained.train_dataset)) == (24, 2, 32)
    assert trained.train().global_step == 4
    # Prompts have no labels.
    of_first = pack([trained.train_dataset[0]])
    assert (
        0 < int((of_first.labels != -100).sum()) < len(trained.train_dataset[0]["input_ids"]) - 1
    )
    plain, engine = plain_loop(trained.train_dataset, pack)
    assert trained.get_epsilon() == engine.get_epsilon(DELTA)
    assert largest_difference(plain, trained.model) <= 1e-6
    assert largest_difference(llama(), trained.model) > 1e-3


@pytest.mark.parametrize("strategy", ["wrapped", "bfd_split"])
def test_packing_that_cuts_entries_into_several_is_refused_by_name(strategy, tmp_path):
    with pytest.raises(ValueError, match=f"packing_strategy='{strategy}'"):
        _sft(tmp_path, packing=True, packing_strategy=strategy)
