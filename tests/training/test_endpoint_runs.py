"""Runs with an endpoint among the agents: a real server, with and without log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hacrl.config.schema import (
    AgentSettings,
    AlignedSettings,
    AsynchronousSettings,
    EndpointSettings,
    FtisSettings,
    NaiveSettings,
    ReplicaSettings,
    RunConfig,
    S2lpoSettings,
    SapoSettings,
    SuccessGatedSettings,
)
from hacrl.engines.endpoint import client
from hacrl.errors import ConfigError, TrainingError
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun, run_locally
from tests.support.openai_server import OpenAIServer, serving
from tests.support.tiny import char_agent, with_logit_bias
from tests.training.runs import HACPO, Run, Runs, Watcher, assert_moved, assert_same_weights
from tests.training.test_interruptions import Events

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
ERROR = (500, {}, "out of order")
NO_LOGPROBS = r"Methods that need no log-probabilities of the source: success_gated, sapo"


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.001)


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    """Serve the weights of the agent "char" as it is before training."""
    with serving(OpenAIServer(char_agent("served"))) as running:
        yield running


def gpt(server: OpenAIServer, **options: Any) -> AgentSettings:
    return AgentSettings(name="gpt", endpoint=EndpointSettings(url=server.url, model="tiny", **options))


def notes_of(config: RunConfig) -> list[str]:
    events = Events()
    run_locally(config, [events])
    return events.notes


def resumed(folder: Path, *overrides: str) -> list[str]:
    events = Events()
    found = inspect_run(folder, list(overrides))
    with LocalRun(found.config, [events], resumed=found.point) as run:
        run.train()
        run.save()
    return events.notes


def used(run: Run) -> list[dict[str, Any]]:
    found = [step["learning"]["sources"] for step in run.of("char")]
    return [sources["gpt"] for sources in found if "gpt" in sources]


@pytest.mark.parametrize("counts_stop", [True, False])
@pytest.mark.parametrize("interface", ["chat", "completions"])
def test_an_endpoint_with_the_learners_weights_has_ratio_one(
    runs: Runs, server: OpenAIServer, counts_stop: bool, interface: str
) -> None:
    """The sum of log-probabilities is that of the learner's own tokens, with or without the stop token."""
    server.counts_stop = counts_stop
    run = runs(
        "char", gpt(server, interface=interface), steps=1, learning={"updates_per_source": 1, "lr": 1e-9}
    )
    (source,) = used(run)
    assert source["used"] > 0
    assert source["ratio_min"] == pytest.approx(1, abs=1e-5)
    assert source["ratio_max"] == pytest.approx(1, abs=1e-5)


def test_every_method_learns_from_its_log_probabilities(runs: Runs, server: OpenAIServer) -> None:
    served = {"gpt": gpt(server)}
    for method in (
        HACPO,
        NaiveSettings(**CLIP),
        FtisSettings(**CLIP),
        AlignedSettings(**CLIP),
        S2lpoSettings(explorer="gpt", **CLIP),
        SuccessGatedSettings(**CLIP),
        SapoSettings(**CLIP),
    ):
        run = runs("char", served["gpt"], method=method, steps=2)
        learnt = [step["learning"] for step in run.of("char")]
        assert all("no_logprobs" not in step["dropped"].get("gpt", {}) for step in learnt), method.name
        tokens = [step["sources"].get("gpt", {}).get("tokens", 0) + step["probe_tokens"] for step in learnt]
        assert sum(tokens) > 0, method.name


@pytest.mark.parametrize("method", [SuccessGatedSettings(**CLIP), SapoSettings(**CLIP)])
@pytest.mark.parametrize("gives", [False, None])
def test_two_methods_learn_without_log_probabilities(
    runs: Runs, server: OpenAIServer, method: Any, gives: bool | None
) -> None:
    server.gives_logprobs = gives  # ignores the question for them, or refuses it
    config = runs.config("char", gpt(server), method=method, steps=3)
    notes = notes_of(config)
    why = "returned none that belong to its text" if gives is False else "refuses requests for them"
    assert (
        f"agent 'gpt' is used without log-probabilities, which method.name='{method.name}' does not need: "
        f"{server.url} {why}"
    ) in notes
    steps = [
        json.loads(line)["agents"]
        for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    ]
    assert sum(step["char"]["learning"]["sources"].get("gpt", {}).get("used", 0) for step in steps) > 0
    assert all(step["gpt"]["rollout"]["entropy"] is None for step in steps)
    assert all(step["gpt"]["rollout"]["tokens"] > 0 for step in steps)  # the endpoint counts them


@pytest.mark.parametrize(
    "method",
    [
        HACPO,
        NaiveSettings(**CLIP),
        FtisSettings(**CLIP),
        AlignedSettings(**CLIP),
        S2lpoSettings(explorer="gpt", **CLIP),
    ],
)
def test_the_other_methods_refuse_to_and_name_those_that_do(
    runs: Runs, server: OpenAIServer, method: Any
) -> None:
    from hacrl.config.checks import check_config

    with pytest.raises(
        ConfigError, match=rf"logprobs=false, but method.name='{method.name}' .* {NO_LOGPROBS}"
    ):
        check_config(runs.config("char", gpt(server, logprobs=False), method=method))
    server.gives_logprobs = False
    with pytest.raises(ConfigError, match=rf"returned none that belong to its text, but .* {NO_LOGPROBS}"):
        runs("char", gpt(server), method=method)


def test_log_probabilities_of_another_distribution_are_used_only_if_asked_for(
    runs: Runs, server: OpenAIServer
) -> None:
    with pytest.raises(ConfigError, match=r"rollout.temperature, top_k or top_p change what is sampled from"):
        runs("char", gpt(server), rollout={"temperature": 0.7})
    notes = notes_of(runs.config("char", gpt(server, logprobs=True), steps=1, rollout={"temperature": 0.7}))
    assert any("are taken to be those of the distribution that is sampled from" in note for note in notes)
    server.gives_logprobs = False
    with pytest.raises(ConfigError, match=r"logprobs=true, but .* returned none that belong to its text"):
        runs("char", gpt(server, logprobs=True), method=SapoSettings())


def test_single_responses_without_log_probabilities_are_dropped_and_counted(
    runs: Runs, server: OpenAIServer
) -> None:
    reply = json.dumps({"choices": [{"message": {"content": "77"}, "finish_reason": "length"}]})
    server.fault = lambda number: (200, {}, reply) if number in (1, 5) else None  # 0 is the first question
    run = runs("char", gpt(server), steps=1)
    assert run.of("char")[0]["learning"]["dropped"]["gpt"]["no_logprobs"] == 2
    assert run.of("gpt")[0]["rollout"]["verdicts"]["correct"] >= 2  # their rewards count nevertheless
    fates = [row["fate"] for row in RolloutLog(run.result.folder / "rollouts").read_learnt(1)]
    assert fates.count("no_logprobs") == 2


def test_the_log_holds_its_responses_and_a_resumed_run_asks_for_none_again(
    runs: Runs, server: OpenAIServer
) -> None:
    agents = ("char", gpt(server, max_concurrency=1))
    server.fault = lambda number: ERROR if 2 <= number < 8 else None  # one request, six attempts
    events = Events(("learn", "char"))
    config = runs.config(*agents, steps=2, evaluation={"problems": 2, "samples_per_problem": 1, "every": 1})
    with LocalRun(config, [events]) as run:
        events.run = run
        run.train()
        assert run.is_interrupted
        run.save()
    folder = Path(config.output)
    rows = list(RolloutLog(folder / "rollouts").read(1, "gpt"))
    assert len(rows) == 16
    asked = len(server.requests)
    assert asked == 1 + 2 + 5 + 16  # trial, evaluation with five attempts more, step 1
    for row in rows:
        assert row["segments"][0]["token_ids"] == []
        assert len(row["segments"][0]["token_logprobs"]) == row["tokens"] == row["remote"]["tokens"]
        assert row["tokenizer"] == "endpoint:tiny"
    resumed(folder)
    assert len(server.requests) == asked + 1 + 16  # trial, step 2
    evaluations = [
        json.loads(line)["agents"] for line in (folder / "evaluations.jsonl").read_text().splitlines()
    ]
    assert [one["gpt"] for one in evaluations] == [evaluations[0]["gpt"]] * 3
    assert evaluations[0]["gpt"]["problems"] == 1  # one of two was not answered


def test_equal_runs_with_an_endpoint_that_honours_seeds_are_equal(runs: Runs, server: OpenAIServer) -> None:
    one, other = (runs("char", gpt(server, max_concurrency=n), steps=2) for n in (1, 8))
    assert one.metrics_text == other.metrics_text


def test_what_is_not_answered_is_counted_in_the_metrics(runs: Runs, server: OpenAIServer) -> None:
    server.fault = lambda number: (400, {}, "no") if 3 <= number < 6 else None
    watcher = Watcher()
    config = runs.config("char", gpt(server), steps=1)
    run_locally(config, [watcher])
    rollout = json.loads((Path(config.output) / "metrics.jsonl").read_text())["agents"]["gpt"]["rollout"]
    assert (rollout["rollouts"], rollout["unanswered"]) == (13, 3)
    assert len(watcher.rollouts[1, "gpt"]) == 13
    assert (
        "left 3 of 16 requests unanswered (3 x HTTP 400: no)"
        in (Path(config.output) / "notes.txt").read_text()
    )


def test_an_endpoint_that_goes_silent_ends_the_run_and_it_can_be_resumed(
    runs: Runs, server: OpenAIServer
) -> None:
    config = runs.config("char", gpt(server, retries=1), steps=3)
    config = replace(config, checkpoint=replace(config.checkpoint, every=1))
    server.fault = lambda number: ERROR if number > 20 else None  # after step 1
    with pytest.raises(
        TrainingError, match=r"left 9 of 16 requests unanswered, more than .*max_unanswered=0.5"
    ):
        run_locally(config)
    server.fault = lambda _: None
    notes = resumed(Path(config.output))
    assert "resumed after step 1" in notes


def test_the_key_is_nowhere_in_the_runs_folder(
    runs: Runs, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = runs.config("char", gpt(server, api_key_env="TINY_KEY"), steps=1)
    with pytest.raises(ConfigError, match="the environment variable TINY_KEY is not set"):
        run_locally(config)
    monkeypatch.setenv("TINY_KEY", "sk-very-secret")
    server.fault = lambda number: (400, {}, "you sent sk-very-secret") if number == 2 else None
    run_locally(config)
    assert server.headers[-1]["Authorization"] == "Bearer sk-very-secret"
    written = [path for path in Path(config.output).rglob("*") if path.is_file()]
    assert not [path for path in written if b"very-secret" in path.read_bytes()]
    assert "you sent ***" in (Path(config.output) / "notes.txt").read_text()


def test_an_endpoint_that_does_not_answer_is_refused_before_models_load(
    runs: Runs, server: OpenAIServer
) -> None:
    server.fault = lambda _: ERROR
    config = runs.config(
        AgentSettings(name="char", model=str(runs.folder / "start" / "char")), gpt(server, retries=0)
    )
    with pytest.raises(ConfigError, match="did not answer a first question: 1 x HTTP 500: out of order"):
        run_locally(config)
    server.fault = lambda _: (404, {}, "no such model")
    with pytest.raises(ConfigError, match="HTTP 404: no such model; check url, interface and model"):
        run_locally(config)
    assert not Path(config.output).exists()


def test_a_dry_run_asks_it_nothing(runs: Runs, server: OpenAIServer) -> None:
    from hacrl.cli.dry_run import dry_run_lines
    from hacrl.runs.dry_run import dry_run

    plan = dry_run(runs.config("char", gpt(server)))
    assert server.requests == []
    lines = " ".join(dry_run_lines(plan))
    assert f"the endpoint of agent 'gpt' ({server.url}): a dry run asks it nothing" in lines
    assert plan.devices[0].agents == ("char",)


def test_an_asynchronous_run_learns_from_it(runs: Runs, server: OpenAIServer) -> None:
    learner = runs.agent("char", replicas=ReplicaSettings(count=1))
    config = runs.config(learner, gpt(server), steps=3, evaluation={"problems": 2, "every": 1})
    server.fault = lambda number: (400, {}, "no") if number == 9 else None
    result = run_locally(replace(config, asynchronous=AsynchronousSettings(max_staleness=1)))
    assert result.updates["char"] > 0
    assert result.rollouts == {"char": 48, "gpt": 47}
    resumed(Path(config.output), "steps=4")


def test_success_gated_transfer_makes_no_use_of_log_probabilities(runs: Runs, server: OpenAIServer) -> None:
    options = {"method": SuccessGatedSettings(**CLIP), "steps": 2, "learning": {"lr": 1e-2}}
    known = runs("char", gpt(server), **options)
    unknown = runs("char", gpt(server, logprobs=False), **options)
    assert sum(source["used"] for source in used(known)) > 0
    assert_same_weights(known.weights("char"), unknown.weights("char"))


def test_what_it_teaches_is_learnt(runs: Runs) -> None:
    """The served agent writes sevens. So does the learner soon, whose own responses earn nothing at first."""
    expert = with_logit_bias(char_agent("served", seed=3), {"7": 6.0, "<eos>": 4.0})
    method = SuccessGatedSettings(**CLIP)
    evaluation = {"problems": 5, "samples_per_problem": 4}
    with serving(OpenAIServer(expert, gives_logprobs=False)) as server:
        run = runs("char", gpt(server), method=method, steps=12, learning={"lr": 2e-2}, evaluation=evaluation)
    before, after = run.result.accuracies[0]["char"].mean, run.result.accuracies[12]["char"].mean
    assert after > before + 0.4
    assert_moved(runs.initial_weights("char"), run.weights("char"))
