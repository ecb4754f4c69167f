"""Accelerate returns what is private as it is, in any order, or the mistake is refused."""

import pytest
import torch
from small_runs import gpt2, llama, lora, mlp, points
from torch.utils.data import DataLoader, TensorDataset

import dpflash

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("error:the optimizer's state is of an earlier run"),
]

DELTA = 1e-3


@pytest.fixture(autouse=True)
def fresh_states():
    """Accelerate's states are shared by a process, also with the tests of trainers."""
    _reset_states()
    yield
    _reset_states()


def _reset_states():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def build(model, batch_size=8, **options):
    engine = dpflash.PrivacyEngine(seed=0)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        data_loader=DataLoader(points(), batch_size=batch_size),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        physical_batch_size=3,
        **options,
    )
    return engine, *made


def tokens():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(1, 23, (32, 8), generator=generator))


def trained(order=(), precision=None, accelerator=None):
    """A run of two epochs, whose objects went through `prepare` as `order` names them.

    Args:
        order: groups of letters: model, optimizer, loader, scheduler.
    """
    torch.manual_seed(0)
    engine, model, optimizer, loader = build(mlp())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    made = {"m": model, "o": optimizer, "l": loader, "s": scheduler}
    if order:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    for group in order:
        assert accelerator is not None
        prepared = accelerator.prepare(*[made[k] for k in group])
        for k, value in zip(group, prepared if len(group) > 1 else [prepared], strict=True):
            assert k == "s" or value is made[k]
            made[k] = value
    scheduler = made["s"]
    waits = isinstance(scheduler, accelerate.scheduler.AcceleratedScheduler)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16" and not order)
    for _ in range(2):
        for x, y in loader:
            with autocast:
                logits = model(x)
            engine.backward(dpflash.losses.cross_entropy(logits.float(), y))
            optimizer.step()
            if waits or loader.is_last:
                scheduler.step()
            optimizer.zero_grad()
    assert optimizer.releases == 8
    return list(model.parameters()), engine.get_epsilon(DELTA), scheduler.get_last_lr()


@pytest.mark.parametrize("precision", [None, "bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "order",
    [["mols"], ["l"], ["o"], ["m"], ["ol"], ["s", "o", "l", "m"], ["l", "so", "m"]],
    ids=lambda order: "-".join(order),
)
def test_prepare_changes_nothing_in_any_order(order, precision):
    if precision == "bf16" and "m" not in "".join(order):
        precision = None  # only the model's forward has a precision
    parameters, *public = trained(precision=precision)
    prepared, *of_prepared = trained(order, precision)
    assert of_prepared == public
    assert public[0] == pytest.approx(3.43, abs=0.01)
    assert all(torch.equal(a, b) for a, b in zip(parameters, prepared, strict=True))


def bert():
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=23, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
            intermediate_size=24, max_position_embeddings=16,
        )
    )  # fmt: skip


MODELS = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "llama-lora": lambda: lora(llama, "q_proj"),
    "gpt2-lora": lambda: lora(gpt2, "c_attn"),
}


def language_model(name, accelerator, checkpoint=None, epochs=2):
    torch.manual_seed(0)
    model, engine = MODELS[name](), dpflash.PrivacyEngine(seed=0)
    trainable = [p for p in model.parameters() if p.requires_grad]
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(trainable, lr=1e-2),
        data_loader=DataLoader(tokens(), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        physical_batch_size=3,
    )
    model, optimizer, loader = accelerator.prepare(*made) if accelerator else made
    if checkpoint is not None and checkpoint.exists():
        engine.load_checkpoint(checkpoint)
    for _ in range(epochs):
        for (x,) in loader:
            logits = model(input_ids=x).logits
            engine.backward(dpflash.losses.cross_entropy(logits[:, :-1], x[:, 1:]))
            optimizer.step()
            optimizer.zero_grad()
        if checkpoint is not None:
            engine.save_checkpoint(checkpoint)
    return list(model.parameters()), optimizer.releases, engine.get_epsilon(DELTA)


@pytest.mark.cases(0)
@pytest.mark.parametrize("name", MODELS)
def test_language_models_are_those_of_a_plain_loop_also_resumed(name, tmp_path):
    parameters, *public = language_model(name, None)
    assert public[0] == 8
    accelerator = accelerate.Accelerator(cpu=True)
    language_model(name, accelerator, tmp_path / "checkpoint", epochs=1)
    resumed, *of_resumed = language_model(name, accelerator, tmp_path / "checkpoint", epochs=1)
    assert of_resumed == public
    assert all(torch.equal(a, b) for a, b in zip(parameters, resumed, strict=True))


def test_what_was_prepared_before_is_refused():
    accelerator = accelerate.Accelerator(cpu=True)
    model = mlp()
    loader = DataLoader(points(), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters())
    made = {"module": model, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    engine = dpflash.PrivacyEngine()
    with pytest.raises(ValueError, match="data_loader=DataLoaderShard of accelerate"):
        engine.make_private(**made, optimizer=optimizer, data_loader=accelerator.prepare(loader))
    with pytest.raises(ValueError, match="optimizer=AcceleratedOptimizer of accelerate"):
        engine.make_private(**made, optimizer=accelerator.prepare(optimizer), data_loader=loader)
    engine.make_private(**made, optimizer=optimizer, data_loader=loader)


def test_a_model_with_a_forward_of_its_own_object_is_refused():
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(mlp())
    with pytest.raises(ValueError, match=r"module\.forward was assigned"):
        build(model)


def test_accumulation_is_refused():
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    _, _, optimizer, loader = build(mlp())
    for private in (optimizer, loader):
        with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
            accelerator.prepare(private)


def test_accelerators_own_backward_releases_nothing():
    accelerator = accelerate.Accelerator(cpu=True)
    engine, model, optimizer, loader = build(mlp())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    x, y = next(iter(loader))
    losses = dpflash.losses.cross_entropy(model(x), y)
    with pytest.raises(RuntimeError):
        accelerator.backward(losses)
    losses = dpflash.losses.cross_entropy(model(x), y)
    with pytest.raises(RuntimeError):
        accelerator.backward(losses.mean())
    assert optimizer.releases == 0


def test_accelerators_backward_takes_a_declared_mean():
    torch.manual_seed(0)
    engine, model, optimizer, loader = build(mlp(), loss_reduction="mean")
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(model, optimizer, loader)
    assert prepared == (model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(dpflash.losses.cross_entropy(model(x), y).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.releases == 4
