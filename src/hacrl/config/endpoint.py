"""Settings of an agent that is an OpenAI-compatible endpoint: it is sampled, and others learn from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from hacrl.config.settings import Settings

EndpointInterface = Literal["chat", "completions"]
EndpointLogprobs = bool | Literal["auto"]
# Fields of a request that hacrl writes. Others can be added, and hacrl's own sampling fields replaced.
_OWN_FIELDS = frozenset(("model", "messages", "prompt", "n", "stream", "logprobs", "top_logprobs"))


@dataclass(frozen=True, kw_only=True)
class EndpointSettings(Settings):
    """An OpenAI-compatible endpoint: who answers, and how long hacrl waits."""

    url: str
    """Base address of the interface, e.g. `https://api.example.com/v1` or `http://gpu7:8000/v1`."""
    model: str
    """The model's name there."""
    interface: EndpointInterface = "chat"
    """`chat`: messages go to `URL/chat/completions`. `completions`: the prompt goes to `URL/completions` as
    plain text, for base models."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. The key itself is never written or shown. Default: no
    key."""
    logprobs: EndpointLogprobs = "auto"
    """Whether to use the endpoint's log-probabilities. `auto`: if it returns some and responses are sampled
    without top-k, top-p and at temperature 1. `true`: require them; they must be those of the distribution
    that is sampled from. `false`: do without."""
    max_concurrency: int = 8
    """Most requests at a time. A request asks for one response."""
    timeout: float = 120.0
    """Longest time in seconds that one request may take."""
    retries: int = 5
    """How often a request is sent again after HTTP 408, 409, 429 or 5xx, a broken connection or a timeout.
    The waits in between double from a second to a minute; the endpoint may ask for longer ones."""
    max_unanswered: float = 0.5
    """Share of a step's responses that may be missing. What the endpoint does not answer is left out and
    counted; above this share the run ends."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request, e.g. `{max_completion_tokens: 4096, max_tokens: null}`; null removes a
    field that hacrl writes."""

    def __post_init__(self) -> None:
        self._check_url()
        if not self.model.strip():
            raise ValueError("model must name the endpoint's model")
        if self.api_key_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):
            raise ValueError(  # the value is not shown: it may be the key itself
                "api_key_env must be the name of an environment variable, e.g. OPENAI_API_KEY, not the key"
            )
        if self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, not {self.max_concurrency}")
        if not 0 < self.timeout <= 86400:
            raise ValueError(
                f"timeout must be a positive number of seconds, at most a day, not {self.timeout}"
            )
        if not 0 <= self.retries <= 100:
            raise ValueError(f"retries must be between 0 and 100, not {self.retries}")
        if not 0 <= self.max_unanswered < 1:
            raise ValueError(f"max_unanswered is a share in [0, 1), not {self.max_unanswered}")
        if own := sorted(_OWN_FIELDS & self.request.keys()):
            raise ValueError(f"request.{own[0]} is hacrl's own field; leave it out")

    def _check_url(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
            is_whole = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port  # raises for what is no number
        except ValueError:
            is_plain, is_whole = True, False
        if not is_plain:  # the url is not shown: it may hold a key
            raise ValueError(
                "url must have no user name, password, query or fragment: an API key belongs into an "
                "environment variable (api_key_env)"
            )
        if not is_whole:
            raise ValueError(f"url must be an address such as http://gpu7:8000/v1, not {self.url!r}")
