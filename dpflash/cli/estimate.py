"""`dpflash estimate`: estimates the memory and time of a training step, without training."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ._parser import add_options

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    from dpflash.clipping.device_speed import Ceilings
    from dpflash.clipping.estimate import StepCost

_OPTIONS = {
    "--model PATH": "folder of a model or of a dpflash train run without LoRA, or a config.json "
    "(of a model of transformers or of a LongContextLM). Weights are not read",
    "--seq-len N": "number of tokens of a sample, over all ranks (default: 1024)",
    "--batch-size N": "number of samples of a step (default: 1)",
    "--physical-batch-size N": "maximum number of samples in memory at once (default: all)",
    "--lora-rank N": "train LoRA adapters of this rank on all linear layers",
    "--ranks N": "number of ranks that divide the tokens of each sample, as --context-parallel of "
    "dpflash train (default: 1)",
    "--memory SIZE": "memory of a device, such as 80GB, of which the process itself takes about "
    "0.4 GiB. The longest sequence and the largest "
    "batch that fit into it are then printed too",
    "--json": "print one JSON object instead",
}
_MODES = ("instantiate", "book_keeping", "ghost")
_DEVICE_BYTES = 80 * 10**9  # memory of a GPU if --memory is not given
_WITHIN = 100  # relative error of the longest sequence that is found: 1 / 100
_FAR = 16  # second guess / first guess; large, since other parts of a step may peak there
_MIB = 2**20


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash estimate`."""
    parser.description = (
        "Estimate the memory and the time of a private and of a plain training step. Nothing is "
        "trained or downloaded, and no weights are allocated. The estimate assumes parameters in "
        "the dtype of config.json or else float32, dpflash's attention, the optimizer AdamW, and "
        "on a GPU bfloat16 autocast."
    )
    add_options(parser, _OPTIONS, required=["--model"])
    parser.add_argument(
        "--device",
        choices=("cpu", "h100", "a100"),
        help="device that trains: this machine's CPU, whose speed is measured in some seconds, or "
        "a GPU with 80 GB (default: cpu)",
    )
    parser.add_argument(
        "--clipping",
        choices=("flat", "per_layer"),
        help="clipping by one norm or layer by layer (default: flat)",
    )
    parser.set_defaults(run=_run_estimate, device="cpu", clipping="flat")
    parser.set_defaults(seq_len=1024, batch_size=1, ranks=1)


def _run_estimate(args: argparse.Namespace) -> int:
    from dpflash._json import finite
    from dpflash._validate import bytes_of, optional, positive_int

    for name in ("seq_len", "batch_size", "ranks", "physical_batch_size", "lora_rank"):
        optional(positive_int, **{name: getattr(args, name)})
    if args.seq_len < args.ranks:
        raise ValueError(
            f"ranks={args.ranks} for seq_len={args.seq_len}: expected at least one token for each "
            "rank; pass fewer ranks or a longer seq_len"
        )
    memory = None if args.memory is None else bytes_of(memory=args.memory)
    subject = Subject(args.model, args.lora_rank, is_fake=True)
    with tqdm(desc="estimate", unit="step", leave=False) as bar:
        report = _report(args, subject, ceilings_of(args.device), memory, bar)
    print(json.dumps(finite(report), indent=2) if args.json else _text(report))
    return 0


def ceilings_of(device: str) -> Ceilings:
    """Return the speed of "h100", "a100", or "cpu" (this machine, which is measured)."""
    from dpflash.clipping.device_speed import reached_ceilings

    if device != "cpu":
        return reached_ceilings(device)
    from dpflash.bench.work import measured_ceilings

    return measured_ceilings()


class Subject:
    """The model that a path describes, with random weights.

    Args:
        path: a folder or a config.json.
        lora_rank: rank of adapters on all linear layers; None to train all parameters.
        is_fake: whether the model's tensors have shapes but no memory.
        checkpoints: whether blocks recompute their activations.

    Attributes:
        model: the model.
        most_tokens: the longest sequence that the model supports; None for no limit.
    """

    def __init__(
        self,
        path: str,
        lora_rank: int | None = None,
        *,
        is_fake: bool = False,
        checkpoints: bool = False,
    ):
        import torch

        self._checkpoints = checkpoints
        self.most_tokens: int | None = None
        config, file = _read_config(path)
        with torch.device("meta" if is_fake else "cpu"):
            if "model_type" in config:
                self.model = self._of_transformers(file, is_fake)
            else:
                self.model = self._of_dpflash(path, config.get("architecture", config))
            if lora_rank is not None:
                self.model = _adapted(self.model, path, lora_rank)
        if is_fake:
            # Libraries can build a model on the device "meta", but not from fake tensors.
            with fake_tensors():
                _replace_meta(self.model)
        self.model.train()

    def _of_dpflash(self, path: str, architecture: dict[str, Any]) -> nn.Module:
        from dpflash.nn import LongContextLM
        from dpflash.patterns import from_key

        given = {**architecture, "activation_checkpointing": self._checkpoints}
        if (key := given.get("pattern")) is not None:
            given["pattern"] = from_key(key)
        if given.get("positions") != "learned" and "max_seq_len" in given:
            given["max_seq_len"] = 1 << 62  # has no effect without learned positions
        try:
            model = LongContextLM(**given)
        except TypeError as error:
            raise ValueError(
                f"model={path!r}: neither the config.json of a model of transformers (it has no "
                f"model_type), nor the arguments of a LongContextLM ({error}); pass one of these"
            ) from None
        if model.position_embedding is not None:
            self.most_tokens = model.max_seq_len
        return model

    def _of_transformers(self, file: Path, is_fake: bool) -> nn.Module:
        from dpflash.integrations.transformers import NAME, register
        from dpflash.train.pretrained import quiet_peft, require_transformers

        transformers = require_transformers(file)
        register()
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
        config.use_cache = False
        self.most_tokens = getattr(config, "max_position_embeddings", None)
        kind = getattr(transformers, next(iter(config.architectures or ()), ""), None)
        kind = kind or transformers.AutoModelForCausalLM
        make = getattr(kind, "_from_config", None) or kind.from_config
        name = _register_without_values(transformers, NAME) if is_fake else NAME
        dropouts = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
        drops = any(getattr(config, dropout, 0) for dropout in dropouts)
        try:
            model: nn.Module = make(config, attn_implementation="eager" if drops else name)
        except ValueError:  # the model's code has its own attention
            model = make(config, attn_implementation="eager")
        if self._checkpoints:
            enable: Any = model.gradient_checkpointing_enable
            with quiet_peft():
                enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    @property
    def head(self) -> nn.Module | None:
        """The layer that computes the logits, or None if it is not known."""
        find = getattr(self.model, "get_output_embeddings", lambda: None)
        found: nn.Module | None = getattr(self.model, "lm_head", None) or find()
        return found

    def losses(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return losses [B] of tokens [B, T], with arbitrary targets."""
        from dpflash.losses import cross_entropy

        if hasattr(model, "architecture"):
            sample_losses: Tensor = model(inputs, inputs)
            return sample_losses
        output: Any = model(input_ids=inputs)
        logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
        return cross_entropy(logits, inputs.new_zeros(logits.shape[:-1]))


def _read_config(path: str) -> tuple[dict[str, Any], Path]:
    from dpflash.release.load import pretrained_folder

    file = Path(path)
    if file.is_dir():
        file = pretrained_folder(file) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"model={path!r}: there is no {file}; pass the folder of a model, of a dpflash run, "
            "or a config.json. For a folder of LoRA adapters, which has no config.json, pass the "
            "base model with --lora-rank"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model={path!r}: not readable as JSON ({error}); restore it") from None
    if not isinstance(config, dict):
        raise ValueError(f"model={path!r}: expected an object of settings; pass a config.json")
    return config, file


def _register_without_values(transformers: Any, name: str) -> str:
    """Register attention for fake tensors: it assumes one document per row and no padding."""
    attend = transformers.AttentionInterface()[name]

    def of_shapes(*given: Any, position_ids: Any = None, **options: Any) -> Any:
        return attend(*given[:4], None, **options)

    name = "shapes_alone"  # transformers takes names with "flash" for libraries
    transformers.AttentionInterface.register(name, of_shapes)
    transformers.AttentionMaskInterface.register(name, lambda **_: None)
    return name


def _adapted(model: nn.Module, path: str, rank: int) -> nn.Module:
    from dpflash.train.pretrained import quiet_peft, require_peft

    peft = require_peft(f"lora_rank={rank}")
    if not hasattr(model, "config"):
        raise ValueError(
            f"lora_rank={rank} with model={path!r}: adapters are for models of transformers; "
            "leave lora_rank out"
        )
    with quiet_peft():
        adapted: nn.Module = peft.get_peft_model(
            model, peft.LoraConfig(r=rank, target_modules="all-linear")
        )
    return adapted


def _replace_meta(model: nn.Module) -> None:
    """Replace the model's tensors, which are on the device "meta", by fake tensors."""
    import torch

    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in tables:
            for name, x in held.items():
                if x is None:
                    continue
                if x not in made:
                    made[x] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
                    if isinstance(x, torch.nn.Parameter):
                        made[x] = torch.nn.Parameter(made[x], requires_grad=x.requires_grad)
                held[name] = made[x]


@functools.cache
def fake_tensors() -> FakeTensorMode:
    """The mode in which tensors have shapes but no memory; all callers share one mode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def memory_budget(is_gpu: bool, memory: int | None) -> int:
    """Return the planner's memory budget in bytes: a quarter of the device's memory."""
    import torch

    from dpflash.clipping.planner import default_memory_budget

    if not is_gpu and memory is None:
        return default_memory_budget(torch.device("cpu"))
    return (memory or _DEVICE_BYTES) // 4


def cost_of(
    subject: Subject,
    ceilings: Ceilings,
    *,
    batch: int,
    tokens: int,
    mode: str | None = "auto",
    clipping: str = "flat",
    microbatch: int | None = None,
    ranks: int = 1,
    memory: int | None = None,
) -> StepCost:
    """Estimate the cost of a step, by running it on fake tensors.

    Args:
        subject: a subject with is_fake=True.
        ceilings: speed of the device.
        batch: samples of a step.
        tokens: tokens of a sample, over all ranks.
        mode: grad_sample_mode; None for a step without privacy.
        clipping: "flat" or "per_layer".
        microbatch: largest number of samples of a microbatch; None for all samples.
        ranks: number of ranks that share each sequence.
        memory: memory of the device; None for this machine's memory, or 80 GB for a GPU.
    """
    import torch

    from dpflash.clipping.device_speed import CPU_RULE
    from dpflash.clipping.estimate import Workload, estimate_step
    from dpflash.clipping.planner import Planner
    from dpflash.clipping.tape import Tape

    is_gpu = ceilings.device != "cpu"
    rows = min(batch, microbatch or batch)
    budget = memory_budget(is_gpu, memory)
    planner = None
    if mode is not None:
        planner = Planner(
            mode,
            budget,
            rows,
            ghost_allowed=clipping == "flat",
            book_keeping_allowed=ranks == 1,
            ceilings=ceilings if is_gpu else CPU_RULE,
        )
    workload = Workload(
        subject.model,
        subject.losses,
        batch,
        -(-tokens // ranks),
        microbatch=microbatch,
        head=subject.head,
        optimizer=functools.partial(torch.optim.AdamW, foreach=is_gpu),
    )
    with fake_tensors(), torch.autocast("cpu", torch.bfloat16, enabled=is_gpu):
        return estimate_step(workload, Tape(ceilings, ranks), planner, clipping=clipping)


def _report(
    args: argparse.Namespace, subject: Subject, ceilings: Ceilings, memory: int | None, bar: Any
) -> dict[str, Any]:
    """Return the values that `--json` prints; `bar` counts the steps that were estimated."""

    # Cached: the searches begin with steps that were estimated for the tables.
    @functools.cache
    def followed(of: Subject, **given: Any) -> StepCost:
        bar.set_postfix({name: given[name] for name in ("mode", "batch", "tokens")})
        found = cost_of(of, ceilings, **given)
        bar.update()
        return found

    def cost(of: Subject = subject, **changes: Any) -> StepCost:
        given: dict[str, Any] = {"batch": args.batch_size, "tokens": args.seq_len, "mode": "auto"}
        given.update(clipping=args.clipping, microbatch=args.physical_batch_size)
        given.update(ranks=args.ranks, memory=memory)
        return followed(of, **{**given, **changes})

    if subject.most_tokens is not None and args.seq_len > subject.most_tokens:
        raise ValueError(
            f"seq_len={args.seq_len}: the model takes at most {subject.most_tokens} tokens; pass "
            "fewer, or raise that number in its config.json"
        )
    parameters = list(subject.model.parameters())
    private, plain = cost(), cost(mode=None)
    by_mode = {"per_layer": cost(clipping="per_layer")}
    for mode in _MODES if args.ranks == 1 else ("instantiate", "ghost"):
        by_mode[mode] = cost(clipping="flat", mode=mode)
    kinds = {"private": "auto", "plain": None}
    again = Subject(args.model, args.lora_rank, is_fake=True, checkpoints=True)
    recomputed = {name: cost(again, mode=mode) for name, mode in kinds.items()}
    report = {
        **_figures(private),
        "modes": dict(private.modes),
        "modes_limited_by": "memory" if private.is_limited else "time",
        "memory_budget": memory_budget(ceilings.device != "cpu", memory),
        "plain": _figures(plain),
        "by_mode": {name: _figures(one) for name, one in by_mode.items()},
        "with_checkpointing": {name: _figures(one) for name, one in recomputed.items()},
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "ceilings": str(ceilings),
    }
    for name in ("model", "device", "seq_len", "batch_size", "physical_batch_size", "lora_rank"):
        report[name] = getattr(args, name)
    report["ranks"] = args.ranks
    if memory is not None:

        def tokens(mode: str | None) -> int | None:
            return largest(
                lambda n: cost(mode=mode, tokens=n).memory_bytes,
                memory,
                first=args.seq_len,
                least=args.ranks,
                most=subject.most_tokens,
            )

        def batch(mode: str | None) -> int | None:
            return largest(
                lambda n: cost(mode=mode, batch=n, microbatch=None).memory_bytes,
                memory,
                first=args.batch_size,
            )

        report["fits"] = {
            "memory_bytes": memory,
            "most_tokens": subject.most_tokens,
            "longest_seq_len": {name: tokens(mode) for name, mode in kinds.items()},
            "largest_batch_size": {name: batch(mode) for name, mode in kinds.items()},
        }
    return report


def _figures(one: StepCost) -> dict[str, Any]:
    return {
        "memory_bytes": one.memory_bytes,
        "step_seconds": one.seconds,
        "parts": dict(one.parts),
    }


def largest(
    size_of: Callable[[int], int],
    limit: int,
    *,
    first: int,
    least: int = 1,
    most: int | None = None,
) -> int | None:
    """Return the largest number with size_of(number) <= limit, within 1%; None if there is none.

    Sizes grow with the number, and almost linearly for large numbers. So each guess is the number
    at which a line through two known sizes meets the limit.
    """
    low, high = least - 1, (1 << 40) if most is None else most + 1
    known: dict[int, int] = {}
    guess, widths = first, [0, 0]
    while high - low > max(1, low // _WITHIN):
        guess = min(max(guess, low + 1), high - 1)
        widths.append(high - low)
        known[guess] = size = size_of(guess)
        is_within = size <= limit
        low, high = (guess, high) if is_within else (low, guess)
        other = high if high in known else max((n for n in known if n < low), default=0)
        if low not in known or other not in known:
            guess = guess * _FAR if is_within else guess // _FAR
        elif high in known and 2 * (high - low) > widths[-2] > 0:
            guess = (low + high) // 2  # the last two guesses did not halve the interval
        else:
            slope = (known[other] - known[low]) / (other - low)
            on_line = low + (limit - known[low]) / slope if slope else low * _FAR
            # Aim a little beyond the line, so that later guesses move both ends of the interval.
            guess = round(on_line * (1 + (0.4 if is_within else -0.4) / _WITHIN))
    return low if low >= least else None


def _text(report: dict[str, Any]) -> str:
    from ._tables import table

    columns = {"plain": report["plain"], "private": report}
    for name, found in report["with_checkpointing"].items():
        columns[f"{name}, checkpoints"] = found
    rows = [
        (part, *(f"{one['parts'][part] / _MIB:,.1f}" for one in columns.values()))
        for part in report["parts"]
    ]
    rows.append(("total", *(f"{c['memory_bytes'] / _MIB:,.1f}" for c in columns.values())))
    rows.append(("seconds", *(f"{c['step_seconds']:,.3g}" for c in columns.values())))
    modes = [
        (name, f"{one['memory_bytes'] / _MIB:,.1f}", f"{one['step_seconds']:,.3g}")
        for name, one in report["by_mode"].items()
    ]
    chosen = ", ".join(f"{mode} {count}" for mode, count in report["modes"].items())
    why = "limited by time: the faster mode of each parameter"
    if report["modes_limited_by"] == "memory":
        budget = f"{report['memory_budget'] / _MIB:,.1f} MiB, a quarter of the memory"
        why = f"limited by memory: the faster modes would keep more than memory_budget ({budget})"
    lines = [
        f"{report['parameters']:,} parameters, {report['trained_parameters']:,} of them trained; "
        f"T={report['seq_len']:,}, B={report['batch_size']:,}, {report['ranks']} rank(s)",
        "",
        table(rows, ["peak memory of a rank, MiB", *columns]),
        "",
        table(modes, ["private step by mode", "MiB", "seconds"]),
        "",
        f"modes that the planner chooses: {chosen}; {why}",
        f"speed of the device: {report['ceilings']}",
    ]
    if "fits" in report:
        fits = report["fits"]
        lines.append(f"within {fits['memory_bytes']:,} bytes on each rank:")
        for key, text in (
            ("longest_seq_len", "longest sequence"),
            ("largest_batch_size", "largest batch"),
        ):
            found = {k: "none" if v is None else f"{v:,}" for k, v in fits[key].items()}
            most = fits["most_tokens"] if key == "longest_seq_len" else None
            limit = most is not None and most in fits[key].values()
            limited = " (the model takes no more)" if limit else ""
            lines.append(f"  {text}: {found['private']} private, {found['plain']} plain{limited}")
    return "\n".join(lines)
