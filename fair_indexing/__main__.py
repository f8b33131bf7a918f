"""``python -m fair_indexing``: builds indexes of large collections (`fair_indexing.cli`)."""

import sys

from fair_indexing.cli import main

if __name__ == "__main__":  # worker processes import this module
    sys.exit(main())
