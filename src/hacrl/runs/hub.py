"""Find out in seconds whether the Hugging Face hub can be reached.

Without a network the libraries try for half a minute per file before they use the cache. After one failed
probe here, they use the cache only.
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


def probe_hub_if_needed(
    config: RunConfig, loaded: Collection[str] = (), has_task: bool = False
) -> AbstractContextManager[str | None]:
    """Apply :func:`cache_only_if_unreachable` if the run needs the hub; otherwise use no network."""
    return cache_only_if_unreachable() if needs_hub(config, loaded, has_task) else nullcontext()


def needs_hub(config: RunConfig, loaded: Collection[str] = (), has_task: bool = False) -> bool:
    """Return whether a model or the data may have to come from the hub.

    The ``loaded`` agents need nothing from the hub, nor does the task of a run that ``has_task`` already.
    """
    for agent in config.local_agents:
        if agent.name not in loaded:
            path = Path(resolve_model(agent.model))
            if not path.is_absolute() and not os.path.isdir(path):  # os.path: no error for an overlong name
                return True
    return not has_task and data_needs_hub(config.task)


def data_needs_hub(task: TaskSettings) -> bool:
    """Return whether a task names data that are not local files."""
    return any(not os.path.exists(os.path.expanduser(path)) for path in _data_paths(task))


def _data_paths(task: TaskSettings) -> list[str]:
    options: Mapping[str, Any] = {**PRESETS.get(task.name, {}), **task.options}
    sources = [options[key] for key in ("train", "test") if options.get(key)]
    paths = [source.get("path") if isinstance(source, Mapping) else source for source in sources]
    return [path for path in paths if isinstance(path, str)]  # others are rows, or an error of the task


@contextmanager
def cache_only_if_unreachable() -> Iterator[str | None]:
    """Make the libraries use their cache only, within the block, if the hub cannot be reached.

    Yield the reason why it cannot be reached, or None if it can.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield "HF_HUB_OFFLINE is set"
        return
    reason = _probe(constants.ENDPOINT)
    if reason is None:
        yield None
        return
    switches: list[tuple[Any, bool]] = [(constants, False)]
    if "datasets" in sys.modules:  # it copied the setting when it was imported
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
    """Return why the hub does not answer, or None if it answers anything."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=PROBE_SECONDS)
    except Exception as error:  # the exception's class depends on the HTTP client
        return f"{endpoint} cannot be reached: {error or type(error).__name__}"
    return None


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether an error was caused by an unreachable hub, and not by a wrong request."""
    while error is not None:
        # huggingface_hub's error for a file that is not cached while the hub does not answer
        if isinstance(error, ConnectionError) or type(error).__name__ == "LocalEntryNotFoundError":
            return True
        error = error.__cause__ or error.__context__
    return False
