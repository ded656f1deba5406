"""``hacrl eval`` from end to end, with real models: numbers, files, and going on after an interruption."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hacrl.config.load import build_config
from hacrl.config.schema import BenchmarkSettings, TaskSettings
from hacrl.errors import ConfigError, ModelError, TaskError
from hacrl.evaluation.plan import EvaluationRequest, chunk_seed, plan_pairs
from hacrl.evaluation.run import EvaluationObserver, evaluate_targets
from hacrl.evaluation.specs import BenchmarkSpecs
from hacrl.evaluation.targets import resolve_targets
from hacrl.models.agent import Agent
from hacrl.runs.run import run_locally
from tests.support.tiny import byte_tokenizer, save_agents, tiny_qwen
from tests.tasks.helpers import build

BUNDLED = ("bundled:qwen-small-a", "bundled:llama-pairs")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A short run of two bundled agents, with its own evaluations of 12 problems."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    names = ("small", "llama")
    config = build_config(
        {
            "agents": [{"name": n, "model": m} for n, m in zip(names, BUNDLED, strict=True)],
            "output": str(folder),
            "steps": 1,
            "seed": 3,
            "threads": 1,
            "rollout": {"prompts_per_step": 4, "rollouts_per_prompt": 4, "max_new_tokens": 24},
            "learning": {"lr": 1e-3},
            "evaluation": {"problems": 12, "samples_per_problem": 3},
        }
    )
    run_locally(config)
    return folder


def ask(*targets: str, output: Path, watch: EvaluationObserver | None = None, **options):
    keys = set(BenchmarkSettings.__dataclass_fields__) & set(options)
    settings = BenchmarkSettings(**{key: options.pop(key) for key in keys})
    request = EvaluationRequest(targets=targets, output=output, settings=settings, device="cpu", **options)
    return evaluate_targets(request, watch)[0]


def responses(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "responses.jsonl").read_text("utf-8").splitlines()]


def test_a_run_s_own_task_gives_the_run_s_own_numbers(run, tmp_path):
    """Before and after, mean and error, of both agents: the same draws as in the run's own evaluations."""
    results = ask(str(run), before=True, seed=3, limit=12, output=tmp_path / "e")
    logged = [json.loads(line)["agents"] for line in (run / "evaluations.jsonl").read_text().splitlines()]
    for pair in results.pairs:
        own = logged[0 if pair.stage == "before" else 1][pair.agent]
        assert (pair.score.average.mean, pair.score.average.stderr) == (own["mean"], own["stderr"])
        assert (pair.score.problems, pair.score.samples) == (12, 3)
    assert [pair.label for pair in results.pairs] == ["small (before)", "small", "llama (before)", "llama"]
    assert logged[0] != logged[1]
    changes = {change.agent: change.change.mean for change in results.changes()}
    for name in ("small", "llama"):
        assert changes[name] == pytest.approx(logged[1][name]["mean"] - logged[0][name]["mean"])


def test_every_response_is_kept_with_its_verdict(run, tmp_path):
    results = ask(str(run / "agents" / "small"), limit=10, samples=2, output=tmp_path / "e")
    (pair,) = results.pairs
    kept = responses(tmp_path / "e")
    assert [line["sample"] for line in kept] == [0, 1] * 10
    assert len({line["problem"] for line in kept}) == 10
    for line in kept:
        # judged again by hand: (23+14)*2 is answered by what stands after the last #
        right = line["response"].rpartition("#")[2] == str(eval(line["problem"]))
        assert line["reward"] == right
        assert (line["agent"], line["benchmark"]) == ("small", "task")
    assert pair.score.verdicts["correct"] == sum(line["reward"] for line in kept) > 0
    assert pair.score.mean_tokens == sum(line["tokens"] for line in kept) / 20
    assert pair.stage == "after"  # found by its run, so asked the run's way


def test_draws_do_not_depend_on_what_else_is_evaluated(tmp_path):
    options = {"samples": 2, "limit": 5, "max_new_tokens": 24}
    problems = tmp_path / "sums.jsonl"
    problems.write_text("\n".join(json.dumps({"problem": f"(1{i}+2)*3", "answer": "1"}) for i in range(5)))
    ask(BUNDLED[0], on=("arithmetic",), output=tmp_path / "alone", **options)
    both = (*BUNDLED, "bundled:qwen-large")
    on = (f"{problems},arithmetic",)
    ask(*reversed(both), on=on, prompt="{problem}:", output=tmp_path / "among", **options)
    among = [
        line
        for line in responses(tmp_path / "among")
        if (line["agent"], line["benchmark"]) == ("qwen-small-a", "arithmetic")
    ]
    assert among == responses(tmp_path / "alone")
    ask(BUNDLED[0], on=("arithmetic",), output=tmp_path / "other", seed=1, **options)
    assert responses(tmp_path / "other") != responses(tmp_path / "alone")


def test_a_gym_benchmark_of_the_runs_own_kind_is_noted_as_overlapping(run):
    """Questions are drawn by number: another size or seed makes other splits."""
    pytest.importorskip("reasoning_gym")
    (target, _) = resolve_targets([str(run)])
    trained = replace(target.run, task=TaskSettings(name="gym:gcd"))
    with closing(BenchmarkSpecs(BenchmarkSettings())) as specs:
        specs.build("gym:gcd", replace(target, run=trained))
        assert "small may have been trained on some of them; --on task" in specs.notes[-1]
        before = len(specs.notes)
        specs.build("gym:gcd", target)
        assert len(specs.notes) == before


def test_bundled_tasks_with_tools_are_benchmarks():
    (target,) = resolve_targets(BUNDLED[:1])
    with closing(BenchmarkSpecs(BenchmarkSettings(limit=3))) as specs:
        spec = specs.build("calculator", target)
        assert len(spec.problems) == 3
        assert set(spec.problems) < set(build("calculator").test)
        assert {tool.name for tool in spec.problems[0].tools} == {"calculate", "submit"}


def test_every_chunk_has_draws_of_its_own():
    """3 problems x 3 samples, 2 side by side: 6 chunks that share problems or samples, but never a seed."""
    settings = BenchmarkSettings(samples=3, batch=2, limit=3, max_new_tokens=24)
    request = EvaluationRequest(targets=BUNDLED, settings=settings)
    specs = BenchmarkSpecs(settings)
    pairs, _ = plan_pairs(request, resolve_targets(BUNDLED), ["arithmetic"], specs, "cpu")
    seeds = [chunk_seed(pair, chunk, seed) for pair in pairs for chunk in pair.plan.chunks for seed in (0, 1)]
    assert len(seeds) == len(set(seeds)) == 2 * 6 * 2  # models x chunks x seeds
    specs.close()


class StopAfter(EvaluationObserver):
    """Ctrl-C after so many chunks."""

    def __init__(self, chunks: int) -> None:
        self.left = chunks
        self.loaded: list[str] = []

    def on_load(self, label: str) -> None:
        self.loaded.append(label)

    def on_progress(self, label, benchmark, done, total, reward) -> None:
        self.left -= done > 0
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("chunks", [1, 3, 5])
def test_continuing_after_an_interruption_gives_identical_files(chunks, tmp_path):
    """6 problems, 2 side by side: 3 chunks for each of two agents; a torn line is of no account."""
    options = {"on": ("arithmetic",), "limit": 6, "batch": 4, "samples": 2, "max_new_tokens": 24}
    ask(*BUNDLED, output=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        ask(*BUNDLED, output=tmp_path / "broken", watch=StopAfter(chunks), **options)
    path = tmp_path / "broken" / "responses.jsonl"
    assert len(responses(tmp_path / "broken")) == 4 * chunks
    lines = path.read_text("utf-8").splitlines(keepends=True)
    # half a chunk, broken off in the middle of a character
    path.write_bytes("".join([*lines, lines[0], lines[1][:25], "é"]).encode()[:-1])
    watch = StopAfter(-1)
    ask(*BUNDLED, output=tmp_path / "broken", watch=watch, **options)
    assert watch.loaded == (["qwen-small-a", "llama-pairs"] if chunks < 3 else ["llama-pairs"])
    for name in ("responses.jsonl", "results.json", "results.md", "plan.json"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    again = StopAfter(-1)
    ask(*BUNDLED, output=tmp_path / "broken", watch=again, **options)
    assert again.loaded == []  # nothing left to ask


def test_one_model_at_a_time_is_in_memory(tmp_path, monkeypatch):
    load, models = Agent.load, []

    def loading(*arguments):
        gc.collect()
        assert [model() for model in models] == [None] * len(models)
        agent = load(*arguments)
        models.append(weakref.ref(agent.model))
        return agent

    monkeypatch.setattr(Agent, "load", loading)
    ask(*BUNDLED, on=("arithmetic",), limit=1, max_new_tokens=8, output=tmp_path / "e")
    assert len(models) == 2


def test_unfinished_files_do_not_block_an_evaluation(tmp_path):
    options = {"on": ("arithmetic",), "limit": 2, "max_new_tokens": 8, "output": tmp_path / "e"}
    ask(BUNDLED[0], **options)
    for name in ("plan", "responses", "results"):
        (tmp_path / "e" / f"{name}.unfinished").write_text("[")
    ask(BUNDLED[0], **options)
    assert {path.suffix for path in (tmp_path / "e").iterdir()} == {".json", ".jsonl", ".md"}


def test_overwrite_replaces_a_damaged_evaluation(tmp_path):
    options = {"on": ("arithmetic",), "limit": 2, "max_new_tokens": 8, "output": tmp_path / "e"}
    ask(BUNDLED[0], **options)
    path = tmp_path / "e" / "responses.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"?" + whole)
    with pytest.raises(ConfigError, match=r"line 1, is damaged: .*; use --overwrite to start again"):
        ask(BUNDLED[0], **options)
    ask(BUNDLED[0], overwrite=True, **options)
    assert path.read_bytes() == whole


def test_a_folder_with_another_evaluation_is_refused(run, tmp_path):
    options = {"on": ("arithmetic",), "max_new_tokens": 24, "output": tmp_path / "e"}
    ask(BUNDLED[0], limit=3, **options)
    before = (tmp_path / "e" / "responses.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="problem_count 3, not 4; use another"):
        ask(BUNDLED[0], limit=4, **options)
    with pytest.raises(ConfigError, match=r"temperature 0\.0, not 0\.5"):
        ask(BUNDLED[0], limit=3, temperature=0.5, **options)
    with pytest.raises(ConfigError, match="qwen-small-a on arithmetic, which this command does not request"):
        ask(BUNDLED[1], limit=3, **options)
    assert (tmp_path / "e" / "responses.jsonl").read_bytes() == before
    ask(*BUNDLED, limit=3, **options)  # more models may join
    assert (tmp_path / "e" / "responses.jsonl").read_bytes().startswith(before)
    ask(BUNDLED[0], limit=4, overwrite=True, **options)
    assert len(responses(tmp_path / "e")) == 4
    (tmp_path / "e" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds files of something else \(thesis.txt\)"):
        ask(BUNDLED[0], limit=4, overwrite=True, **options)


def test_other_weights_in_the_same_folder_are_noticed(tmp_path):
    shutil.copytree(resolve(BUNDLED[0]), tmp_path / "m")
    options = {"on": ("arithmetic",), "limit": 2, "max_new_tokens": 8, "output": tmp_path / "e"}
    ask(str(tmp_path / "m"), **options)
    weights = tmp_path / "m" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1000] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match="holds an evaluation with other weights"):
        ask(str(tmp_path / "m"), **options)


def resolve(reference: str) -> str:
    from hacrl.models.model_sources import resolve_model

    return resolve_model(reference)


@pytest.fixture(scope="module")
def boxer(tmp_path_factory) -> str:
    r"""A tiny model taught to answer ``\boxed{4}`` to everything, in bytes."""
    tokenizer = byte_tokenizer()
    model = tiny_qwen(tokenizer)
    answer = [*tokenizer("\\boxed{4}").input_ids, tokenizer.eos_token_id]
    prompts = [tokenizer(text).input_ids for text in ("2+2?", "8/2?", "7-3?")]
    ids = torch.tensor([prompt + answer for prompt in prompts])
    labels = ids.clone()
    labels[:, :4] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("boxer") / "boxer"
    Agent("boxer", model.eval(), tokenizer).save(folder)
    return str(folder)


def test_maths_from_a_file_is_judged_as_maths(boxer, tmp_path):
    golds = {"2+2?": "4", "8/2?": "\\frac{8}{2}", "7-3?": "5"}
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps({"problem": p, "answer": a, "id": p}) for p, a in golds.items()))
    results = ask(boxer, on=(str(path),), prompt="{problem}", output=tmp_path / "e")
    (pair,) = results.pairs
    verdicts = {line["problem"]: line["verdict"] for line in responses(tmp_path / "e")}
    assert verdicts == {"2+2?": "correct", "8/2?": "correct", "7-3?": "wrong"}
    assert pair.score.average.mean == pytest.approx(2 / 3)
    assert (pair.score.stopped, pair.score.mean_tokens) == (1.0, 10.0)
    assert (pair.benchmark, pair.temperature) == ("sums", 0.0)
    assert pair.score.pass_at == {}  # one response each: nothing beyond the average


def test_prompts_that_do_not_fit_count_as_wrong(boxer, tmp_path):
    """The model's context has 64 bytes: one prompt leaves 4 of them, one none at all."""
    prompts = ["2+2?", "2+2?" * 15, "2+2?" * 16]
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join(json.dumps({"problem": p, "answer": "4", "id": str(len(p))}) for p in prompts))
    options = {"on": (str(path),), "prompt": "{problem}", "samples": 2}
    results = ask(boxer, output=tmp_path / "e", **options)
    (pair,) = results.pairs
    assert (pair.score.problems, pair.score.shortened, pair.score.unanswered) == (3, 1, 1)
    assert pair.score.max_new_tokens == 60
    kept = {(line["problem"], line["sample"]): line for line in responses(tmp_path / "e")}
    assert kept["60", 0]["tokens"] <= 4
    assert (kept["64", 1]["verdict"], kept["64", 1]["reward"]) == ("unparsable", 0.0)
    assert (kept["64", 1]["tokens"], kept["64", 1]["response"]) == (0, "")
    assert any("at most 60 new tokens instead of 8192" in note for note in results.notes)
    assert any("1 prompts do not fit" in note and "'64'" in note for note in results.notes)
    with pytest.raises(ConfigError, match="--max-new-tokens 20: problem '60' of long is 60 tokens long"):
        ask(boxer, output=tmp_path / "f", max_new_tokens=20, **options)
    assert not (tmp_path / "f").exists()
    path.write_text(json.dumps({"problem": "2+2?" * 16, "answer": "4"}))
    with pytest.raises(ConfigError, match="context has 64 tokens, and the shortest prompt has 64"):
        ask(boxer, output=tmp_path / "f", **options)


def test_several_samples_are_sampled_and_pass_at_k_is_reported(boxer, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"problem": "2+2?", "answer": "4"}))
    options = {"on": (str(path),), "prompt": "{problem}"}
    (pair,) = ask(boxer, output=tmp_path / "a", samples=4, **options).pairs
    assert (pair.temperature, list(pair.score.pass_at)) == (1.0, [4])
    (pair,) = ask(boxer, output=tmp_path / "b", pass_at=(1, 3), **options).pairs
    assert (pair.score.samples, list(pair.score.pass_at)) == (3, [1, 3])  # as many as the largest k needs
    assert pair.score.pass_at[1].mean == pytest.approx(pair.score.average.mean)
    with pytest.raises(ValueError, match="pass_at 8 draws more responses than there are: samples is 4"):
        BenchmarkSettings(samples=4, pass_at=(1, 8))


def test_targets_are_resolved(run, tmp_path):
    second = tmp_path / "again"
    shutil.copytree(run, second)
    both = [target.label for target in resolve_targets([str(run), str(second)])]
    assert both == ["short/small", "short/llama", "again/small", "again/llama"]
    one = resolve_targets([str(run / "agents" / "llama")], before=True)
    assert [(c.stage, c.settings.model) for c in one] == [
        ("before", "bundled:llama-pairs"),
        ("after", str(run / "agents" / "llama")),
    ]
    models = save_agents(tmp_path / "models")
    shutil.copytree(models["char"], tmp_path / "other" / "char")
    labels = [c.label for c in resolve_targets([models["char"], str(tmp_path / "other" / "char"), "o/char"])]
    assert labels == ["char #1", "char #2", "char #3"]
    assert resolve_targets(["meta-llama/Llama-3.2-1B"])[0].label == "Llama-3.2-1B"


def test_wrong_targets_are_named(run, tmp_path):
    with pytest.raises(ModelError, match=r"folder \./gone does not exist"):
        resolve_targets(["./gone"])
    with pytest.raises(ModelError, match="neither a run"):
        resolve_targets([str(tmp_path)])
    with pytest.raises(ConfigError, match="--before needs a run"):
        resolve_targets([BUNDLED[0]], before=True)
    shutil.copytree(run, tmp_path / "unfinished")
    shutil.rmtree(tmp_path / "unfinished" / "agents" / "llama")
    with pytest.raises(ModelError, match="agents are saved at the end of a run"):
        resolve_targets([str(tmp_path / "unfinished")])
    with pytest.raises(ConfigError, match="is a model, not a run, and has no task of its own"):
        ask(BUNDLED[0], output=tmp_path / "e")
    with pytest.raises(ModelError, match="nobody/nothing is not a local folder"):
        ask("nobody/nothing", on=("arithmetic",), output=tmp_path / "e")


def test_columns_of_a_file_may_have_other_names(boxer, tmp_path):
    rows = [{"q": "2+2?", "meta": {"gold": "4"}, "n": 1}, {"q": "7-3?", "meta": {"gold": "5"}, "n": 2}]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    options = {"on": (str(path),), "prompt": "{problem}"}
    columns = {"problem": "q", "answer": "meta.gold", "id": "n"}
    ask(boxer, columns=columns, output=tmp_path / "e", **options)
    verdicts = {line["problem"]: line["verdict"] for line in responses(tmp_path / "e")}
    assert verdicts == {"1": "correct", "2": "wrong"}
    for wrong, words in (
        ({}, "has no column 'problem' or 'question' or 'prompt'.*name it with --columns problem=NAME"),
        ({"problem": "qq"}, r"has no column 'qq' \(--columns problem=...\); it has q, .* did you mean 'q'"),
        ({"prolbem": "q"}, "--columns.prolbem: unknown; did you mean 'problem'"),
    ):
        with pytest.raises(TaskError, match=words):
            ask(boxer, columns=wrong, output=tmp_path / "f", **options)
    with pytest.raises(ConfigError, match="--columns names the columns of a file: give one with --on"):
        ask(boxer, on=("arithmetic",), columns=columns, output=tmp_path / "f")
