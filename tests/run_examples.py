"""Run the Python examples of Markdown pages: python tests/run_examples.py README.md docs/*.md."""

import os
import re
import sys
import tempfile
from pathlib import Path


def examples(page: Path) -> list[str]:
    """The blocks of Python in a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


def run(page: Path) -> int:
    """Run all examples of a page, each by itself, and return how many there are."""
    blocks = examples(page)
    for block in blocks:
        exec(compile(block, page.name, "exec"), {})
    return len(blocks)


if __name__ == "__main__":
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for page in pages:
            print(f"{page.name}: {run(page)} examples ran")
