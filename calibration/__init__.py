"""Measuring a machine, and fitting the measurements. Imports parsim; parsim never imports it (the command line apart).

`calibration.rounds.calibrate.calibrate` is the way in; `python -m calibration JOB.json` is one rank of the measuring job.
"""

import parsim  # noqa: F401  (whose list of moved modules names those of calibration, too)
