"""The program of a replica's process: ``python -m hacrl.engines.replicas.program``.

Its arguments are JSON in the environment variable ``HACRL_REPLICA``, because they contain a token. An
executor may call :func:`main` with them in a process on another host instead.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

import torch

from hacrl.engines.replicas.connection import connect
from hacrl.engines.replicas.placement import VARIABLE
from hacrl.engines.replicas.replica import Replica, ReplicaArguments

CONNECT_SECONDS = 60.0


def main(arguments: dict[str, Any]) -> int:
    """Connect to the engine at ``arguments["host"]``, serve it to the end, and return the exit code."""
    settings = ReplicaArguments(**arguments)
    torch.set_num_threads(settings.threads)
    where = settings.host, settings.port, settings.token, settings.number, CONNECT_SECONDS
    return Replica(settings, partial(connect, *where)).serve()


if __name__ == "__main__":
    code = main(json.loads(os.environ.pop(VARIABLE)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the interpreter would take seconds to free everything
