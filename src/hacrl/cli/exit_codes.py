"""What the command's exit codes mean; scripts and schedulers decide by them.

====  =========================================================================
0     finished
1     failed: the run could not go on; the message says why
2     bad input: a config, a file or an option is wrong; nothing was trained
128+  stopped by that signal: 129 because the terminal was closed (SIGHUP), 130 by
      Ctrl-C (SIGINT), 143 by SIGTERM. What was done is saved, unless a second
      signal asked to end at once
====  =========================================================================
"""

from __future__ import annotations

import signal

from hacrl.errors import HacrlError

FINISHED = 0
FAILED = 1
BAD_INPUT = 2  # as the parser of options has it


def stopped_by(number: signal.Signals) -> int:
    """Ended because of a signal, as shells count."""
    return 128 + number


def of_error(error: BaseException) -> int:
    """Whether the user's input was wrong, or the work failed."""
    return BAD_INPUT if isinstance(error, HacrlError) and isinstance(error, ValueError) else FAILED
