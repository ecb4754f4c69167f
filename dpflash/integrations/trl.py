"""DPSFTTrainer: TRL's SFTTrainer, which trains with differential privacy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import TrainingArguments
from trl import SFTTrainer

from ..config import PerformanceConfig
from ..packing import PackTo
from .sample_losses import plain_model
from .trainer import DPTrainer

_PER_SAMPLE = "it is not a mean over each sample's own tokens; leave it out"
# Documents of fewer tokens, on average, leave space in a microbatch.
_TOKENS_OF_DOCUMENT = 64
_REFUSED_ARGUMENTS = {
    "loss_type": (("nll",), _PER_SAMPLE),
    "activation_offloading": ((False,), "use gradient_checkpointing=True"),
}


class DPSFTTrainer(DPTrainer, SFTTrainer):
    """`trl.SFTTrainer` with differential privacy.

    It prepares data as SFTTrainer does, and trains as `DPTrainer`. The loss is that of the logits,
    the mean over each sample's own labels: SFTTrainer's fused head uses the weight of `lm_head`
    without calling the module, so its gradient would not be clipped. Evaluations report that
    loss alone.

    With ``packing=True`` or ``padding_free=True`` the entries are packed as documents, each a
    sample, by `dpflash.packing.PackTo`: into rows of `max_length` tokens, as many in a microbatch
    as ``PerformanceConfig(physical_batch_size=...)`` says, by default 1. TRL's own packing, which
    makes one entry of several, does not run. For other sizes pass ``data_collator=PackTo(...)``.

    Args:
        model, args, privacy, performance, engine, log_private_metrics: as for `DPTrainer`.
        options: those of `trl.SFTTrainer`: train_dataset, processing_class, peft_config, ...

    Raises:
        ValueError: for an option that cannot be private, naming it and the way out:
            packing_strategy="wrapped", loss_type="dft", losses of routers, Liger, and those of
            `DPTrainer`.

    Guarantees:
        Those of `DPTrainer`.
    """

    _loads_models = True

    def __init__(
        self,
        model: nn.Module | Any = None,
        args: Any = None,
        *,
        performance: PerformanceConfig | None = None,
        **options: Any,
    ):
        if args is not None and (args.packing or args.padding_free or args.eval_packing):
            performance = performance or PerformanceConfig()
            if not isinstance(options.get("data_collator"), PackTo):
                options["data_collator"] = _pack_of(args, performance, options)
                performance = replace(performance, physical_batch_size=None)
            args = _unpacked(args)
        super().__init__(model, args, performance=performance, **options)

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


def _unpacked(args: Any) -> Any:
    """A copy of SFTConfig that leaves packing to the collate function."""
    copied = copy.copy(args)
    # Its constructor would read the environment and the device again.
    copied.__dict__.update(packing=False, padding_free=False, eval_packing=None)
    return copied


def _pack_of(args: Any, performance: PerformanceConfig, options: Mapping[str, Any]) -> PackTo:
    """What SFTConfig(packing=True) or SFTConfig(padding_free=True) means."""
    asked = "packing" if args.packing else "padding_free" if args.padding_free else "eval_packing"
    if options.get("data_collator") is not None:
        raise ValueError(
            f"args.{asked}=True with data_collator={type(options['data_collator']).__name__}: "
            "pass data_collator=dpflash.packing.PackTo(...), or leave it out"
        )
    if asked == "eval_packing":
        raise ValueError(
            "args.eval_packing=True without packing: evaluations pack as training does; pass "
            "packing=True, or leave it out"
        )
    if args.packing and args.packing_strategy != "bfd":
        raise ValueError(
            f"args.packing_strategy={args.packing_strategy!r}: it cuts an entry into several, "
            "each of which would count as a sample; leave it out, or pass data_collator="
            "dpflash.packing.PackTo(rows=...), which keeps them one sample"
        )
    if args.max_length is None:
        raise ValueError(
            f"args.{asked}=True with max_length=None: rows have max_length tokens; pass it, or "
            "data_collator=dpflash.packing.PackTo(...)"
        )
    rows = performance.physical_batch_size or 1
    tokens = rows * args.max_length
    return PackTo(tokens=tokens, rows=rows, max_documents=max(rows, tokens // _TOKENS_OF_DOCUMENT))


def _remove_fused_head(model: nn.Module) -> None:
    """Give the model the forward of its class, which SFTTrainer has replaced in the object."""
    forward = vars(model).get("forward")
    code = getattr(getattr(forward, "__func__", None), "__code__", None)
    if code is not None and code.co_name == "_fused_forward":
        del model.forward
