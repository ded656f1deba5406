"""Join or start a Ray cluster, and get room in it. No wait is endless: it says what was asked and is free."""

from __future__ import annotations

import math
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError, TrainingError
from hacrl.executors.ray.placement import Party, described, free_resources

POLL_SECONDS = 0.2
CONNECT_SECONDS = 10.0
TOKEN_FILE = Path.home() / ".ray" / "auth_token"  # where Ray keeps it


def import_ray() -> Any:
    """Return the ray module; raise ConfigError with the pip command without it."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"executor: ray needs the package 'ray', which cannot be imported ({error}); install it with: "
            "pip install 'hacrl[ray]'"
        ) from error
    return ray


class Cluster:
    """The run's connection to its cluster."""

    def __init__(self, config: RunConfig) -> None:
        """Connect to the cluster that the recipe names, or start one on this machine."""
        if config.ray.address is not None:
            _use_token()  # before Ray is imported
        self._ray = ray = import_ray()
        self._settings = config.ray
        self._is_own = False  # whether the cluster ends with the run
        if ray.is_initialized():  # by the user's own program
            return
        self._is_own = True
        address = config.ray.address
        if address is not None:
            _check_answers(address)
        # Ray's own messages would disturb the progress display; errors come as exceptions.
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if address is None:
                cores = max(os.cpu_count() or 1, cores_asked(config))
                ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
            else:
                ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise _unusable(address, str(error).strip().splitlines()[0]) from error

    @property
    def hosts(self) -> dict[str, str]:
        """Host names and addresses of all machines -> address."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        names = {node["NodeManagerHostname"]: node["NodeManagerAddress"] for node in alive}
        return {**names, **{address: address for address in names.values()}}

    @property
    def has_gpus(self) -> bool:
        """Whether the cluster has a GPU."""
        return bool(self._ray.cluster_resources().get("GPU"))

    def reserve(self, parties: list[Party]) -> dict[str, Any]:
        """Return a placement group for each party, by name; wait as long as the recipe allows."""
        from ray.util.placement_group import placement_group, remove_placement_group

        groups = {party.name: placement_group(party.bundles, strategy="PACK") for party in parties}
        limit = self._settings.placement_timeout
        deadline = time.monotonic() + limit
        waiting = dict(groups)
        while waiting:
            for name, group in list(waiting.items()):
                if group.wait(timeout_seconds=POLL_SECONDS):
                    del waiting[name]
            if waiting and time.monotonic() > deadline:
                message = self._no_room([party for party in parties if party.name in waiting], limit)
                for group in groups.values():
                    remove_placement_group(group)
                raise TrainingError(message)
        return groups

    def _no_room(self, parties: list[Party], seconds: float) -> str:
        asked = "; ".join(
            f"{' and '.join(agent.name for agent in party.agents)}: {described(party.bundles)}"
            for party in parties
        )
        free = free_resources(self._ray.available_resources())
        whole = free_resources(self._ray.cluster_resources())
        return (
            f"executor: ray: the cluster has had no room for {seconds:g} s (ray.placement_timeout). Asked "
            f"for: {asked}. Free: {free}; the whole cluster: {whole}. Lower agents.NAME.place or ranks, end "
            "other jobs (ray status shows them), or raise ray.placement_timeout"
        )

    def free(self, group: Any) -> None:
        """Give a placement group back; its processes end."""
        from ray.util.placement_group import remove_placement_group

        with suppress(Exception):  # the cluster may be gone, and the group with it
            remove_placement_group(group)

    def disconnect(self) -> None:
        """Leave the cluster; end it if hacrl started it."""
        if self._is_own and self._ray.is_initialized():
            self._ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise ConfigError if nobody listens at ``host:port``: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # auto, or an address that Ray finds itself
        return
    try:
        socket.create_connection((host.rpartition("/")[2], int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise _unusable(address, f"nobody answers there ({error})") from error


def _use_token() -> None:
    """Let Ray send this machine's token, if it has one: Ray's clusters ask for it unless told otherwise."""
    has_token = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ or TOKEN_FILE.is_file()
    if has_token:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _unusable(address: str | None, reason: str) -> ConfigError:
    where = "on this machine" if address is None else f"at ray.address={address!r}"
    return ConfigError(
        f"executor: ray: no cluster can be used {where}: {reason}. Is it running (ray status), and does this "
        "machine have its token (RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or ~/.ray/auth_token)?"
    )


def cores_asked(config: RunConfig) -> int:
    """Return the cores that all processes ask for, so that a cluster of hacrl's own always has room."""
    return math.ceil(sum(agent.place.cpus * (agent.ranks + agent.replicas.count) for agent in config.agents))
