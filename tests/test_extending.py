"""The code of docs/extending.md runs as printed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hacrl.algorithms.advantage import equal_capability
from hacrl.algorithms.methods import make_method
from hacrl.config.checks import updates_per_step
from hacrl.config.load import build_config, config_to_yaml, load_config, parse_yaml
from hacrl.config.schema import PluginMethodSettings, TaskSettings
from hacrl.engines.base import Engine
from hacrl.errors import ConfigError, EngineMismatchError, TaskError, TrainingError
from hacrl.executors.local import LocalExecutor
from hacrl.models.agent import Agent
from hacrl.plugins import load_reference
from hacrl.runs.dry_run import dry_run
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun, run_locally
from hacrl.studies.compare import plan_runs
from hacrl.tasks.registry import make_task
from hacrl.tracking.registry import make_trackers
from hacrl.training.metrics import StepReport
from hacrl.training.observer import Observer
from hacrl.types import LossBatch
from tests.engines.engine_contract import EngineContract
from tests.support.chaos import chaos_config, differing_files

DOCS = Path(__file__).parent.parent / "docs" / "extending.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the guide's files in it."""
    for block in re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None
        (tmp_path / name[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(**changes: object) -> dict:
    return {
        "agents": [{"name": "small", "model": "bundled:qwen-small-a"}],
        "output": "run",
        "steps": 1,
        "threads": 1,
        "method": "gspo",
        "rollout": {"prompts_per_step": 2, "rollouts_per_prompt": 2, "max_new_tokens": 4},
        "evaluation": {"problems": 0},
        **changes,
    }


def test_a_run_with_the_guides_task_and_tracker(folder: Path):
    task = {"name": "counting.py:Counting", "options": {"upto": 200}}
    result = run_locally(build_config(recipe(task=task, trackers=["lines.py:Lines"])))
    assert result.rollouts == {"small": 4}
    lines = (folder / "run" / "agents.txt").read_text().splitlines()
    assert sum(line.startswith("1 small ") for line in lines) == 2  # a response to each of two problems
    assert any("reward" in line for line in lines)


def test_a_module_of_the_working_folder(folder: Path):
    task = make_task(TaskSettings(name="counting:Counting", options={"upto": 30}))
    sys.modules.pop("counting")
    assert [len(task.train), len(task.test)] == [20, 10]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, target: str) -> None:
    """Install a package that offers ``target`` under the name ``mine``."""
    site = folder / "site"
    (site / "others-1.0.dist-info").mkdir(parents=True)
    (site / "others-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: others\nVersion: 1.0\n"
    )
    (site / "others-1.0.dist-info" / "entry_points.txt").write_text(f"[{group}]\nmine = {target}\n")
    monkeypatch.syspath_prepend(str(site))


@pytest.mark.parametrize("group", ["hacrl.tasks", "hacrl.trackers"])
def test_installed_packages_offer_names(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str):
    target = {"hacrl.tasks": "counting:Counting", "hacrl.trackers": "lines:Lines"}[group]
    install(folder, monkeypatch, group, target)
    if group == "hacrl.tasks":
        assert make_task(TaskSettings(name="mine")).name == "counting"
        with pytest.raises(TaskError, match="did you mean 'mine'"):
            make_task(TaskSettings(name="mines"))
    else:
        (tracker,) = make_trackers(build_config(recipe(trackers=["mine"])), folder / "run")
        assert type(tracker._backend).__name__ == "Lines"
    sys.modules.pop(target.partition(":")[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("counting.py:Countin", "task.name: .* has no 'Countin'; did you mean 'Counting'?"),
        ("nowhere.py:Task", "task.name: .*nowhere.py does not exist"),
        ("no_such_module:Task", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("counting.py:Counting.name", "is not a class or function"),
        ("lines.py:Lines", "cannot|does not make a task|do not fit"),
    ],
)
def test_a_task_that_cannot_be_used(folder: Path, name: str, message: str):
    with pytest.raises(TaskError, match=message):
        make_task(TaskSettings(name=name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lines.py:Line", "trackers: .*did you mean 'Lines'?"),
        ("counting.py:Counting", "does not make a hacrl.tracking.base.Backend"),
        ("collections:OrderedDic", "did you mean 'OrderedDict'"),
    ],
)
def test_a_tracker_that_cannot_be_used(folder: Path, name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        make_trackers(build_config(recipe(trackers=[name])), folder / "run")


def test_the_guides_recipes(folder: Path):
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    keys = set()
    for block in blocks:
        changes = parse_yaml(block, "guide")
        keys |= set(changes)
        rollout = {**recipe()["rollout"], **changes.pop("rollout", {})}
        checked = dry_run(build_config(recipe(**changes, rollout=rollout)))
        assert checked.agents[0].longest_prompt is not None
    assert keys == {"task", "trackers", "method", "rollout", "executor"}


SHARING = "sharing.py:WeightedSharing"


def method_of(name: str = SHARING, **options: object) -> dict:
    return {"name": name, "options": options, "clip_low": 0.05, "clip_high": 0.05}


def agents_of(run: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in run.glob("agents/*/model.safetensors")}


def test_a_method_with_full_weights_is_naive_sharing(folder: Path):
    """The guide's method computes what the built-in method computes, byte for byte, when all count alike."""
    naive = {"name": "naive", "clip_low": 0.05, "clip_high": 0.05}
    runs = {"naive": naive, "full": method_of(weight=1.0), "half": method_of(weight=0.5)}
    for name, method in runs.items():
        run_locally(chaos_config(folder / name, 2, method=method))
    metrics = (folder / "naive" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]
    assert differing_files(folder / "naive", folder / "full") == []
    assert len(agents_of(folder / "naive")) == 2
    assert agents_of(folder / "naive") != agents_of(folder / "half")


class StopAfterOneStep(Observer):
    run: LocalRun

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        self.run.interrupt()


def test_a_resumed_run_with_a_method_is_the_same(folder: Path):
    config = chaos_config(folder / "whole", 2, method=method_of(weight=0.25))
    run_locally(config)
    observer = StopAfterOneStep()
    with LocalRun(replace(config, output=str(folder / "stopped")), [observer]) as observer.run:
        observer.run.train()
        observer.run.save()
    found = inspect_run(folder / "stopped")
    assert (found.point.steps_done, found.config.method) == (1, config.method)
    with LocalRun(found.config, resumed=found.point) as run:
        run.train()
        run.save()
    assert differing_files(folder / "whole", folder / "stopped") == []
    with pytest.raises(ConfigError, match=r"method\.options\.weight was 0\.25, now 0\.5"):
        inspect_run(folder / "stopped", ["method.options.weight=0.5"])


def test_a_methods_advantages_and_loss(folder: Path):
    """Rewards 1, 0 and 0, 0: baseline (1/2 + 0) / 2 = 1/4, sigma^2 = 3 * (1/4)^2 + (3/4)^2 over 3 = 1/4."""
    settings = build_config(recipe(method=method_of(weight=0.5))).method
    method = make_method(settings)
    found = method.advantages({"a": [1.0, 0.0], "b": [0.0, 0.0]}, "a", equal_capability)
    assert found["a"] == pytest.approx((1.5, -0.5), abs=1e-5)
    assert found["b"] == pytest.approx((-0.5, -0.5), abs=1e-5)
    # Ratios are 1: the loss is minus the advantage, half of it for the other agent's response.
    terms = method.loss(batch())
    assert terms.loss_B.tolist() == [-2.0, 1.5]
    with_kl = make_method(replace(settings, kl_coefficient=0.5))
    assert with_kl.needs_reference
    # The penalty counts for own responses only: r = e^(ln 2), k3 = 2 - ln 2 - 1.
    reference = replace(batch(), reference_logprobs_BT=torch.full((2, 1), -1.0 + math.log(2)))
    expected = [-2.0 + 0.5 * (1 - math.log(2)), 1.5]
    assert with_kl.loss(reference).loss_B.tolist() == pytest.approx(expected)


def batch() -> LossBatch:
    """An own response with advantage 2 and another agent's with advantage -3, of one token each."""
    return LossBatch(
        logprobs_BT=torch.full((2, 1), -1.0, requires_grad=True),
        mask_BT=torch.ones(2, 1, dtype=torch.bool),
        behaviour_logprobs_BT=torch.full((2, 1), -1.0),
        behaviour_logprob_B=torch.full((2,), -1.0),
        source_length_B=torch.ones(2),
        advantages_B=torch.tensor([2.0, -3.0]),
        is_own_B=torch.tensor([True, False]),
        updates_done=0,
    )


def test_a_method_gets_the_shared_settings_and_the_tasks_highest_reward(folder: Path):
    (folder / "seen.py").write_text(
        "class Seen:\n    shares_rollouts = False\n    advantages = loss = None\n"
        "    def __init__(self, settings, **options):\n        seen.append((settings, options))\nseen = []\n"
    )
    method = {"name": "seen.py:Seen", "options": {"a": [1]}, "reading": "public", "clip_low": 0.1}
    make_method(build_config(recipe(method=method)).method, max_reward=2.5)
    settings, options = load_reference("seen.py:seen", "method.name", ConfigError)[-1]
    assert (settings.clip_low, settings.max_reward, options) == (0.1, 2.5, {"a": [1]})
    assert (settings.choices.ratio_length, settings.choices.kl_coefficient) == ("own", 0.001)


def test_a_method_says_whether_rollouts_are_shared(folder: Path):
    (folder / "alone.py").write_text(
        "from sharing import WeightedSharing\nclass Alone(WeightedSharing):\n    shares_rollouts = False\n"
    )
    two = [{"name": name, "model": "bundled:qwen-small-a"} for name in ("a", "b")]
    shared = build_config(recipe(agents=two, method=SHARING, learning={"updates_per_source": 3}))
    alone = build_config(recipe(agents=two, method="alone.py:Alone", learning={"updates_per_source": 3}))
    try:
        assert [updates_per_step(shared), updates_per_step(alone)] == [6, 3]
        lonely = replace(alone, rollout=replace(alone.rollout, rollouts_per_prompt=1))
        with pytest.raises(ConfigError, match="a single response has nothing to be compared with"):
            dry_run(lonely)
        # its advantages cover other agents' responses nevertheless
        with pytest.raises(TrainingError, match=r"'alone.py:Alone' gave .*shares_rollouts is False"):
            make_method(alone.method).advantages({"a": [1.0], "b": [0.0]}, "a", equal_capability)
    finally:
        sys.modules.pop("sharing")


def test_a_method_whose_loss_has_the_wrong_shape(folder: Path):
    (folder / "wrong.py").write_text(
        "class Wrong:\n    shares_rollouts = True\n    def advantages(self, rewards, learner, ratio):\n"
        "        return {source: values[1:] for source, values in rewards.items()}\n"
        "    def loss(self, batch):\n        return batch.logprobs_BT.sum()\n"
    )
    method = make_method(build_config(recipe(method="wrong.py:Wrong")).method)
    with pytest.raises(TrainingError, match=r"loss_B should have the shape \(2,\), not None"):
        method.loss(batch())
    with pytest.raises(TrainingError, match=r"advantages of {'a': 1} responses .* there are {'a': 2}"):
        method.advantages({"a": [1.0, 0.0]}, "a", equal_capability)


def test_the_config_of_a_method_round_trips_and_imports_nothing(folder: Path):
    config = build_config(recipe(method=method_of("no_such_module:Method", weight=0.5, names=["a"])))
    assert isinstance(config.method, PluginMethodSettings)
    (folder / "config.yaml").write_text(config_to_yaml(config))
    assert load_config(folder / "config.yaml") == config
    short = build_config(recipe(method=SHARING))
    assert (short.method.name, short.method.options, short.method.title) == (SHARING, {}, "WeightedSharing")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (method_of(wieght=1), "method.options.wieght: unknown option of method .*; did you mean 'weight'"),
        (method_of(settings=1), "method.options.settings: unknown option of method .*; it takes weight"),
        (method_of(weight=2.0), r"method.options: .* do not fit method .*: weight must be in \[0, 1\]"),
        (method_of(weight="x"), "method.options: .* do not fit method"),
        (method_of("sharing.py:WeightSharing"), "method.name: .* did you mean 'WeightedSharing'"),
        (method_of("nowhere.py:Method"), "method.name: .*nowhere.py does not exist"),
        (method_of("counting.py:Counting"), "method.name: .* it has no shares_rollouts, advantages, loss"),
        (method_of("sharing.py:torch"), "method.name: 'sharing.py:torch' is not a class or function"),
    ],
)
def test_a_method_that_cannot_be_used(folder: Path, method: dict, message: str):
    config = build_config(recipe(method=method))
    for check in (dry_run, run_locally):
        with pytest.raises(ConfigError, match=message):
            check(config)
    assert not (folder / "run").exists()


def test_keys_of_other_methods_are_refused(folder: Path):
    with pytest.raises(ConfigError, match=r"method\.delta: unknown key"):
        build_config(recipe(method={"name": SHARING, "delta": 0.2}))
    with pytest.raises(ConfigError, match=r"method\.clip_lo: unknown key; did you mean 'clip_low'"):
        build_config(recipe(method={"name": SHARING, "clip_lo": 0.2}))


def test_installed_packages_offer_methods(folder: Path, monkeypatch: pytest.MonkeyPatch):
    install(folder, monkeypatch, "hacrl.methods", "sharing:WeightedSharing")
    config = build_config(recipe(method={"name": "mine", "options": {"weight": 0.125}}))
    assert config.method.make().weight == 0.125
    sys.modules.pop("sharing")
    with pytest.raises(ConfigError, match=r"method\.name: must be .*hacpo, .*, mine, not 'mines'; .*'mine'"):
        build_config(recipe(method="mines"))


def test_a_comparison_with_a_method(folder: Path):
    """The command trains with the method in another process and prints a table."""
    (folder / "recipe.yaml").write_text(
        "agents: [{name: small, model: bundled:qwen-small-a}, {name: llama, model: bundled:llama-pairs}]\n"
        "steps: 1\nmethod: {clip_low: 0.05, clip_high: 0.05}\nevaluation: {problems: 4, max_new_tokens: 4}\n"
        "rollout: {prompts_per_step: 2, rollouts_per_prompt: 2, max_new_tokens: 4}\n"
    )
    variants = f"{SHARING}@method.options.weight=0.25"
    command = [sys.executable, "-m", "hacrl", "compare", "recipe.yaml", "--methods", variants]
    done = subprocess.run([*command, "--seeds", "1", "--output", "study"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert SHARING.partition(":")[0] in done.stdout
    (path,) = (folder / "study").glob("sharing*/seed-0/config.yaml")
    method = load_config(path).method
    assert (method.name, method.options, method.clip_low) == (SHARING, {"weight": 0.25}, 0.05)


def test_a_comparison_checks_the_method_first(folder: Path):
    data = {"agents": recipe()["agents"]}
    with pytest.raises(ConfigError, match=r"method\.options\.wait: unknown option"):
        plan_runs(data, [f"{SHARING}@method.options.wait=1"], 1, folder / "study")


class TestGuidesEngine(EngineContract):
    """The guide's engine keeps every promise of an engine: its log-probabilities are the model's own."""

    @pytest.fixture
    def engine_of(self, folder: Path):
        kind = load_reference("generating.py:GenerateEngine", "engine", ConfigError)

        def make(agent: Agent, seeded: bool = True) -> Engine:
            return kind(agent)

        return make


def test_a_run_with_the_guides_engine(folder: Path):
    config = chaos_config(folder / "run", 2)
    run_locally(replace(config, rollout=replace(config.rollout, engine="generating.py:GenerateKind")))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [agent["learning"]["sampler_gap"] for line in lines for agent in line["agents"].values()]
    assert len(gaps) == 4
    assert max(gaps) < 1e-5  # between the engine's log-probabilities and the learner's, per token
    assert "GenerateKind" in (folder / "run" / "config.yaml").read_text()


def test_an_engine_that_computes_something_else_is_refused(folder: Path):
    text = (folder / "generating.py").read_text()
    wrong = text.replace("logprobs_BT[0].tolist()", "(logprobs_BT[0] - 1).tolist()")
    assert wrong != text
    (folder / "wrong.py").write_text(wrong)
    with pytest.raises(EngineMismatchError, match="small"):
        run_locally(build_config(recipe(rollout={**recipe()["rollout"], "engine": "wrong.py:GenerateKind"})))


def test_a_run_with_the_guides_executor_is_the_same(folder: Path):
    config = chaos_config(folder / "local", 2)
    run_locally(config)
    threads = replace(config, output=str(folder / "threads"), executor="threads.py:make")
    with LocalRun(threads) as run:
        assert type(run.trainer.executor).__name__ == "ThreadExecutor"
        assert isinstance(run.trainer.executor, LocalExecutor)
        run.train()
        run.save()
    assert differing_files(folder / "local", folder / "threads") == []


def test_installed_packages_offer_engines_and_executors(folder: Path, monkeypatch: pytest.MonkeyPatch):
    install(folder, monkeypatch, "hacrl.executors", "threads:make")
    info = folder / "site" / "others-1.0.dist-info" / "entry_points.txt"
    info.write_text(info.read_text() + "\n[hacrl.engines]\nmine = generating:GenerateKind\n")
    engine = {**recipe()["rollout"], "engine": "mine"}
    result = run_locally(build_config(recipe(executor="mine", rollout=engine)))
    assert result.rollouts == {"small": 4}
    assert [sys.modules.pop(name).__name__ for name in ("threads", "generating")] == ["threads", "generating"]
