"""Where episodes run: in processes if another process can import the factory, else in threads."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

from hacrl.environments.interface import EnvironmentLimits, EnvironmentSource, Factory
from hacrl.environments.process_backend import ProcessBackend
from hacrl.environments.references import reference_of
from hacrl.environments.replies import Reply
from hacrl.environments.thread_backend import ThreadBackend
from hacrl.errors import TaskError
from hacrl.json_values import is_plain_json
from hacrl.plugins import is_reference, load_reference


class EpisodeBackend(Protocol):
    """One episode, wherever it runs. No method waits."""

    grace: float  # seconds beyond a limit on time before the pool itself ends the episode

    @property
    def wants_to_write(self) -> bool:
        """Whether a part of the call is not written yet."""
        ...

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when a reply arrives."""
        ...

    def send(self, message: Mapping[str, Any], limit: float) -> None:
        """Send a call that may take ``limit`` seconds."""
        ...

    def receive(self) -> Reply | None:
        """Return the reply if it has arrived."""
        ...

    def end(self) -> None:
        """End the episode."""
        ...

    def kill_supervisor(self) -> None:
        """End an episode that does not end by itself."""
        ...


class Backend(Protocol):
    """Starts the episodes of one environment."""

    def new_episode(self) -> EpisodeBackend | None:
        """Start an episode; None if that is not possible for the moment. Raise TaskError if it never is."""
        ...

    def forget(self) -> None:
        """After a fork, drop what belongs to the parent process without ending it."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...


def backend_of(
    given: Factory | str | EnvironmentSource, limits: EnvironmentLimits, key: str
) -> tuple[Backend, str]:
    """Return the backend of an environment, and a sentence that the user should read, if there is one.

    Raise TaskError, beginning with the config ``key``, for what can be no environment.
    """
    source = given if isinstance(given, EnvironmentSource) else EnvironmentSource(given)
    factory, options = source.factory, dict(source.options)
    if not is_plain_json(options):
        raise TaskError(f"{key}: the options must be plain JSON values, not {options!r:.200}")
    if isinstance(factory, str) and not is_reference(factory):
        raise TaskError(f"{key}: {factory!r} is not package.module:attribute or path/to/file.py:attribute")
    if not isinstance(factory, str) and not callable(factory):
        raise TaskError(f"{key}: {factory!r:.200} is not a class or function that makes an environment")
    reference = factory if isinstance(factory, str) else reference_of(factory)
    if reference is not None and sys.platform == "linux":
        return ProcessBackend(reference, options, limits, key), ""
    if isinstance(factory, str):
        factory = load_reference(factory, key, TaskError)
    return ThreadBackend(factory, options, limits), _thread_note(factory, key, is_linux=reference is None)


def _thread_note(factory: Factory, key: str, *, is_linux: bool) -> str:
    name = getattr(factory, "__qualname__", type(factory).__name__)
    why = (
        "no other process can import it; put it into a module or file of its own, which the script imports"
        if is_linux
        else "this system is not Linux"
    )
    return (
        f"{key}: episodes of {name} run in threads of this process: {why}. An episode that hangs cannot be "
        "stopped, one that fills the memory or ends its process ends the run, and hacrl does not seed its "
        "random numbers."
    )
