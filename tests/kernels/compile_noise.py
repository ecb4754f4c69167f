"""Compiles the noise kernels ahead of time, for GPUs that are not there.

Prints what each kernel needs as JSON lines, in the words of `compile_attention.py`. An entry is
generator, dtype, block and skip ("any": known when the kernel runs), or "normals_at" and the
generator. `test_compile_noise.py` runs this script; by hand, with TRITON_INTERPRET=0, for
instance `compile_noise.py sm_90 chacha20/fp32/128/0`.
"""

import argparse
import json
import os
import time

import triton
import triton.language as tl
from compile_attention import TARGETS, resources
from triton.compiler import ASTSource

from dpflash.kernels import noise_triton as kernels

ENTRIES = [
    f"{generator}/{dtype}/128/{skip}"
    for generator in ("chacha20", "philox")
    for dtype in ("fp32", "fp64")
    for skip in ("0", "1", "any")
] + ["normals_at/chacha20", "normals_at/philox"]


# What another kernel does that adds noise to the elements it holds.
@triton.jit(do_not_specialize=["first", "step_low", "step_high", "parameter_id"])
def _normals_at_kernel(
    out_ptr, key_ptr, first: tl.int64,
    step_low: tl.uint32, step_high: tl.uint32, parameter_id: tl.uint32,
    BLOCK: tl.constexpr, PHILOX: tl.constexpr,
):  # fmt: skip
    key = (
        tl.load(key_ptr), tl.load(key_ptr + 1), tl.load(key_ptr + 2), tl.load(key_ptr + 3),
        tl.load(key_ptr + 4), tl.load(key_ptr + 5), tl.load(key_ptr + 6), tl.load(key_ptr + 7),
    )  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    normals = kernels.normals_at(key, first + offsets, step_low, step_high, parameter_id, PHILOX)
    tl.store(out_ptr + offsets, normals)


def source(entry):
    parts = entry.split("/")
    if parts[0] == "normals_at":
        function = _normals_at_kernel
        constants = {"BLOCK": 256, "PHILOX": parts[1] == "philox"}
        types = {"out_ptr": "*fp32", "key_ptr": "*u32", "first": "i64"}
        aligned = ["out_ptr", "key_ptr"]
    else:
        generator, dtype, block, skip = parts
        function = kernels._gaussian_noise_kernel
        constants = {"BLOCK": int(block), "PHILOX": generator == "philox"}
        types = {"out_ptr": f"*{dtype}", "std_bits": "u64", "skip": "i32", "num_elements": "i32"}
        aligned = ["out_ptr", "num_elements"]
        if skip == "0":
            aligned.append("skip")
        elif skip != "any":
            # An integer that is 1 becomes a constant.
            constants["skip"] = int(skip)
    names = function.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "u32") for name in names
    }
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    return ASTSource(function, signature, constants, attributes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arch", choices=TARGETS)
    parser.add_argument("entries", nargs="*", default=ENTRIES, help="without: all")
    arguments = parser.parse_args()
    for entry in arguments.entries:
        start = time.perf_counter()
        compiled = triton.compile(
            source(entry), target=TARGETS[arguments.arch], options=kernels.OPTIONS
        )
        seconds = round(time.perf_counter() - start, 1)
        line = {"arch": arguments.arch, "entry": entry, **resources(compiled, arguments.arch)}
        print(json.dumps({**line, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit("TRITON_INTERPRET is set: the interpreter compiles nothing. Unset it.")
    main()
