"""Compiles the per-sample gradient kernels ahead of time, for GPUs that are not there.

Prints what each kernel needs as JSON lines, in the words of `compile_attention.py`.
`test_compile.py` runs this script; by hand, with TRITON_INTERPRET=0, for instance
`compile_grads.py sm_90 clipped_grad/16`.
"""

import argparse
import importlib.util
import json
import os
import time
from pathlib import Path

import triton.language as tl
from triton.compiler import ASTSource

from dpflash.kernels import grad_launch as launch
from dpflash.kernels import grad_triton as kernels
from dpflash.kernels.attention_configs import column
from dpflash.kernels.grad_configs import table

# Next to this script, which runs as a program of its own.
_SPEC = importlib.util.spec_from_file_location(
    "compile_attention", Path(__file__).with_name("compile_attention.py")
)
attention = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(attention)
TARGETS = attention.TARGETS

FUNCTIONS = {
    "gram": "grad_norm_gram",
    "exact_clip_reduce": "clip_reduce",
    "noisy_clip_reduce": "clip_reduce",
    "offset_clip_reduce": "clip_reduce",
    "philox_clip_reduce": "clip_reduce",
}
REDUCE = {
    **{"BLOCK": launch.REDUCE_BLOCK, "OUT": tl.float32, "VECTORS": True},
    **{"EXACT": False, "INTO": False, "NOISE": False, "ALIGNED": True, "PHILOX": False},
}
EXACT = REDUCE | {"EXACT": True, "INTO": True, "OUT": tl.float64}
NOISY = REDUCE | {"EXACT": True, "NOISE": True}
# Of the kernels without an entry in the table: what the launcher passes.
REDUCTIONS = {
    "clip_reduce": REDUCE,
    "exact_clip_reduce": EXACT,
    "noisy_clip_reduce": NOISY,
    "offset_clip_reduce": NOISY | {"ALIGNED": False},
    "philox_clip_reduce": NOISY | {"PHILOX": True},
    "squares": {"CHUNK": launch.SQUARES_CHUNK, "BLOCK": launch.REDUCE_BLOCK, "VECTORS": True},
    "sum_squares": {"INTO": True, "BLOCK": launch.REDUCE_BLOCK},
    "clip_factors": {"HARD": True, "BLOCK": launch.TOKEN_CHUNK},
    "token_norms": {"BLOCK_T": launch.TOKEN_BLOCK, "BLOCK_E": launch.WIDTH_BLOCK},
    "gram_bound": {"BLOCK": launch.REDUCE_BLOCK},
    "token_sums": {
        "CHUNK": launch.TOKEN_CHUNK,
        "BLOCK_T": launch.TOKEN_BLOCK,
        "BLOCK_E": launch.WIDTH_BLOCK,
        "PRODUCTS": True,
        "HAS_MEAN": True,
        "SUMS": True,
    },
    "embedding_grad_norm": {"BLOCK_T": launch.TOKEN_BLOCK, "BLOCK_E": launch.WIDTH_BLOCK},
    "embedding_clipped_grad": {"BLOCK_T": launch.TOKEN_BLOCK, "BLOCK_E": launch.WIDTH_BLOCK},
}
SIZES = ("num_inputs", "num_outputs", "width")
POINTERS = {
    "grads_ptr": "*fp32",
    "owners_ptr": "*i32",
    "squares_ptr": "*fp64",
    "parts_ptr": "*fp64",
    "norms_ptr": "*fp64",
    "apart_ptr": "*fp32",
    "keep_ptr": "*u8",
    "samples_ptr": "*i64",
    "of_samples_ptr": "*i64",
    "pairs_ptr": "*i32",
    "factors_ptr": "*fp32",
    "out_ptr": "*fp32",
    "mean_ptr": "*fp32",
    "rstd_ptr": "*fp32",
    "products_ptr": "*fp32",
    "sums_ptr": "*fp32",
    "order_ptr": "*i64",
    "rows_ptr": "*i64",
    "ends_ptr": "*i64",
    "spans_ptr": "*i64",
    "open_ptr": "*i64",
}
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# What the launcher passes None for; these too, but for spans.
ABSENT = {
    "clip_reduce": "open_ptr",
    "exact_clip_reduce": "open_ptr",
}
OF_SPANS = ("spans_ptr", "samples_ptr", "of_samples_ptr")


def constants_of(kernel, arch, sizes):
    """The constexprs of a kernel as the launcher would pass them."""
    if kernel in REDUCTIONS:
        return REDUCTIONS[kernel]
    flags = {
        "per_sample_grad": {"SQUARES": True},
        "gram": {"RUN": launch.GRAM_STEPS * sizes[2]},
        "clipped_grad": {},
    }[kernel]
    precision = launch.precision(TARGETS[arch].backend == "hip")
    blocks = {"BLOCK_M": sizes[0], "BLOCK_N": sizes[1], "BLOCK_K": sizes[2]}
    return {**flags, **blocks, "UPCAST": False, "PRECISION": precision}


def compile_one(kernel, arch, dtype, sizes, odd=False, spans=False):
    """Compiles one kernel as the launcher would for widths that are multiples of 16.

    `odd`: for widths that are neither that nor 1. The rows are aligned in memory either way.
    `spans`: for samples that are spans of tokens.
    """
    function = getattr(kernels, f"_{FUNCTIONS.get(kernel, kernel)}_kernel")
    constants = {"GRADS": getattr(tl, NAMES[dtype]), **constants_of(kernel, arch, sizes)}
    if odd and "VECTORS" in constants:
        constants["VECTORS"] = False
    signature, constexprs, attributes = {}, {}, {}
    for position, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            constexprs[name] = constants[name]
        elif name == ABSENT.get(kernel) or (name in OF_SPANS and not spans):
            signature[name] = "constexpr"
            constexprs[name] = None
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, f"*{dtype}")
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif parameter.annotation_type:
            signature[name] = parameter.annotation_type
        else:
            signature[name] = "i32"
            if name.startswith("stride_") or (name in SIZES and not odd):
                attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs, attributes)
    options = {"num_warps": sizes[3], "num_stages": sizes[4], "enable_fp_fusion": True}
    return attention.needs(source, arch, options)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arch", choices=TARGETS)
    parser.add_argument("entries", nargs="*", help="kernel/bits; without: all, and the reductions")
    parser.add_argument(
        "--sizes", type=int, nargs=5, help="block_m block_n block_k num_warps num_stages"
    )
    parser.add_argument("--half", choices=("bf16", "fp16"), default="bf16", help="16-bit dtype")
    parser.add_argument("--odd", action="store_true", help="widths that are no multiples of 16")
    parser.add_argument("--spans", action="store_true", help="samples are spans of tokens")
    arguments = parser.parse_args()
    rows = table()[column(arguments.arch)]
    for entry in arguments.entries or [*rows, *(f"{name}/16" for name in REDUCTIONS)]:
        kernel, bits = entry.split("/")
        dtype = "fp32" if bits == "32" else arguments.half
        warps = launch.OFFSET_OPTIONS["num_warps"] if kernel == "offset_clip_reduce" else 4
        sizes = arguments.sizes or list(rows.get(entry, (0, 0, 0, warps, 3)))
        start = time.perf_counter()
        needed = compile_one(kernel, arguments.arch, dtype, sizes, arguments.odd, arguments.spans)
        line = {
            "arch": arguments.arch,
            "entry": entry,
            "sizes": sizes,
            **needed,
            "seconds": round(time.perf_counter() - start, 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit("TRITON_INTERPRET is set: the interpreter compiles nothing. Unset it.")
    main()
