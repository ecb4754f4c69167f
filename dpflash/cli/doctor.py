"""`dpflash doctor`: reports this machine's hardware and libraries, and the kernels that run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dpflash import __version__
from dpflash.clipping.device_speed import cpu_model, usable_cores

_OLDEST_TORCH = (2, 9)
# The newest releases that the tests have run with.
_NEWEST_TESTED = {"torch": (2, 14), "triton": (3, 9), "transformers": (5, 24)}
_TRAINERS = ("transformers", "peft", "accelerate", "trl", "lightning")
_OPTIONAL_PACKAGES = ("matplotlib", "opacus", *_TRAINERS)
_GIB = 1024**3


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of `dpflash doctor`."""
    parser.description = (
        "Report the hardware and libraries of this machine, and the kernels that dpflash uses."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def machine_report() -> dict[str, Any]:
    """Return the machine's hardware, libraries and kernels, as plain values for JSON."""
    report: dict[str, Any] = {
        "dpflash": __version__,
        "system": platform.platform(),
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "cpu": {"model": cpu_model(), "usable_cores": usable_cores()},
        "memory": _memory(),
        "torch": _torch_build(),
        "devices": _devices(),
        "triton": _triton(),
        "cryptography": _cryptography(),
        "optional": {name: _installed_version(name) for name in _OPTIONAL_PACKAGES},
    }
    report["paths"] = _paths(report)
    report["warnings"] = _warnings(report)
    return report


def _run(args: argparse.Namespace) -> int:
    report = machine_report()
    print(json.dumps(report, indent=2) if args.json else _as_text(report))
    return 0


def _memory() -> dict[str, int | None]:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        rows = (line.split() for line in meminfo.read_text(encoding="utf-8").splitlines())
        kib = {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1}
        return {
            "total": 1024 * kib["MemTotal"],
            "available": 1024 * kib["MemAvailable"] if "MemAvailable" in kib else None,
        }
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return {"total": total, "available": None}
    return {"total": None, "available": None}


def _torch_build() -> dict[str, Any]:
    import torch

    if torch.version.hip:
        built_for = f"ROCm {torch.version.hip}"
    elif torch.version.cuda:
        built_for = f"CUDA {torch.version.cuda}"
    else:
        built_for = "CPU"
    return {
        "version": str(torch.__version__),
        "built_for": built_for,
        "threads": torch.get_num_threads(),
    }


def _devices() -> list[dict[str, Any]]:
    import torch

    from dpflash.kernels.devices import problem_with

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "cuda":
        what = {"name": accelerator.type, "memory": None, "capability": None}
        return [{"index": 0, **what, "problem": problem_with(accelerator)}]
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            capability = properties.gcnArchName
        else:
            capability = f"{properties.major}.{properties.minor}"
        found.append(
            {
                "index": index,
                "name": properties.name,
                "memory": properties.total_memory,
                "capability": capability,
                "problem": problem_with(torch.device("cuda", index)),
            }
        )
    return found


def _triton() -> dict[str, str | None]:
    try:
        triton = import_module("triton")
    except ModuleNotFoundError:
        why = "not installed; the GPU builds of PyTorch bring it, and a CPU does not need it"
        return {"version": None, "why_not": why}
    except ImportError as error:
        return {"version": None, "why_not": f"cannot be imported: {error}"}
    return {"version": str(triton.__version__), "why_not": None}


def _cryptography() -> dict[str, Any]:
    """Return cryptography's version, and whether OpenSSL supports ChaCha20 (in FIPS mode not)."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    chacha20 = True
    try:
        Cipher(algorithms.ChaCha20(bytes(32), bytes(16)), mode=None).encryptor()
    except UnsupportedAlgorithm:
        chacha20 = False
    return {"version": version("cryptography"), "chacha20": chacha20}


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _paths(report: dict[str, Any]) -> dict[str, str]:
    import torch

    from dpflash.kernels import attention_vendor, native

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report contains the reason
        library = native.library()
        file = "" if library is None else f", {library._name}"
        paths = {
            "attention": native.describe() + file,
            "private_gradients": f"C++ kernels{file}" if file else "plain PyTorch, slower",
        }
    if any(device["problem"] is None for device in report["devices"]):
        triton = report["triton"]
        on_gpu = "Triton kernels" if triton["version"] else f"none: triton {triton['why_not']}"
        paths = {f"{name}_on_cpu": path for name, path in paths.items()}
        paths |= {"attention": on_gpu, "private_gradients": on_gpu}
        for device in (device for device in report["devices"] if device["problem"] is None):
            index = device["index"]
            paths[f"gpu_{index}"] = attention_vendor.describe(torch.device("cuda", index))
    chacha20 = report["cryptography"]["chacha20"]
    paths["noise"] = (
        f"ChaCha20 ({'C++' if file else 'cryptography'}, CPU)"
        if chacha20
        else "none: OpenSSL does not support ChaCha20 on this machine"
    )
    return paths


def _warnings(report: dict[str, Any]) -> list[str]:
    found = []
    torch_version = report["torch"]["version"]
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    if (major, minor) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        found.append(f"torch {torch_version} is too old: dpflash needs {oldest} or newer")
    if newer := _untested(report):
        found.append(f"not tested with dpflash {__version__}: {', '.join(newer)}")
    found += [f"gpu {d['index']}: {d['problem']}" for d in report["devices"] if d["problem"]]
    if report["torch"]["built_for"] != "CPU" and not report["devices"]:
        found.append(
            f"torch is built for {report['torch']['built_for']} but finds no device: "
            "check the driver and CUDA_VISIBLE_DEVICES"
        )
    threads, cores = report["torch"]["threads"], report["cpu"]["usable_cores"]
    if threads > cores:
        found.append(
            f"torch uses {threads} threads on {cores} usable cores: set OMP_NUM_THREADS={cores}"
        )
    if not report["cryptography"]["chacha20"]:
        found.append("no secure noise: OpenSSL does not support ChaCha20 here (FIPS mode?)")
    return found


def _untested(report: dict[str, Any]) -> list[str]:
    versions = {name: report[name]["version"] for name in ("torch", "triton")}
    versions["transformers"] = report["optional"]["transformers"]
    return [
        f"{name} {versions[name]} (tested up to {newest[0]}.{newest[1]})"
        for name, newest in _NEWEST_TESTED.items()
        if versions[name] and tuple(map(int, versions[name].split(".")[:2])) > newest
    ]


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / _GIB:.1f} GiB"


def _described(device: dict[str, Any]) -> str:
    if device["capability"] is None:
        return str(device["name"])
    return f"{device['name']}, {_gib(device['memory'])}, capability {device['capability']}"


def _as_text(report: dict[str, Any]) -> str:
    python, cpu, memory = report["python"], report["cpu"], report["memory"]
    torch, triton = report["torch"], report["triton"]
    threads = f"{torch['threads']} thread{'s' if torch['threads'] != 1 else ''}"
    sections: dict[str, list[tuple[str, str]]] = {
        "machine": [
            ("system", report["system"]),
            ("python", f"{python['implementation']} {python['version']} ({python['executable']})"),
            ("cpu", f"{cpu['model']}, {cpu['usable_cores']} usable cores"),
            ("memory", f"{_gib(memory['total'])}, {_gib(memory['available'])} available"),
        ],
        "libraries": [
            ("torch", f"{torch['version']} for {torch['built_for']}, {threads}"),
            ("triton", triton["version"] or triton["why_not"]),
            ("cryptography", report["cryptography"]["version"]),
        ],
        "devices": [(f"gpu {device['index']}", _described(device)) for device in report["devices"]]
        or [("gpu", "none")],
        "what will run": [
            (name.replace("_", " "), path) for name, path in report["paths"].items()
        ],
        "optional packages": [
            (name, found or "not installed") for name, found in report["optional"].items()
        ],
    }
    lines = [f"dpflash {report['dpflash']}"]
    for title, rows in sections.items():
        lines += ["", title]
        lines += [f"  {name:<18} {value}" for name, value in rows]
    if report["warnings"]:
        lines += ["", "warnings"]
        lines += [f"  - {warning}" for warning in report["warnings"]]
    return "\n".join(lines)
