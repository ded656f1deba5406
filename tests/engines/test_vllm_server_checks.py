"""Servers that are not what they should be, played by small HTTP servers, are found before models load."""

from __future__ import annotations

import http.server
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path

import pytest

from hacrl.config.schema import AgentSettings, RunConfig, VllmSettings
from hacrl.engines.registry import check_engines
from hacrl.engines.sync_check import EngineError
from hacrl.engines.vllm import client as http_client
from hacrl.engines.vllm.backend import EngineLostError, Request
from hacrl.engines.vllm.client import ServerClient
from hacrl.engines.vllm.in_vllm.hacrl_vllm_worker import PROTOCOL
from hacrl.engines.vllm.weight_transfer import free_port
from hacrl.errors import ConfigError
from hacrl.models.agent import Agent
from hacrl.runs.run import run_locally
from hacrl.types import Sampling

Answers = dict[str, tuple[int, object]]  # path -> status, JSON
NEVER = 0  # instead of a status: no answer
MODELS: Answers = {
    "/health": (200, None),
    "/v1/models": (200, {"data": [{"id": "ada"}]}),
    "/version": (200, {"version": "0.32.0"}),
}
DESCRIBED = (200, {"results": [{"protocol": PROTOCOL, "device": "cpu", "gpu": None, "model": {}}]})


@contextmanager
def serving(answers: Answers) -> Iterator[str]:
    """A server that gives these answers, and 404 otherwise: its address."""

    over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answers.get(self.path, (404, {"detail": "Not Found"}))
            if status == NEVER:
                over.wait()
                return
            content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            with suppress(ConnectionError):  # who asked may have heard enough
                self.end_headers()
                self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Quiet."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            over.set()
            server.shutdown()
            thread.join()


def config(tmp_path: Path, *settings: VllmSettings) -> RunConfig:
    agents = [
        AgentSettings(name=name, model="bundled:qwen-small-a", engine="vllm", vllm=vllm)
        for name, vllm in zip(("ada", "bob"), settings, strict=False)
    ]
    return RunConfig(agents=tuple(agents), output=str(tmp_path / "run"), device="cpu")


def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *settings: VllmSettings) -> str:
    """What a run says that does not begin."""
    monkeypatch.setattr(Agent, "load", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError) as caught:
        run_locally(config(tmp_path, *settings))
    assert not (tmp_path / "run").exists()
    return str(caught.value)


def test_a_server_as_it_should_be(tmp_path: Path) -> None:
    with serving({**MODELS, "/collective_rpc": DESCRIBED}) as url:
        check_engines(config(tmp_path, VllmSettings(url=url)))
        check_engines(config(tmp_path, VllmSettings(url=f"{url}/")))


def test_a_server_with_the_worker_extension_of_another_hacrl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = (200, {"results": [{"protocol": PROTOCOL - 1, "device": "cpu", "gpu": None, "model": {}}]})
    with serving({**MODELS, "/collective_rpc": older}) as url:
        said = refusal(tmp_path, monkeypatch, VllmSettings(url=url))
    assert said.startswith(
        f"agents.ada.vllm.url: vLLM server {url} has the worker extension of another version"
    )


def test_nothing_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    said = refusal(tmp_path, monkeypatch, VllmSettings(url=url))
    assert said.startswith(f"agents.ada.vllm.url: vLLM server {url} is not ready: nothing answers")


def test_a_server_that_is_none_of_vllms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"/": (200, b"<html></html>")}) as url:
        said = refusal(tmp_path, monkeypatch, VllmSettings(url=url))
    assert said.startswith(
        f"agents.ada.vllm.url: vLLM server {url} is not ready: nothing answers {url}/health"
    )


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ((200, b"<html></html>"), "answered /v1/models with no JSON: is it a vLLM server?"),
        ((200, {"data": []}), "lists no model: is it a vLLM server?"),
        ((200, ["what"]), "lists no model: is it a vLLM server?"),
        ((404, {"detail": "Not Found"}), "has no /v1/models (HTTP 404): {'detail': 'Not Found'}"),
        ((500, {"error": {"message": "broken"}}), "answered /v1/models with HTTP 500: broken"),
    ],
)
def test_a_server_that_is_healthy_and_yet_not_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: tuple[int, object], reason: str
) -> None:
    with serving({"/health": (200, b"fine"), "/v1/models": models}) as url:
        said = refusal(tmp_path, monkeypatch, VllmSettings(url=url))
    assert said.startswith(f"agents.ada.vllm.url: vLLM server {url} ")
    assert reason in said


def test_a_server_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "ANSWER_SECONDS", 0.3)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        said = refusal(tmp_path, monkeypatch, VllmSettings(url=url))
    assert said.startswith(f"agents.ada.vllm.url: vLLM server {url} is not ready")


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_with_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    with serving({**MODELS, "/v1/models": (status, {"error": "Unauthorized"})}) as url:
        said = refusal(tmp_path, monkeypatch, VllmSettings(url=url))
    assert said.startswith(f"agents.ada.vllm.url: vLLM server {url} refuses the API key (HTTP {status}")
    assert said.endswith("put the server's key into the environment variable HACRL_VLLM_API_KEY")


@pytest.mark.parametrize(
    "answer",
    [(404, {"detail": "Not Found"}), (500, {"error": {"message": "no attribute 'hacrl_describe'"}})],
    ids=["without dev mode", "without our extension"],
)
def test_a_plain_vllm_server_takes_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, object]
) -> None:
    with serving({**MODELS, "/collective_rpc": answer}) as url:
        said = refusal(tmp_path, monkeypatch, VllmSettings(url=url))
    assert said.startswith(f"agents.ada.vllm.url: vLLM server {url} ")
    assert "VLLM_SERVER_DEV_MODE=1" in said
    assert "`hacrl serve`" in said


def test_two_agents_with_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:1"
    said = refusal(tmp_path, monkeypatch, VllmSettings(url=url), VllmSettings(url=f"{url}/"))
    assert said == f"agents: vllm.url {url} is named twice; every engine needs a server of its own"


def test_an_interpreter_without_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(tmp_path, monkeypatch, VllmSettings(python=sys.executable))
    assert said.startswith(f"agents.ada.vllm.python: {sys.executable} has no vllm")
    said = refusal(tmp_path, monkeypatch, VllmSettings(python=str(tmp_path / "nothing")))
    assert said.startswith(f"agents.ada.vllm.python: {tmp_path / 'nothing'} cannot be run")


def test_vllm_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(tmp_path, monkeypatch, VllmSettings())
    assert "agents.ada.engine is vllm, but vllm is not installed here: pip install 'hacrl[vllm]'" in said
    assert "agents.ada.vllm.python" in said
    assert "agents.ada.vllm.url" in said


ASKS = [Request((1, 2), Sampling(4), (1,), seed=None)] * 3
SAID = {"choices": [{"token_ids": [5, 1], "logprobs": {"token_logprobs": [-0.5, -0.25]}}]}


def test_answers_to_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({**MODELS, "/v1/completions": (200, SAID)}) as url:
        answers = dict(chain.from_iterable(ServerClient("it", url, None).generate(ASKS)))
    assert sorted(answers) == [0, 1, 2]
    assert all((said.token_ids, said.logprobs) == ((5, 1), (-0.5, -0.25)) for said in answers.values())


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((500, {"error": {"message": "EngineDead"}}), EngineLostError, "it failed while generating: EngineD"),
        ((503, {}), EngineLostError, "it cannot work"),
        ((400, {"error": {"message": "too long"}}), EngineError, "/v1/completions with HTTP 400: too long"),
    ],
)
def test_requests_that_fail(answer: tuple[int, object], kind: type[Exception], message: str) -> None:
    with serving({**MODELS, "/v1/completions": answer}) as url, pytest.raises(kind, match=message) as caught:
        list(ServerClient("it", url, None).generate(ASKS))
    assert type(caught.value) is kind


def test_a_server_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HEALTH_EVERY", 0.05), ("HEALTH_MISSES", 2), ("ANSWER_SECONDS", 0.3)):
        monkeypatch.setattr(http_client, name, value)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineLostError, match=r"it no longer answers\."):
            list(ServerClient("it", url, None, model="ada").generate(ASKS))


def test_a_server_that_becomes_unhealthy_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM server whose engine is dead still answers: that it is not well."""
    monkeypatch.setattr(http_client, "HEALTH_EVERY", 0.05)
    answers = {**MODELS, "/health": (503, None), "/v1/completions": (NEVER, None)}
    with serving(answers) as url, pytest.raises(EngineLostError, match=r"it no longer answers\."):
        list(ServerClient("it", url, None).generate(ASKS))


def metrics(*tokens: float) -> bytes:
    return b"".join(b'vllm:generation_tokens_total{engine="0",model_name="ada"} %g\n' % one for one in tokens)


def test_a_server_that_samples_no_token_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is well, as it says. A server that says nothing of its tokens, or is paused, is waited for."""
    monkeypatch.setattr(http_client, "HEALTH_EVERY", 0.05)
    answers = {**MODELS, "/metrics": (200, metrics(7, 5)), "/v1/completions": (NEVER, None)}
    with serving(answers) as url:
        with pytest.raises(EngineLostError, match=r"it sampled no token for 0.3 s"):
            list(ServerClient("it", url, None, timeout=0.3).generate(ASKS))
        client = ServerClient("it", url, None, timeout=0.3)
        client.is_paused = True
        ends = threading.Timer(1.0, lambda: answers.update({"/health": (503, None)}))
        ends.start()
        with pytest.raises(EngineLostError, match=r"it no longer answers"):
            list(client.generate(ASKS))
        answers.update({"/health": (200, None), "/metrics": (404, None)})
        threading.Timer(1.0, lambda: answers.update({"/health": (503, None)})).start()
        with pytest.raises(EngineLostError, match=r"it no longer answers"):
            list(ServerClient("it", url, None, timeout=0.3).generate(ASKS))


def test_a_process_that_ended_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "HEALTH_EVERY", 0.05)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        client = ServerClient("it", f"http://127.0.0.1:{silent.getsockname()[1]}", None, model="ada")
        client.is_alive = lambda: False
        with pytest.raises(EngineLostError, match=r"it has ended\."):
            list(client.generate(ASKS))
