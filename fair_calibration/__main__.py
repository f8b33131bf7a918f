"""``python -m fair_calibration``: the command line (`fair_calibration.commands`)."""

import sys

from fair_calibration.commands import main

sys.exit(main())
