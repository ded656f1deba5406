"""The worker process: reads pairs of answers from stdin, says for each whether they are equal.

Started as ``python -m hacrl.tasks.math.worker TIME_LIMIT MEMORY_BYTES``. Imports sympy and
math-verify, but neither torch nor the rest of hacrl, and trusts nothing it reads.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import sys

from hacrl.processes import receive_message, send_message


def main() -> None:
    """Serve until stdin ends."""
    time_limit, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    replies = os.dup(1)  # whatever a library prints must not get between the messages
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        _warm_up()
    except Exception as error:  # reported to the user by the pool
        send_message(replies, {"error": f"{type(error).__name__}: {error}"})
        return
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    send_message(replies, {"ready": True})
    while (pair := receive_message(0)) is not None:
        # The kernel ends this process when it has computed for so long, whatever it is doing, and even if
        # the process that would kill it is gone; a busy machine does not make honest answers late.
        signal.setitimer(signal.ITIMER_PROF, time_limit)
        equal = _judge(pair["gold"], pair["answer"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        send_message(replies, {"equal": equal})


def _warm_up() -> None:
    """Import everything and run it once, so that the first answer is not charged for it."""
    from hacrl.tasks.math.symbolic import equal_values

    logging.disable(logging.CRITICAL)  # math-verify warns that it has no time limit of its own
    sys.setrecursionlimit(3000)
    equal_values("\\frac{x^{2}}{2}+\\sqrt{3}", "\\sqrt{3}+0.5x^{2}")


def _judge(gold: str, answer: str) -> bool:
    import sympy.core.random  # type: ignore[import-untyped,unused-ignore]

    from hacrl.tasks.math.matching import answers_match
    from hacrl.tasks.math.symbolic import equal_values

    # sympy tests some things at random points: always the same ones, whatever was judged before
    random.seed(0)
    sympy.core.random.seed(0)
    try:
        return answers_match(gold, answer, equal_values)
    except (MemoryError, RecursionError):
        raise  # ends this process, whose state is doubtful: the pool says "crash" and starts another
    except Exception:  # untrusted text: what cannot be compared is not equal
        return False


if __name__ == "__main__":
    main()
