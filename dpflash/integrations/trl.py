"""DPSFTTrainer: TRL's SFTTrainer, which trains with differential privacy."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainingArguments
from trl import SFTTrainer

from .sample_losses import plain_model
from .trainer import DPTrainer

_PER_SAMPLE = "it is not a mean over each sample's own tokens; leave it out"
_ONE_ROW = (
    "documents of several samples share a row, whose gradient cannot be divided among them; leave "
    "it out, and pad (pad_to_multiple_of=..., or dpflash.sampling.PadTo)"
)
_REFUSED_ARGUMENTS = {
    "packing": ((False,), _ONE_ROW),
    "padding_free": ((False,), _ONE_ROW),
    "loss_type": (("nll",), _PER_SAMPLE),
    "activation_offloading": ((False,), "use gradient_checkpointing=True"),
}


class DPSFTTrainer(DPTrainer, SFTTrainer):
    """`trl.SFTTrainer` with differential privacy.

    It prepares data as SFTTrainer does, and trains as `DPTrainer`. The loss is that of the logits,
    the mean over each sample's own labels: SFTTrainer's fused head uses the weight of `lm_head`
    without calling the module, so its gradient would not be clipped. Evaluations report that
    loss alone.

    Args:
        model, args, privacy, performance, engine, log_private_metrics: as for `DPTrainer`.
        options: those of `trl.SFTTrainer`: train_dataset, processing_class, peft_config, ...

    Raises:
        ValueError: for an option that cannot be private, naming it and the way out: packing,
            padding_free, loss_type="dft", losses of routers, Liger, and those of `DPTrainer`.

    Guarantees:
        Those of `DPTrainer`.
    """

    _loads_models = True

    def _check_arguments(self, args: TrainingArguments) -> None:
        super()._check_arguments(args)
        self._refuse(args, _REFUSED_ARGUMENTS)

    def _check_model(self) -> None:
        if self.aux_loss_enabled:
            raise ValueError(
                f"args.router_aux_loss_coef={self.router_aux_loss_coef!r}: the router's loss "
                "balances the experts over the batch, so it is not a sum over samples; pass "
                "SFTConfig(router_aux_loss_coef=0.0)"
            )
        super()._check_model()
        _remove_fused_head(plain_model(self._module()))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """One loss for each sample, `[B]`; their mean in an evaluation."""
        losses, outputs = self._losses_of(model, inputs)
        if not model.training:
            losses = losses.mean()
        return (losses, outputs) if return_outputs else losses


def _remove_fused_head(model: nn.Module) -> None:
    """Give the model the forward of its class, which SFTTrainer has replaced in the object."""
    forward = vars(model).get("forward")
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    if code is not None and code.co_name == "_fused_forward":
        del model.forward
