"""``python -m mteb_fair``."""

import sys

from mteb_fair.cli import main

if __name__ == "__main__":
    sys.exit(main())
