"""The C++ kernels as they are compiled, kept and loaded, and what happens where they cannot be."""

import ctypes
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpflash.kernels import attention_cpu, attention_reference, native
from dpflash.patterns import Dilated

X86 = platform.machine() in ("x86_64", "AMD64")
# Processors that this one can stand in for, with the bytes of their vectors.
PROCESSORS = {"native": (("-march=native",), None)}
if X86:
    PROCESSORS["sse2"] = (("-march=x86-64",), 16)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        PROCESSORS["avx2"] = (("-march=x86-64-v3",), 32)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-O0"))  # compiles faster
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dpflash"


def gradients(module, dtype, dim):
    """Of a graph with weights and bands, on more queries than any vector is wide."""
    torch.manual_seed(0)
    graph = Dilated(segment_lengths=(48, 96), dilation_rates=(1, 3), causal=True).graph(203, 4)
    q, do = torch.randn(2, 2, 4, 203, dim, dtype=torch.float64).to(dtype)
    k, v = torch.randn(2, 2, 2, 203, dim, dtype=torch.float64).to(dtype)
    o, lse = module.attention_forward(q, k, v, graph, 0.3)
    grads = module.attention_backward(do, None, q, k, v, o, lse, graph, 0.3)
    return o, lse, grads.dq, grads.dk, grads.dv


@pytest.mark.parametrize("dim", [3, 40, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_width_of_vectors_matches_the_twin(processor, dtype, dim, monkeypatch):
    options, width = PROCESSORS[processor]
    library = native.load(options)
    assert width is None or library.vector_bytes() == width
    monkeypatch.setattr(native, "library", lambda: library)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    expected = gradients(attention_reference, torch.float64, dim)
    for x, reference in zip(gradients(attention_cpu, dtype, dim), expected, strict=True):
        assert x.dtype == dtype
        assert (x.double() - reference).abs().max() <= tolerance * reference.abs().max()


def test_python_and_c_mean_the_same_fields():
    assert native.load().problem_bytes() == ctypes.sizeof(attention_cpu._Problem)
    source = (native._FOLDER / "tiles.h").read_text(encoding="utf-8")
    body = re.search(r"struct Problem \{(.*?)\n\};", source, re.DOTALL).group(1)
    body = re.sub(r"//.*", "", body)
    names = [name for line in body.split(";") for name in re.findall(r"(\w+)\s*(?:,|$)", line)]
    assert names == [field[0] for field in attention_cpu._Problem._fields_]


TINY = """
#include "tiny.h"
extern "C" long long problem_bytes() { return 96; }
extern "C" long long vector_bytes() { return other(); }
"""


@pytest.fixture
def tiny(cache, tmp_path, monkeypatch):
    """Two sources that compile in no time."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "tiny.h").write_text("long long other();\n")
    (folder / "tiny.cpp").write_text(TINY)
    (folder / "other.cpp").write_text('#include "tiny.h"\nlong long other() { return 16; }\n')
    monkeypatch.setattr(native, "_FOLDER", folder)
    monkeypatch.setattr(native, "_SOURCES", ("tiny.cpp", "tiny.h", "other.cpp"))
    return folder


def test_all_sources_become_one_library(tiny, cache):
    assert native.load().vector_bytes() == 16
    (kept,) = cache.iterdir()
    assert re.fullmatch(r"kernels-[0-9a-f]{32}\.so", kept.name)


def test_what_was_compiled_is_found_again(cache, monkeypatch):
    native.load()
    (kept,) = cache.iterdir()
    assert kept.suffix == ".so"
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled twice"))
    native.load()


def test_other_sources_options_and_compilers_are_other_libraries(tmp_path, monkeypatch):
    def name():
        return native._digest(native._origin(), ("-march=native",))

    names = {name(), native._digest(native._origin(), ())}
    monkeypatch.setattr(native, "_processor", lambda: iter(("another",)))
    names.add(name())
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-g"))
    names.add(name())
    for source in native._SOURCES:
        (tmp_path / source).write_bytes((native._FOLDER / source).read_bytes() + b"\n")
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    names.add(name())
    monkeypatch.setenv("CXX", "g++ -w")
    names.add(name())
    assert len(names) == 6


def test_a_damaged_library_is_made_anew(cache, tmp_path, monkeypatch):
    native.load()
    (kept,) = cache.iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    damaged = tmp_path / "other" / "dpflash" / kept.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(kept.read_bytes()[:1000])
    assert native.load().vector_bytes() in (16, 32, 64)
    assert damaged.stat().st_size == kept.stat().st_size


def test_a_cache_that_cannot_be_written_costs_only_time(cache, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native.load().vector_bytes() in (16, 32, 64)


def test_a_processor_that_the_compiler_does_not_know_gets_its_general_code(cache, monkeypatch):
    unknown = (("-march=no-such-processor",), ())
    monkeypatch.setattr(native, "_PROCESSORS", unknown)
    assert native.load().vector_bytes() in (16, 32)


CALL = """
import sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, dpflash
    q, k, v = (torch.randn(2, 4, 50, 8, requires_grad=True) for _ in range(3))
    for _ in range(2):
        o = dpflash.attention(q, k, v, causal=True)
        o.sum().backward()
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(o, plain)
print(*(w.message for w in caught), sep="\\n")
"""


def call_in_a_fresh_process(tmp_path, **environment):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment}
    done = subprocess.run(
        [sys.executable, "-c", CALL], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_a_compiler_the_plain_twin_runs_and_says_so_once(tmp_path):
    said = call_in_a_fresh_process(tmp_path, CXX="no-such-compiler")
    assert said.count("in plain PyTorch") == 1
    assert "CXX='no-such-compiler' is not a command" in said
    (tmp_path / "bin").mkdir()
    said = call_in_a_fresh_process(tmp_path, CXX="", PATH=str(tmp_path / "bin"))
    assert "no C++ compiler found (looked for c++, g++, clang++); install one" in said


@pytest.mark.parametrize("named", ["g++ '", "   ", "/", "no-ccache g++"])
def test_a_compiler_that_is_none_is_named(named, cache, monkeypatch):
    monkeypatch.setenv("CXX", named)
    with pytest.raises(OSError, match=re.escape(f"CXX={named!r} is not a command")) as raised:
        native.load()
    assert ("'no-ccache' is not installed" in str(raised.value)) == ("ccache" in named)


def test_without_a_compiler_what_was_kept_runs(cache, tmp_path, monkeypatch):
    native.load()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.load().vector_bytes() in (16, 32, 64)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_compiler_of_c_is_told_apart(cache, monkeypatch):
    monkeypatch.setenv("CXX", "gcc")
    with pytest.raises(OSError, match="gcc: what it made does not load .is it a compiler of C"):
        native.load()
    assert not cache.exists()


def test_the_first_use_says_that_it_compiles(cache, capfd):
    native.load()
    assert "compiling CPU kernels" in capfd.readouterr().err
    native.load()
    assert capfd.readouterr().err == ""


def test_a_compiler_that_does_not_answer_is_an_error_of_the_system(cache, monkeypatch):
    monkeypatch.setattr(native, "_SECONDS", 0.2)
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'import time; time.sleep(60)'")
    with pytest.raises(OSError, match=r"took more than 0\.2 s"):
        native.load()


def test_a_cache_that_moves_with_the_work_is_none(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert native._cache() is None
    assert native.load().vector_bytes() in (16, 32, 64)
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_kept_leaves_nothing_behind(cache, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    assert native.load().vector_bytes() in (16, 32, 64)
    assert not list(cache.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_while_another_thread_compiles_does_not_wait_for_it():
    context = multiprocessing.get_context("fork")
    with native._lock:
        child = context.Process(target=native.library)
        child.start()
        child.join(60)
    assert child.exitcode == 0


def test_a_compiler_that_fails_is_quoted(tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'error: out of paper' >&2; exit 1\n")
    compiler.chmod(0o755)
    said = call_in_a_fresh_process(tmp_path, CXX=str(compiler))
    assert said.count("in plain PyTorch") == 1 and "error: out of paper" in said
    assert not list(Path(tmp_path / "cache").glob("**/*.so"))


def test_with_a_compiler_nothing_is_said(tmp_path):
    assert call_in_a_fresh_process(tmp_path) == ""
    assert len(list(Path(tmp_path / "cache" / "dpflash").iterdir())) == 1
