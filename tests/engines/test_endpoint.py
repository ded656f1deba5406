"""The client of an endpoint against a real server: replies, retries, limits, and what is never shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from hacrl.config.endpoint import EndpointSettings
from hacrl.engines.endpoint import client
from hacrl.engines.endpoint.answering import EndpointAnswerer
from hacrl.engines.endpoint.client import EndpointError
from hacrl.engines.endpoint.endpoint import Endpoint
from hacrl.engines.endpoint.replies import Reply, UnusableReplyError, read_reply
from hacrl.types import Problem, Remote, Rollout, Sampling, Turn
from tests.support.openai_server import Fault, OpenAIServer, serving
from tests.support.sevens import SevensTask
from tests.support.tiny import char_agent, with_logit_bias

SAMPLING = Sampling(6)
PROBLEMS = [Problem("a", "1+2:", "3"), Problem("b", "3+4:", "7")]
ERROR = (500, {}, '{"error": {"message": "out of order"}}')


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.001)


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with serving(
        OpenAIServer(with_logit_bias(char_agent("served"), {"<eos>": 1.0, "<unk>": -30.0, "<pad>": -30.0}))
    ) as running:
        yield running


def endpoint(server: OpenAIServer, key: str | None = None, **options) -> Endpoint:
    return Endpoint("gpt", EndpointSettings(url=server.url, model="tiny", **options), key)


def rollouts(found: Endpoint, samples: int = 2, sampling: Sampling = SAMPLING) -> list[Rollout]:
    return EndpointAnswerer(found, SevensTask()).generate(PROBLEMS, samples, sampling, seed=5)


def failing(fault: Fault, *numbers: int) -> Callable[[int], Fault]:
    return lambda number: fault if number in numbers else None


def test_each_problem_is_asked_as_often_as_wanted_and_equal_seeds_ask_the_same(server: OpenAIServer) -> None:
    found = rollouts(endpoint(server))
    assert [rollout.problem.id for rollout in found] == ["a", "a", "b", "b"]
    assert {rollout.agent for rollout in found} == {"gpt"}
    assert all(
        rollout.remote == Remote(len(rollout.token_logprobs), rollout.finish_reason == "stop")
        for rollout in found
    )
    assert len({request["seed"] for request in server.requests}) == 4
    assert {request["path"] for request in server.requests} == {"/v1/chat/completions"}
    assert rollouts(endpoint(server)) == found


def test_the_request_says_what_is_sampled(server: OpenAIServer) -> None:
    problem = Problem("c", "5+6:", "11", context=(Turn("system", "1"),))
    asked = endpoint(server, request={"max_tokens": 3, "top_p": None, "user": "hacrl"}, logprobs=False)
    body = asked._question(problem, Sampling(6, 0.5, top_k=4, stop=(";",)), seed=2**40 + 1).body
    assert body == {
        "messages": [{"role": "system", "content": "1"}, {"role": "user", "content": "5+6:"}],
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "stop": [";"],
        "seed": 1,  # 2**40 is a multiple of 2**31
        "user": "hacrl",
    }


@pytest.mark.parametrize("interface", ["chat", "completions"])
@pytest.mark.parametrize("counts_stop", [True, False])
def test_log_probabilities_are_those_that_the_server_sampled_with(
    server: OpenAIServer, interface: str, counts_stop: bool
) -> None:
    server.counts_stop = counts_stop
    found = rollouts(endpoint(server, interface=interface), samples=8)
    stopped = [rollout for rollout in found if rollout.finish_reason == "stop"]
    assert 0 < len(stopped) < len(found)
    for rollout in found:
        if not rollout.text and not counts_stop:  # nothing is left that has a log-probability
            assert not rollout.has_logprobs
            continue
        # characters are tokens, and the stop token is one more
        expected = len(rollout.text) + (counts_stop and rollout.finish_reason == "stop")
        assert len(rollout.token_logprobs) == rollout.num_tokens == expected
        assert rollout.ends_with_stop_token == (counts_stop and rollout.finish_reason == "stop")


def test_without_log_probabilities_the_stop_token_is_learnt_and_lengths_are_counted(
    server: OpenAIServer,
) -> None:
    for rollout in rollouts(endpoint(server, logprobs=False), samples=4):
        assert not rollout.has_logprobs
        assert rollout.token_logprobs == ()
        assert rollout.ends_with_stop_token == (rollout.finish_reason == "stop")
        assert rollout.num_tokens == len(rollout.text) + rollout.ends_with_stop_token
    assert not any("logprobs" in request for request in server.requests)


@pytest.mark.parametrize(
    "fault",
    [
        ERROR,
        (429, {"Retry-After": "0.01"}, "slow down"),
        (200, {}, "<html>garbage</html>"),
        (200, {}, "\ud7ff[[["),
        "disconnect",
        "hang",
    ],
)
def test_what_may_pass_is_tried_again(server: OpenAIServer, fault: Fault) -> None:
    expected = rollouts(endpoint(server))
    server.requests.clear()
    server.fault = failing(fault, 0, 2)
    asked = endpoint(server, timeout=0.5 if fault == "hang" else 20, max_concurrency=1)
    assert rollouts(asked) == expected
    assert len(server.requests) == 6
    assert asked.take_notes() == []


@pytest.mark.parametrize(
    ("fault", "attempts", "reason"),
    [
        (ERROR, 3, "HTTP 500: out of order (3 attempts)"),
        ("hang", 3, "no reply within 0.5 s (3 attempts)"),
        ("disconnect", 3, "the connection failed: Server disconnected (3 attempts)"),
        ((200, {}, "{}"), 1, "the reply has no choices"),
        ((400, {}, '{"error": "too long"}'), 1, "HTTP 400: too long"),
        ("flood", 1, "the reply is longer than 1,073,152 bytes"),  # 2**20 + 6 * 4096
    ],
)
def test_what_stays_unanswered_is_left_out_and_counted(
    server: OpenAIServer, fault: Fault, attempts: int, reason: str
) -> None:
    server.fault = failing(fault, *range(attempts))
    asked = endpoint(server, retries=2, timeout=0.5 if fault == "hang" else 20, max_concurrency=1)
    found = rollouts(asked)
    assert [rollout.problem.id for rollout in found] == ["a", "b", "b"]
    assert asked.take_notes() == [
        f"agent 'gpt': its endpoint left 1 of 4 requests unanswered (1 x {reason}); they are left out"
    ]


def test_too_many_unanswered_requests_end_the_run_at_once(server: OpenAIServer) -> None:
    server.fault = lambda _: ERROR
    with pytest.raises(EndpointError) as raised:
        rollouts(endpoint(server, retries=0, max_unanswered=0.25, max_concurrency=1), samples=10)
    # 6 of 20 are more than a quarter; one more may have been under way
    assert str(raised.value) == (
        f"agent 'gpt': {server.url}/chat/completions left 6 of 20 requests unanswered, more than "
        "agents.gpt.endpoint.max_unanswered=0.25 allows (6 x HTTP 500: out of order). hacrl resume goes on "
        "once it answers"
    )
    assert len(server.requests) <= 7


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            (401, {}, '{"error": {"message": "wrong key sk-1234"}}'),
            "HTTP 401: wrong key ***; check the key in api_key_env",
        ),
        ((404, {}, "no such model"), "HTTP 404: no such model; check url, interface and model"),
        (
            (307, {"Location": "http://elsewhere/?key=sk-1234"}, ""),
            "HTTP 307: ; the address has moved to http://elsewhere/?key=***: correct url",
        ),
    ],
)
def test_what_never_passes_ends_the_run_and_the_key_is_not_shown(
    server: OpenAIServer, fault: Fault, message: str
) -> None:
    server.fault = lambda _: fault
    with pytest.raises(EndpointError) as raised:
        rollouts(endpoint(server, key="sk-1234"))
    assert str(raised.value) == f"agents.gpt.endpoint: {server.url}/chat/completions answers {message}"
    assert server.headers[0]["Authorization"] == "Bearer sk-1234"


def test_no_more_requests_than_allowed_are_under_way(server: OpenAIServer) -> None:
    rollouts(endpoint(server, max_concurrency=3), samples=12)
    assert server.most_at_once == 3


def test_an_endpoint_that_nobody_serves_is_named() -> None:
    with pytest.raises(EndpointError, match=r"the connection failed: Cannot connect to host 127.0.0.1:9"):
        rollouts(Endpoint("gpt", EndpointSettings(url="http://127.0.0.1:9/v1", model="m", retries=0), None))


def test_a_stop_string_is_what_the_learner_learns_to_write(server: OpenAIServer) -> None:
    sampling = Sampling(6, stop=("1", "2", "3", "4"))
    found = rollouts(endpoint(server, logprobs=False), samples=8, sampling=sampling)
    ended = [rollout for rollout in found if rollout.finish_reason == "stop_string"]
    assert ended
    assert {rollout.segments[0].stop_text for rollout in ended} <= {"1", "2", "3", "4"}
    assert not any(rollout.ends_with_stop_token for rollout in ended)
    server.names_stop_reason = False  # then "stop" may mean either, and nothing is made of it
    found = rollouts(endpoint(server, logprobs=False), samples=8, sampling=sampling)
    assert {rollout.finish_reason for rollout in found} >= {"stop"}
    assert not any(rollout.ends_with_stop_token for rollout in found)


def chat(text: str | None, tokens: list[tuple[str, float]] | None, **choice) -> dict:
    content = [{"token": token, "logprob": value} for token, value in tokens or []]
    logprobs = None if tokens is None else {"content": content}
    return {
        "choices": [{"message": {"content": text}, "finish_reason": "stop", "logprobs": logprobs, **choice}],
        "usage": {"completion_tokens": 9},
    }


@pytest.mark.parametrize(
    ("body", "reply"),
    [
        # the tokens spell the text: a server that leaves the stop token out
        (chat("ab", [("a", -1.0), ("b", -2.0)]), Reply("ab", "stop", (-1.0, -2.0), 2, False)),
        # one more token: the stop token, by name or as empty text
        (chat("ab", [("ab", -1.0), ("<e>", -2.0)]), Reply("ab", "stop", (-1.0, -2.0), 2, True)),
        (chat("ab", [("ab", -1.0), ("", -2.0)]), Reply("ab", "stop", (-1.0, -2.0), 2, True)),
        # two more tokens, other tokens (a hidden chain of thought), impossible numbers: no log-probabilities
        (chat("a", [("a", -1.0), ("b", -1.0), ("c", -1.0)]), Reply("a", "stop", (), 3, True)),
        (chat("a", [("so", -1.0), ("a", -1.0)]), Reply("a", "stop", (), 2, True)),
        (chat("a", [("a", -9999.0)]), Reply("a", "stop", (), 9, True)),
        (chat("a", [("a", 0.1)]), Reply("a", "stop", (), 9, True)),
        (chat("a", [("a", float("nan"))]), Reply("a", "stop", (), 9, True)),
        (chat("a", None), Reply("a", "stop", (), 9, True)),
        (chat("a", None, finish_reason="length"), Reply("a", "length", (), 9, False)),
        # a stop string, whose tokens come behind the text
        (
            chat("a", [("a", -1.0), (";\n", -2.0)], stop_reason=";"),
            Reply("a", "stop_string", (-1.0, -2.0), 2, False, ";\n"),
        ),
        (chat("a", None, stop_reason=";"), Reply("a", "stop_string", (), 9, False, ";")),
        (chat("a", [("a", 0.0005)]), Reply("a", "stop", (0.0,), 1, False)),  # rounding
    ],
)
def test_replies_are_read_and_log_probabilities_must_belong_to_the_text(body: dict, reply: Reply) -> None:
    assert read_reply(json.loads(json.dumps(body)), "chat", has_stop_strings=False) == reply


def test_a_part_of_a_character_is_matched_by_its_bytes() -> None:
    parts = [
        {"token": "?", "bytes": [0xC3], "logprob": -1.0},
        {"token": "?", "bytes": [0xA9], "logprob": -2.0},
    ]
    body = chat("é", None, logprobs={"content": parts})
    assert read_reply(body, "chat", False) == Reply("é", "stop", (-1.0, -2.0), 2, False)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ([], "no choices"),
        ({"choices": []}, "no choices"),
        ({"choices": ["a"]}, "no choices"),
        (chat(None, None), "no text"),
        (chat("a", None, finish_reason="content_filter"), "finish_reason is 'content_filter'"),
        (chat("a", None, finish_reason=None), "finish_reason is None"),
        (chat("\ud800", None), "half a character"),
    ],
)
def test_a_reply_without_a_response_says_why(body: object, reason: str) -> None:
    with pytest.raises(UnusableReplyError, match=reason):
        read_reply(body, "chat", False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "gpu7:8000"}, "url must be an address such as"),
        ({"url": "http://me:secret@host/v1"}, "url must have no user name"),
        ({"url": "http://host/v1?key=secret"}, "url must have no user name"),
        ({"api_key_env": "sk-secret"}, "api_key_env must be the name of an environment variable"),
        ({"timeout": 0}, "timeout must be a positive number"),
        ({"max_unanswered": 1.0}, "max_unanswered is a share"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1"),
        ({"request": {"messages": []}}, "request.messages is hacrl's own field"),
    ],
)
def test_settings_are_checked_and_show_no_secret(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        EndpointSettings(**{"url": "http://host/v1", "model": "m", **options})
    assert "secret" not in str(raised.value)
