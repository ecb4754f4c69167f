"""What a user installs is what the repository holds."""

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dpflash
from dpflash.kernels import native

tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from 3.11 on")

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "dpflash": "dpflash",
    "kernels": "dpflash.kernels",
    "accounting": "dpflash.accounting",
    "benchmarks": "dpflash.bench",
}
SETUP = str(ROOT / "setup.py")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _packages_on_disk():
    found = set()
    for folder, package in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            below = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([package, *below]))
    return found


def test_every_package_is_listed_and_every_listed_package_exists():
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == _packages_on_disk()


def test_every_package_is_mapped_to_its_folder():
    mapped = PYPROJECT["tool"]["setuptools"]["package-dir"]
    assert mapped == {package: folder for folder, package in FOLDERS.items()}


def test_version_is_the_same_in_the_project_file_the_citation_and_the_library():
    assert PYPROJECT["project"]["version"] == dpflash.__version__
    citation = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {dpflash.__version__}" in citation


def test_links_of_the_long_description_lead_into_the_repository_if_there_is_one():
    readme = "[a](docs/a.md#b) ([x](y)) ![c](d.png)\n```\n[e](f)\n```\n[g](https://h) [i](#j)\n"
    project = 'version = "1.2"\n'
    code = "\n```\n[e](f)\n```\n[g](https://h) "
    assert runpy.run_path(SETUP)["long_description"](readme, project) == f"a {code}i\n"
    project += 'urls = { Changelog = "https://k", Repository = "https://r/" }\n'
    blob, raw = "https://r/blob/v1.2", "https://r/raw/v1.2"
    expected = f"[a]({blob}/docs/a.md#b) ([x]({blob}/y)) ![c]({raw}/d.png){code}[i](https://r#j)\n"
    assert runpy.run_path(SETUP)["long_description"](readme, project) == expected


def test_console_script_points_at_something_callable():
    module, _, name = PYPROJECT["project"]["scripts"]["dpflash"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_type_checkers_find_the_packages_through_the_links():
    for folder in ("kernels", "accounting", "benchmarks"):
        link = ROOT / "tests" / "typing" / FOLDERS[folder].replace(".", "/")
        assert link.resolve() == ROOT / folder


def test_wheel_holds_every_module_and_nothing_beside_dpflash(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("pip")
    # Built from a copy: a build leaves folders behind, and an old one's leftovers enter the wheel.
    source = tmp_path / "source"
    junk = shutil.ignore_patterns("__pycache__")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=junk)
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr

    (wheel,) = tmp_path.glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    (metadata,) = (name for name in inside if name.endswith("/METADATA"))
    page = zipfile.ZipFile(wheel).read(metadata).decode()
    title = (source / "README.md").read_text().splitlines()[0]
    assert title in page and "Description-Content-Type: text/markdown" in page
    targets = re.findall(r"""\]\(([^)\s]+)\)|(?:src|href)="([^"]+)\"""", page)
    assert all("".join(target).startswith("https://") for target in targets), targets
    assert {n.split("/")[0] for n in inside if ".dist-info/" not in n} == {"dpflash"}
    assert "dpflash/py.typed" in inside
    expected = {
        "/".join([*package.split("."), *path.relative_to(source / folder).parts])
        for folder, package in FOLDERS.items()
        for path in (source / folder).rglob("*.py")
        if not {"build", "scripts"} & set(path.parts)
    }
    assert {n for n in inside if n.endswith(".py")} == expected
    sources = {f"dpflash/kernels/{name}" for name in native._SOURCES}
    assert {n for n in inside if n.endswith((".cpp", ".h"))} == sources
    data = {n for n in inside if n.startswith("dpflash/bench/") and not n.endswith(".py")}
    assert data == {"dpflash/bench/published.json", "dpflash/bench/suite_pages.md"}
