"""Each health note, provoked by a real short run that is ill in that way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast

from hacrl.config.schema import AlignedSettings, GspoSettings, HacpoSettings, NaiveSettings, RunConfig
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.models.agent import Agent
from hacrl.runs.run import LocalRun, run_locally
from hacrl.tasks.registry import TASKS
from hacrl.training.health.monitor import HealthMonitor
from hacrl.training.learn_stats import LearnStats
from hacrl.training.metrics import AgentReport, StepReport, learn_report, rollout_report
from hacrl.training.observer import Observer
from hacrl.training.samples import LearnerSamples
from hacrl.types import Problem, Rollout, Verdict
from tests.support.rollouts import judged
from tests.support.sevens import SevensTask
from tests.support.tiny import CHARACTERS, SPECIALS, char_agent, tiny_qwen, with_logit_bias
from tests.training.runs import Runs

ENDS = {"rollouts_per_prompt": 8, "max_new_tokens": 6}


class Alternating(SevensTask):
    """Every second response is right, whatever it says."""

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        return [Verdict(1.0, "correct") if i % 2 else Verdict(0.0, "wrong") for i, _ in enumerate(rollouts)]


class Never(SevensTask):
    """No response can be read."""

    def judge(self, response: str) -> Verdict:
        return Verdict(0.0, "unparsable")


class OneInSix(SevensTask):
    """Two of twelve problems can be solved, and always are."""

    solvable = ("1+0:", "1+6:")

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        right, wrong = Verdict(1.0, "correct"), Verdict(0.0, "wrong")
        return [right if rollout.problem.id in self.solvable else wrong for rollout in rollouts]


def notes(folder: Path) -> list[str]:
    file = folder / "notes.txt"
    return file.read_text("utf-8").splitlines() if file.exists() else []


def of(folder: Path, words: str) -> list[str]:
    return [note for note in notes(folder) if words in note]


def biased(config: RunConfig, biases: dict[str, dict[str, float]]) -> dict[str, Agent]:
    """Return the config's agents with some tokens' logits raised."""
    agents = {settings.name: Agent.load(settings, "cpu") for settings in config.agents}
    return {name: with_logit_bias(agent, biases.get(name, {})) for name, agent in agents.items()}


def ill(config: RunConfig, biases: dict[str, dict[str, float]]) -> Path:
    return run_locally(config, agents=biased(config, biases)).folder


def test_no_reward_anywhere(runs: Runs, monkeypatch) -> None:
    monkeypatch.setitem(TASKS, "sevens", Never)
    folder = runs("char", "pair", steps=5).result.folder
    (note,) = of(folder, "no reward")
    assert note.startswith("step 3: no reward anywhere: none of the 32 responses of char, pair earned one")
    assert "100% of them have no answer that could be read: show the format" in note
    assert note.endswith("Seen in 3 steps in a row")
    assert of(folder, "never succeeds") == of(folder, "learns nothing from") == []  # said once


def test_a_partner_that_never_succeeds(runs: Runs) -> None:
    config = runs.config("char", "pair", steps=4)
    folder = ill(config, {"char": {"7": 2.0}, "pair": {"7": -90.0} | {f"{i:02d}": -90.0 for i in range(100)}})
    (note,) = of(folder, "never succeeds")
    assert note.startswith(
        "step 3: agent pair never succeeds: none of its 16 responses earned a reward, while char did. its "
        "partners' baselines count it with a capability of 1e-08"
    )
    assert of(folder, "no reward") == []


@pytest.mark.parametrize("easy", [True, False])
def test_most_prompts_teach_nothing(runs: Runs, monkeypatch, easy: bool) -> None:
    monkeypatch.setitem(TASKS, "sevens", SevensTask if easy else OneInSix)
    config = runs.config("char", method=GspoSettings(), steps=6, rollout={"prompts_per_step": 12})
    folder = ill(config, {"char": {"7": 30.0}})
    (note,) = of(folder, "learns nothing from")
    right, wrong, fix = ("100%", "0%", "too easy") if easy else ("17%", "83%", "too hard")
    assert note.startswith(
        "step 3: agent char learns nothing from 100% of the prompts: all responses compared"
    )
    assert f"all right for {right} of the prompts and all wrong for {wrong}. The problems are {fix}" in note


def test_cut_responses_and_a_partner_whose_responses_are_left_out(runs: Runs) -> None:
    config = runs.config("char", "twin", steps=4, rollout=ENDS, learning={"mask_truncated": True})
    folder = ill(config, {"char": {"<eos>": 1.2}, "twin": {"<eos>": -90.0}})
    (cut,) = of(folder, "were cut at")
    assert cut.startswith("step 2: ")
    assert "% of the responses of char were cut at rollout.max_new_tokens=6, and a cut response" in cut
    assert "Set rollout.max_new_tokens=12" in cut
    (never,) = of(folder, "ended by itself")
    assert never.startswith("step 2: not one of the 32 responses of twin ended by itself within")
    (dropped,) = of(folder, "are dropped")
    assert dropped.startswith(
        "step 2: agent char learns nothing from twin: 32 of 32 responses are dropped (truncated 32); "
        "rollout.max_new_tokens cut them"
    )


def test_a_partner_whose_text_cannot_be_written(runs: Runs) -> None:
    config = runs.config("char", "pair", steps=3)
    folder = ill(config, {"pair": {"<unk>": 30.0}})
    (note,) = of(folder, "are dropped")
    assert (
        "agent char learns nothing from pair: 16 of 16 responses are dropped (not_representable 16)" in note
    )
    assert "check that both tokenizers" in note


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        # the partner writes 1 where this agent would write 2: nearly impossible to it
        ({"2": 9.0}, {"1": 9.0}, "(100% below, 0% above)"),
        # both write 1, and this agent is still surer of it: above 1, which is the upper bound
        ({"1": 12.0}, {"1": 5.5}, " above); the mean ratio is "),
    ],
)
def test_all_of_a_partner_s_responses_are_clipped(runs: Runs, monkeypatch, mine, theirs, words) -> None:
    monkeypatch.setitem(TASKS, "sevens", Alternating)
    method = HacpoSettings(clip_low=0.2, clip_high=0.2)
    config = runs.config("char", "twin", method=method, steps=2, learning={"lr": 1e-6})
    folder = ill(config, {"char": mine, "twin": theirs})
    (note,) = of(folder, "agent char learns nothing from twin")
    assert words in note
    assert "the interval [0.8, 1]" in note
    fix = "method.delta=" if "100% below" in words else "raise method.cross_upper"
    assert fix in note


def triples() -> PreTrainedTokenizerFast:
    """Four equal digits are one token."""
    pieces = [*SPECIALS, *CHARACTERS, "1111", "7777"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("1111|7777|."), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


class LongNumbers(SevensTask):
    """Prompts of many equal digits."""

    def __init__(self, problems: int = 12) -> None:
        super().__init__(problems)
        self.train = [Problem(f"{i}", f"{'1111' * (i % 6 + 4)}+1:", "7") for i in range(problems)]
        self.test = []


def test_a_tokenizer_that_makes_several_tokens_of_one(runs: Runs, monkeypatch, tmp_path) -> None:
    fine = triples()
    Agent("fine", tiny_qwen(fine), fine).save(runs.folder / "start" / "fine")
    config = runs.config("char", "fine", steps=3, rollout={"rollouts_per_prompt": 8})
    folder = ill(config, {"fine": {"7777": 9.0}})
    (note,) = of(folder, "the tokenizer of agent char")  # its characters are the partner's quarters
    assert note.startswith("step 1: the tokenizer of agent char makes 4.0 ")
    assert "times as many tokens of fine's responses as that of fine" in note
    monkeypatch.setitem(TASKS, "sevens", LongNumbers)
    config = runs.config("char", "fine", steps=1, rollout={"max_new_tokens": 2, "prompts_per_step": 2})
    note = of(ill(config, {}), "the tokenizer of agent char")[0]
    # 4 n + 3 characters and n + 3 tokens, n twice from 4 to 9: (4 * 78 + 36) / (78 + 36) = 3.05
    assert note.startswith(
        "step 0: the tokenizer of agent char makes 3.1 times as many tokens of the prompts"
    )
    assert "(1.00 tokens a character, not 0.33)" in note


def shifted(monkeypatch, shift: float) -> None:
    """Have the engine report every log-probability too high by ``shift``."""
    generate = TransformersEngine.generate

    def changed(self, request, on_finished=None):
        samples = generate(self, request, None)
        changed = [replace(one, logprobs=tuple(value + shift for value in one.logprobs)) for one in samples]
        if on_finished is not None:
            on_finished(list(enumerate(changed)))
        return changed

    monkeypatch.setattr(TransformersEngine, "generate", changed)


@pytest.mark.parametrize(
    ("shift", "words"),
    [
        (
            0.1,
            "the sampler of char and its learner disagree: their log-probabilities of the same tokens differ "
            "by 0.1 nats",
        ),
        (
            0.01,
            "the sampler's numerics move the ratios of char by 0.01 before any update, more than its clip "
            "range of 0.001 is wide",
        ),
        (0.0005, None),
    ],
)
def test_a_sampler_that_disagrees(runs: Runs, monkeypatch, shift, words) -> None:
    shifted(monkeypatch, shift)
    method = GspoSettings(clip_low=0.001, clip_high=0.001)
    folder = runs("char", method=method, steps=2, rollout=ENDS, learning={"lr": 1e-6}).result.folder
    found = of(folder, "the sampler")
    assert [note.partition(words or "")[1] for note in found] == ([words] if words else [])


def test_a_learning_rate_far_too_high(runs: Runs, monkeypatch) -> None:
    """Most own responses are clipped at once, the policy jumps, and its entropy is gone."""
    method = GspoSettings(clip_low=0.01, clip_high=0.01, kl_coefficient=1e-6)
    folder = runs(
        "char", method=method, steps=8, rollout={**ENDS, "prompts_per_step": 8}, learning={"lr": 0.1}
    ).result.folder
    assert of(
        folder, "are clipped after the first update: the learning rate 0.1 moves ratios out of [0.99, 1.01]"
    )
    assert of(folder, "the policy of char moves ")
    assert of(folder, "nats per token away from its reference (healthy: below 1)")


def test_an_entropy_that_collapses(runs: Runs) -> None:
    """Every response is a row of sevens, at every temperature that matters."""
    run = runs(
        "char",
        method=GspoSettings(clip_low=0.5, clip_high=0.5),
        steps=12,
        rollout={**ENDS, "prompts_per_step": 8},
        learning={"lr": 0.05},
    )
    (note,) = of(run.result.folder, "the entropy of char has collapsed: ")
    entropies = [step["rollout"]["entropy"] for step in run.of("char")]
    low = [value < 0.05 * entropies[0] for value in entropies]
    third = next(i for i in range(12) if all(low[i - 2 : i + 1]) and i > 1)  # the third in a row
    share = f"{entropies[third]:.2g} nats per token, {entropies[third] / entropies[0]:.0%} of the "
    assert note.startswith(f"step {third + 1}: the entropy of char has collapsed: {share}")


def test_updates_that_move_nothing(runs: Runs) -> None:
    quiet = {"method": GspoSettings(clip_low=0.2, clip_high=0.2), "rollout": ENDS}
    folder = runs("char", steps=6, learning={"lr": 1e-9}, **quiet).result.folder
    (note,) = of(folder, "hardly move")
    assert note.startswith("step 5: the updates hardly move char: its ratios stay within ")
    assert "Raise learning.lr (1e-09)" in note
    warming = {"lr": 1e-9, "warmup": 100}  # a schedule that has only begun explains it
    assert of(runs("char", steps=6, learning=warming, **quiet).result.folder, "hardly move") == []


def report(step: int, *, stopped: bool) -> StepReport:
    """Return a real report of real rollouts, all cut or all ended by themselves."""
    agent = char_agent("ada")
    problem = Problem("p", "1:", "7")
    ids = (10, 1) if stopped else (10, 11)
    rollouts = [
        judged(
            Rollout.single_turn(
                problem,
                "ada",
                "7",
                ids,
                (-0.5, -0.5),
                "stop" if stopped else "length",
                0,
                agent.tokenizer_fingerprint,
            ),
            i % 2,
        )
        for i in range(4)
    ]
    learning = learn_report("ada", LearnStats(), LearnerSamples())
    return StepReport(step, {"ada": AgentReport(0.5, 0, rollout_report(rollouts), learning)})


def test_a_note_is_said_once_an_episode_and_resumes_exactly(runs: Runs) -> None:
    config = replace(runs.config("char"), agents=(replace(runs.agent("char"), name="ada"),))
    # cut: noted in the 2nd step; gone for 4 steps it is the same episode, for 5 a new one
    cut = [True] * 4 + [False] * 4 + [True] * 3 + [False] * 5 + [True] * 3
    expected = [False, True] + [False] * 14 + [False, True, False]
    monitor = HealthMonitor(config)
    said = []
    for step, is_cut in enumerate(cut, 1):
        said.append(bool(monitor.update(report(step, stopped=not is_cut))))
        state = json.loads(json.dumps(monitor.state_dict()))
        monitor = HealthMonitor(config)  # as in a run that is resumed after every step
        monitor.load_state_dict(state)
    assert said == expected


class Interrupter(Observer):
    run: LocalRun

    def on_step(self, report: StepReport, seconds) -> None:
        if report.step == 2:
            self.run.interrupt()


def test_a_resumed_run_has_the_same_notes(runs: Runs, monkeypatch) -> None:
    from hacrl.runs.resume import inspect_run

    monkeypatch.setitem(TASKS, "sevens", Never)
    whole = runs("char", "pair", steps=4).result.folder
    config = runs.config("char", "pair", steps=4)
    observer = Interrupter()
    with LocalRun(config, [observer]) as observer.run:
        observer.run.train()
        observer.run.save()
    found = inspect_run(Path(config.output))
    with LocalRun(found.config, resumed=found.point) as run:
        run.train()
        run.save()
    resumed = [note for note in notes(Path(config.output)) if "resumed after" not in note]
    assert resumed == notes(whole)
    assert of(whole, "no reward")


def test_naive_sharing_names_its_own_bounds(runs: Runs, monkeypatch) -> None:
    monkeypatch.setitem(TASKS, "sevens", Alternating)
    method = NaiveSettings(clip_low=0.2, clip_high=0.3)
    assert method.cross_range == (0.8, 1.3, "method.clip_low", "method.clip_high")


class OnlyChar(Alternating):
    """Every second response of the agent "char" is right, and none of anybody else's."""

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        verdicts = super().verify(rollouts)
        return [
            verdict if rollout.agent == "char" else Verdict(0.0, "wrong")
            for rollout, verdict in zip(rollouts, verdicts, strict=True)
        ]


def test_a_partner_that_is_not_trusted(runs: Runs, monkeypatch) -> None:
    monkeypatch.setitem(TASKS, "sevens", OnlyChar)
    run = runs("char", "twin", method=AlignedSettings(clip_low=0.01, clip_high=0.01), steps=10)
    (note,) = of(run.result.folder, "does not trust")
    assert "agent char does not trust twin and learns nothing from it" in note
    # twin has no gradient of its own, and nothing to lose: it trusts char after two measurements
    trusted = [step["learning"]["trusted"]["char"] for step in run.of("twin")]
    assert trusted == [0, 0, *[1] * 8]
