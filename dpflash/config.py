"""PrivacyConfig and PerformanceConfig: the checked arguments of `make_private`.

`make_private` takes them as `privacy=` and `performance=`, or takes their fields as keywords. Only
this file defines the fields and their defaults. `resolved` checks the two configurations together
and returns them as `Settings`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar, cast

from ._validate import (
    finite,
    naming_unknown_fields,
    noise_fits,
    one_of,
    optional,
    positive,
    positive_int,
    probability,
    words,
)
from .attn.backend import BACKENDS
from .clipping.groups import Bounds, joint_bound
from .clipping.planner import DEFAULT_LEVEL, GRAD_SAMPLE_MODES, LEVELS, clipping_for
from .noise import Banded
from .opacus_calls import known_keywords, refuse_keywords_of
from .privacy.budget import PrivacyBudget
from .sampling import SAMPLINGS
from .sampling.plan import ALLOCATION, INDEPENDENT
from .step.block import refuse_large

AUTO = "auto"  # noise_mechanism="auto" chooses the number of bands with the least error
CLIPPINGS = ("flat", "per_layer")
CLIP_FUNCTIONS = ("hard", "automatic")

# Number of bands of the noise (None: no mechanism; 2: two or more) -> allowed samplings.
_SAMPLINGS_OF_BANDS = {
    None: ("poisson", "fixed_size", "shuffled", ALLOCATION),
    1: INDEPENDENT,
    2: ("cyclic_poisson",),
}

_Method = TypeVar("_Method", bound=Callable[..., Any])

# Default of each keyword argument that is a field of one of the two configurations.
UNSET: Any = type("UNSET", (), {"__repr__": lambda self: "UNSET"})()

# Fields that only `make_private_with_epsilon` and trainers use, since both know the steps.
TARGETS = ("target_epsilon", "target_delta")

# Opacus' and former names of grad_sample_mode -> the present names.
_SAME_MODE = {"hooks": "instantiate", "functorch": "instantiate", "ew": "instantiate"}
_SAME_MODE |= {"ghost_fsdp": "ghost"}


@naming_unknown_fields
@dataclass(frozen=True)
class PrivacyConfig:
    """The arguments of `make_private` that determine epsilon and the effect of one sample.

    Args:
        max_grad_norm: L2 bound C of one sample's gradient over all parameters; between 1e-30 and
            1e30 if there is noise. With clipping="per_layer" also a list with a bound C_k for
            each clipping group, in the order of `engine.groups()`, or a dict from the groups'
            names to their bounds; then C = sqrt(sum C_k^2), and noise is scaled to C.
        noise_multiplier: standard deviation of the noise divided by max_grad_norm; 0 for no noise,
            and then epsilon is infinite. None if `make_private_with_epsilon` chooses the noise.
        target_epsilon: epsilon at the end of training, in place of noise_multiplier:
            `make_private_with_epsilon` and the trainers of `dpflash.integrations` choose the
            noise multiplier that spends this epsilon.
        target_delta: delta for target_epsilon, and for the epsilon that trainers report.
        clipping: "flat" (one norm over all parameters) or "per_layer" (one norm for each module,
            each with an equal part of C^2). None for the optimization level's default: "flat", or
            "per_layer" if `optimize` is "aggressive" and no grad_sample_mode is given.
        clip_function: "hard", c_i = min(1, C / n_i), or "automatic", c_i = C / (n_i + 0.01), for
            the clipping factor c_i of a sample whose gradient has norm n_i.
        sampling: the sampler, for which epsilon is computed:
            "poisson": each sample is drawn independently.
            "fixed_size": each logical batch has batch_size different samples, chosen anew.
            "shuffled": the loader's own epochs. An epoch costs one Gaussian step, an upper bound
            without amplification.
            "cyclic_poisson": the dataset is divided, in secret, into as many parts as
            noise_mechanism has bands; each logical batch is a Poisson sample of the next part. One
            round over all parts costs one Poisson step at (number of bands) times the rate.
            "random_allocation": each sample is in exactly one logical batch of each epoch, chosen
            at random and in secret. The first release of an epoch is charged the cost of the whole
            epoch, and noise_multiplier cannot be lowered before the epoch ends.
        noise_mechanism: None, or one band, for independent noise; `dpflash.noise.Banded(bands=4)`
            and sampling="cyclic_poisson" for correlated noise: later releases subtract a part of
            it again. noise_multiplier and max_grad_norm then cannot change in training. With
            "auto", and no sampling=, `make_private_with_epsilon` chooses sampling and number of
            bands: of all numbers whose states fit into memory_budget, the number with the least
            error of the iterates (`dpflash.noise.compare_bands`).
        max_batch_size: the largest number of samples in a Poisson-sampled logical batch; larger
            batches are truncated to it. Epsilon accounts for the truncation, which costs next to
            nothing if max_batch_size is well above batch_size. If physical_batch_size is at least
            max_batch_size, every logical batch is one microbatch of max_batch_size rows.
        max_dataset_size: a public upper bound on the number of entries of any dataset that could
            be used. The probability that max_batch_size truncates a batch is computed for this
            number. So it is required for max_batch_size with dataset_size or sample_rate, and has
            no effect without max_batch_size. A dataset with more entries is refused before
            training. Epsilon does not cover this refusal: pass a number with room to grow.
        dataset_size: a public size of the dataset. Sample rate, steps of an epoch and the divisor
            are computed from it alone; the number of entries is private, may differ, and is never
            compared with dataset_size. With None the number of entries counts as public, and the
            relation is "zero_out". Only Poisson sampling and random allocation support it.
        sample_rate: the sample rate itself; pass it with steps_per_epoch, in place of
            dataset_size. Random allocation refuses it: the rate is 1 / steps per epoch.
        steps_per_epoch: number of logical batches in an epoch; pass it with sample_rate.
        unit_of: required if a privacy unit, such as a user, has several entries: a list or array
            with the unit of each entry, or a function from an entry to its unit. With
            unit_sampling="example" an entry may belong to several units (a tuple, list or set).
            None if each entry is a unit. With unit_of, dataset_size, batch_size of the loader,
            max_batch_size and physical_batch_size count units.
        examples_per_unit: k, the largest number of entries of a unit that one logical batch uses,
            chosen at random; with unit_sampling="example" the largest number used in training.
        unit_sampling: "unit" samples units, and clips the mean gradient of each unit's entries.
            "example" samples entries (batch_size and the other sizes then count entries), clips
            each entry's gradient, and accounts for up to k entries of a unit in one batch (Charles
            et al., arXiv:2407.07737). If entries belong to several units, two datasets are
            neighbors if the entries of one unit are replaced by nothing, and the assignment of
            entries to units is public and the same in both (fixed-graph relation of Ganesh et al.,
            arXiv:2503.03622).
        unit_name: name of a unit, such as "patient"; required with a ledger. It is public:
            `engine.privacy_unit` and each line of the ledger contain it ("user: patient"), so that
            all releases of one ledger protect the same units.
        run_name: name of this run in the ledger, such as "notes, bound 0.5". It is public.
        data_name: name of the dataset in the ledger, such as "notes of 2026". It is public.
        public_length: the length of all samples, that is, dimension 1 of the batch's tensors. A
            batch whose shape differs from the first batch's is then refused.
            `dpflash.sampling.PadTo` pads to this length and declares it.
        loss_reduction: "mean" or "sum" if the training loop calls loss.backward() on a scalar
            that is this reduction over samples; None for engine.backward(losses). "mean" needs
            full float32: it is refused if parameters, autocast (also the autocast of `optimize`)
            or float32 products have lower precision. One case is not detected: a model calls
            convolutions as functions on a GPU, where cudnn rounds them by default (set
            torch.backends.cudnn.conv.fp32_precision = "ieee").
        budget: a limit on the epsilon of all releases, past and future; a step that would exceed
            it raises `BudgetSpent` and releases nothing.
        exact: "auto" sums clipped gradients exactly, in multiples of 2^(floor(log2 max_grad_norm)
            - 30), if per-sample gradients exist: with grad_sample_mode="instantiate", as tiles
            (parts), and in layers other than linear and embedding layers. The mode stays the same.
            True chooses modes that are exact for all parameters; False sums in float32 everywhere.
            Noise is exact in each case. `engine.plan()` and `engine.rounded_sums` show the result.
        verify_first_batch: test on the first batches, and occasionally later, that the model and
            the loop compute each sample by itself, see `PrivacyEngine.verified`.
        example: a public batch of two or more samples (made up, or from another dataset), in the
            form that the loader yields. Before training the loader yields it three times: with
            other contents in half of the samples, in the other half, and unchanged. If the loss or
            gradient of an unchanged sample differs, a ValueError names the sample, the place and
            the difference. The model does not train on this batch.
        foreign_batches: also accept batches that are not from the private loader. You guarantee
            that each row of such a batch is computed from one privacy unit, that no unit is in two
            rows, and that the rows and their number were chosen without the private data. So pass
            no two views of a sample, and no padding rows (as another private loader adds). Each
            such batch costs a Gaussian step without amplification. From the first such batch on,
            epsilon is for "zero_out". With False a backward on such a batch is refused.
        allow_buffers: names of buffers, parameters and other entries of `state_dict()` that the
            forward or the loop may change, because you guarantee that their contents are public,
            such as a bound on a weight's norm or a count of releases. A count of forwards
            (num_updates, num_batches_tracked) is private. All other entries must not change.

    Raises:
        ValueError: names the argument, its value and what to do.
    """

    max_grad_norm: float | Bounds
    noise_multiplier: float | None = None
    clipping: str | None = None
    clip_function: str = "hard"
    sampling: str = "poisson"
    noise_mechanism: Banded | str | None = None
    max_batch_size: int | None = None
    max_dataset_size: int | None = None
    dataset_size: int | None = None
    sample_rate: float | None = None
    steps_per_epoch: int | None = None
    unit_of: Sequence[Any] | Callable[[Any], Any] | None = None
    examples_per_unit: int | None = None
    unit_sampling: str = "unit"
    unit_name: str | None = None
    run_name: str | None = None
    data_name: str | None = None
    public_length: int | None = None
    loss_reduction: str | None = None
    budget: PrivacyBudget | None = None
    exact: bool | str = "auto"
    verify_first_batch: bool = True
    example: Any = field(default=None, compare=False, repr=False)
    foreign_batches: bool = False
    allow_buffers: tuple[str, ...] = ()
    target_epsilon: float | None = None
    target_delta: float | None = None

    @property
    def bounds(self) -> Bounds | None:
        """The bounds of the clipping groups; None if max_grad_norm is one number."""
        return None if isinstance(self.max_grad_norm, float) else self.max_grad_norm

    @property
    def bound(self) -> float:
        """L2 bound of one sample's gradient over all parameters."""
        if isinstance(self.max_grad_norm, float):
            return self.max_grad_norm
        return joint_bound(self.max_grad_norm)

    def _set_bounds(self) -> None:
        given: Any = self.max_grad_norm
        if not isinstance(given, list | tuple | Mapping):
            positive(max_grad_norm=given)
            object.__setattr__(self, "max_grad_norm", float(given))
            return
        named = isinstance(given, Mapping)
        values = list(given.values() if isinstance(given, Mapping) else given)
        if not values:
            raise ValueError(f"max_grad_norm={given!r}: expected a bound for each clipping group")
        for key, value in zip(given if named else range(len(values)), values, strict=True):
            name = f"max_grad_norm[{key!r}]"
            positive(**{name: value})
            finite(**{name: value})
        numbers = [float(value) for value in values]
        bounds = dict(zip(given, numbers, strict=True)) if named else tuple(numbers)
        object.__setattr__(self, "max_grad_norm", bounds)

    def __post_init__(self) -> None:
        self._set_bounds()
        noise = 0.0 if self.noise_multiplier is None else self.noise_multiplier
        noise_fits(max_grad_norm=self.bound, noise_multiplier=noise)
        if self.noise_multiplier is not None:
            object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))
        self._check_target()
        names = self.allow_buffers
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"allow_buffers={names!r}: expected a list of names")
        object.__setattr__(self, "allow_buffers", tuple(names))
        if isinstance(self.clipping, str) and self.clipping == "per_block":
            raise ValueError(
                "clipping='per_block' was removed: per_layer is faster and smaller; pass "
                "clipping='per_layer', or 'flat' for one norm over all parameters"
            )
        if isinstance(self.clipping, str) and self.clipping == "adaptive":
            raise ValueError(
                "clipping='adaptive': there is no bound here that follows the samples' norms; "
                "leave clipping out, and pass clip_function='automatic', which needs no tuned "
                "max_grad_norm, or set optimizer.max_grad_norm by a public schedule"
            )
        one_of(clipping=(self.clipping, (None, *CLIPPINGS)))
        one_of(clip_function=(self.clip_function, CLIP_FUNCTIONS))
        one_of(sampling=(self.sampling, SAMPLINGS))
        one_of(loss_reduction=(self.loss_reduction, (None, "mean", "sum")))
        one_of(verify_first_batch=(self.verify_first_batch, (True, False)))
        one_of(foreign_batches=(self.foreign_batches, (True, False)))
        if self.example is not None and not self.verify_first_batch:
            raise ValueError(
                "example with verify_first_batch=False, which leaves its trial out: nothing would "
                "be tested on the example; leave one of the two arguments out"
            )
        if self.exact not in ("auto", True, False) or not isinstance(self.exact, bool | str):
            raise ValueError(f"exact={self.exact!r}: expected 'auto', True or False")
        if self.exact is True and math.isinf(self.bound):
            raise ValueError("exact=True with max_grad_norm=inf: pass a finite max_grad_norm")
        if self.budget is not None and not isinstance(self.budget, PrivacyBudget):
            raise ValueError(
                f"budget={self.budget!r}: expected a dpflash.PrivacyBudget(epsilon, delta) or None"
            )
        if self.max_batch_size is not None:
            positive_int(max_batch_size=self.max_batch_size)
            if self.sampling != "poisson":
                why = (
                    "for which no epsilon of truncated batches is known"
                    if self.sampling in INDEPENDENT
                    else "whose batches are never larger than batch_size"
                )
                raise ValueError(
                    f"max_batch_size={self.max_batch_size} with sampling={self.sampling!r}, {why};"
                    " leave it out"
                )
        self._check_mechanism()
        self._check_public_size()
        self._check_units()

    def _check_mechanism(self) -> None:
        mechanism, sampling = self.noise_mechanism, self.sampling
        if isinstance(mechanism, str) and mechanism == AUTO:
            self._check_auto()
            return
        if mechanism is not None and not isinstance(mechanism, Banded):
            raise ValueError(
                f"noise_mechanism={mechanism!r}: expected a dpflash.noise.Banded, 'auto' or None; "
                "pass dpflash.noise.Banded(bands=4)"
            )
        bands = None if mechanism is None else min(mechanism.bands, 2)
        if sampling not in _SAMPLINGS_OF_BANDS[bands]:
            way_out = {
                None: "pass noise_mechanism=dpflash.noise.Banded(bands=4), or sampling='poisson'",
                1: "pass sampling='poisson'",
                2: "pass sampling='cyclic_poisson'",
            }[bands]
            raise ValueError(
                f"sampling={sampling!r} with noise_mechanism={mechanism!r}: no epsilon is known "
                f"for this combination; {way_out}"
            )
        if mechanism is None or mechanism.bands == 1:
            return
        if self.foreign_batches:
            raise ValueError(
                f"foreign_batches=True with noise_mechanism={mechanism!r}: the accountant would "
                "not know in which releases a sample takes part; leave foreign_batches out"
            )
        refuse_large(self.noise_multiplier or 0.0, mechanism.noise_scale())

    def _check_auto(self) -> None:
        """Refuse options that do not work with several bands, since "auto" may choose several."""
        if self.sampling != "poisson":
            raise ValueError(
                f"sampling={self.sampling!r} with noise_mechanism='auto', which chooses the "
                "sampling; leave sampling out, or pass dpflash.noise.Banded(bands=4)"
            )
        refused = {
            "max_batch_size": (self.max_batch_size, None),
            "foreign_batches": (self.foreign_batches, False),
            "unit_sampling": (self.unit_sampling, "unit"),
        }
        for name, (value, usual) in refused.items():
            if value != usual:
                raise ValueError(
                    f"{name}={value!r} with noise_mechanism='auto': no epsilon of banded noise is "
                    f"known in this case; leave {name} or noise_mechanism out"
                )

    def _check_units(self) -> None:
        optional(words, run_name=self.run_name, data_name=self.data_name)
        one_of(unit_sampling=(self.unit_sampling, ("unit", "example")))
        if (self.unit_of is None) != (self.examples_per_unit is None):
            missing = "unit_of" if self.unit_of is None else "examples_per_unit"
            raise ValueError(
                f"{missing}=None: unit_of and examples_per_unit must be passed together; pass both"
            )
        if self.unit_of is None:
            if self.unit_sampling != "unit":
                raise ValueError(
                    f"unit_sampling={self.unit_sampling!r} without unit_of: pass the unit of each "
                    "entry, and examples_per_unit"
                )
            if self.unit_name is not None:
                raise ValueError(
                    f"unit_name={self.unit_name!r} without unit_of: pass unit_of and "
                    "examples_per_unit too, or leave unit_name out"
                )
            return
        optional(words, unit_name=self.unit_name)
        positive_int(examples_per_unit=self.examples_per_unit)
        if self.sampling == "shuffled" or (
            self.unit_sampling == "example" and self.sampling != "poisson"
        ):
            raise ValueError(
                f"sampling={self.sampling!r} with unit_of and unit_sampling="
                f"{self.unit_sampling!r}: no epsilon is known for this combination; use "
                "sampling='poisson'"
            )
        if self.unit_sampling == "example" and self.max_batch_size is not None:
            raise ValueError(
                f"max_batch_size={self.max_batch_size} with unit_sampling='example': no epsilon "
                "is known for truncated batches; leave max_batch_size out"
            )
        if self.unit_sampling == "unit" and self.loss_reduction is not None:
            raise ValueError(
                f"loss_reduction={self.loss_reduction!r} with unit_of: a scalar loss cannot be "
                "split into units; leave it out, and call engine.backward with one loss per row"
            )

    def _check_target(self) -> None:
        optional(probability, target_delta=self.target_delta)
        if self.target_epsilon is None:
            return
        positive(target_epsilon=self.target_epsilon)
        finite(target_epsilon=self.target_epsilon)
        if self.noise_multiplier is not None:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier!r} conflicts with target_epsilon="
                f"{self.target_epsilon!r}, which determines it; pass one of the two"
            )
        if self.target_delta is None:
            raise ValueError(
                f"target_epsilon={self.target_epsilon!r} without target_delta: pass target_delta "
                "too, well below 1 / size of the dataset"
            )

    def _check_public_size(self) -> None:
        most = self.max_dataset_size
        if most is not None:
            positive_int(max_dataset_size=most)
            if most < (self.dataset_size or 1):
                raise ValueError(
                    f"max_dataset_size={most!r} below dataset_size={self.dataset_size!r}; pass a "
                    "number that no dataset of this kind exceeds"
                )
        names = ("dataset_size", "sample_rate", "steps_per_epoch")
        named = [f"{n}={getattr(self, n)!r}" for n in names if getattr(self, n) is not None]
        if not named:
            return
        if self.sampling not in INDEPENDENT:
            raise ValueError(
                f"{named[0]} with sampling={self.sampling!r}, whose neighboring relation counts "
                "the size of the dataset as public; leave it out, or use sampling='poisson'"
            )
        if self.sampling == ALLOCATION and self.dataset_size is None:
            raise ValueError(
                f"{named[0]} with sampling={self.sampling!r}, whose rate is 1 / steps per epoch; "
                f"leave {named[0]} out, or pass dataset_size instead"
            )
        if (self.sample_rate is None) != (self.steps_per_epoch is None):
            raise ValueError(
                f"{named[0]}: sample_rate and steps_per_epoch come together; pass both"
            )
        if self.dataset_size is not None:
            positive_int(dataset_size=self.dataset_size)
            if self.sample_rate is not None:
                raise ValueError(
                    f"{', '.join(named)}: the size gives the rate; pass dataset_size alone, or "
                    "sample_rate with steps_per_epoch"
                )
        if self.sample_rate is not None:
            positive(sample_rate=self.sample_rate)
            if self.sample_rate > 1:
                raise ValueError(f"sample_rate={self.sample_rate!r}: expected a number in (0, 1]")
            positive_int(steps_per_epoch=self.steps_per_epoch)
        if self.max_batch_size is not None and most is None:
            raise ValueError(
                f"{named[0]} with max_batch_size={self.max_batch_size}: the more entries there "
                "are, the more often batches are truncated, and the number of entries is private. "
                "Pass max_dataset_size=, a public number that the number of entries cannot exceed"
            )


@naming_unknown_fields
@dataclass(frozen=True)
class PerformanceConfig:
    """The arguments of `make_private` that determine time and memory, but not epsilon.

    Args:
        grad_sample_mode: how flat clipping computes its norms and sums. "instantiate" stores each
            layer's per-sample gradients; "book_keeping" stores activations and output gradients;
            "ghost" runs a second backward; with "auto" a planner chooses for each layer. Opacus'
            "hooks", "functorch" and "ew" mean "instantiate", its "ghost_fsdp" means "ghost".
        physical_batch_size: largest number of rows of a microbatch on one rank. All microbatches
            have the same public number of rows, `loader.slots`. A logical batch fills as many
            microbatches as it needs, and the step() after the last one releases it. Without this
            limit, about 10% of all rows stay empty on average.
        memory_budget: bytes for the stored gradients of physical_batch_size samples (of the
            expected batch size if that is None); by default a quarter of the device's memory.
        optimize: "none" (textbook DP-SGD: each layer keeps its per-sample gradients),
            "conservative" (a planner chooses the mode; results change by rounding alone),
            "balanced" (also runs the model's forward under bfloat16 autocast) or "aggressive"
            (also per_layer clipping and torch.compile). `engine.optimization` lists the changes
            made and the changes left out; none of the levels changes epsilon.
        attention_backend: the attention kernels for the model's forward and backward: "own",
            "fast" or "auto", see `dpflash.attention_backend`. Only with "auto" does a ``with
            dpflash.attention_backend(...)`` in the loop have an effect. exact=True means "own";
            with "fast" the planner never uses "ghost", and grad_sample_mode="ghost" becomes
            "auto".
        cuda_graph: on a GPU, replay the model's forward and its clipped backward as CUDA graphs,
            so that a small model does not wait for Python. Losses, charge, noise and release run
            without graphs. Isolation tests, dropout, hooks, several calls before a backward, and
            several ranks also run without graphs, and so does a model whose forward reads or keeps
            tensors other than its arguments, parameters, buffers and outputs. Use few batch
            shapes. Each call overwrites the outputs of the previous call. Python values that the
            forward reads, such as a global, are read at the capture only, except numbers in the
            model's attributes. `engine.optimization` says whether calls are captured, or why not.
            Not yet run on a GPU.
        fp8: compute the products of all linear layers except the last one in float8 (e4m3), in the
            forward and for the gradient of the input. Each token's row has its own scale, so that
            no sample's rounding depends on another sample. Weight gradients use unquantized inputs
            and output gradients. GPUs of compute capability 8.9 and above multiply in float8;
            other GPUs and the CPU emulate float8, which is slower. `engine.optimization` names
            these layers. Not yet run on a GPU.

    Raises:
        ValueError: names the argument, its value and what to do.
    """

    grad_sample_mode: str = "auto"
    physical_batch_size: int | None = None
    memory_budget: int | None = None
    optimize: str = DEFAULT_LEVEL
    attention_backend: str = AUTO
    cuda_graph: bool = False
    fp8: bool = False
    # The grad_sample_mode that was passed; __post_init__ sets it for each object.
    asked_mode: ClassVar[str]

    def __post_init__(self) -> None:
        mode = self.grad_sample_mode
        object.__setattr__(self, "asked_mode", mode)
        if mode == "no_op":
            raise ValueError(
                "grad_sample_mode='no_op': gradients without clipping have no guarantee; use "
                "'auto', or for ordinary gradients noise_multiplier=0 and max_grad_norm=math.inf"
            )
        object.__setattr__(self, "grad_sample_mode", _SAME_MODE.get(mode, mode))
        one_of(grad_sample_mode=(self.grad_sample_mode, ("auto", *GRAD_SAMPLE_MODES)))
        one_of(optimize=(self.optimize, LEVELS), cuda_graph=(self.cuda_graph, (False, True)))
        one_of(attention_backend=(self.attention_backend, BACKENDS))
        self._check_fp8()
        optional(positive_int, physical_batch_size=self.physical_batch_size)
        optional(positive_int, memory_budget=self.memory_budget)
        if self.optimize == "none" and self.grad_sample_mode not in ("auto", "instantiate"):
            raise ValueError(
                f"grad_sample_mode={self.grad_sample_mode!r} with optimize='none', which needs "
                "grad_sample_mode='auto' or 'instantiate'; pass one of these, or "
                "optimize='conservative'"
            )

    def _check_fp8(self) -> None:
        if isinstance(self.fp8, str):
            raise ValueError(
                f"fp8={self.fp8!r}: scales over tokens or over the batch make a sample's rounding "
                "depend on other samples; pass fp8=True, which has one scale for each token's row"
            )
        one_of(fp8=(self.fp8, (False, True)))
        if self.fp8 and self.cuda_graph:
            raise ValueError(
                "fp8=True with cuda_graph=True: graphs would reuse the weights' float8 casts made "
                "at the capture; pass one of the two"
            )


# The names of all fields.
FIELDS = {f.name for kind in (PrivacyConfig, PerformanceConfig) for f in fields(kind)}


@dataclass(frozen=True)
class Settings:
    """Both configurations of a private model, checked together.

    Attributes:
        privacy, performance: the configurations passed, with clipping and grad_sample_mode set.
        noise_multiplier, clipping: the fields of `privacy`, which are not None here.
        asked_clipping: the clipping that was passed; None for the optimization level's default.
    """

    privacy: PrivacyConfig
    performance: PerformanceConfig
    noise_multiplier: float
    clipping: str
    asked_clipping: str | None


def resolved(privacy: PrivacyConfig, performance: PerformanceConfig) -> Settings:
    """Return both configurations with `clipping` set.

    Raises:
        ValueError: two arguments cannot be combined; the message names them.
    """
    mode, clipping = performance.grad_sample_mode, privacy.clipping
    clipping = clipping_for(performance.optimize, clipping, mode)
    for name in TARGETS:
        if getattr(privacy, name) is not None:
            raise ValueError(
                f"privacy.{name}={getattr(privacy, name)!r} with make_private, which does not "
                "know the number of steps; call make_private_with_epsilon(epochs=...)"
            )
    if privacy.noise_mechanism == AUTO:
        raise ValueError(
            "noise_mechanism='auto' with make_private, which does not know epsilon and the number "
            "of steps; call make_private_with_epsilon(epochs=...), or pass "
            "dpflash.noise.Banded(bands=4)"
        )
    if privacy.noise_multiplier is None:
        raise ValueError(
            "noise_multiplier is missing: pass it, or call make_private_with_epsilon, which "
            "chooses it for target_epsilon"
        )
    if clipping != "flat" and performance.asked_mode == "hooks":  # Opacus' default
        mode, performance = "auto", replace(performance, grad_sample_mode="auto")
    infinite = math.isinf(privacy.bound)
    if privacy.bounds is not None and clipping == "flat":
        raise ValueError(
            f"max_grad_norm={privacy.max_grad_norm!r} with clipping='flat', which takes one "
            "number; bounds for the layers need clipping='per_layer'. Pass one of the two"
        )
    if privacy.clip_function == "automatic" and infinite:
        raise ValueError(
            f"clip_function='automatic' with max_grad_norm={privacy.max_grad_norm}: automatic "
            "clipping needs a finite bound; pass one, or clip_function='hard'"
        )
    if clipping != "flat" and mode != "auto":
        raise ValueError(
            f"grad_sample_mode={performance.asked_mode!r} with clipping={clipping!r}: the modes "
            "belong to clipping='flat' alone; leave grad_sample_mode='auto'"
        )
    if privacy.exact is True and mode not in ("auto", "instantiate"):
        raise ValueError(
            f"exact=True with grad_sample_mode={mode!r}, which stores no per-sample gradients and "
            "therefore rounds the sum; leave grad_sample_mode='auto', or exact='auto'"
        )
    if mode == "ghost" and privacy.loss_reduction is not None:
        raise ValueError(
            "grad_sample_mode='ghost' needs each sample's loss, since it multiplies the losses by "
            "weights; leave loss_reduction=None and call engine.backward(losses)"
        )
    if performance.physical_batch_size is not None and privacy.sampling == "shuffled":
        raise ValueError(
            f"physical_batch_size={performance.physical_batch_size} with sampling='shuffled' "
            "(poisson_sampling=False): the loader's own batches are not split; give the loader a "
            "smaller batch_size"
        )
    filled = replace(privacy, clipping=clipping)
    return Settings(
        filled, performance, privacy.noise_multiplier, clipping, asked_clipping=privacy.clipping
    )


def refuse_noise_multiplier(privacy: PrivacyConfig | None, keywords: Mapping[str, Any]) -> None:
    """Raise ValueError if noise_multiplier is passed along with target_epsilon."""
    noise = keywords.get("noise_multiplier", getattr(privacy, "noise_multiplier", None))
    if noise is not None:
        raise ValueError(
            f"noise_multiplier={noise!r} conflicts with target_epsilon, which determines it. "
            "Drop it, or call make_private"
        )


def take_targets(
    privacy: PrivacyConfig, target_epsilon: float | None, target_delta: float | None
) -> tuple[PrivacyConfig, float, float]:
    """Return (the configuration with both targets None, target_epsilon, target_delta).

    Raises:
        ValueError: a target is passed twice, or is out of range.
        TypeError: a target is missing.
    """
    given = {"target_epsilon": target_epsilon, "target_delta": target_delta}
    for name, value in given.items():
        held = getattr(privacy, name)
        if value is not None and held is not None:
            raise ValueError(
                f"{name}={value!r} with privacy=, which sets it too: pass it in one of the two"
            )
        if value is None and held is None:
            raise TypeError(f"make_private_with_epsilon needs {name}=")
        given[name] = held if value is None else value
    epsilon, delta = given.values()
    assert epsilon is not None and delta is not None
    positive(target_epsilon=epsilon)
    finite(target_epsilon=epsilon)
    probability(target_delta=delta)
    return replace(privacy, target_epsilon=None, target_delta=None), epsilon, delta


def takes_fields(*but: str) -> Callable[[_Method], _Method]:
    """Decorator: add all fields except `but` to a method's signature, refuse positional values."""

    def named(method: _Method) -> _Method:
        @functools.wraps(method)
        def checked(self: Any, *positional: Any, **keywords: Any) -> Any:
            if positional:
                name = method.__name__
                raise TypeError(
                    f"{name} takes keywords alone, but got {len(positional)} positional "
                    f"argument(s): write {name}(module=..., optimizer=..., data_loader=..., ...)"
                )
            return method(self, **keywords)

        own = inspect.signature(method)
        *others, last = own.parameters.values()
        kinds = (PrivacyConfig, PerformanceConfig)
        given = {f.name: f.type for kind in kinds for f in fields(kind) if f.name not in but}
        keywords = [
            inspect.Parameter(name, last.KEYWORD_ONLY, default=UNSET, annotation=annotation)
            for name, annotation in {**given, "poisson_sampling": "bool"}.items()
        ]
        signature = own.replace(parameters=[*others, *keywords, last])
        checked.__signature__ = signature  # type: ignore[attr-defined]
        return cast(_Method, checked)

    return named


def configs_of(
    method: Callable[..., Any],
    privacy: PrivacyConfig | None,
    performance: PerformanceConfig | None,
    keywords: Mapping[str, Any],
) -> tuple[PrivacyConfig, PerformanceConfig]:
    """Return the two configurations of a call of `make_private`, from objects or keywords.

    Args:
        method: the method called, for messages.
        privacy, performance: the objects passed; None if keywords are used.
        keywords: the other keyword arguments. Keywords that are not UNSET and are in the method's
            signature are fields of a configuration.

    Raises:
        ValueError: a configuration and keywords of its fields are both passed.
        TypeError: a keyword is unknown, or max_grad_norm is missing.
    """
    held_mode = getattr(performance, "grad_sample_mode", None)
    mode = keywords.get("grad_sample_mode") if performance is None else held_mode
    known = known_keywords(method)
    unknown = {n: v for n, v in keywords.items() if n not in known}
    refuse_keywords_of(method, unknown, mode=mode)
    given = {n: v for n, v in keywords.items() if n in known and v is not UNSET}
    poisson_sampling = given.pop("poisson_sampling", True)
    one_of(poisson_sampling=(poisson_sampling, (True, False)))
    sampling = given.get("sampling")
    if sampling is None:
        given.pop("sampling", None)
    if not poisson_sampling:
        if sampling not in (None, "shuffled"):
            raise ValueError(
                f"sampling={sampling!r} with poisson_sampling=False, which means "
                "sampling='shuffled'; leave poisson_sampling out"
            )
        given["sampling"] = "shuffled"
    kinds = (("privacy", privacy, PrivacyConfig), ("performance", performance, PerformanceConfig))
    built: list[Any] = []
    for name, held, kind in kinds:
        own = {f.name: given[f.name] for f in fields(kind) if f.name in given}
        if held is None:
            if kind is PrivacyConfig and "max_grad_norm" not in own:
                raise TypeError(f"{method.__name__} needs max_grad_norm=, or privacy=")
            held = kind(**own)
        elif not isinstance(held, kind):
            raise ValueError(f"{name}={held!r}: expected a dpflash.{kind.__name__}")
        elif own:
            key, value = next(iter(own.items()))
            raise ValueError(
                f"{key}={value!r} with {name}=, which also has this field: set it there alone"
            )
        built.append(held)
    return built[0], built[1]
