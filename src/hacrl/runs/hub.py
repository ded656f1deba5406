"""Whether the Hugging Face hub can be reached, found out in seconds.

Without a network the libraries try each file for half a minute before they look into the cache. Asked once
here, they can be told to look there at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hacrl.config.schema import RunConfig, TaskSettings
from hacrl.models.model_sources import resolve_model
from hacrl.tasks.boxed import PRESETS

PROBE_SECONDS = 5.0


def hub_if_needed(
    config: RunConfig, loaded: Collection[str] = (), has_task: bool = False
) -> AbstractContextManager[str | None]:
    """As :func:`cache_only_if_unreachable`; a run of local files does not touch the network."""
    return cache_only_if_unreachable() if needs_hub(config, loaded, has_task) else nullcontext()


def needs_hub(config: RunConfig, loaded: Collection[str] = (), has_task: bool = False) -> bool:
    """Whether a model or the data may have to come from the hub.

    ``loaded`` agents are there already, and so are the data of a run that ``has_task``.
    """
    for agent in config.agents:
        if agent.name not in loaded:
            place = Path(resolve_model(agent.model))
            if not place.is_absolute() and not os.path.isdir(place):  # no error for a name that is too long
                return True
    return not has_task and data_needs_hub(config.task)


def data_needs_hub(task: TaskSettings) -> bool:
    """Whether a task names data that are not here."""
    return any(not os.path.exists(os.path.expanduser(path)) for path in _data_paths(task))


def _data_paths(task: TaskSettings) -> list[str]:
    options: Mapping[str, Any] = {**PRESETS.get(task.name, {}), **task.options}
    sources = [options[key] for key in ("train", "test") if options.get(key)]
    paths = [source.get("path") if isinstance(source, Mapping) else source for source in sources]
    return [path for path in paths if isinstance(path, str)]  # else rows, or a mistake the task will name


@contextmanager
def cache_only_if_unreachable() -> Iterator[str | None]:
    """Within the block an unreachable hub is not asked again; gives the reason, None if it can be reached."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield "HF_HUB_OFFLINE is set"
        return
    reason = _probe(constants.ENDPOINT)
    if reason is None:
        yield None
        return
    switches: list[tuple[Any, bool]] = [(constants, False)]
    if "datasets" in sys.modules:  # has a copy; imported later, it takes that of the hub's library
        config = sys.modules["datasets"].config
        switches.append((config, config.HF_HUB_OFFLINE))
    for module, _ in switches:
        module.HF_HUB_OFFLINE = True
    try:
        yield reason
    finally:
        for module, before in switches:
            module.HF_HUB_OFFLINE = before


def _probe(endpoint: str) -> str | None:
    """Why there is no answer; any answer at all will do."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=PROBE_SECONDS)
    except Exception as error:  # the library's kind depends on which HTTP client it has
        return f"{endpoint} cannot be reached: {error or type(error).__name__}"
    return None


def is_unreachable(error: BaseException | None) -> bool:
    """Whether an error came about because the hub was not there, and not because of what was asked of it."""
    while error is not None:
        # huggingface_hub's: neither in the cache nor on a hub that answers
        if isinstance(error, ConnectionError) or type(error).__name__ == "LocalEntryNotFoundError":
            return True
        error = error.__cause__ or error.__context__
    return False
