"""The built site fits into a browser's window: on a telephone, a small and a wide screen."""

import html
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (380, 900, 1400)
PAGES = ("docs/index", "README", "docs/training", "docs/models", "docs/api/engine")
# What reaches beyond the window, and is in no box that scrolls.
FIND = """
onload = () => document.body.textContent = JSON.stringify(Object.fromEntries(
  [...document.querySelectorAll("iframe")].map(frame => {
    const inner = frame.contentWindow, scrolls = x => x !== inner.document.body &&
      (inner.getComputedStyle(x).overflowX !== "visible" || scrolls(x.parentElement));
    const wide = [...inner.document.querySelectorAll("article *")].filter(x =>
      x.getBoundingClientRect().right > frame.clientWidth + 1 && !scrolls(x.parentElement));
    const cut = [...inner.document.querySelectorAll("pre")].filter(x =>
      x.scrollWidth > x.clientWidth + 1);
    const shown = x => `${x.tagName}: ${x.textContent.trim().slice(0, 60)}`;
    return [frame.id, {wide: wide.map(shown), cut: cut.map(shown)}];
  })))
"""

pytestmark = [
    pytest.mark.cases(0),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
    pytest.mark.skipif(importlib.util.find_spec("furo") is None, reason="needs dpflash[docs]"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-c", "docs"]
    subprocess.run([*command, "-b", "html", ".", str(out)], cwd=ROOT, check=True)
    return out


def looked_at(site, pages):
    """What is wide and what is cut, by page and width."""
    frames = [
        f'<iframe id="{page} {width}" src="{page}.html" width="{width}" height="900"></iframe>'
        for page in pages
        for width in WIDTHS
    ]
    (site / "look.html").write_text(f"{''.join(frames)}<script>{FIND}</script>")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    options += [f"--user-data-dir={site / 'profile'}", "--virtual-time-budget=60000", "--dump-dom"]
    command = [CHROMIUM, *options, (site / "look.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    return json.loads(html.unescape(re.search(r"<body>(.*)</body>", shown, re.S)[1]))


def test_nothing_reaches_beyond_the_window_and_a_wide_one_cuts_no_example(site):
    found = looked_at(site, PAGES)
    assert len(found) == len(PAGES) * len(WIDTHS)
    assert not {where: x["wide"] for where, x in found.items() if x["wide"]}
    assert not [x for page in PAGES for x in found[f"{page} {WIDTHS[-1]}"]["cut"]]


def test_what_reaches_beyond_the_window_is_found(tmp_path):
    inner = '<div style="width: 1000px">wide</div><pre style="overflow: auto">' + "x" * 999
    (tmp_path / "broken.html").write_text(f"<article>{inner}</pre></article>")
    found = looked_at(tmp_path, ["broken"])
    assert [bool(x["wide"]) for x in found.values()] == [True, True, False]
    assert all(x["cut"] for x in found.values())
