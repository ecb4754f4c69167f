"""DPSFTTrainer: parameters and epsilon of a plain loop over the data that SFTTrainer prepares."""

import json

import pytest
import torch
from small_runs import gpt2, largest_difference, llama, lora, mixture, quiet_trl, tokenizer
from torch.utils.data import DataLoader

import dpflash

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from dpflash.integrations.trl import DPSFTTrainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DELTA = 1e-3


MODELS = {
    "llama": llama,
    "gpt2": gpt2,
    "llama-lora": lambda: lora(llama, "q_proj"),
    "gpt2-lora": lambda: lora(gpt2, "c_attn"),
}


def built(name):
    torch.manual_seed(0)
    return MODELS[name]()


def texts(count=32):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(3, 23, (5 + i % 4,), generator=generator) for i in range(count)]
    return datasets.Dataset.from_dict({"text": [" ".join(f"w{t}" for t in x) for x in drawn]})


def arguments(tmp_path, **changes):
    return trl.SFTConfig(**quiet_trl(tmp_path, **changes))


def trainer(tmp_path, name="llama", args=None, **options):
    return DPSFTTrainer(
        model=options.pop("model", None) or built(name),
        args=args or arguments(tmp_path),
        train_dataset=texts(),
        processing_class=tokenizer(),
        privacy=dpflash.PrivacyConfig(target_epsilon=3.0, target_delta=DELTA, max_grad_norm=1.0),
        performance=dpflash.PerformanceConfig(physical_batch_size=3),
        engine=dpflash.PrivacyEngine(seed=0, ledger=tmp_path / "ledger"),
        **options,
    )


def plain_loop(name, prepared, bf16=False):
    model, engine = built(name), dpflash.PrivacyEngine(seed=0)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
        ),
        data_loader=DataLoader(
            prepared.train_dataset, batch_size=8, collate_fn=prepared.data_collator
        ),
        target_epsilon=3.0,
        target_delta=DELTA,
        max_grad_norm=1.0,
        physical_batch_size=3,
        epochs=2,
    )
    scheduler = transformers.get_scheduler("linear", optimizer, 0, 8)
    model.train()
    for _ in range(2):
        for batch in loader:
            labels = batch.pop("labels")
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(**batch).logits
            losses = dpflash.losses.cross_entropy(logits[:, :-1].float(), labels[:, 1:])
            engine.backward(losses)
            optimizer.step()
            optimizer.zero_grad()
            if loader.is_last:
                scheduler.step()
    assert optimizer.releases == 8
    return model, engine


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_epsilon_are_those_of_a_plain_loop(name, checkpointing, bf16, tmp_path):
    args = arguments(tmp_path, bf16=bf16, gradient_checkpointing=checkpointing)
    trained = trainer(tmp_path, name, args)
    assert trained.train().global_step == trained.optimizer.releases == 8
    plain, engine = plain_loop(name, trained, bf16)
    assert trained.get_epsilon() == engine.get_epsilon(DELTA)
    assert largest_difference(plain, trained.model) <= 1e-6
    assert largest_difference(built(name), trained.model) > 1e-3


def test_adapters_of_peft_config_are_trained_and_nothing_private_is_logged(tmp_path):
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args = arguments(tmp_path, save_strategy="epoch", eval_strategy="epoch")
    trained = trainer(
        tmp_path, args=args, peft_config=adapters, eval_dataset=texts(36).select(range(32, 36))
    )
    before = {n: p.detach().clone() for n, p in trained.model.named_parameters()}
    trained.train()
    moved = {
        n for n, p in trained.model.named_parameters() if not torch.equal(p.detach(), before[n])
    }
    assert moved and all("lora_" in name for name in moved)
    written = (tmp_path / "out/checkpoint-8/trainer_state.json").read_text()
    logs = json.loads(written)["log_history"]
    of_training = [log for log in logs if "eval_loss" not in log]
    assert len(of_training) == 8
    assert all(log.keys() <= {"learning_rate", "epoch", "epsilon", "step"} for log in of_training)
    assert sum("eval_loss" in log for log in logs) == 2
    for word in ("entropy", "token_accuracy", "num_tokens"):
        assert word not in json.dumps(of_training)
    assert "| epsilon | 3" in (tmp_path / "out/README.md").read_text()
    again = trainer(tmp_path, peft_config=adapters)
    again.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    # The four steps behind the checkpoint were made twice.
    assert again.get_epsilon() > trained.get_epsilon()


REFUSED = {
    "loss_type": "dft",
    "activation_offloading": True,
    "use_liger_kernel": True,
    "label_smoothing_factor": 0.1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_per_sample_is_refused_by_name(name, tmp_path):
    value = REFUSED[name]
    with pytest.raises(ValueError, match=f"args.{name}={value!r} with DPSFTTrainer"):
        trainer(tmp_path, args=arguments(tmp_path, **{name: value}))


def test_losses_of_routers_are_refused_by_name(tmp_path):
    model = mixture()
    with pytest.raises(ValueError, match=r"args\.router_aux_loss_coef=0\.001.*=0\.0"):
        trainer(tmp_path, model=model)
    without = arguments(tmp_path, router_aux_loss_coef=0.0, max_steps=1)
    assert trainer(tmp_path, model=model, args=without).train().global_step == 1
