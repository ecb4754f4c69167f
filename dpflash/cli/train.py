"""`dpflash train`: trains or fine-tunes a model of texts with differential privacy.

With torchrun every rank runs this command; only rank 0 prints, except for errors.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from dpflash._validate import counted
from dpflash.refusal import PrivateRefusal
from dpflash.train.config import Parallelism, TrainingConfig

from ._parser import add_options

_DEFAULT_OUT = Path("runs/train")
_LOST, _REFUSED, _INTERRUPTED = 1, 2, 130
_ONE_SIGNAL = 2.0  # seconds within which repeated signals count as one
_PATIENCE = 10.0  # seconds that other ranks wait for rank 0 to report an error

# Names in braces are replaced by the defaults of TrainingConfig.
_OPTIONS = {
    "--data PATH": "folder with text files; with --unit record or field:NAME a JSONL file, or a "
    "folder of JSONL files (default: the *.py files of Python's standard library)",
    "--unit UNIT": "privacy unit, which epsilon protects: file (each file); record (each line of "
    "a JSONL file); folder (all files in one folder of --data, such as a patient's notes); "
    "field:NAME (all records with the same value of that field, such as field:patient) "
    "(default: {unit})",
    "--unit-name NAME": "name of a unit that is a folder or a value of a field, such as patient, "
    "for the ledger, the report and the model card (default: folder, or the field's name)",
    "--examples-per-unit K": "maximum number of documents of a unit that one step trains on, "
    "chosen at random, with --unit folder or field:NAME (default: 4)",
    "--field NAME": "key of the text in a JSONL record (default: {field})",
    "--label-field NAME": "key of the label in a JSONL record. --model is then trained as a "
    "classifier of texts; needs --labels",
    "--class-weights F...": "factors of the losses, one for each label, in the order of --labels. "
    "Weights must be public: epsilon does not cover weights computed from the private labels "
    "(default: no weights)",
    "--model DIR": "fine-tune the model in this folder, which save_pretrained wrote: a causal "
    "language model, or with --label-field a classifier or an encoder such as BERT. Nothing is "
    "downloaded (default: train a new byte-level model)",
    "--tokenizer DIR": "folder of the tokenizer of --model (default: the folder of --model)",
    "--lora-rank N": "train LoRA adapters of this rank (alpha 2 N, no dropout) on all linear "
    "layers instead of all parameters",
    "--eval-data PATH": "file or folder to evaluate on, instead of units held out of --data",
    "--eval-fraction F": "expected fraction of units that are held out for the evaluation and not "
    "trained on; 0 for no evaluation (default: 0.1)",
    "--out DIR": f"new folder for the results (default: {_DEFAULT_OUT}, or the next free number)",
    "--resume DIR": "continue the run in this folder, with any number of ranks. Its options are "
    "read from the checkpoint, except the options for several ranks: pass these options again",
    "--resume-if-present": "continue the run in --out if that folder has a checkpoint, else start "
    "it, so that one command starts and restarts a job, as torchrun --max-restarts does. Pass the "
    "options with which the job began",
    "--seq-len N": "maximum number of tokens per window. A step trains on one window of each "
    "sampled document, or with --pack on the whole document (default: {seq_len})",
    "--batch-size N": "expected number of units per step, over all ranks (default: {batch_size})",
    "--physical-batch-size N": "maximum number of documents in memory at once on each rank; with "
    "--pack the number of rows (default: {physical_batch_size})",
    "--steps N": "number of noisy steps (default: computed from --epochs, or 20, which is enough "
    "for a first look only)",
    "--epochs X": "expected number of times that each unit is sampled, in place of --steps",
    "--dataset-size N": "declared public number of units, from which the sample rate is computed. "
    "The actual number of units then stays private (default: the actual number, which is then "
    "treated as public)",
    "--delta D": "delta of the guarantee, below 1 / number of units (default: {delta})",
    "--accountant NAME": "name of the accountant (default: {accountant})",
    "--clipping NAME": "flat (one norm over all parameters) or per_layer (default: flat, or "
    "per_layer with --optimize aggressive)",
    "--grad-sample-mode NAME": "auto, instantiate, book_keeping or ghost (default: "
    "{grad_sample_mode})",
    "--max-grad-norm C": "clipping bound: maximum norm of one unit's gradient (default: "
    "{max_grad_norm})",
    "--optimize LEVEL": "none, conservative, balanced (bfloat16) or aggressive (compiled) "
    "(default: {optimize})",
    "--attention-backend NAME": "attention kernels on a GPU: auto, own (dpflash's kernels) or "
    "fast (also kernels of cuDNN and FlashAttention whose gradients are not deterministic) "
    "(default: {attention_backend})",
    "--cuda-graph": "replay forward and clipped backward as CUDA graphs. If a part of the step is "
    "left out, the reason is printed",
    "--fp8": "multiply in float8 in all linear layers but the last, on GPUs of compute capability "
    "8.9 or above with --optimize balanced. Other devices compute the same numbers in float32, "
    "which is slower",
    "--learning-rate R": "learning rate of Adam (default: 0.01 for a new model, 1e-4 for all "
    "parameters of --model, 1e-3 for its adapters with --lora-rank)",
    "--embed-dim N": "width of a new model (default: 64)",
    "--layers N": "number of blocks of a new model (default: 2)",
    "--heads N": "number of attention heads of a new model (default: 1)",
    "--pattern NAME": "attention pattern of a new model: a name such as sliding_window, or a name "
    "with sizes such as 'sliding_window(window=256)' (default: dense)",
    "--eval-windows N": "held-out windows per evaluation (default: {eval_windows})",
    "--max-total-bytes N": "maximum bytes of text to hold in memory (default: {max_total_bytes})",
    "--checkpoint-every N": "steps between checkpoints (default: {checkpoint_every})",
    "--target-epsilon E": "epsilon after all steps, from which the noise is computed (default: "
    "{target_epsilon})",
    "--max-epsilon E": "limit of epsilon: training ends before the step that would exceed it. "
    "With --ledger it limits all runs of the ledger together, and a run that would exceed it is "
    "refused (default: no limit)",
    "--ledger FILE": "append to this ledger, which several runs on the same data share, so that "
    "their epsilons add up. --target-epsilon is for the new run alone (default: ledger.jsonl in "
    "--out)",
    "--noise-multiplier S": "standard deviation of the noise over the clipping bound, in place of "
    "--target-epsilon; 0 for a run without privacy",
    "--bands NUMBER": "banded noise: number of steps over which the noise is correlated. It takes "
    "(bands - 1) x 8 bytes for each trained parameter. auto: the number with the least error at "
    "--target-epsilon that fits into a quarter of the device's memory (default: {bands}, "
    "independent noise)",
    "--pack": "pack whole documents into rows of --seq-len tokens. A step trains on all tokens of "
    "each sampled document, or on a window of a document that is longer than a microbatch",
    "--allow-large-delta": "accept a delta that is not below 1 / number of units",
    "--seed N": "make the run repeatable, for research alone: whoever knows the seed can subtract "
    "the noise",
}

# Arguments that are not of the job.
_OF_COMMAND = ("command", "run", "out", "resume", "resume_if_present")

# A held-out loss's name in the summary, and its key in the report.
_MEASURED = (
    ("before training", "before"),
    ("after private training", "after"),
    ("after non-private training", "nonprivate"),
)

# Names in braces are replaced by the defaults of Parallelism. A resumed run may change these.
_SHARED = {
    "--context-parallel K": "number of ranks over which the tokens of each window are sharded; "
    "groups of K ranks divide the documents of a step (default: {context_parallel})",
    "--context-mode NAME": "how ranks exchange keys and values: auto, ring, all_gather or ulysses "
    "(default: {context_mode})",
    "--sharding NAME": "which tokens each rank holds: contiguous, or zigzag, which balances the "
    "work of causal attention (default: {sharding})",
    "--rank-timeout SECONDS": "how long a rank waits in an operation for a rank that is alive "
    "(default: {rank_timeout})",
    "--heartbeat-timeout SECONDS": "how long a rank may send no heartbeat before the other ranks "
    "end (default: {heartbeat_timeout})",
    "--shard-parameters": "shard parameters and optimizer state over the ranks that divide the "
    "documents (FSDP2). There is then no non-private run to compare",
}


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash train`."""
    parser.description = (
        "Train a byte-level language model, or fine-tune a causal language model or a classifier "
        "of transformers (--model), with differential privacy. The privacy unit is one file, "
        "unless --unit chooses another. Ctrl-C finishes the step and writes a checkpoint, from "
        "which --resume continues. To train on several ranks: torchrun --nproc-per-node N -m "
        "dpflash train ..."
    )
    # Options that are not given are absent, because --resume compares only the given options.
    parser.argument_default = argparse.SUPPRESS
    add_options(parser, _with_defaults(_OPTIONS, TrainingConfig))
    parser.add_argument(
        "--suffixes",
        nargs="+",
        metavar="S",
        help="read only files with these suffixes, e.g. .txt .md",
    )
    parser.add_argument(
        "--labels",
        nargs="+",
        metavar="L",
        help="names of all labels, which are public. Records with other labels are left out",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to compute (default: cpu)"
    )
    parser.add_argument(
        "--baseline",
        action=argparse.BooleanOptionalAction,
        help="also train the same model without privacy, to compare (default: yes for a new "
        "model, no with --model)",
    )
    shared = parser.add_argument_group("several ranks, started by torchrun")
    add_options(shared, _with_defaults(_SHARED, Parallelism))
    parser.set_defaults(run=_run_train)


def _with_defaults(
    options: dict[str, str], config: type[TrainingConfig | Parallelism]
) -> dict[str, str]:
    defaults = {f.name: f.default for f in fields(config)}
    return {usage: text.format_map(defaults) for usage, text in options.items()}


def _run_train(args: argparse.Namespace) -> int:
    # torch and the engine are slow to import, and other subcommands do not need them.
    from dpflash.train.launch import Launch, describe_loss

    given = {k: v for k, v in vars(args).items() if k not in _OF_COMMAND}
    shared = {f.name: given.pop(f.name) for f in fields(Parallelism) if f.name in given}
    rank = _rank()
    try:
        launch = Launch.from_environment(Parallelism(**shared), on_loss=_end)
        with launch, warnings.catch_warnings():
            if rank != 0:
                warnings.showwarning = lambda *_, **__: None
            return _train(args, given, launch)
    except (ValueError, OSError, RuntimeError) as error:
        loss = describe_loss(error) if isinstance(error, RuntimeError) else None
        if loss is not None:
            _print_error(rank, loss)
            return _LOST
        if rank == 0 or not isinstance(error, (ValueError, OSError, PrivateRefusal)):
            raise
        # Usually rank 0 reports the same error and ends, and torchrun ends this sleeping rank.
        time.sleep(_PATIENCE)
        _print_error(rank, error)
        return _REFUSED


def _train(args: argparse.Namespace, given: dict[str, Any], launch: Any) -> int:
    from dpflash.train.run import Interrupted

    job = _job(args, given, launch)
    show: Callable[[str], None] = print if job.is_first else lambda _: None
    if job.state.finished:
        why = "finished" if job.state.stopped is None else job.state.stopped
        show(f"The run in {job.folder} is {why}; nothing is left to do.")
    else:
        show("\n".join(_announcement(job)))
    try:
        with _stop_on_signals(shown=job.is_first) as should_stop:
            report = job.run(should_stop=should_stop, progress=True)
    except Interrupted:
        from dpflash.privacy.spending import rounded_up

        show(
            f"Stopped after step {job.step} of {job.total_steps} (epsilon so far "
            f"{rounded_up(job.epsilon)}); resume with: {_resume_command(job, launch)}"
        )
        return _INTERRUPTED
    show("\n".join(_summary(report, job)))
    return 0


def _resume_command(job: Any, launch: Any) -> str:
    if launch.world_size == 1:
        return f"dpflash train --resume {job.folder}"
    context = launch.parallel.context_parallel
    return (
        f"torchrun --nproc-per-node {launch.world_size} -m dpflash train --resume {job.folder}"
        f"{f' --context-parallel {context}' if context > 1 else ''} (any number of ranks)"
    )


def _rank() -> int:
    """Return the global rank; 0 if torchrun's variable is missing or wrong."""
    is_single = os.environ.get("WORLD_SIZE", "1") == "1"
    rank = os.environ.get("RANK", "")
    return int(rank) if not is_single and rank.isascii() and rank.isdigit() else 0


def _print_error(rank: int, error: object) -> None:
    text = " ".join(str(error).split())
    print(f"dpflash: error: rank {rank}: {text}", file=sys.stderr, flush=True)


def _end(loss: str) -> None:
    """End this process at once: its main thread waits for the lost rank and cannot end it."""
    print(file=sys.stderr)  # after a progress bar
    _print_error(_rank(), f"{loss}; resume the run with --resume")
    sys.stdout.flush()
    os._exit(_LOST)


def _job(args: argparse.Namespace, given: dict[str, Any], launch: Any) -> Any:
    from dpflash.train.run import TrainingRun, checkpoint_of, holds_a_run

    resumed = getattr(args, "resume", None)
    out = getattr(args, "out", None)
    if getattr(args, "resume_if_present", False):
        if out is None:
            raise ValueError(
                "resume_if_present=True without out: expected the folder of the run; pass --out "
                "DIR"
            )
        resumed = resumed or (out if checkpoint_of(out) is not None else None)
    if resumed is not None:
        if out is not None and Path(out).resolve() != Path(resumed).resolve():
            raise ValueError(f"out={out!r}: a resumed run stays in its folder; drop --out")
        return TrainingRun.resume(resumed, given, launch)
    if "noise_multiplier" in given:
        given.setdefault("target_epsilon", None)
    elif (given.get("max_epsilon") or 0) > 0:
        # The default target must not exceed max_epsilon, at which the job would stop early.
        default = TrainingConfig.target_epsilon
        assert default is not None
        given.setdefault("target_epsilon", min(default, given["max_epsilon"]))
    folder = _DEFAULT_OUT if out is None else Path(out)
    number = 1
    # All ranks choose the same folder, because no rank writes before all are connected.
    while out is None and holds_a_run(folder):
        number += 1
        folder = _DEFAULT_OUT.with_name(f"{_DEFAULT_OUT.name}-{number}")
    return TrainingRun.start(TrainingConfig(**given), folder, launch)


def _target(job: Any) -> str:
    config = job.config
    if config.target_epsilon is None:
        return ""
    if job.lost_steps:
        return (
            f"epsilon above {config.target_epsilon:g} after the last step, since steps lost "
            "in a crash count too (--max-epsilon ends the run before), "
        )
    of = "" if config.ledger is None else "of this run "
    return f"epsilon {config.target_epsilon:g} {of}after the last step, "


def _bands(job: Any) -> str:
    return "" if job.noise.bands == 1 else f" of {job.noise.bands} bands"


def _announcement(job: Any) -> list[str]:
    config, state, ranks = job.config, job.state, job.ranks
    lines = [
        f"data      {config.data}: {_documents(job)}",
        f"privacy   {_unit(config)} is one unit; {_target(job)}noise multiplier "
        f"{state.noise_multiplier:.4g}{_bands(job)}, {config.clipping} clipping at "
        f"{config.max_grad_norm:g}, delta {config.delta:g}",
    ]
    if config.model is not None:
        adapters = f", LoRA of rank {config.lora_rank}" if config.lora_rank else ""
        lines.append(f"model     {config.model}{adapters}")
    lines.append(f"steps     {_schedule(job)}")
    asked = (config.optimize, config.attention_backend, config.cuda_graph, config.fp8)
    default = TrainingConfig
    if asked != (default.optimize, default.attention_backend, False, False):
        first, *changes = str(job.optimization).splitlines()
        lines += [f"level     {first}", *(f"        {change}" for change in changes)]
    if ranks["data"] * ranks["context"] > 1:
        lines.append(
            f"ranks     {ranks['data']} along the documents x {ranks['context']} along the tokens"
        )
    resumed = f", resumed after step {job.step}" if job.step else ""
    if config.ledger is not None:
        from dpflash.privacy.spending import rounded_up

        lines.append(f"ledger    {job.ledger}: epsilon {rounded_up(job.epsilon)} so far")
    return [*lines, f"results   {job.folder}{resumed}"]


def _documents(job: Any) -> str:
    config = job.config
    if config.dataset_size is not None:
        return f"a declared size of {counted(config.dataset_size, _noun(config))}"
    text = counted(job.num_units, _noun(config))
    document, others = _noun(config), ""
    if config.examples_per_unit is not None:
        document = config.document
        others = f" of {counted(job.num_held_out_units, f'other {config.noun}')}"
        text += f" with {counted(job.num_documents, document)}"
    text += " to train on, "
    held_out = counted(job.num_held_out, document)
    if config.eval_data is not None:
        text += f"{held_out} in {config.eval_data} to evaluate on"
    elif not config.holds_out:
        text += "no evaluation"
    else:
        text += f"{held_out}{others} held out (epsilon does not cover them)"
    return text + (f"; left out: {job.left_out}" if job.left_out else "")


def _noun(config: TrainingConfig) -> str:
    return "document" if config.unit == "file" else config.noun


def _unit(config: TrainingConfig) -> str:
    text = f"one {config.noun}"
    if config.examples_per_unit is not None:
        text += f" (at most {counted(config.examples_per_unit, config.document)} of it in a step)"
    return text


def _schedule(job: Any) -> str:
    config = job.config
    text = f"{job.total_steps} of about {counted(config.batch_size, _noun(config))}, "
    if config.labels is None:
        text += f"{'rows' if config.pack else 'windows'} of {counted(job.window_len, job.token)}"
    else:
        text += f"texts of {counted(job.window_len, 'token')}"
    if job.window_len < config.seq_len:
        text += f" (not {config.seq_len}: {job.shortened})"
    return f"{text}, Adam with learning rate {config.learning_rate:g}"


def _summary(report: dict[str, Any], job: Any) -> list[str]:
    from dpflash.privacy.spending import rounded_up
    from dpflash.train import run as training
    from dpflash.train.metrics import METRICS
    from dpflash.train.report import PLOT, REPORT

    def shown(key: str, form: str = ".3f", missing: str = "not measured") -> str:
        return missing if report[key] is None else format(report[key], form)

    def at_most(key: str) -> str:
        return "none (no noise)" if report[key] is None else rounded_up(report[key])

    public = report["public"]
    declared = "declared" if public["dataset_size_declared"] else "treated as public"
    folder, is_lm = job.folder, job.config.labels is None
    plot = folder / PLOT
    rows = [
        *(
            (f"held-out bits per {job.token} {name}", shown(f"bits_per_{job.token}_{key}"))
            for name, key in _MEASURED
            if report[f"bits_per_{job.token}_{key}"] is not None
        ),
        *(
            (f"held-out accuracy {name}", shown(f"accuracy_{key}"))
            for name, key in _MEASURED
            if f"accuracy_{key}" in report
        ),
        (
            f"epsilon at delta {report['delta']:g}",
            f"{at_most('epsilon_of_run')} after {counted(report['steps'], 'step')}",
        ),
        *(
            [("epsilon of all runs of the ledger", at_most("epsilon"))]
            if report["ledger_is_shared"]
            else []
        ),
        ("neighboring relation", report["neighboring_relation"]),
        ("privacy unit", report["privacy_unit"]),
        ("dataset size", f"{counted(public['dataset_size'], _noun(job.config))}, {declared}"),
        ("sampler", report["sampler"]),
        ("accountant", report["accountant"]),
        (
            f"{'tokens' if is_lm else 'texts'} per second",
            f"{shown('tokens_per_second', ',.0f')} (without padding)",
        ),
        ("peak memory", f"{shown('peak_memory_mb', ',.0f')} MB"),
        ("trained weights", f"{job.released} (dpflash export adds the model card)"),
        ("checkpoint (keep secret)", str(training.checkpoint_of(folder))),
        ("ledger", str(job.ledger)),
        ("ledger's head (save it elsewhere)", report["ledger_head"]),
        ("report (do not publish)", str(folder / REPORT)),
        ("metrics (do not publish)", str(folder / METRICS)),
        (
            "plot (do not publish)",
            str(plot) if plot.exists() else "none; pip install 'dpflash[plot]' to get one",
        ),
    ]
    width = max(len(label) for label, _ in rows)
    evaluate = f"evaluate {folder} --data FILE --label-field {job.config.label_field}"
    return [
        *(f"{label:<{width}}  {value}" for label, value in rows),
        *(f"note: {note}" for note in report["notes"]),
        f"next: dpflash {f'generate {folder} --prompt TEXT' if is_lm else evaluate}, "
        f"or dpflash export {folder} --out DIR",
    ]


@contextmanager
def _stop_on_signals(*, shown: bool) -> Iterator[Any]:
    """Yield a function that returns whether Ctrl-C or SIGTERM was received.

    Signals within two seconds count as one, because launchers repeat them. A later signal raises
    KeyboardInterrupt.
    """
    received: list[float] = []

    def on_signal(number: int, frame: Any) -> None:
        received.append(time.monotonic())
        if received[-1] - received[0] > _ONE_SIGNAL:
            raise KeyboardInterrupt
        if not shown or len(received) > 1:
            return
        print(
            "\nfinishing the step, then writing the checkpoint (a second Ctrl-C exits at once and "
            "loses the steps since the last checkpoint)",
            file=sys.stderr,
        )

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
