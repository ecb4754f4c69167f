"""DPDPOTrainer: sums of clipped gradients of preference pairs, as DPOTrainer has their losses."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from small_runs import llama as small_llama
from small_runs import mixture, quiet_trl, tokenizer

import dpflash
from dpflash.packing import Pairs

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from dpflash.integrations.trl import DPDPOTrainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DELTA, BETA = 1e-3, 0.1


def llama(seed):
    torch.manual_seed(seed)
    return small_llama(initializer_range=0.2)


def pairs(count=24, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def text(length):
        drawn = torch.randint(3, 23, (length,), generator=generator)
        return " ".join(f"w{token}" for token in drawn)

    return datasets.Dataset.from_list(
        [
            {
                "prompt": text(2 + i % 2) + " ",
                "chosen": text(2 + i % 4),
                "rejected": text(1 + i % 3),
            }
            for i in range(count)
        ]
    )


def arguments(tmp_path, **changes):
    chosen = {"per_device_train_batch_size": 6, "num_train_epochs": 1, "optim": "sgd"}
    return trl.DPOConfig(**quiet_trl(tmp_path, beta=BETA, **{**chosen, **changes}))


def trainer(tmp_path, *, bound=1.0, noise=1.0, model=None, args=None, **options):
    if model is None:
        model, options = llama(0), {"ref_model": llama(1), **options}
    return DPDPOTrainer(
        model=model,
        args=args or arguments(tmp_path),
        privacy=dpflash.PrivacyConfig(
            noise_multiplier=noise, target_delta=DELTA, max_grad_norm=bound
        ),
        performance=dpflash.PerformanceConfig(physical_batch_size=4),
        engine=dpflash.PrivacyEngine(seed=0, ledger=tmp_path / "ledger"),
        **{"train_dataset": pairs(), "processing_class": tokenizer(), **options},
    )


def log_probs(model, rows, mask):
    """Of the answer in each row."""
    logs = F.log_softmax(model(rows, use_cache=False).logits[:, :-1], -1)
    return (logs.gather(-1, rows[:, 1:, None])[..., 0] * mask[:, 1:]).sum(1)


def pair_gradient(model, rows, mask, expected):
    """Of the DPO loss of one pair (Rafailov et al., arXiv:2305.18290, equation 7)."""
    chosen, rejected = log_probs(model, rows, mask) - expected
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(-F.logsigmoid(BETA * (chosen - rejected)), parameters)
    return torch.cat([g.flatten() for g in grads])


LORA = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


def with_reference(kind):
    """(options of the trainer, the reference model that they mean), in float64."""
    if kind == "new-adapter":  # the model without it
        options = {"model": llama(0), "peft_config": peft.LoraConfig(**LORA)}
        return options, llama(0).double()
    if kind == "given-adapter":  # a copy of it
        config = peft.LoraConfig(**LORA, init_lora_weights=False)
        model = peft.get_peft_model(llama(0), config)
        return {"model": model}, copy.deepcopy(model).double()
    return {"model": llama(0), "ref_model": llama(1).double()}, llama(1).double()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("kind", ["model", "precomputed", "new-adapter", "given-adapter"])
def test_the_sum_is_over_pairs_of_their_clipped_gradients(kind, checkpointing, tmp_path):
    options, reference = with_reference(kind)
    options["model"].double()
    args = arguments(
        tmp_path,
        precompute_ref_log_probs=kind == "precomputed",
        gradient_checkpointing=checkpointing,
    )
    bound = 0.3 if "adapter" in kind else 1.4
    made = trainer(tmp_path, bound=bound, noise=0.0, args=args, **options)
    model = made.model.train()
    torch.manual_seed(2)
    with torch.no_grad():  # A new adapter changes nothing, and a given one equals its copy.
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    plain, rows = copy.deepcopy(model), []
    for microbatch in next(iter(made.get_train_dataloader())):
        made.optimizer.original_optimizer.param_groups[0]["lr"] = 0.0
        made.engine.backward(made.compute_loss(model, microbatch))
        real = made._private_loader.is_real
        tokens, masks = microbatch["input_ids"][real], microbatch["completion_mask"][real]
        rows += zip(tokens, masks, strict=True)
    made.optimizer.step()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    expected, norms = torch.zeros_like(found), []
    for tokens, mask in rows:
        with torch.no_grad():
            of_reference = log_probs(reference, tokens, mask)
        gradient = pair_gradient(plain, tokens, mask, of_reference)
        norms.append(float(gradient.norm()))
        expected += gradient * min(1.0, bound / norms[-1])
    assert min(norms) < bound < max(norms)
    assert float((6 * found - expected).norm()) <= 1e-6 * bound


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": ["sigmoid", "robust", "sft"], "loss_weights": [1.0, 0.5, 0.2]},
        {"use_weighting": True, "ld_alpha": 0.5},
        {"f_divergence_type": "js_divergence"},
    ],
    ids=["several", "weighted", "divergence"],
)
def test_the_loss_of_a_pair_is_that_of_dpo_trainer_on_this_pair_alone(changes, tmp_path):
    args = arguments(tmp_path, label_smoothing=0.1, **changes)
    made = trainer(tmp_path, args=args)
    dpo = trl.DPOTrainer(
        model=llama(0), ref_model=llama(1), args=args, train_dataset=pairs(),
        processing_class=tokenizer(),
    )  # fmt: skip
    entries = [made.train_dataset[index] for index in range(5)]
    kinds = ["ipo", "hinge", "sigmoid_norm"]
    if "f_divergence_type" not in changes:
        kinds += ["bco_pair", "apo_down", "sppo_hard", "nca_pair"]
    for losses in [args.loss_type, *([kind] for kind in kinds)]:
        for own in (made, dpo):
            own.loss_types, own.loss_weights = losses, (args.loss_weights or [1.0])[: len(losses)]
        found, _ = made._losses_of(made.model, Pairs(made.data_collator)(entries))
        alone = [dpo.compute_loss(dpo.model, dpo.data_collator([entry])) for entry in entries]
        torch.testing.assert_close(found, torch.stack(alone), rtol=1e-5, atol=1e-5)
    assert not made._metrics["train"] and not made._metrics["eval"]


def test_nothing_of_the_training_data_is_logged_and_the_pair_is_the_unit_everywhere(tmp_path):
    args = arguments(tmp_path, eval_strategy="epoch", save_strategy="epoch")
    held_out = pairs(5, seed=1)
    made = trainer(tmp_path, args=args, eval_dataset=held_out)
    made.train()
    logs = [log for log in made.state.log_history if "eval_loss" not in log]
    assert len(logs) == 5
    assert all(log.keys() <= {"learning_rate", "epoch", "epsilon", "step"} for log in logs)
    (evaluated,) = (log for log in made.state.log_history if "eval_loss" in log)
    assert evaluated["eval_num_tokens"] == 0
    # What DPOTrainer finds with these parameters, on these pairs.
    dpo = trl.DPOTrainer(
        model=made.engine.detach(made.model), ref_model=llama(1), args=args, train_dataset=pairs(),
        eval_dataset=held_out, processing_class=tokenizer(),
    )  # fmt: skip
    dpo.evaluate()
    (expected,) = dpo.state.log_history
    for name in ("eval_loss", "eval_rewards/chosen", "eval_rewards/margins", "eval_entropy"):
        assert evaluated[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
    assert "eval_rewards/accuracies" in evaluated and "eval_mean_token_accuracy" in evaluated
    assert made.engine.privacy_unit == "preference pair"
    assert "| privacy unit | one preference pair" in (tmp_path / "out/README.md").read_text()
    lines = (tmp_path / "ledger").read_text().splitlines()
    assert {json.loads(line)["unit"] for line in lines} == {"preference pair"}
    again = trainer(tmp_path, args=args, eval_dataset=held_out)
    again.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    assert again.get_epsilon() == made.get_epsilon()


def test_rewards_of_the_drawn_pairs_are_logged_if_asked(tmp_path):
    args = arguments(
        tmp_path,
        max_steps=1,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=1.0,
    )
    made = trainer(tmp_path, args=args, log_private_metrics=True)
    compute, tokens = made.compute_loss, []

    def seen(model, inputs):
        tokens.append(int(inputs["attention_mask"][made._private_loader.is_real].sum()))
        return compute(model, inputs)

    made.compute_loss = seen
    made.train()
    (log,) = (log for log in made.state.log_history if "rewards/chosen" in log)
    assert log["rewards/margins"] == pytest.approx(log["rewards/chosen"] - log["rewards/rejected"])
    # Neither padding nor the pairs on which the loss was tried.
    assert len(tokens) > 1 and log["num_tokens"] == sum(tokens)
    # A reference that follows the model has its released parameters.
    rows = torch.arange(3, 9)[None]
    assert torch.equal(made.ref_model(rows).logits, made.engine.detach(made.model)(rows).logits)


REFUSED = {
    "padding_free": (True, "args.padding_free=True with DPDPOTrainer"),
    "activation_offloading": (True, "args.activation_offloading=True with DPDPOTrainer"),
    "use_liger_kernel": (True, "args.use_liger_kernel=True with DPDPOTrainer"),
    "loss_type": (["sigmoid", "aot"], "args.loss_type has 'aot': a pair's loss must depend"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_couples_pairs_is_refused_by_name(name, tmp_path):
    value, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, args=arguments(tmp_path, **{name: value}))


def test_losses_of_routers_and_images_are_refused_by_name(tmp_path):
    given = {"model": mixture(), "ref_model": mixture()}
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.001.*DPOConfig\(.*=0\.0"):
        trainer(tmp_path, **given)
    made = trainer(tmp_path, args=arguments(tmp_path, router_aux_loss_coef=0.0), **given)
    made._is_vision_dataset = True
    with pytest.raises(ValueError, match="train_dataset has images"):
        made._check_model()


def test_an_evaluation_of_the_training_data_is_refused_also_before_it_is_prepared(tmp_path):
    given = pairs()
    made = trainer(tmp_path, train_dataset=given)
    for dataset in (given, made.train_dataset):
        with pytest.raises(ValueError, match="the dataset to evaluate on is train_dataset"):
            made.evaluate(dataset)


class Comparing(transformers.LlamaModel):
    def forward(self, input_ids, **given):
        outputs = super().forward(input_ids, **given)
        outputs.last_hidden_state = outputs.last_hidden_state * len(input_ids)
        return outputs


def test_a_reference_that_compares_pairs_is_refused(tmp_path):
    reference = llama(1)
    reference.model = Comparing(reference.config)
    made = trainer(tmp_path, model=llama(0), ref_model=reference)
    with pytest.raises(ValueError, match="the loss of a made-up entry is"):
        made.train()
