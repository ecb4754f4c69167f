"""Compiles the attention kernels ahead of time, for GPUs that are not there.

Prints what each kernel needs as JSON lines: its architecture, name and sizes, the registers of a
thread, the bytes that a thread spills, the shared memory of a block in bytes, the columns of
tensor memory, what the assembler says of lost speed, the instructions of each loop over chunks and
its copies of 4 bytes (CUDA only), and the seconds that compiling took.
`test_compile.py` runs this script; by hand, with TRITON_INTERPRET=0, for instance
`compile_attention.py sm_90 forward/128/16`.
"""

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import tempfile
import time

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dpflash.kernels import attention_launch as launch
from dpflash.kernels import attention_triton as kernels
from dpflash.kernels.attention_configs import HEAD_DIMS, column, config, table

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Pointers not listed here point to the tensors' dtype.
POINTERS = {
    "lse_ptr": "*fp32",
    "statistics_ptr": "*i64",
    "dlse_ptr": "*fp32",
    "sinks_ptr": "*fp32",
    "slopes_ptr": "*fp32",
    "bias_ptr": "*fp32",
    "dbias_ptr": "*fp32",
    "key_range_ptr": "*i32",
    "q_sums_ptr": "*fp32",
    "k_sums_ptr": "*fp32",
    "v_sums_ptr": "*fp32",
    "slope_sums_ptr": "*fp32",
    "run_sums_ptr": "*fp32",
    "squares_ptr": "*fp64",
    "tiles_ptr": "*i32",
    "head_variants_ptr": "*i32",
    "runs_ptr": "*i32",
}
# The flag of the kernel that makes a pointer present; without it the launcher passes None.
OPTIONAL = {
    "sinks_ptr": "HAS_SINKS",
    "slopes_ptr": "HAS_SLOPES",
    "bias_ptr": "HAS_BIAS",
    "dbias_ptr": "BIAS_GRAD",
    "slope_sums_ptr": "HAS_SLOPES",
    "key_range_ptr": "HAS_KEY_RANGE",
    "q_sums_ptr": "TOKEN_SUMS",
    "k_sums_ptr": "TOKEN_SUMS",
    "v_sums_ptr": "TOKEN_SUMS",
    "run_sums_ptr": "RUN_GRADS",
    "squares_ptr": "SQUARES",
    "dlse_ptr": "HAS_DLSE",
}
FLAGS = sorted({*OPTIONAL.values(), "HAS_SOFTCAP", "HAS_VARIANTS"})


def jit_function(kernel):
    return getattr(kernels, f"_attention_{kernel}_kernel")


def compile_one(kernel, arch, head_dim, dtype, sizes, flags, small_tensors=False, aligned=True):
    """Compiles one kernel as the launcher would for sizes that are neither 1 nor multiples of 16.

    `aligned`: base addresses and the strides of heads and tokens are multiples of 16, as they are
    wherever the head dim is. `small_tensors` (HIP only): every tensor is smaller than 2 GiB.
    """
    function = jit_function(kernel)
    target = TARGETS[arch]
    constants = {flag: flag in flags for flag in FLAGS}
    if kernel == "delta":
        constants |= {"E": head_dim, "BLOCK_E": 1 << (head_dim - 1).bit_length(), "BLOCK_M": 64}
    else:
        constants |= launch._head_dims(head_dim, head_dim, aligned=aligned)
        constants |= {"BLOCK_M": sizes[0], "BLOCK_N": sizes[1], "UPCAST": False}
        constants["PRECISION"] = launch.precision(hip=target.backend == "hip")
    signature, constexprs, attributes = {}, {}, {}
    for position, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            constexprs[name] = constants[name]
        elif name in OPTIONAL and OPTIONAL[name] not in flags:
            signature[name] = "constexpr"
            constexprs[name] = None
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, f"*{dtype}")
            if kernel == "delta" and name == "statistics_ptr":
                signature[name] = "*fp32"
            attributes[(position,)] = [["tt.divisibility", 16]] if aligned else []
            if small_tensors:
                attributes[(position,)].append(["tt.pointer_range", 32])
        elif name.startswith(("scale", "softcap")):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if aligned and name.startswith("stride_") and name != "stride_variant_b":
                attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs, attributes)
    options = {"num_warps": sizes[2], "num_stages": sizes[3], "enable_fp_fusion": True}
    return needs(source, arch, options)


def needs(source, arch, options):
    """Registers of a thread, bytes that it spills, shared bytes and tensor memory of a block."""
    log = io.StringIO()
    # The assembler's report is printed by what compiles, and not by what is in the cache.
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(source, target=TARGETS[arch], options=options)
    cuda = arch.startswith("sm_")
    loops = chunk_loops(compiled.asm["cubin"]) if cuda else []
    registers, spilled = cuda_resources(log.getvalue()) if cuda else hip_resources(compiled)
    return {
        "registers": registers,
        "spilled": spilled,
        "shared": compiled.metadata.shared,
        "tensor_memory": getattr(compiled.metadata, "tmem_size", None) or 0,
        "chunks": [len(loop) for loop in loops],
        "narrow_copies": [sum(map(is_narrow_copy, loop)) for loop in loops],
        "lost": re.findall(r"\(C\d+\) Potential Performance Loss.*", log.getvalue()),
    }


def cuda_resources(log):
    """Registers and stack, which holds nothing but what is spilled, by ptxas.

    Fewer registers than 255 beside spills are no misreading: where it does not find enough,
    ptxas may settle for 128 or 32 of them and keep the rest on the stack.
    """
    (registers,) = re.findall(r"Used (\d+) registers", log)
    (stack,) = re.findall(r"(\d+) bytes stack frame", log)
    return int(registers), int(stack)


def chunk_loops(cubin):
    """The instructions of each innermost loop that multiplies matrices, in the program's order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    begins, code, loops = {}, [], []
    for label, instruction in re.findall(r"^(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.M):
        if label:
            begins[label] = len(code)
            continue
        code.append(instruction)
        target = re.search(r"\bBRA\b.*(\.L_x_\d+)", instruction)
        if target and target[1] in begins:
            loops.append((begins[target[1]], len(code)))
    # A loop ends after those inside of it.
    inner = [(b, e) for i, (b, e) in enumerate(loops) if all(x < b for x, _ in loops[:i])]
    return [code[b:e] for b, e in inner if any("MMA" in x for x in code[b:e])]


def is_narrow_copy(instruction):
    """Whether it copies 4 bytes to shared memory; names of wider ones end in .64 or .128."""
    return re.search(r"LDGSTS(?!\S*\.(64|128))", instruction) is not None


def hip_resources(compiled):
    """Registers (accumulation registers included) and scratch, by the assembler's metadata."""
    text = compiled.asm["amdgcn"]
    found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", text))
    return int(found["vgpr_count"]), int(found["private_segment_fixed_size"])


def measure(kernel, arch, head_dim, dtype, sizes, flags, small_tensors, aligned):
    """One line of the output, without the entry's name."""
    present = [name for name in flags if name in jit_function(kernel).arg_names]
    start = time.perf_counter()
    needed = compile_one(kernel, arch, head_dim, dtype, sizes, present, small_tensors, aligned)
    seconds = round(time.perf_counter() - start, 1)
    described = {"sizes": list(sizes), "dtype": dtype, "head_dim": head_dim, "flags": present}
    return {**described, **needed, "seconds": seconds}


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arch", choices=TARGETS)
    parser.add_argument("entries", nargs="*", help="kernel/head_dim/bits; without: all, and delta")
    parser.add_argument("--head-dim", type=int, help="instead of the entry's: one that fits it")
    parser.add_argument("--sizes", type=int, nargs=4, help="block_m block_n num_warps num_stages")
    parser.add_argument("--half", choices=("bf16", "fp16"), default="bf16", help="16-bit dtype")
    parser.add_argument("--flags", nargs="*", choices=FLAGS, default=[], help="optional features")
    parser.add_argument("--all-but", nargs="*", choices=FLAGS, help="all but these")
    parser.add_argument("--unaligned", action="store_true", help="rows begin anywhere in memory")
    parser.add_argument("--small-tensors", action="store_true", help="HIP: tensors below 2 GiB")
    return parser.parse_args()


def main():
    arguments = parse()
    rows = table()[column(arguments.arch)]
    flags = arguments.flags
    if arguments.all_but is not None:
        flags = [name for name in FLAGS if name not in arguments.all_but]
    for entry in arguments.entries or [*rows, *(f"delta/{size}/16" for size in HEAD_DIMS)]:
        kernel, bucket, bits = entry.split("/")
        head_dim = arguments.head_dim or int(bucket)
        dtype = "fp32" if bits == "32" else arguments.half
        if kernel == "delta":
            sizes = (64, 0, 4, 3)  # the launcher leaves its options at Triton's defaults
        else:
            table_dtype = torch.float32 if bits == "32" else torch.bfloat16
            given = (kernel, int(bucket), table_dtype, column(arguments.arch))
            sizes = config(*given, has_bias="HAS_BIAS" in flags)
        sizes = arguments.sizes or sizes
        where = (arguments.small_tensors, not arguments.unaligned)
        line = measure(kernel, arguments.arch, head_dim, dtype, sizes, flags, *where)
        print(json.dumps({"arch": arguments.arch, "entry": entry, **line}), flush=True)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit("TRITON_INTERPRET is set: the interpreter compiles nothing. Unset it.")
    main()
