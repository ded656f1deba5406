"""The processes behind ``gym:NAME``: one that makes questions, one that scores answers and can be killed.

Started as ``python -m hacrl.tasks.gym.worker questions`` or ``... scores``. Some scorers compute with the
answer: what a model wrote, such as ``9**9**9**9``, must not be able to hang or fill the process that trains.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import signal
import sys
from importlib import import_module
from typing import Any

from hacrl.json_values import from_tagged_json
from hacrl.processes import receive_message, send_message
from hacrl.tasks.gym.scoring import is_correct


def main() -> None:
    """Serve until stdin ends."""
    replies = os.dup(1)  # what a scorer prints must not get between the messages
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    if sys.argv[1] == "questions":
        from hacrl.tasks.gym.questions import answer_request

        request = receive_message(0)
        if request is not None:
            send_message(replies, answer_request(request))
        return
    _serve_scores(replies)


def _serve_scores(replies: int) -> None:
    setup = receive_message(0)
    if setup is None:
        return
    gym: Any = import_module("reasoning_gym")
    dataset = gym.create_dataset(setup["kind"], size=1, seed=setup["seed"], **setup["config"])
    with contextlib.suppress(Exception):  # imports of the first call are not charged to the first answer
        dataset.score_answer("0", dataset[0])
    if setup["memory"]:
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory"], setup["memory"]))
    send_message(replies, {"ready": True})
    while (request := receive_message(0)) is not None:
        # The parent kills a slow scorer; should the parent be gone itself, the alarm does.
        signal.alarm(math.ceil(setup["time_limit"]) + 2)
        send_message(replies, {"label": _label(dataset, request["answer"], request["entry"])})
        signal.alarm(0)


def _label(dataset: Any, answer: str, entry: Any) -> str:
    """The verdict on an answer that could be read."""
    try:
        right = is_correct(dataset, answer, from_tagged_json(entry))
    except MemoryError:
        raise  # ends this process, whose state is doubtful
    except Exception:  # odd text makes some scorers raise: counted as such, never silently as wrong
        return "crash"
    return "correct" if right else "wrong"


if __name__ == "__main__":
    main()
