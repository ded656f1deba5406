"""The worker process: reads pairs of answers from stdin and replies for each whether they are equal.

Command: ``python -m hacrl.tasks.math.worker TIME_LIMIT MEMORY_BYTES``. The process imports sympy and
math-verify, but neither torch nor the rest of hacrl, and treats its input as untrusted.
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
    replies = os.dup(1)  # output of a library must not mix with the messages
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        _warm_up()
    except Exception as error:  # the pool reports it to the user
        send_message(replies, {"error": f"{type(error).__name__}: {error}"})
        return
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    send_message(replies, {"ready": True})
    while (pair := receive_message(0)) is not None:
        # The kernel ends this process after so much CPU time, even if the parent process is gone. A busy
        # machine uses up clock time but no CPU time, so it causes no timeout.
        signal.setitimer(signal.ITIMER_PROF, time_limit)
        equal = _judge(pair["gold"], pair["answer"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        send_message(replies, {"equal": equal})


def _warm_up() -> None:
    """Import and run everything once, so that this does not count towards the first answer's time."""
    from hacrl.tasks.math.symbolic import equal_values

    logging.disable(logging.CRITICAL)  # math-verify warns that it has no time limit of its own
    sys.setrecursionlimit(3000)
    equal_values("\\frac{x^{2}}{2}+\\sqrt{3}", "\\sqrt{3}+0.5x^{2}")


def _judge(gold: str, answer: str) -> bool:
    import sympy.core.random  # type: ignore[import-untyped,unused-ignore]

    from hacrl.tasks.math.matching import answers_match
    from hacrl.tasks.math.symbolic import equal_values

    # sympy tests at random points: fixed seeds make verdicts independent of earlier pairs
    random.seed(0)
    sympy.core.random.seed(0)
    try:
        return answers_match(gold, answer, equal_values)
    except (MemoryError, RecursionError):
        raise  # ends this process, whose state is unreliable: the pool counts "crash" and starts another
    except Exception:  # untrusted text: answers that cannot be compared are not equal
        return False


if __name__ == "__main__":
    main()
