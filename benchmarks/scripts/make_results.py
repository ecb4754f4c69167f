"""Makes the pages of results and the figures of `dpflash.recommend` from the committed JSON files.

python benchmarks/scripts/make_results.py [--check]
"""

import argparse
import sys
from pathlib import Path

from dpflash.bench.document import markdown
from dpflash.bench.output import write_picture, write_text
from dpflash.bench.published import read_reports
from dpflash.bench.result_files import device_names, load
from dpflash.bench.results_page import PICTURE, draw_headline, newest, render
from dpflash.bench.suites import suite_named
from dpflash.recommender import shipped_table

ROOT = Path(__file__).resolve().parents[2]


def made(root: Path) -> dict[Path, str]:
    """Return {path: text} of the files to write."""
    results, page = root / "benchmarks" / "results", root / "benchmarks" / "RESULTS.md"
    devices = [load(results, device) for device in device_names(results)]
    measured = [
        files[name].path
        for files in devices
        for name in ("attention", "variants", "sequence")
        if name in files
    ]
    pages = {
        path: markdown(suite_named(path.stem), file.held)
        for files in devices
        for file in files.values()
        if (path := file.path.with_suffix(".md")).exists()
    }
    return {
        **pages,
        page: render(results, read_reports(), page),
        root / "dpflash" / "recommendations.json": shipped_table(measured),
    }


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Write the files; return the exit status, which is 1 if --check finds an outdated file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a file would change"
    )
    check = parser.parse_args(arguments).check
    stale = []
    for path, text in made(root).items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not check:
            write_text(path, text)
    results = root / "benchmarks" / "results"
    shown = newest(results, {name: load(results, name) for name in device_names(results)})
    if not check and shown is not None:
        write_picture(results / PICTURE, draw_headline(*shown))
    for path in stale:
        print(f"{'differs from what the JSON gives' if check else 'written'}: {path}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
