"""KeepPrivacy, a Lightning callback that saves the engine's state in Lightning's checkpoints.

Lightning trains privately with manual optimization on `dpflash.sampling.LogicalBatches`. Fabric
needs no callback. `docs/frameworks.md` has examples of both.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from ..engine import PrivacyEngine


class KeepPrivacy(Callback):
    """Callback that saves and loads an engine with the checkpoints of a Trainer.

    Without the callback, a run that resumes from a checkpoint samples other batches, and the
    privacy that earlier steps spent is known only if the engine has a ledger. With a ledger,
    steps that were made after an older checkpoint stay counted too.

    Keep the checkpoints secret; the model to publish is `module.state_dict()`.

    Args:
        engine: the engine of the private model. Call its `make_private` in
            `configure_optimizers`, or earlier.

    Raises:
        ValueError: engine is not a `PrivacyEngine`.
    """

    def __init__(self, engine: PrivacyEngine):
        if not isinstance(engine, PrivacyEngine):
            raise ValueError(f"engine={engine!r}: expected a dpflash.PrivacyEngine")
        self._engine = engine
        self._saved: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's checkpoint, as bytes."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "engine.pt")
            self._engine.save_checkpoint(path)
            return {"engine": torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the engine's checkpoint, which is loaded once the optimizer exists."""
        self._saved = state_dict["engine"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the engine's checkpoint, after Lightning has loaded the rest."""
        self._load()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """If the run had already finished, load its checkpoint now, so that epsilon is not 0."""
        self._load()

    def _load(self) -> None:
        if self._saved is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "engine.pt")
            path.write_bytes(self._saved.numpy().tobytes())
            self._engine.load_checkpoint(path)
        self._saved = None
