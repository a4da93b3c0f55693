"""README, docs and model cards, and the steps in their code blocks."""

import re
import textwrap
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]


def texts(*patterns: str) -> dict[str, str]:
    files = [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


PAGES = texts("README.md", "docs/*.md")
CARDS = texts("checkpoints/*/README.md")


def steps(page: str) -> list[tuple[str, str]]:
    """Return the language and the code of each step of a page, in order. A step is one command or one Python block."""
    found = []
    for language, code in re.findall(r"^ *```(bash|python)\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            found.append((language, textwrap.dedent(code)))
        else:
            lines = code.replace("\\\n", " ").replace("&&", "\n").splitlines()
            found += [(language, line.strip()) for line in lines if line.strip()]
    return found
