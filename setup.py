"""Makes the long description for PyPI: README.md without relative links, which PyPI breaks."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def long_description(readme: str, project: str) -> str:
    """Return README with absolute links, or without relative links if no repository is named.

    Args:
        readme: text of README.md.
        project: text of pyproject.toml.
    """
    repository = re.search(r'^urls = .*\bRepository = "([^"]+?)/?"', project, re.M)
    version = re.search(r'^version = "([^"]+)"', project, re.M)

    def absolute(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        if repository is None or version is None:
            return "" if image else text
        if target.startswith("#"):
            return f"[{text}]({repository[1]}{target})"
        kind = "raw" if image else "blob"
        return f"{image}[{text}]({repository[1]}/{kind}/v{version[1]}/{target})"

    if repository is None:
        readme = re.sub(r" ?\(\[[^]]*\]\((?!https?:)[^)\s]+\)\)", "", readme)  # " ([how](page))"
    parts = re.split(r"(^```.*?^```)", readme, flags=re.M | re.S)  # every other one is code
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(!?)\[([^]]*)\]\((?!https?:)([^)\s]+)\)", absolute, parts[i])
    return "".join(parts)


if __name__ == "__main__":
    readme, project = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "pyproject.toml")
    )
    setup(
        long_description=long_description(readme, project),
        long_description_content_type="text/markdown",
    )
