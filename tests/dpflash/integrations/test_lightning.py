"""Lightning with manual optimization and Fabric: parameters and epsilon of a plain loop."""

import pytest
import torch
from small_runs import mlp, points
from torch import nn
from torch.utils.data import DataLoader

import dpflash
from dpflash.sampling import LogicalBatches

lightning = pytest.importorskip("lightning")

from dpflash.integrations.lightning import KeepPrivacy  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("error:the optimizer's state is of an earlier run"),
]

DELTA = 1e-3


def make_private(engine, model, **options):
    return engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        data_loader=DataLoader(points(), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        physical_batch_size=3,
        **options,
    )


def loop(engine, model, optimizer, loader, precision=None):
    model.train()
    for _ in range(2):
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                logits = model(x)
            engine.backward(dpflash.losses.cross_entropy(logits, y))
            optimizer.step()
            optimizer.zero_grad()


def plain(precision=None):
    engine = dpflash.PrivacyEngine(seed=0)
    model, optimizer, loader = make_private(engine, mlp())
    loop(engine, model, optimizer, loader, precision)
    assert optimizer.releases == 8
    return model, engine


def assert_same(model, engine, precision=None):
    expected, private = plain(precision)
    assert engine.get_epsilon(DELTA) == private.get_epsilon(DELTA)
    pairs = zip(expected.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


class Private(lightning.LightningModule):
    """Made private in __init__, or in configure_optimizers."""

    def __init__(self, early=True, automatic=False, **options):
        super().__init__()
        self.automatic_optimization = automatic
        self.net = mlp()
        self.engine = dpflash.PrivacyEngine(seed=0)
        self.made = make_private(self.engine, self.net, **options) if early else None

    def configure_optimizers(self):
        self.made = self.made or make_private(self.engine, self.net)
        return self.made[1]

    def train_dataloader(self):
        return LogicalBatches(self.made[2])

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        for x, y in batch:
            self.engine.backward(dpflash.losses.cross_entropy(self.net(x), y))
        optimizer.step()
        optimizer.zero_grad()


def fit(module, *, epochs=2, data=None, callbacks=(), checkpoint=None, **options):
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=checkpoint and True)
    return trainer


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
@pytest.mark.parametrize("early", [True, False], ids=["init", "configure_optimizers"])
def test_max_epochs_makes_all_releases_of_a_plain_loop(early, precision):
    module = Private(early)
    trainer = fit(module, precision=precision)
    assert trainer.global_step == module.made[1].releases == 8
    assert_same(module.net, module.engine, precision)


class Killed(Exception):
    pass


class SaveAndDie(lightning.Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise Killed


@pytest.mark.parametrize("step", [3, 4, 6])
def test_a_resumed_run_is_the_uninterrupted_one(step, tmp_path):
    module = Private()
    with pytest.raises(Killed):
        die = SaveAndDie(step, tmp_path / "checkpoint")
        fit(module, callbacks=[KeepPrivacy(module.engine), die])
    assert module.made[1].releases == step
    again = Private()
    fit(again, callbacks=[KeepPrivacy(again.engine)], checkpoint=tmp_path / "checkpoint")
    assert again.made[1].releases == 8
    assert_same(again.net, again.engine)


class Scheduled(Private):
    """With a schedule for each release and one for each epoch, and a validation."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], list(schedules(optimizer))

    def training_step(self, batch, index):
        super().training_step(batch, index)
        self.lr_schedulers()[0].step()

    def on_train_epoch_end(self):
        self.lr_schedulers()[1].step()

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", dpflash.losses.cross_entropy(self.net(x), y).mean())

    def val_dataloader(self):
        return DataLoader(points(), batch_size=5)


def schedules(optimizer):
    steps = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    return steps, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@pytest.mark.parametrize("step", [None, 3, 6])
def test_schedulers_and_a_validation_are_those_of_a_plain_loop(step, tmp_path):
    engine = dpflash.PrivacyEngine(seed=0)
    model, optimizer, loader = make_private(engine, mlp())
    by_release, by_epoch = schedules(optimizer)
    for _ in range(2):
        for x, y in loader:
            engine.backward(dpflash.losses.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if loader.is_last:
                by_release.step()
        by_epoch.step()

    module, path = Scheduled(), None
    if step is not None:
        path = tmp_path / "checkpoint"
        with pytest.raises(Killed):
            fit(module, callbacks=[KeepPrivacy(module.engine), SaveAndDie(step, path)])
        module = Scheduled()
    best = lightning.pytorch.callbacks.EarlyStopping("val_loss", patience=9)
    trainer = fit(module, callbacks=[KeepPrivacy(module.engine), best], checkpoint=path)
    assert trainer.global_step == module.made[1].releases == 8
    assert "val_loss" in trainer.callback_metrics
    assert module.made[1].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert module.engine.get_epsilon(DELTA) == engine.get_epsilon(DELTA)
    assert all(map(torch.equal, model.parameters(), module.net.parameters()))


def test_a_finished_run_that_is_fitted_again_has_its_epsilon(tmp_path):
    module = Private()
    trainer = fit(module, callbacks=[KeepPrivacy(module.engine)])
    trainer.save_checkpoint(tmp_path / "checkpoint")
    again = Private()
    fit(again, callbacks=[KeepPrivacy(again.engine)], checkpoint=tmp_path / "checkpoint")
    assert again.engine.get_epsilon(DELTA) == module.engine.get_epsilon(DELTA) > 0


def test_automatic_optimization_is_refused_with_the_lines_to_use():
    class Automatic(Private):
        def training_step(self, batch, index):
            return sum(dpflash.losses.cross_entropy(self.net(x), y).mean() for x, y in batch)

    module = Automatic(automatic=True, loss_reduction="mean")
    with pytest.raises(RuntimeError, match="automatic_optimization = False") as refusal:
        fit(module)
    assert "engine.backward(losses)" in str(refusal.value)
    assert "optimizer.step(); optimizer.zero_grad()" in str(refusal.value)
    assert module.made[1].releases == 0


class Microbatches(Private):
    def training_step(self, batch, index):
        super().training_step([batch], index)


class StepsInside(Private):
    def training_step(self, batch, index):
        optimizer = self.optimizers()
        for x, y in batch:
            self.engine.backward(dpflash.losses.cross_entropy(self.net(x), y))
            optimizer.step()


def test_a_step_of_each_microbatch_which_lightning_would_count_is_refused():
    module = StepsInside()
    with pytest.raises(RuntimeError, match="global_step") as refused:
        fit(module)
    assert not isinstance(refused.value, dpflash.PrivateRefusal)
    assert module.made[1].releases == 0


class Clips(Private):
    def training_step(self, batch, index):
        optimizer = self.optimizers()
        for x, y in batch:
            self.engine.backward(dpflash.losses.cross_entropy(self.net(x), y))
        self.clip_gradients(optimizer, gradient_clip_val=1e-6, gradient_clip_algorithm="norm")
        norms = [p.grad.norm() for p in self.net.parameters()]
        assert torch.stack(norms).norm() <= 1.1e-6
        optimizer.step()


def test_lightning_may_clip_a_release_in_mixed_precision():
    module = Clips()
    fit(module, precision="bf16-mixed")
    assert module.made[1].releases == 8


def test_other_loaders_than_logical_batches_are_refused():
    module = Microbatches()
    with pytest.raises(RuntimeError, match="trains on a PrivateDataLoader.*LogicalBatches"):
        fit(module, data=module.made[2])
    module = Microbatches(early=False)
    with pytest.raises(RuntimeError, match="the batch is not of the private loader"):
        fit(module, data=DataLoader(points(), batch_size=8))
    assert module.made[1].releases == 0


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(lightning.Trainer, "world_size", 2)
    module = Private()
    with pytest.raises(RuntimeError, match=r"Lightning runs 2 processes.*Trainer\(devices=1\)"):
        fit(module)


class AutocastByFabric(nn.Module):
    def __init__(self, fabric, model):
        super().__init__()
        self.fabric, self.model = fabric, model

    def forward(self, x):
        with self.fabric.autocast():
            return self.model(x)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_is_a_plain_loop(precision):
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    engine = dpflash.PrivacyEngine(seed=0)
    model, optimizer, loader = make_private(engine, mlp())
    module, optimizer = fabric.setup(model, optimizer)
    if precision == "bf16-mixed":
        # The module that Fabric has set up insists on fabric.backward(loss) then.
        module = AutocastByFabric(fabric, model)
    loop(engine, module, optimizer, fabric.setup_dataloaders(loader))
    assert optimizer.releases == 8
    assert_same(model, engine, precision)


def test_what_fabric_has_set_up_before_is_refused():
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = mlp()
    plain_optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(points(), batch_size=8)
    made = {"module": model, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    engine = dpflash.PrivacyEngine()
    with pytest.raises(ValueError, match="data_loader=_FabricDataLoader of lightning"):
        engine.make_private(
            **made, optimizer=plain_optimizer, data_loader=fabric.setup_dataloaders(loader)
        )
    _, optimizer = fabric.setup(model, plain_optimizer)
    with pytest.raises(ValueError, match="optimizer=FabricAdamW of lightning"):
        engine.make_private(**made, optimizer=optimizer, data_loader=loader)


def test_a_logical_batch_that_is_left_early_is_refused():
    engine = dpflash.PrivacyEngine(seed=0)
    model, _, loader = make_private(engine, mlp())
    with pytest.raises(ValueError, match="loader=DataLoader"):
        LogicalBatches(DataLoader(points()))
    batches = LogicalBatches(loader)
    assert len(batches) == 4
    with pytest.raises(RuntimeError, match="before the last microbatch"):
        for batch in batches:
            x, y = next(iter(batch))
            engine.backward(dpflash.losses.cross_entropy(model(x), y))
