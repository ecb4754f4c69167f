"""Opacus' own tests, which its wheel ships, pass with this library registered as without."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

pytest.importorskip("opacus")

REGISTER = """
from dpflash.integrations import opacus

opacus.register(replace_accountants=True)
"""


def not_passed(folder, *options):
    """The names of tests that fail, and how many pass; files that need torchvision may lack it."""
    report = folder / "report.xml"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    subprocess.run(
        [sys.executable, *command, f"--junitxml={report}", *options, "--pyargs", "opacus.tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        timeout=900,
    )
    failed, passed = set(), 0
    for case in ElementTree.parse(report).iter("testcase"):
        broken = [child for child in case if child.tag in ("failure", "error")]
        if not broken:
            passed += not any(child.tag == "skipped" for child in case)
        elif "No module named 'torchvision'" not in (broken[0].text or ""):
            failed.add(f"{case.get('classname')}.{case.get('name')}")
    return failed, passed


@pytest.mark.cases(0)
def test_opacus_own_tests_pass_with_dpflash_registered(tmp_path):
    (tmp_path / "register_dpflash.py").write_text(REGISTER)
    failed, passed = not_passed(tmp_path, "-p", "register_dpflash")
    assert passed > 100
    if failed:  # perhaps of Opacus itself
        failed -= not_passed(tmp_path)[0]
    assert not failed
