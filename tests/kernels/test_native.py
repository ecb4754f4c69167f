"""The C++ kernels as they are compiled, kept and loaded, and what happens where they cannot be."""

import hashlib
import multiprocessing
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from dpflash.kernels import attention_cpu, attention_reference, native
from dpflash.kernels.attention_reference import AttentionInputs
from dpflash.patterns import Dilated

X86 = platform.machine() in ("x86_64", "AMD64")
FULL = os.environ.get("DPFLASH_FULL") == "1"
# Processors that this one can stand in for, with the bytes of their vectors.
PROCESSORS = {"native": (("-march=native",), None)}
if X86:
    PROCESSORS["sse2"] = (("-march=x86-64",), 16)
    if FULL and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        PROCESSORS["avx2"] = (("-march=x86-64-v3",), 32)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-O0"))  # compiles faster
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dpflash"


TINY = """
#include "tiny.h"
extern "C" long long problem_bytes() { return 96; }
extern "C" long long vector_bytes() { return other(); }
"""
OTHER = '#include "tiny.h"\nlong long other() { return %d; }\n'


@pytest.fixture
def tiny(cache, tmp_path, monkeypatch):
    """Two sources that compile in no time to a library whose vectors have 16 bytes."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "tiny.h").write_text("long long other();\n")
    (folder / "tiny.cpp").write_text(TINY)
    (folder / "other.cpp").write_text(OTHER % 16)
    monkeypatch.setattr(native, "_FOLDER", folder)
    monkeypatch.setattr(native, "_SOURCES", ("tiny.cpp", "tiny.h", "other.cpp"))
    return folder


def plant(path, content):
    """As another file: a library that is loaded must not change."""
    path.unlink()
    path.write_bytes(content)


@pytest.fixture
def planted(tiny, cache, tmp_path, monkeypatch):
    """In a new cache: a library that differs (32 bytes), whole and of the right name."""
    native.load()
    (kept,) = cache.glob("*.so")
    (tiny / "other.cpp").write_text(OTHER % 32)
    native.load()
    (other,) = set(cache.glob("*.so")) - {kept}
    (tiny / "other.cpp").write_text(OTHER % 16)
    folder = tmp_path / "home" / "dpflash"
    folder.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    return other.rename(folder / kept.name)


COMPILER = """#!/bin/sh
echo "$TMPDIR" >> {folder}/calls
. {folder}/do
"""


class Compiler:
    """Counts its calls; what else it does is a shell script."""

    def __init__(self, folder):
        self.path, self._folder = folder / "compiler", folder
        self.path.write_text(COMPILER.format(folder=folder))
        self.path.chmod(0o755)

    def does(self, script):
        (self._folder / "do").write_text(script)

    def calls(self):
        """Its TMPDIR in each call."""
        calls = self._folder / "calls"
        return [Path(line) for line in calls.read_text().splitlines()] if calls.exists() else []


@pytest.fixture
def compiler(tiny, tmp_path, monkeypatch):
    folder = tmp_path / "compiler"
    folder.mkdir()
    monkeypatch.setenv("CXX", str(folder / "compiler"))
    return Compiler(folder)


WORKS = 'exec g++ "$@"'


def gradients(module, dtype, dim):
    """Of a graph with weights and bands, on more queries than any vector is wide."""
    torch.manual_seed(0)
    graph = Dilated(segment_lengths=(48, 96), dilation_rates=(1, 3), causal=True).graph(203, 4)
    q, do = torch.randn(2, 2, 4, 203, dim, dtype=torch.float64).to(dtype)
    k, v = torch.randn(2, 2, 2, 203, dim, dtype=torch.float64).to(dtype)
    inputs = AttentionInputs(q, k, v, graph, 0.3)
    o, lse = module.attention_forward(inputs)
    grads = module.attention_backward(do, None, o, lse, inputs)
    return o, lse, grads.dq, grads.dk, grads.dv


@pytest.mark.parametrize("dim", [3, 40, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_width_of_vectors_matches_the_reference(processor, dtype, dim, monkeypatch):
    options, width = PROCESSORS[processor]
    library = native.load(options)
    assert width is None or library.vector_bytes() == width
    monkeypatch.setattr(native, "library", lambda: library)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    expected = gradients(attention_reference, torch.float64, dim)
    for x, reference in zip(gradients(attention_cpu, dtype, dim), expected, strict=True):
        assert x.dtype == dtype
        assert (x.double() - reference).abs().max() <= tolerance * reference.abs().max()


def test_python_and_c_mean_a_problem_of_the_same_size():
    assert native.load().problem_bytes() == attention_cpu._CALL.size + attention_cpu._ROWS.size


def test_all_sources_become_one_library(tiny, cache):
    assert native.load().vector_bytes() == 16
    (kept,) = cache.glob("*.so")
    assert re.fullmatch(r"kernels-[0-9a-f]{32}\.so", kept.name)


def test_what_was_compiled_is_found_again(tiny, cache, monkeypatch):
    assert native.load()._name == str(next(cache.glob("*.so")))
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled twice"))
    assert native.load()._name == str(next(cache.glob("*.so")))


def test_other_sources_options_and_compilers_are_other_libraries(tmp_path, monkeypatch):
    def name():
        return native._digest(native._origin(), ("-march=native",))

    names = {name(), native._digest(native._origin(), ())}
    monkeypatch.setattr(native, "_processor", lambda: iter(("another",)))
    names.add(name())
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "9.99"))
    names.add(name())
    monkeypatch.setattr(native, "_system_libraries", lambda: iter(("libstdc++.so.6.9",)))
    names.add(name())
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-g"))
    names.add(name())
    for source in native._SOURCES:
        (tmp_path / source).write_bytes((native._FOLDER / source).read_bytes() + b"\n")
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    names.add(name())
    monkeypatch.setenv("CXX", "g++ -w")
    names.add(name())
    assert len(names) == 8


@pytest.mark.skipif(sys.platform != "linux", reason="another system's libraries")
def test_the_libraries_of_the_system_are_known_by_version():
    found = list(native._system_libraries())
    assert platform.libc_ver()[1] in found
    assert any(re.fullmatch(r"libstdc\+\+\.so\.6[.\d]*", name) for name in found)


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_library_is_made_anew(damage, tiny, cache):
    native.load()
    (kept,) = cache.glob("*.so")
    whole = kept.read_bytes()
    # The names of symbols, at the end of the file, matter to nobody who loads it.
    plant(kept, whole[:1000] if damage == "cut" else whole[:-40] + b"damaged." + whole[-32:])
    assert native.load().vector_bytes() == 16
    assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_only_time(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="in each process, since the cache folder is not used"):
        library = native.load()
    assert library.vector_bytes() == 16
    assert library._name.startswith("compiled for this process: the cache folder is not used: ")


def test_a_processor_that_the_compiler_does_not_know_gets_its_general_code(tiny, monkeypatch):
    unknown = (("-march=no-such-processor",), ())
    monkeypatch.setattr(native, "_PROCESSORS", unknown)
    assert native.load().vector_bytes() in (16, 32)


CALL = """
import os, sys, warnings
from dpflash.kernels import native
native._load_once.cache_clear()
os.environ["CXX"], os.environ["XDG_CACHE_HOME"] = sys.argv[1:]
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


@pytest.fixture
def call(forked, tmp_path):
    """call(compiler): the warnings of attention where nothing is compiled yet."""

    def run(compiler):
        status, output = forked(CALL, str(compiler), str(tmp_path / "cache"))
        assert status == 0, output
        return output.strip()

    return run


def test_without_a_compiler_the_reference_runs_and_says_so_once(call):
    said = call("no-such-compiler")
    assert said.count("in plain PyTorch") == 1
    assert "CXX='no-such-compiler' is not a command" in said


def test_a_missing_compiler_is_named(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match=r"no C\+\+ compiler found \(looked for c\+\+, g\+\+, clang"):
        native.load()


@pytest.mark.parametrize("named", ["g++ '", "   ", "/", "no-ccache g++"])
def test_a_compiler_that_is_none_is_named(named, cache, monkeypatch):
    monkeypatch.setenv("CXX", named)
    with pytest.raises(OSError, match=re.escape(f"CXX={named!r} is not a command")) as raised:
        native.load()
    assert ("'no-ccache' is not installed" in str(raised.value)) == ("ccache" in named)


def test_without_a_compiler_what_was_kept_runs(tiny, tmp_path, monkeypatch):
    native.load()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.load().vector_bytes() == 16


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_compiler_of_c_is_told_apart(tiny, cache, monkeypatch):
    (tiny / "other.cpp").write_text("long long other() { return *new long long(16); }\n")
    monkeypatch.setenv("CXX", "gcc")
    with pytest.raises(OSError, match="gcc: its library does not load .does it compile C only"):
        native.load()
    assert not list(cache.glob("*.so"))


def test_the_first_use_says_that_it_compiles(tiny, capfd):
    native.load()
    assert "compiling CPU kernels" in capfd.readouterr().err
    native.load()
    assert capfd.readouterr().err == ""


def test_a_compiler_that_does_not_answer_is_an_error_of_the_system(cache, monkeypatch):
    monkeypatch.setattr(native, "_SECONDS", 0.2)
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'import time; time.sleep(60)'")
    with pytest.raises(OSError, match=r"took more than 0\.2 s"):
        native.load()


def test_a_cache_that_moves_with_the_work_is_none(tiny, tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.warns(RuntimeWarning, match="this user has no home folder"):
        assert native.load().vector_bytes() == 16
    assert not list(work.iterdir())


def test_what_could_not_be_kept_leaves_nothing_behind(tiny, cache, monkeypatch):
    def full(copy, path):
        if path.parent == cache:
            raise OSError("no space left")
        replace(copy, path)

    replace = os.replace
    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="cannot be written: no space left"):
        library = native.load()
    assert library.vector_bytes() == 16
    assert library._name.startswith("compiled for this process: ")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


@pytest.mark.cases(0)
def test_a_compiler_that_fails_is_quoted(call, tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'error: out of paper' >&2; exit 1\n")
    compiler.chmod(0o755)
    said = call(compiler)
    assert said.count("in plain PyTorch") == 1 and "error: out of paper" in said
    assert not list(Path(tmp_path / "cache").glob("**/*.so"))


@pytest.mark.cases(0)
def test_with_a_compiler_nothing_is_said(call, tmp_path):
    quick = tmp_path / "quick"
    quick.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    quick.chmod(0o755)
    assert call(quick) == ""
    kept = (tmp_path / "cache" / "dpflash").iterdir()
    assert sorted(path.suffix for path in kept) == [".lock", ".so"]


def test_a_library_in_a_folder_that_others_can_write_is_not_loaded(planted):
    cache = planted.parent
    for folder, mode in ((cache, 0o777), (cache, 0o770), (cache, 0o1777)):
        usual = folder.stat().st_mode
        folder.chmod(mode)
        with pytest.warns(RuntimeWarning) as caught:
            library = native.load()
        (warning,) = caught
        assert f"{folder} can be written by its group or others" in str(warning.message)
        assert library.vector_bytes() == 16
        assert f"{folder} can be written" in library._name
        folder.chmod(usual)
    assert native.load().vector_bytes() == 32  # it runs where only its owner could have put it


def test_a_library_that_others_can_write_is_replaced(planted):
    planted.chmod(0o620)
    assert native.load().vector_bytes() == 16
    assert planted.stat().st_mode & 0o777 == 0o600
    assert native.load()._name == str(planted)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
def test_a_library_of_another_user_is_replaced(planted):
    os.chown(planted, 12345, -1)
    assert native.load().vector_bytes() == 16
    assert planted.stat().st_uid == 0


def test_a_link_to_a_library_is_replaced(planted, tmp_path):
    elsewhere = tmp_path / "elsewhere.so"
    planted.rename(elsewhere)
    planted.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    assert native.load().vector_bytes() == 16
    assert not planted.is_symlink() and elsewhere.read_bytes() == before


def test_a_link_to_a_cache_folder_is_not_used(planted, tmp_path):
    cache = planted.parent
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="dpflash is a symbolic link"):
        assert native.load().vector_bytes() == 16


def test_the_cache_is_its_owners_under_any_umask(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    old = os.umask(0)
    try:
        native.load()
    finally:
        os.umask(old)
    folder = tmp_path / "home" / "dpflash"
    assert folder.stat().st_mode & 0o777 == 0o700
    kept = {path.suffix: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert kept == {".so": 0o600, ".lock": 0o600}


def test_a_library_that_does_not_load_is_compiled_anew(planted, compiler, monkeypatch):
    content = b"made for another libc"
    plant(planted, content + hashlib.sha256(content).digest())
    monkeypatch.delenv("CXX")
    assert native.load().vector_bytes() == 16
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    assert native.load()._name == str(planted)


@pytest.mark.parametrize("has_memory", [True, False])
def test_two_libraries_are_two(has_memory, tiny, cache, monkeypatch):
    if not has_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    assert native.load().vector_bytes() == 16
    (tiny / "other.cpp").write_text(OTHER % 32)
    assert native.load().vector_bytes() == 32


def load_at(barrier, found):
    barrier.wait(60)
    found.put(native.load().vector_bytes())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_four_processes_compile_once(compiler, cache):
    compiler.does(f"sleep 0.5; {WORKS}")
    context = multiprocessing.get_context("fork")
    barrier, found = context.Barrier(4), context.SimpleQueue()
    processes = [context.Process(target=load_at, args=(barrier, found)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert [found.get() for _ in range(4)] == [16] * 4
    assert len(compiler.calls()) == 1


def test_what_never_loads_is_not_kept(compiler, cache):
    compiler.does('while [ "$1" != -o ]; do shift; done; echo no library > "$2"')
    with pytest.raises(OSError, match="its library does not load"):
        native.load()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
