"""``python -m fair_calibration``: evaluation and diagnosis by position (`fair_evaluation.cli`)."""

import sys

from fair_evaluation.cli import main

sys.exit(main())
