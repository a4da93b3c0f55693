"""Entry point of `python -m frugalvit`, which runs the `frugalvit` command."""

import sys

from .cli import main


if __name__ == "__main__":
    sys.exit(main())
