"""README and the pages of docs/ are true where a machine can tell."""

import ast
import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

FULL = os.environ.get("DPFLASH_FULL") == "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(
    0, str(ROOT / "tests" / "distributed")
)  # the new process finds the function there too
from fresh_process import FORKED, run_script  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = ("dpflash", "kernels", "accounting", "benchmarks")
TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]
# What a block has -> what takes less time.
LESS = {
    "in range(3):": "in range(1):",
    "canaries=200": "canaries=100",
    "epsilon=1.0,": "epsilon=0.5,",
}
# What a tutorial has -> what makes two steps of it.
TWO_STEPS = {
    "for epsilon in (1, 3, 8)": "for epsilon in (3,)",
    "range(EPOCHS)": "range(1)",
    "in loader:": "in itertools.islice(loader, 8):",
    "max_steps=30": "max_steps=2",
    "'--steps', '100'": "'--steps', '2'",
}


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.S)


def needs(block):
    """Skipped without what `make test` does not install."""
    named = set(re.findall(r"^(?:import|from) (datasets|lightning|trl)\b", block, re.M))
    missing = sorted(name for name in named if importlib.util.find_spec(name) is None)
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}", marks=needs(block))
    for page in PAGES
    if page not in TUTORIALS
    for number, block in enumerate(blocks(page))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_python_runs_by_itself(block, tmp_path):
    for whole, part in LESS.items():
        block = block.replace(whole, part)
    run(block, tmp_path)


def run(block, tmp_path):
    """In a process of its own, whose folder is `tmp_path`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # What torchrun --nproc-per-node 1 sets, for blocks that make a mesh.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    errors = tmp_path / "errors.txt"
    environment = {**alone, "MASTER_PORT": str(port)} if "init_device_mesh" in block else {}
    process = FORKED.Process(target=run_script, args=(block, tmp_path, environment, errors))
    process.start()
    process.join(300)
    assert process.exitcode == 0, errors.read_text() if errors.exists() else process.exitcode


@pytest.mark.cases(0)
@pytest.mark.parametrize(
    "block", blocks(ROOT / "docs" / "ranks.md"), ids=["plain", "transformers"]
)
def test_a_block_of_many_ranks_runs_on_two(block, tmp_path):
    (tmp_path / "block.py").write_text(block)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "block.py"]
    subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, timeout=300)


def called(line):
    """A command of dpflash as a line of Python."""
    program, *arguments = shlex.split(line)
    assert program == "dpflash"
    return f"assert dpflash.cli.main({arguments!r}) == 0\n"


@pytest.mark.cases(0)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_from_top_to_bottom(page, tmp_path):
    """With two steps of training; and every picture that it shows is one that it draws."""
    program = "import itertools, dpflash.cli\n"
    for kind, block in re.findall(r"```(python|sh)\n(.*?)```", page.read_text(), re.S):
        lines = block.replace("\\\n", "").splitlines()
        program += block if kind == "python" else "".join(map(called, lines))
    for whole, part in TWO_STEPS.items():
        program = program.replace(whole, part)
    run(program, tmp_path)
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())
    assert all((tmp_path / picture).exists() for picture in pictures)


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
    del lengths["troubleshooting.md"]  # a list of messages, to be searched
    assert max(lengths.values()) < 250, lengths


def test_the_words_that_people_type_into_the_search_lead_to_a_page():
    words = {"memory": "OOM, CUDA out of memory", "class-imbalance": "imbalanced, minority class"}
    words |= {"privacy-officer": "HIPAA, GDPR, de-identified", "gpus": "multi-GPU"}
    for page, typed in words.items():
        text = (ROOT / "docs" / f"{page}.md").read_text().lower()
        assert not [word for word in typed.lower().split(", ") if word not in text], page


def test_each_page_has_a_title_of_its_own():
    titles = [page.read_text().partition("\n")[0] for page in PAGES]
    assert all(title.startswith("# ") for title in titles)
    assert len(set(titles)) == len(titles)


def test_the_names_of_pages_and_messages_resolve():
    """`import dpflash; dpflash.packing.PackTo` works wherever a text says so."""
    names = set()
    for page in PAGES:
        names |= named_in(page.read_text())
    for path in (p for folder in CODE for p in (ROOT / folder).rglob("*.py")):
        code = path.read_text()
        if named_in(code) <= names:
            continue
        nodes = ast.walk(ast.parse(code))
        texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
        names |= named_in("\n".join(text for text in texts if isinstance(text, str)))
    for library in ("lightning", "trl", "transformers"):  # `make test-all` waits for them
        if not FULL or importlib.util.find_spec(library) is None:
            names = {n for n in names if not n.startswith(f"integrations.{library}")}
    assert len(names) > 50
    # A fresh process, since other imports set attributes of packages.
    script = (
        "import dpflash, operator, sys\nfor n in sys.argv[1:]: operator.attrgetter(n)(dpflash)"
    )
    subprocess.run([sys.executable, "-c", script, *sorted(names)], check=True)


def named_in(text):
    """The names below `dpflash` in a text; `torch.ops.dpflash` and file names are none."""
    return set(re.findall(r"(?<![\w./-])dpflash\.((?:[A-Za-z]\w*\.)*[A-Za-z]\w*)", text))
