"""Compiles the noise kernels ahead of time, for GPUs that are not there.

Prints what they need as JSON lines, in the words of `compile_attention.py`. An entry is generator,
dtype and "aligned" or "offset", or "settle". `test_compile.py` runs this script; by hand, with
TRITON_INTERPRET=0, for instance `compile_noise.py sm_90 chacha20/fp32/aligned`.
"""

import argparse
import json
import os
import time

import triton.language as tl
from compile_attention import TARGETS, needs
from triton.compiler import ASTSource

from dpflash.kernels import noise_triton as kernels

ENTRIES = [
    f"{generator}/{dtype}/{place}"
    for generator in ("chacha20", "philox")
    for dtype in ("fp32", "fp64")
    for place in ("aligned", "offset")
]
ENTRIES.append("settle")
TYPES = {
    **{"rows_ptr": "*i64", "owners_ptr": "*i32", "open_ptr": "*i64", "capacity": "i32"},
    **{"grid_bits": "u64", "scale_bits": "u64"},
    **{"lists_ptr": "*i64", "tails_ptr": "*i64", "programs": "i32"},
}


def source(entry):
    if entry == "settle":
        return source_of(kernels._settle_kernel, {"BLOCK": kernels.SETTLE_BLOCK})
    generator, dtype, place = entry.split("/")
    constants = {
        "DTYPE": {"fp32": tl.float32, "fp64": tl.float64}[dtype],
        "BLOCK": 8 * kernels.GROUPS,
        "VECTORS": True,
        "ALIGNED": place == "aligned",
        "PHILOX": generator == "philox",
    }
    return source_of(kernels._add_noise_kernel, constants)


def source_of(function, constants):
    names = function.arg_names
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "u32") for name in names
    }
    aligned = [i for i, name in enumerate(names) if name.endswith("_ptr")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    return ASTSource(function, signature, constants, attributes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arch", choices=TARGETS)
    parser.add_argument("entries", nargs="*", default=ENTRIES, help="without: all")
    arguments = parser.parse_args()
    for entry in arguments.entries:
        start = time.perf_counter()
        needed = needs(source(entry), arguments.arch, kernels.OPTIONS)
        seconds = round(time.perf_counter() - start, 1)
        line = {"arch": arguments.arch, "entry": entry, **needed}
        print(json.dumps({**line, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit("TRITON_INTERPRET is set: the interpreter compiles nothing. Unset it.")
    main()
