"""DPSFTTrainer and DPDPOTrainer: TRL's trainers with differential privacy.

Letters: B pairs, T tokens, V classes.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import TrainingArguments
from trl import DPOTrainer, SFTTrainer, __version__
from trl.trainer import dpo_trainer

from ..config import PerformanceConfig
from ..packing import PackTo, Pairs
from .sample_losses import SampleLoss, plain_model
from .trainer import DPTrainer

# Assumed mean tokens per document. With shorter documents, microbatches are partly empty.
_TOKENS_OF_DOCUMENT = 64
_NO_OFFLOADING = ((False,), "use gradient_checkpointing=True")
# The values of loss_type with which a pair's loss depends on that pair alone.
_LOSSES_OF_PAIRS = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
)
# The private methods of trl.DPOTrainer that DPDPOTrainer calls or replaces.
_OF_DPO = ("_compute_loss", "compute_ref_log_probs")
_NOT_OF_MODEL = ("completion_mask", "ref_chosen_logps", "ref_rejected_logps")
_NO_LABEL = -100


class _TRLTrainer(DPTrainer):
    _loads_models = True

    def _check_model(self) -> None:
        trainer: Any = self
        if trainer.aux_loss_enabled:
            raise ValueError(
                f"args.router_aux_loss_coef={trainer.router_aux_loss_coef!r}: the router's loss "
                "balances the experts over the batch, so it is not a sum over samples; pass "
                f"{type(self.args).__name__}(router_aux_loss_coef=0.0)"
            )
        super()._check_model()
        # Restore the forward of the model's class, which SFTTrainer has replaced in the object.
        model = plain_model(self._module())
        forward = vars(model).get("forward")
        code = getattr(getattr(forward, "__func__", None), "__code__", None)
        if code is not None and code.co_name == "_fused_forward":
            del model.forward


class DPSFTTrainer(_TRLTrainer, SFTTrainer):
    """`trl.SFTTrainer` with differential privacy.

    Prepares data as SFTTrainer does, and trains as `DPTrainer` does. A sample's loss is the mean
    over its own labels, computed from the logits. SFTTrainer's fused head is not used: it reads
    the weight of `lm_head` without calling `lm_head`, so the gradient of the weight would not be
    clipped. Evaluations report the loss and no other metric.

    With ``packing=True`` or ``padding_free=True``, `dpflash.packing.PackTo` packs the entries as
    documents. Each document is one sample. A row has `max_length` tokens, and a microbatch has
    ``PerformanceConfig(physical_batch_size=...)`` rows (default 1). TRL's own packing, which
    joins several entries, does not run. For other sizes pass ``data_collator=PackTo(...)``.

    Args:
        model, args, privacy, performance, engine, log_private_metrics: as for `DPTrainer`.
        options: the other arguments of `trl.SFTTrainer`, such as train_dataset.

    Raises:
        ValueError: an option is not supported in private training, and the message states a
            remedy. Not supported are packing_strategy="wrapped", loss_type="dft", losses of
            routers, Liger, and the options that `DPTrainer` refuses.

    Guarantees:
        The guarantees of `DPTrainer`.
    """

    _refused = {
        "loss_type": (("nll",), "it is not a mean over each sample's own tokens; leave it out"),
        "activation_offloading": _NO_OFFLOADING,
    }

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
            # Not by the constructor of its class, which would read environment and device again.
            args = copy.copy(args)
            args.__dict__.update(packing=False, padding_free=False, eval_packing=None)
        super().__init__(model, args, performance=performance, **options)

    def _evaluated(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        losses, outputs = self._losses_of(model, inputs)
        return (losses.mean(), outputs) if return_outputs else losses.mean()


class DPDPOTrainer(_TRLTrainer, DPOTrainer):
    """`trl.DPOTrainer` with differential privacy. A preference pair is one sample.

    Prepares data as DPOTrainer does, and trains as `DPTrainer` does. An entry of train_dataset is
    a pair, and its gradient, summed over both answers, is clipped. A pair's loss is the loss that
    DPOTrainer computes from logits for a batch of this pair alone. So for loss_type="sft" the loss
    is the mean over the pair's own tokens, whereas TRL averages over the tokens of the batch.
    Evaluations report the loss and the rewards that DPOTrainer reports.

    The reference model is called without gradients and outside of the private step. The reference
    model and the initial model count as public. If they were trained on the same pairs, add the
    epsilon of that training.

    Args:
        model, args, privacy, performance, engine, log_private_metrics: as for `DPTrainer`.
        options: the other arguments of `trl.DPOTrainer`, such as ref_model and train_dataset.

    Raises:
        ValueError: an option is not supported in private training, and the message states a
            remedy. Not supported are padding_free, losses of routers, images, Liger, loss_type
            "aot" and "aot_unpaired" (they sort pairs), and options that `DPTrainer` refuses.
        ImportError: TRL is older than 1.15.

    Guarantees:
        The guarantees of `DPTrainer`, for one preference pair as the privacy unit.
    """

    # Attributes of DPOTrainer, for type checkers that cannot import TRL.
    precompute_ref_logps: bool
    _metrics: dict[str, Any]
    _total_train_tokens: int

    _refused = {
        "activation_offloading": _NO_OFFLOADING,
        "padding_free": ((False,), "the pairs of a batch would share a row; leave it out"),
    }

    def _check_arguments(self, args: TrainingArguments) -> None:
        super()._check_arguments(args)
        for kind in getattr(args, "loss_type", ()):
            if kind not in _LOSSES_OF_PAIRS:
                raise ValueError(
                    f"args.loss_type has {kind!r}: a pair's loss must depend on that pair alone, "
                    "which is not known for this loss (the AOT losses sort the pairs of a batch); "
                    f"pass one or more of {', '.join(_LOSSES_OF_PAIRS)}"
                )

    def _check_model(self) -> None:
        _require_known_dpo()
        if self._is_vision_dataset:
            raise ValueError(
                "train_dataset has images, whose tensors do not show which pair a row belongs to: "
                "train on texts, or write your own loop (dpflash.packing.Pairs)"
            )
        super()._check_model()
        if self.ref_model is not None:
            self.ref_model.eval()

    def _known_loss(self) -> SampleLoss | None:
        return None

    def _training_collate(self, collate: Any) -> Any:
        return Pairs(collate)

    def _evaluated(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        inputs = {**inputs, **self._reference(inputs)}
        with self._trl_state(is_logged=True):
            return self._compute_loss(_with_scores(model), inputs, return_outputs)

    def _losses_of(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        rows = Pairs.rows(inputs)
        given = {name: x for name, x in rows.items() if name not in _NOT_OF_MODEL}
        outputs = model(**given, use_cache=False)
        of_pairs = outputs.logits.unflatten(0, (-1, Pairs.ROWS))  # [B, 2, T, V]
        firsts_first = {
            n: x.transpose(0, 1).flatten(0, 1) for n, x in inputs.items() if x.ndim > 1
        }
        inputs = {**inputs, **self._reference({**inputs, **firsts_first})}
        is_logged = [False] * len(of_pairs)
        if model.training and self._log_private_metrics:
            assert self._private_loader is not None
            is_logged = self._private_loader.is_real.tolist()
        losses = []
        for number, logits in enumerate(of_pairs):
            pair = {n: x[number] if x.ndim > 1 else x[number, None] for n, x in inputs.items()}
            with self._trl_state(is_logged=is_logged[number]):
                losses.append(self._compute_loss(_scores_of(logits), pair, False))
        return torch.stack(losses), outputs

    def _reference(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the reference model's log-probabilities `[B]` of chosen and rejected answers."""
        if self.precompute_ref_logps:
            return {name: inputs[name] for name in ("ref_chosen_logps", "ref_rejected_logps")}
        reference: Any = self.ref_model
        if reference is None:  # PEFT's model without its adapter
            reference = _with_scores(self._module())
        chosen, rejected = self.compute_ref_log_probs(reference, inputs)
        return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    @contextmanager
    def _trl_state(self, *, is_logged: bool) -> Iterator[None]:
        """Let DPOTrainer read the batch's reference log-probs; keep metrics only if is_logged."""
        precomputed, metrics = self.precompute_ref_logps, self._metrics
        tokens = self._total_train_tokens
        self.precompute_ref_logps = True
        if not is_logged:
            self._metrics = {mode: defaultdict(list) for mode in metrics}
        try:
            yield
        finally:
            self.precompute_ref_logps, self._metrics = precomputed, metrics
            if not is_logged:
                self._total_train_tokens = tokens


def _scores_of(logits: Tensor) -> Callable[..., SimpleNamespace]:
    """Return a function that replaces the model in TRL's code, and scores labels by the logits."""
    return lambda **given: _scores(logits, given["labels"])


def _with_scores(model: nn.Module) -> Callable[..., SimpleNamespace]:
    """Wrap the model to return the outputs of TRL's fused head, computed from its logits."""

    def call(labels: Tensor | None = None, fused_lm_head: bool = False, **given: Any) -> Any:
        outputs = model(**given)
        return outputs if labels is None else _scores(outputs.logits, labels)

    return call


def _scores(logits: Tensor, labels: Tensor) -> SimpleNamespace:
    """Compute the outputs of TRL's fused head for the next tokens of R rows, `[R, T - 1]`.

    Only the last T logits of a row are used, since a prompt adapter's virtual tokens come first.
    The log-probability of a label -100 (labels are `[R, T]`) is 0.
    """
    logits = logits[:, -labels.shape[1] : -1]
    is_label, following = labels[:, 1:] != _NO_LABEL, labels[:, 1:].clamp(min=0)
    logs = F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    log_probs = logs.gather(-1, following.unsqueeze(-1)).squeeze(-1).where(is_label, 0)
    with torch.no_grad():
        return SimpleNamespace(
            log_probs=log_probs,
            entropy=torch.special.entr(logs.exp()).sum(-1),
            log_sum_sq_probs=(2 * logs).logsumexp(-1),
            mean_logits=logits.float().mean(-1),
            is_top1=logits.argmax(-1) == following,
        )


def _require_known_dpo() -> None:
    missing = [name for name in _OF_DPO if not hasattr(DPOTrainer, name)]
    if missing or not hasattr(dpo_trainer, "add_fused_lm_head"):
        raise ImportError(
            f"trl {__version__}: DPDPOTrainer needs the DPOTrainer of trl 1.15 or newer; install "
            "trl 1.16, with which it was tested"
        )


def _pack_of(args: Any, performance: PerformanceConfig, options: Mapping[str, Any]) -> PackTo:
    """Return the `PackTo` collator for args with packing, padding_free or eval_packing."""
    asked = "packing" if args.packing else "padding_free" if args.padding_free else "eval_packing"
    if options.get("data_collator") is not None:
        raise ValueError(
            f"args.{asked}=True with data_collator={type(options['data_collator']).__name__}: "
            "pass data_collator=dpflash.packing.PackTo(...), or leave data_collator out"
        )
    if asked == "eval_packing":
        raise ValueError(
            "args.eval_packing=True without packing: evaluations pack only if training packs; "
            "pass packing=True, or leave eval_packing out"
        )
    if args.packing and args.packing_strategy != "bfd":
        raise ValueError(
            f"args.packing_strategy={args.packing_strategy!r}: it cuts an entry into pieces, "
            "each of which would count as a sample; leave it out, or pass data_collator="
            "dpflash.packing.PackTo(rows=...), which counts each entry as one sample"
        )
    if args.max_length is None:
        raise ValueError(
            f"args.{asked}=True with max_length=None: rows have max_length tokens; pass "
            "max_length, or data_collator=dpflash.packing.PackTo(...)"
        )
    rows = performance.physical_batch_size or 1
    tokens = rows * args.max_length
    return PackTo(tokens=tokens, rows=rows, max_documents=max(rows, tokens // _TOKENS_OF_DOCUMENT))
