"""The program of a rank's process: ``python -m hacrl.executors.rank_program ARGUMENTS``, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from hacrl.executors.rank_follower import RankFollower
from hacrl.executors.rank_processes import ready_key
from hacrl.models.rank_group import LeaderLostError, Meeting, join, leave, listen, make_groups


def main(arguments: dict[str, Any]) -> int:
    """Connect to rank 0, and follow it to the end; return the exit code."""
    meeting = Meeting(**arguments["meeting"])
    members, agent = arguments["members"], arguments["agent"]
    store = listen(meeting, arguments["timeout"])
    store.set(ready_key(agent, members[agent].index(meeting.process)), "ready")
    try:
        join(store, meeting, arguments["device"], arguments["timeout"])
        groups = make_groups(store, members, arguments["timeouts"])
        RankFollower(groups[agent], arguments["device"]).follow()
    except LeaderLostError as error:
        print(error, file=sys.stderr)
        return 1
    leave()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
