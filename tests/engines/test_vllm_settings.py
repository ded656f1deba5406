"""What a user may say about an agent's vLLM engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hacrl.config.schema import VllmSettings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "gpu7:8000"}, "url must start with http:// or https://, not 'gpu7:8000'"),
        (
            {"url": "http://gpu7:8000", "python": "/x/python", "devices": (1,)},
            "url names a server that is already running: python, devices would have no effect",
        ),
        ({"url": "http://gpu7:8000", "devices": (0,)}, "already running: devices would have no effect"),
        ({"url": "http://gpu7:8000", "mode": "child"}, "running: mode: child would have no effect"),
        ({"mode": "child", "python": "/x/python"}, "python belongs to mode server"),
        ({"url": ("http://gpu7:8000", "gpu8")}, "url must start with http:// or https://, not 'gpu8'"),
        (
            {"url": ("http://gpu7:8000", "http://gpu8:8000"), "engines": 3},
            "url names 2 servers for 3 engines; name one for each engine",
        ),
        ({"url": "http://gpu7:8000", "engines": 2}, "url names 1 servers for 2 engines"),
        ({"url": ()}, "url names 0 servers for 1 engines"),
        ({"engines": 0}, "engines must be at least 1, not 0"),
        ({"engines": 2, "devices": (1, 2, 3)}, "devices: 3 devices cannot be divided among 2 engines"),
        ({"memory": 0.0}, "memory must be positive, not 0.0"),
        ({"memory": 1.5}, "memory is a share of the GPU's memory, so at most 1, not 1.5"),
        ({"max_logprob_gap": 0.0}, "max_logprob_gap must be positive, not 0.0"),
        ({"max_logprob_gap": float("nan")}, "max_logprob_gap must be positive, not nan"),
        ({"max_sequences": 0}, "max_sequences must be at least 1, not 0"),
        ({"devices": ()}, "devices must name CUDA devices by number, not []"),
        (
            {"engine_args": {"seed": 1, "revision": Path("/x")}},
            "engine_args.revision: PosixPath('/x') cannot be",
        ),
        ({"devices": (0, -1)}, "devices must name CUDA devices by number, not [0, -1]"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        VllmSettings(**options)


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ({}, False),
        ({"mode": "child"}, False),
        ({"mode": "server"}, True),
        ({"python": "/x/python"}, True),
        ({"url": "https://gpu7:8000"}, False),
        ({"url": "https://gpu7:8000", "mode": "server"}, False),
        ({"memory": 1.0, "max_sequences": 1}, False),
    ],
)
def test_which_settings_start_a_server(options: dict, starts: bool) -> None:
    assert VllmSettings(**options).starts_server is starts
