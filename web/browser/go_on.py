"""Continue the run that is watched: python go_on.py FOLDER STEPS."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.report_runs import MadeUpRun

MadeUpRun(steps=6).write(Path(sys.argv[1]), until=int(sys.argv[2]))
