"""What the columns of benchmarks' tables say, by their headers."""

from __future__ import annotations

from collections.abc import Iterable

_TIME = (
    "median over the trials of one call, outliers beyond Tukey's fences left out, with the 95% "
    "interval of the median by order statistics; fewer than 6 trials have no such interval, and "
    "the range of the trials stands there (a quick look has 5). *High variance*: the coefficient "
    "of variation (CV) is above 10%"
)
_PEAK = (
    "how far the memory grows at most during one call, in MiB (2^20 bytes): on a CPU the resident "
    "memory of a fresh process, on a GPU what torch's allocator gives out. What is there before "
    "the call, such as inputs and weights, does not count. In the JSON it is `peak_memory_mb`, "
    "which is MiB too"
)
_SPEEDUP = (
    "time of the baseline over the time of this row, the median over the rounds in which both "
    "took their turns, with its 95% interval; below 1 is slower"
)
_EXPONENT = (
    "p of value ~ size^p, a line fitted to the logarithms by least squares, with its 95% interval "
    "by Student's t. Over 3 sizes that has one degree of freedom: an interval of 1 and more is "
    "no error, it says that 3 points tell little"
)
LEGEND = {
    "T": "tokens of a sequence",
    "B": "sequences of a batch",
    "H": "heads",
    "D": "components of a head",
    "N": "tokens of a sequence",
    "P": "worker processes",
    "direction": "forward is the output alone; forward+backward all gradients too",
    "ms": _TIME,
    "ms of a step": _TIME,
    "speed-up": _SPEEDUP,
    "tokens/s": "tokens of all sequences of the batch over the median",
    "peak MiB": _PEAK,
    "peak MiB of a worker": f"{_PEAK}; of the worker that takes most",
    "GFLOP/s": "floating-point operations of matrix products and attention's pairs over the "
    "median; exp, sums and the like are not counted",
    "roof": "the lower of the machine's two measured roofs for this work: compute (FLOP/s of a "
    "matrix product) or memory (bytes/s)",
    "bound by": "overhead is less than half of its roof: time goes where no roof stands for it "
    "(exp and sums of the softmax, small products, launches, Python); else compute_bound or "
    "memory_bandwidth by its roof, balanced where both roofs are within a quarter of each other; "
    "memory_capacity is four fifths of the device's memory taken",
    "of its roof": "what is achieved over what the lower roof allows; above 1 where torch's "
    "matrix product, which stands for the processor, is not the fastest code on it, where work "
    "stays in caches, or where other jobs lowered the roofs while they were measured",
    "density": "part of all T x T pairs that the pattern has",
    "checked rows": "query rows whose output (and from which all gradients) were compared with "
    "the definition in float64 before anything was timed",
    "of B H": "how many (sample, head) these rows were compared in; a dash: not recorded",
    "correct": "yes: the error was within the tolerance in this very run; a dash: not checked "
    "here; NO: there are no figures",
    "exponent [95%]": _EXPONENT,
    "physical": "sequences of the batch that is timed; a larger batch is made of such ones",
    "level": "of `make_private(optimize=...)`",
    "clipping": "flat clips a sample's gradient as a whole, per_layer each layer's part of it",
    "compiled": "whether torch.compile really ran the model",
    "fell back": "why a level ran without what it asks for; a dash where it ran as asked",
    "efficiency": "throughput of P workers over P times that of one",
    "time over nonprivate": "time of a step over that of the same step without privacy",
}


def legend(headers: Iterable[str]) -> list[str]:
    """A line for each of these columns that needs one, in the order of the tables."""
    wanted = dict.fromkeys(headers)
    told = [f"*{header}*: {LEGEND[header]}." for header in wanted if header in LEGEND]
    # The variants of a header say what the speed-up is over.
    if "speed-up" not in wanted and any(header.startswith("speed-up ") for header in wanted):
        told.append(f"*speed-up*: {_SPEEDUP}.")
    return told
