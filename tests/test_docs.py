"""README and the pages of docs/ are true where a machine can tell."""

import re
import socket
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(
    0, str(ROOT / "tests" / "distributed")
)  # the new process finds the function there too
from fresh_process import FORKED, run_script  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_python_runs_by_itself(block, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # What torchrun --nproc-per-node 1 sets.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    errors = tmp_path / "errors.txt"
    environment = {**alone, "MASTER_PORT": str(port)}
    process = FORKED.Process(target=run_script, args=(block, tmp_path, environment, errors))
    process.start()
    process.join(300)
    assert process.exitcode == 0, errors.read_text() if errors.exists() else process.exitcode


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)", linked.read_text(), re.M)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, target


def test_pages_stay_short():
    lengths = {page.name: len(page.read_text().splitlines()) for page in PAGES}
    assert lengths.pop("README.md") <= 200
    assert max(lengths.values()) < 250, lengths
