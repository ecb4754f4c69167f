"""Compiles the rotary kernel ahead of time, for GPUs that are not there.

Prints what it needs as JSON lines, in the words of `compile_attention.py`. An entry is head dim
and dtype. `test_compile.py` runs this script; by hand, with TRITON_INTERPRET=0, for instance
`compile_rotary.py sm_90 128/bf16`.
"""

import argparse
import json
import os

from compile_attention import TARGETS, needs
from triton.compiler import ASTSource

from dpflash.kernels import rotary_triton as kernels


def source(entry):
    head_dim, dtype = entry.split("/")
    function = kernels._rotary_kernel
    constants = {**kernels.blocks(int(head_dim) // 2), "BACK": True}
    tables = dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
    signature, attributes = {}, {}
    for position, name in enumerate(function.arg_names):
        kind = f"*{dtype}" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else tables.get(name, kind)
        if name.endswith("_ptr") or name.startswith("stride_"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    return ASTSource(function, signature, constants, attributes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arch", choices=TARGETS)
    parser.add_argument("entries", nargs="+")
    arguments = parser.parse_args()
    for entry in arguments.entries:
        needed = needs(source(entry), arguments.arch, kernels.OPTIONS)
        print(json.dumps({"arch": arguments.arch, "entry": entry, **needed}), flush=True)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit("TRITON_INTERPRET is set: the interpreter compiles nothing. Unset it.")
    main()
