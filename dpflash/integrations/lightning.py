"""KeepPrivacy: spent privacy in the checkpoints of a Lightning Trainer.

Lightning trains privately with manual optimization, on `dpflash.sampling.LogicalBatches`, and
Fabric as plain PyTorch does. `docs/frameworks.md` has examples of both.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from ..engine import PrivacyEngine


class KeepPrivacy(Callback):
    """Saves and loads an engine with the checkpoints of a Trainer.

    Without it, a run that goes on from a checkpoint draws other batches; only an engine with a
    ledger would remember what was spent. With a ledger, steps after an older checkpoint stay
    counted too.

    Keep the checkpoints to yourself, and release `module.state_dict()`.

    Args:
        engine: whose `make_private` made the model private, at the latest in
            `configure_optimizers`.

    Raises:
        ValueError: engine is not a `PrivacyEngine`.
    """

    def __init__(self, engine: PrivacyEngine):
        if not isinstance(engine, PrivacyEngine):
            raise ValueError(f"engine={engine!r}: expected a dpflash.PrivacyEngine")
        self._engine = engine
        self._saved: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """The engine's checkpoint, as bytes."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "engine.pt")
            self._engine.save_checkpoint(path)
            return {"engine": torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the engine's checkpoint until the optimizer exists."""
        self._saved = state_dict["engine"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the engine, when Lightning has loaded everything else."""
        self._load()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load the engine of a run that had finished, so that epsilon is not 0."""
        self._load()

    def _load(self) -> None:
        if self._saved is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "engine.pt")
            path.write_bytes(self._saved.numpy().tobytes())
            self._engine.load_checkpoint(path)
        self._saved = None
