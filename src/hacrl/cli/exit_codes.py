"""Exit codes of the commands, for scripts and schedulers.

====  =========================================================================
0     finished
1     failed: the run could not continue; the message says why
2     bad input: a config, a file or an option is wrong; nothing was trained
128+  stopped by a signal: 129 the terminal was closed (SIGHUP), 130 Ctrl-C (SIGINT),
      143 SIGTERM. All work is saved, unless a second signal ended the command at
      once
====  =========================================================================
"""

from __future__ import annotations

import signal

from hacrl.errors import HacrlError

FINISHED = 0
FAILED = 1
BAD_INPUT = 2  # the same as that of the option parser


def stopped_by(number: signal.Signals) -> int:
    """Return the exit code after a signal, as shells define it."""
    return 128 + number


def of_error(error: BaseException) -> int:
    """Return BAD_INPUT if the user's input was wrong, FAILED if the work failed."""
    return BAD_INPUT if isinstance(error, HacrlError) and isinstance(error, ValueError) else FAILED
