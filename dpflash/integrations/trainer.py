"""DPTrainer: the Trainer of transformers with differential privacy.

Users import it as `dpflash.integrations.transformers.DPTrainer`.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import TrainOutput, get_last_checkpoint
from transformers.training_args import ParallelMode

from ..build import sampling_plan
from ..config import PerformanceConfig, PrivacyConfig
from ..engine import PrivacyEngine
from ..losses import causal_lm
from ..optimizer import PrivateOptimizer
from ..packing import PackedBatch, PackTo
from ..random_state import random_state_kept
from ..refusal import PrivateRefusal, warn
from ..sampling import synthetic
from ..sampling.loader import PrivateDataLoader
from ..sampling.logical import LogicalBatch, LogicalBatches
from ..sampling.unit_groups import units_of
from ..verification.nested import tensors_of
from .sample_losses import (
    SampleLoss,
    are_equal,
    changed_in_company,
    losses_of,
    of_documents,
    other_loss,
    plain_model,
    rounding_of,
    sample_loss,
    tried,
)
from .training_data import share_entries

_log = logging.getLogger(__name__)

LEDGER = "ledger.jsonl"
# The folder of the engine's checkpoints, which contain the noise key if the engine has a seed. The
# folder is not inside of checkpoint-N, which trackers may upload. The Hub skips its "_" name.
SECRET = "_secret"
# Settings of trackers that upload all of output_dir.
_UPLOADS = {
    "COMET_LOG_ASSETS": ("1", "on", "true", "yes"),
    "HF_DAGSHUB_LOG_ARTIFACTS": ("1", "on", "true", "yes"),
    "HF_DVCLIVE_LOG_MODEL": ("all",),
}
_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"
_PUBLIC_STATE = (_SCHEDULER, "trainer_state.json")

# Keys that are logged besides evaluation metrics; other keys depend on the training data.
_PUBLIC = ("learning_rate", "epoch", "step", "epsilon")
_EVALUATIONS = ("eval_", "test_")
_KNOWN_PRIVATE = (
    "loss",
    "grad_norm",
    "total_flos",
    "entropy",
    "mean_token_accuracy",
    "num_tokens",
)

_LIBRARIES = ("transformers", "trl", "dpflash")
_OWN_BATCHES = (
    "private training samples the batches itself. Remove the method; collate entries by "
    "data_collator=, and weight classes in the loss"
)
_ONE_DEVICE = "one process trains on one device; docs/ranks.md shows how to use several"
# Argument -> (allowed values, remedy in the error message).
_Refused = Mapping[str, tuple[tuple[Any, ...], str]]
_REFUSED_ARGUMENTS: _Refused = {
    "auto_find_batch_size": ((False,), "pass PerformanceConfig(physical_batch_size=...)"),
    "gradient_accumulation_steps": (
        (1,),
        "per_device_train_batch_size is the expected batch size of a step; pass "
        "PerformanceConfig(physical_batch_size=...) to compute a step in microbatches",
    ),
    "train_sampling_strategy": (
        ("random",),
        "private training samples the batches itself; leave it out, and pad to one length "
        "(dpflash.sampling.PadTo)",
    ),
    "group_by_length": ((False,), "private training samples the batches itself; leave it out"),
    "dataloader_drop_last": ((False,), "each entry must keep its sample rate; leave it out"),
    "label_smoothing_factor": (
        (0, None),
        "pass compute_loss_func=f, where f(outputs, labels, num_items_in_batch) returns [B]",
    ),
    "max_grad_norm": (
        (0, 1.0, None),  # 1.0 is the default of TrainingArguments
        "the engine clips each sample's gradient, and the sum is not clipped again; leave it out "
        "here, and pass PrivacyConfig(max_grad_norm=...)",
    ),
    "debug": (("", []), "it prints private activations and gradients; leave it out"),
    "fp16": ((False,), "clipped sums must not be scaled; use bf16=True"),
    "torch_compile": ((False,), "pass PerformanceConfig(optimize='aggressive')"),
    "use_liger_kernel": ((False,), "its layers have no per-sample gradients; leave it out"),
    "neftune_noise_alpha": ((None,), "its noise is added outside of the private model; drop it"),
    "include_num_input_tokens_seen": (
        ("no", False),
        "the number of tokens is private, as batch sizes are; leave it out",
    ),
    "torch_empty_cache_steps": ((None,), "leave it out"),
    "deepspeed": ((None,), _ONE_DEVICE),
    "fsdp": ((None, "", False, []), _ONE_DEVICE),
    "parallelism_config": ((None,), _ONE_DEVICE),
    "n_gpu": ((0, 1), f"{_ONE_DEVICE}; set CUDA_VISIBLE_DEVICES to one of them"),
    "world_size": ((1,), _ONE_DEVICE),
    "parallel_mode": (
        (ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED),
        "the model would be wrapped for several processes; start the script with python in place "
        "of torchrun",
    ),
}


class DPTrainer(Trainer):
    """`transformers.Trainer` with differential privacy. Each step trains on one logical batch.

    `args.per_device_train_batch_size` is the expected batch size of a step, and an epoch has a
    public number of steps. For language models (causal, masked, sequence to sequence) and
    classifiers, a sample's loss is the mean over its own labels; for other models pass
    `compute_loss_func`, which must return losses `[B]`. Trainer's own gradient clipping is off.

    With ``data_collator=dpflash.packing.PackTo(...)`` a causal language model trains on packed
    documents: each entry of train_dataset is one document, and `args.per_device_train_batch_size`
    is the expected number of documents of a step. Evaluations pack too; their loss is the mean of
    the documents' losses.

    If `privacy` has `unit_of`, the batch size and the length of an epoch count units, such as
    users, and the ledger requires `unit_name`.

    The ledger is `<output_dir>/ledger.jsonl`. The privacy spent by runs with the same output_dir
    adds up, and steps that a resumed run repeats stay counted. `<output_dir>/_secret` is needed to
    resume: keep it secret. The model to publish is the folder that `save_model` writes.

    Logs, trackers, `trainer_state.json` and the result of `train` contain the step, the learning
    rate, epsilon and metrics of evaluations, but no loss, norm, time or count of training data.

    Args:
        model, args, options: the arguments of `transformers.Trainer`, such as train_dataset.
        privacy: a configuration with target_delta and either target_epsilon, for which the noise
            multiplier is chosen from the number of steps in `args`, or noise_multiplier.
        performance: None for the defaults.
        engine: your own engine, with a ledger; None for a new engine.
        log_private_metrics: whether to log the loss and the other numbers of Trainer too. Keep
            such logs secret: no epsilon covers them.

    Attributes:
        engine: the `PrivacyEngine`.

    Raises:
        ValueError: an option is not supported in private training; the message states a remedy.

    Guarantees:
        The guarantees of `PrivacyEngine`, for one entry of train_dataset as the privacy unit, or
        for one user if `privacy` has unit_of. Parameters and epsilon are the same as in a plain
        training loop with the same engine, arguments and losses.
    """

    # Subclasses set whether `model` may be a path, and which other arguments are refused.
    _loads_models = False
    _refused: _Refused = {}

    def __init__(
        self,
        model: nn.Module | Any = None,
        args: TrainingArguments | None = None,
        *,
        privacy: PrivacyConfig,
        performance: PerformanceConfig | None = None,
        engine: PrivacyEngine | None = None,
        log_private_metrics: bool = False,
        **options: Any,
    ):
        _check_privacy(privacy)
        if args is not None:
            self._check_arguments(args)
        _check_options(options, log_private_metrics)
        if model is not None and not isinstance(model, nn.Module) and not self._loads_models:
            raise ValueError(f"model={model!r}: expected a module, as from_pretrained returns")
        options["callbacks"] = [_Checkpoints(self), *(options.get("callbacks") or [])]
        super().__init__(model=model, args=copy.copy(args), **options)
        self._check_arguments(self.args)  # may be defaults, or changed by Trainer
        # Trainer must not clip or skip batches, since the engine clips and resumes the loader.
        vars(self.args).update(max_grad_norm=0.0, ignore_data_skip=True)
        if self.accelerator.gradient_accumulation_steps != 1:
            raise ValueError(
                "args.accelerator_config has gradient_accumulation_kwargs with num_steps="
                f"{self.accelerator.gradient_accumulation_steps}: leave it out, and pass "
                "PerformanceConfig(physical_batch_size=...)"
            )
        self._check_model()
        self._has_unknown_loss = False
        self._sample_loss = self._known_loss()
        if isinstance(self.data_collator, PackTo) and self._sample_loss is not causal_lm:
            raise ValueError(
                f"data_collator=PackTo(...) with {type(self._module()).__name__}"
                + (" and compute_loss_func" if self.compute_loss_func else "")
                + ": packed documents support only the loss of a causal language model; leave "
                "compute_loss_func out, pad instead of packing, or write your own loop"
            )
        self.engine = self._checked_engine(engine)
        # TRL replaces the dataset by a prepared one.
        self._given_dataset = options.get("train_dataset")
        self._privacy = privacy
        self._performance = performance or PerformanceConfig()
        self._log_private_metrics = log_private_metrics
        self._private_optimizer: PrivateOptimizer | None = None
        self._private_loader: PrivateDataLoader | None = None
        self._unknown_metrics: set[str] = set()
        self._checkpoint: str | None = None  # the checkpoint to resume
        self._refusal: str | None = None
        self._is_evaluating = self._has_met_drawn = False

    def get_epsilon(self) -> float:
        """Return the epsilon of all runs in the ledger so far, at `privacy.target_delta`."""
        assert self._privacy.target_delta is not None
        return self.engine.get_epsilon(self._privacy.target_delta)

    def _in_output_dir(self, name: str) -> str:
        assert self.args.output_dir is not None
        return os.path.join(self.args.output_dir, name)

    def _module(self) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        return self.model

    # Checks

    def _check_arguments(self, args: TrainingArguments) -> None:
        for name, (allowed, remedy) in {**_REFUSED_ARGUMENTS, **self._refused}.items():
            value = getattr(args, name, allowed[0])
            if value not in allowed:
                raise ValueError(f"args.{name}={value!r} with {type(self).__name__}: {remedy}")
        optimizer = str(getattr(args.optim, "value", args.optim))
        if "lomo" in optimizer or "layerwise" in optimizer:
            raise ValueError(
                f"args.optim={optimizer!r}: this optimizer steps during the backward, before "
                "noise is added; use 'adamw_torch'"
            )
        strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
        if args.push_to_hub and "checkpoint" in strategy:
            raise ValueError(
                f"args.hub_strategy={strategy!r}: checkpoints without their secret part cannot be "
                "resumed; use 'end' or 'every_save'"
            )

    def _check_model(self) -> None:
        config = getattr(self.model, "config", None)
        if getattr(config, "output_router_logits", False):
            raise ValueError(
                "model.config.output_router_logits=True: the router's loss balances the experts "
                "over the batch, so it is not a sum over samples; set output_router_logits=False"
            )

    def _known_loss(self) -> SampleLoss | None:
        """Return the loss of the model's task; None if only the user's own loss is known."""
        if self.compute_loss_func:
            return None
        try:
            return sample_loss(self._module())
        except ValueError:
            if not self._has_own_loss:
                raise
            self._has_unknown_loss = True
            return None

    @property
    def _has_own_loss(self) -> bool:
        return not type(self).compute_loss.__module__.startswith("dpflash.")

    def _checked_engine(self, engine: PrivacyEngine | None) -> PrivacyEngine:
        if engine is None:
            return PrivacyEngine(ledger=self._in_output_dir(LEDGER))
        if not isinstance(engine, PrivacyEngine):
            raise ValueError(f"engine={engine!r}: expected a dpflash.PrivacyEngine")
        saves = getattr(self.args.save_strategy, "value", self.args.save_strategy) != "no"
        if saves and engine.ledger is None:
            raise ValueError(
                "engine without a ledger: a run that resumes an older checkpoint would not count "
                "the steps made after it. Pass PrivacyEngine(ledger=FILE), or set "
                "args.save_strategy='no'"
            )
        return engine

    # Model, optimizer and loader

    def get_train_dataloader(self) -> Any:
        """Return a `LogicalBatches`, which yields one logical batch for each step."""
        if self._refusal is not None:
            raise ValueError(self._refusal)
        if self._private_loader is None:
            self._private_loader = self._make_private()
        return LogicalBatches(self._private_loader)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the private optimizer's scheduler, even if create_optimizer was overridden."""
        if self._private_optimizer is not None:
            self.optimizer = optimizer = self._private_optimizer
        return super().create_scheduler(num_training_steps, optimizer)

    def _make_private(self) -> PrivateDataLoader:
        # A sampler of the user's class would have no effect; those of libraries are replaced.
        if type(self)._get_train_sampler.__module__.partition(".")[0] not in _LIBRARIES:
            raise ValueError(f"{type(self).__name__}._get_train_sampler: {_OWN_BATCHES}")
        loader = self._plain_loader()
        unit_of, dataset = self._privacy.unit_of, self.train_dataset
        if callable(unit_of) and dataset is not None:
            # Called before columns are removed, since unit_of may read them.
            self._privacy = replace(self._privacy, unit_of=units_of(dataset, unit_of))
        privacy = self._privacy
        if privacy.verify_first_batch:
            example = self._tried_example(loader)
            # Not with torch.compile, which would compile once more for the example's shape.
            if privacy.example is None and self._performance.optimize != "aggressive":
                privacy = replace(privacy, example=example)
        self.create_optimizer()
        spent = self.get_epsilon()
        if spent and self._checkpoint is None:
            warn(
                f"{self.engine.ledger or 'the engine'} holds releases of earlier runs, with "
                f"epsilon {spent:.3f}: this run adds its own, and get_epsilon() counts all runs. "
                "For other data pass another output_dir",
            )
        asked: dict[str, Any] = {
            "module": self._module(),
            "optimizer": self.optimizer,
            "data_loader": loader,
            "performance": self._performance,
        }
        if self._privacy.target_epsilon is None:
            asked["privacy"] = replace(privacy, target_delta=None)
            made = self.engine.make_private(**asked)
        else:
            asked |= {"privacy": privacy, "steps": self._steps(loader)}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "the accountant has spent privacy already")
                made = self.engine.make_private_with_epsilon(**asked)
        _, self._private_optimizer, private_loader = made
        self.optimizer = self._private_optimizer
        return private_loader

    def _plain_loader(self) -> DataLoader:
        if self.train_dataset is None:
            raise ValueError("train_dataset=None: training needs a dataset; pass train_dataset")
        dataset: Any = self.train_dataset
        collate = self.data_collator
        if isinstance(collate, PackTo):
            pass  # PackTo selects the columns that it needs.
        elif hasattr(dataset, "column_names") and hasattr(dataset, "select"):  # a datasets.Dataset
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        args = self.args
        return DataLoader(
            dataset,
            batch_size=args.per_device_train_batch_size,
            shuffle=True,
            collate_fn=self._training_collate(collate),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
        )

    def _training_collate(self, collate: Any) -> Any:
        """Return the collate function for training; subclasses may wrap `collate`."""
        return collate

    def _steps(self, loader: DataLoader) -> int:
        if self.args.max_steps > 0:
            return self.args.max_steps
        plan = sampling_plan(loader, self._privacy)
        return math.ceil(self.args.num_train_epochs * plan.steps_per_epoch)

    def _tried_example(self, loader: DataLoader) -> Any:
        """Return a batch of `dpflash.sampling.synthetic` as example for the isolation test.

        Return None if no batch can be made, or if a forward replaces modules of the model.

        Raises:
            ValueError: a sample's loss differs from the model's own, or depends on other samples.
        """
        physical = self._performance.physical_batch_size or self.args.per_device_train_batch_size
        with random_state_kept(self.args.device):
            batches = synthetic.batches(loader, self._ranges(), at_most=physical)
            if not batches:
                return None
            model = self._module()
            modules = list(model.modules())
            try:
                with tried(model):
                    prepared = [self._placed(batch) for batch in batches]
                    refusal = None if self._has_unknown_loss else self._difference(prepared)
                    if self._has_own_loss:
                        self.compute_loss(model, prepared[-1])
                    is_changed = list(model.modules()) != modules
            except PrivateRefusal as error:
                refusal = str(error)
            except Exception:  # model or loss may not support synthetic samples
                return None
        if refusal is not None:
            raise ValueError(refusal)
        return None if is_changed else batches[-1]

    def _ranges(self) -> synthetic.Ranges:
        """Return the ranges of token ids, labels and positions that the model accepts."""
        model = plain_model(self._module())
        config = getattr(model, "config", None)
        try:
            tokens, head = model.get_input_embeddings(), model.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            tokens, head = None, None
        size = getattr(tokens, "num_embeddings", None)
        return synthetic.Ranges(
            size,
            labels=getattr(config, "num_labels", 1) if head is None or size is None else size,
            padding=getattr(config, "pad_token_id", None) or 0,
            positions=getattr(config, "max_position_embeddings", None) or synthetic.TOKENS,
        )

    def _difference(self, batches: list[Any]) -> str | None:
        """Return an error message if a synthetic sample's loss is wrong, else None.

        A loss is wrong if it differs from the model's own loss, or depends on other samples.
        """
        model, loss = self._module(), self._sample_loss
        *alone, together, again = batches
        if loss is not None:
            found = (other_loss(model, inputs, loss) for inputs in alone)
            if refusal := next(filter(None, found), None):
                return refusal
        if not are_equal(together, again):  # random masks or labels
            return None
        return changed_in_company(
            lambda inputs: of_documents(self._losses_of(model, inputs)[0], inputs),
            alone,
            together,
            again,
            rounding=rounding_of(model),
        )

    def _placed(self, inputs: Any) -> Any:
        is_packed = isinstance(inputs, PackedBatch)
        return inputs.to(self.args.device) if is_packed else self._prepare_inputs(inputs)

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of entries; for the training data, the public dataset size."""
        if isinstance(dataloader, LogicalBatches):
            return dataloader.loader.dataset_size
        return super().num_examples(dataloader)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """Return (next batches, None), without the number of tokens, which is private."""
        return list(islice(epoch_iterator, num_batches)), None

    # Steps

    def training_step(  # type: ignore[override]
        self, model: nn.Module, inputs: LogicalBatch, num_items_in_batch: Any = None
    ) -> Tensor:
        """Add up the clipped gradients of a logical batch.

        Return 0, or the mean loss of the samples if log_private_metrics is True.
        """
        if self._private_loader is None:
            raise ValueError(
                f"{type(self).__name__}.get_train_dataloader returned a loader of its own, whose "
                f"sampling is not accounted for: {_OWN_BATCHES}"
            )
        self._refuse_hooks()
        if self.args.max_grad_norm:
            raise ValueError(
                "args.max_grad_norm was set after the trainer was made, and would clip noisy "
                "gradients: pass PrivacyConfig(max_grad_norm=...) to a new trainer"
            )
        if self._checkpoint is not None:
            raise ValueError(
                "the checkpoint was not loaded, since the callback that loads it was removed from "
                "the trainer: make a new trainer, and keep its callbacks"
            )
        model.train()
        set_mode = getattr(self.optimizer, "train", None)  # schedule-free optimizers have modes
        if callable(set_mode):
            set_mode()
        total, count = torch.zeros((), device=self.args.device), 0
        for microbatch in inputs:
            microbatch = self._placed(microbatch)
            with self.compute_loss_context_manager():
                losses = self.compute_loss(model, microbatch)
            self.engine.backward(losses)
            if self._log_private_metrics:
                real = self._private_loader.is_real.to(losses.device)
                total += losses.detach()[real].sum()
                count += int(real.sum())
        return total / max(count, 1)

    def _refuse_hooks(self) -> None:
        """Raise if a parameter has a hook, which would see gradients without noise."""
        for name, parameter in self._module().named_parameters():
            if parameter.requires_grad and parameter._backward_hooks:
                raise RuntimeError(
                    f"parameter '{name}' has a hook, which would see sums of microbatches without "
                    "noise: remove it (trackers add such hooks, as by WANDB_WATCH=gradients)"
                )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return losses `[B]` of samples or pairs in training, or Trainer's loss in eval mode."""
        if not model.training:
            return self._evaluated(model, inputs, return_outputs)
        assert self._private_loader is not None
        with self._private_loader.tracker.noting_refusals():
            losses, outputs = self._losses_of(model, inputs)
        return (losses, outputs) if return_outputs else losses

    def _evaluated(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool) -> Any:
        return super().compute_loss(model, inputs, return_outputs=return_outputs)

    def _losses_of(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        if self._sample_loss is not None:
            return losses_of(model, inputs, self._sample_loss)
        if self._has_unknown_loss:
            sample_loss(self._module())  # raises
        assert self.compute_loss_func is not None
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
        outputs = model(**inputs)
        losses = self.compute_loss_func(outputs, labels, num_items_in_batch=None)
        if not isinstance(losses, Tensor) or losses.ndim != 1:
            raise PrivateRefusal(
                "compute_loss_func returned something else than a tensor [B]: return one loss for "
                "each sample, such as dpflash.losses.causal_lm(logits, labels)"
            ) from None
        return losses, outputs

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0, since the number of operations of the sampled batch is private."""
        return 0

    # Logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log public values and epsilon, and other values only with log_private_metrics.

        The number of log entries is public too, but the number of microbatches is private. So
        nothing is logged between two microbatches of a step, or if no public value is left.
        """
        kept = self._public(logs)
        loader = self._private_loader
        if not self._log_private_metrics:
            is_inside = loader is not None and loader.tracker.is_inside
            is_end = "train_runtime" in logs  # no public key, but epsilon is added below
            if is_inside or not (kept or is_end):
                return
        if loader is not None and not any(k.startswith(_EVALUATIONS) for k in kept):
            kept["epsilon"] = self.get_epsilon()
        super().log(kept, start_time)

    def _public(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        if self._log_private_metrics:
            return dict(logs)
        shown = _EVALUATIONS if self._is_evaluating and not self._has_met_drawn else ()
        kept = {k: v for k, v in logs.items() if k in _PUBLIC or k.startswith(shown)}
        unknown = {
            k
            for k in logs.keys() - kept.keys() - self._unknown_metrics
            if k not in _KNOWN_PRIVATE and not k.startswith("train_")
        }
        if unknown:
            self._unknown_metrics |= unknown
            _log.warning(
                "not logged, because they may depend on the training data: %s. Metrics of "
                "evaluations, such as those of compute_metrics, are logged while evaluate() runs. "
                "To log other values, pass log_private_metrics=True and keep the logs secret",
                ", ".join(sorted(unknown)),
            )
        return kept

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any
    ) -> TrainOutput:
        """Train as Trainer does; the result holds no loss, time or count of the training data.

        Raises:
            ValueError: the checkpoint lacks the engine's state, or `args` asks for more steps
                than `target_epsilon` allows after the checkpoint.
        """
        checkpoint: Any = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self._in_output_dir("")) or True
        self._checkpoint = None
        if checkpoint and checkpoint is not True:
            _require_complete(checkpoint)
            self._checkpoint = checkpoint
        done = super().train(checkpoint, *arguments, **options)
        if self._log_private_metrics:
            return done
        metrics = {**self._public(done.metrics), "epsilon": self.get_epsilon()}
        return TrainOutput(done.global_step, math.nan, metrics)

    def create_model_card(self, *arguments: Any, **options: Any) -> None:
        """Write Trainer's model card, with a section on privacy."""
        super().create_model_card(*arguments, **options)
        self._write_card(self._in_output_dir(""))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model and its card, with a section on privacy; for checkpoints also the engine.

        The folder can be passed to `dpflash export`, `dpflash evaluate` and `dpflash audit --run`.
        """
        super().save_model(output_dir, _internal_call)
        self._write_card(output_dir or self._in_output_dir(""))
        if _internal_call and output_dir is not None and not self.args.save_only_model:
            secret = _secret_file(output_dir)
            os.makedirs(os.path.dirname(secret), mode=0o700, exist_ok=True)
            self.engine.save_checkpoint(secret)

    def _write_card(self, folder: str) -> None:
        if self._private_loader is not None and self._private_optimizer is not None:
            base = getattr(plain_model(self._module()), "name_or_path", "")
            delta = self._privacy.target_delta
            assert delta is not None
            self.engine.save_model_card(folder, delta=delta, base=base)

    # Checkpoints

    def restore(self) -> None:
        """Load the engine and the scheduler of the checkpoint, if this run resumes one."""
        checkpoint = self._checkpoint
        if checkpoint is None:
            return
        assert self.lr_scheduler is not None
        assert self._private_optimizer is not None
        chosen = self._private_optimizer.noise_multiplier
        self.engine.load_checkpoint(_secret_file(checkpoint))
        restored = self._private_optimizer.noise_multiplier
        if self._privacy.target_epsilon is not None and restored < chosen * (1 - 1e-6):
            self._refusal = (
                f"resume_from_checkpoint={checkpoint!r} has noise_multiplier={restored:.6g}, but "
                f"target_epsilon={self._privacy.target_epsilon!r} for all steps of args needs "
                f"{chosen:.6g}: the run would exceed target_epsilon. Make a new trainer with "
                "max_steps and num_train_epochs as in the first run, or with "
                "PrivacyConfig(noise_multiplier=..., target_delta=...)"
            )
            raise ValueError(self._refusal)
        state = torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(state)
        self._checkpoint = None

    # Evaluations

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return Trainer's loader, or a loader of packed documents if training packs."""
        if not isinstance(self.data_collator, PackTo):
            return super().get_eval_dataloader(eval_dataset)
        known: Any = self.eval_dataset
        given = known if eval_dataset is None else eval_dataset
        given = known[given] if isinstance(given, str) else given
        if given is None:
            raise ValueError("eval_dataset=None: an evaluation needs a dataset; pass eval_dataset")
        return _packed_loader(given, self.data_collator)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Return Trainer's loader, or a loader of packed documents if training packs."""
        if not isinstance(self.data_collator, PackTo):
            return super().get_test_dataloader(test_dataset)
        return _packed_loader(test_dataset, self.data_collator)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Run Trainer's prediction step; for packed documents return losses, not their mean."""
        if self._private_loader is not None and not self._has_met_drawn:
            given = [x for _, x in tensors_of(inputs)]
            self._has_met_drawn = bool(self._private_loader.seen.drawn(given))
        if not isinstance(inputs, PackedBatch):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._placed(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            losses, outputs = self._losses_of(model, inputs)
        losses = of_documents(losses, inputs)
        if prediction_loss_only:
            return losses, None, None
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        return losses, logits.detach(), inputs.labels

    def evaluate(self, eval_dataset: Any = None, *arguments: Any, **options: Any) -> Any:
        """Evaluate as Trainer does, but refuse the training data, whose metrics are private.

        If an evaluated row is a copy of a row that training has sampled, no metrics are logged.

        Raises:
            PrivateRefusal: there are such copies, and training would choose a model by metrics.
        """
        self._refuse_training_data(self.eval_dataset if eval_dataset is None else eval_dataset)
        with self._evaluating():
            metrics = super().evaluate(eval_dataset, *arguments, **options)
        is_chosen_by = self.is_in_train and self.args.metric_for_best_model is not None
        if self._has_met_drawn and is_chosen_by and not self._log_private_metrics:
            raise PrivateRefusal(
                "eval_dataset has rows that training has drawn, so its metrics are private, but "
                "args.metric_for_best_model would choose a model by these metrics: leave the rows "
                "of eval_dataset out of train_dataset, or leave metric_for_best_model and "
                "load_best_model_at_end out"
            ) from None
        return metrics

    def predict(self, test_dataset: Any, *arguments: Any, **options: Any) -> Any:
        """Predict as Trainer does, but refuse the training data, whose metrics are private."""
        self._refuse_training_data(test_dataset)
        with self._evaluating():
            return super().predict(test_dataset, *arguments, **options)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Context in which metrics of evaluations are logged; contexts may be nested."""
        before = self._is_evaluating
        self._is_evaluating, self._has_met_drawn = True, False
        try:
            yield
        finally:
            self._is_evaluating = before

    def _refuse_training_data(self, evaluated: Any) -> None:
        if not self._log_private_metrics:
            if isinstance(evaluated, str):
                evaluated = self.eval_dataset[evaluated]  # type: ignore[index]
            _refuse_training_data(evaluated, self.train_dataset)
            _refuse_training_data(evaluated, self._given_dataset)

    def hyperparameter_search(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise ValueError, since epsilon would not cover the choice of the best trial."""
        raise ValueError(
            "hyperparameter_search with DPTrainer: each trial spends privacy, and so does the "
            "choice of the best trial. Train each model with the same ledger, and choose one by "
            "public data"
        )


def _packed_loader(dataset: Any, pack: PackTo) -> DataLoader:
    lengths = [pack.length_of(dataset[i]) for i in range(len(dataset))]
    return DataLoader(dataset, batch_sampler=pack.microbatches(lengths), collate_fn=pack)


class _Checkpoints(TrainerCallback):
    """Restores the engine from a checkpoint, and removes files that are not needed."""

    def __init__(self, trainer: DPTrainer):
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Load the checkpoint to resume, now that optimizer and scheduler exist."""
        self._trainer.restore()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Set the epoch from the number of steps, since a resumed run may begin in mid-epoch."""
        state.epoch = state.global_step / len(given["train_dataloader"])

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the optimizer's file, which the engine's checkpoint replaces.

        Remove also engine checkpoints whose folder checkpoint-N no longer exists.
        """
        folder = Path(args.output_dir)
        (folder / f"checkpoint-{state.global_step}" / _OPTIMIZER).unlink(missing_ok=True)
        for path in (folder / SECRET).glob("checkpoint-*.pt"):
            if not (folder / path.stem).is_dir():  # `save_total_limit` has removed it
                path.unlink()


def _check_privacy(privacy: PrivacyConfig) -> None:
    if not isinstance(privacy, PrivacyConfig):
        raise ValueError(f"privacy={privacy!r}: expected a dpflash.PrivacyConfig")
    if privacy.target_delta is None:
        raise ValueError(
            "privacy.target_delta=None: pass the delta at which epsilon is reported, well below "
            "1 / size of the dataset"
        )
    if privacy.target_epsilon is None and privacy.noise_multiplier is None:
        raise ValueError("privacy has neither target_epsilon nor noise_multiplier; pass one")
    if privacy.loss_reduction is not None:
        raise ValueError(
            f"privacy.loss_reduction={privacy.loss_reduction!r}: the trainer computes one loss "
            "for each sample; leave loss_reduction out"
        )


def _check_options(options: Mapping[str, Any], log_private_metrics: bool) -> None:
    for name, values in _UPLOADS.items():
        if os.environ.get(name, "").lower() in values:
            raise ValueError(
                f"{name}={os.environ[name]!r}: the tracker uploads all of output_dir, also the "
                f"secret folder {SECRET}; unset it"
            )
    if options.get("model_init") is not None:
        raise ValueError(
            "model_init would build another model in train(), which the engine does not make "
            "private; pass model="
        )
    dataset = options.get("train_dataset")
    if isinstance(dataset, IterableDataset) or (
        dataset is not None and not hasattr(dataset, "__len__")
    ):
        raise ValueError(
            f"train_dataset={type(dataset).__name__}: samples of an IterableDataset cannot be "
            "drawn independently; pass a dataset with __len__ and __getitem__"
        )
    if not log_private_metrics:
        _refuse_training_data(options.get("eval_dataset"), dataset)


def _refuse_training_data(evaluated: Any, train_dataset: Any) -> None:
    if share_entries(evaluated, train_dataset):
        raise ValueError(
            "the dataset to evaluate on is train_dataset, or shares entries with it: its metrics "
            "are private, and would be logged. Evaluate on other data, or pass "
            "log_private_metrics=True and keep the logs secret"
        )


def _require_complete(checkpoint: str) -> None:
    needed = [_secret_file(checkpoint)]
    needed += [os.path.join(checkpoint, name) for name in _PUBLIC_STATE]
    for path in needed:
        if not os.path.isfile(path):
            raise ValueError(
                f"resume_from_checkpoint={checkpoint!r} needs {path}, which is missing (it is "
                "not written with args.save_only_model, or by a plain Trainer); restore the "
                "file, or load the model and start a new run"
            )


def _secret_file(checkpoint: str) -> str:
    output_dir, name = os.path.split(os.path.realpath(checkpoint))
    return os.path.join(output_dir, SECRET, f"{name}.pt")
