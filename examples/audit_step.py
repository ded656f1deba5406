"""Recompute one training step of a run, and compare every number with what the run recorded.

    python -m hacrl train model steps=2 checkpoint.every=1 checkpoint.keep_last=2 device=cpu output=runs/audit
    python examples/audit_step.py runs/audit --step 1
    python examples/audit_step.py runs/audit --step 2

The script never imports hacrl. transformers runs the models; the rest of the file describes HACPO (arXiv
2603.02604) a second time, one function per concept. The script reads the config, the rollout log
(docs/rollout_log.md) and the checkpoint before the step; before step 1, the initial models. The script
computes the step's metrics and the weights after the step. The output compares these numbers with
metrics.jsonl and the next checkpoint. The exit code is 0 if all rows pass, else 1.

The run must keep its rollouts (`keep_rollouts: all`, the default) and the checkpoints before and after the
step (`checkpoint.every: 1`, and `checkpoint.keep_last` not below `steps`). The audit covers HACPO with
single-turn responses, all weights trained in float32, and the settings in `ASSUMED`. For any other run, the
script stops and names the key.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

# ---- The run's folder. Only this part knows the names of files and config keys.

ROLLOUTS, METRICS = "rollouts/step-{step:06d}/{agent}.jsonl", "metrics.jsonl"
CHECKPOINT, HISTORY, TENSORS = "checkpoints/step-{step:06d}", "trainer.json", "agent-{agent}.safetensors"
BUNDLED = Path(__file__).resolve().parent.parent / "src" / "hacrl"  # contains the models "bundled:NAME"

# Constants without a config key. The paper does not state them; hacrl takes them from the public code.
STD_EPSILON = 1e-6  # added to sigma_joint (eq. 7): Normaliser in src/hacrl/algorithms/advantage.py
CAPABILITY_FLOOR = 1e-8  # lowest capability of one step: src/hacrl/algorithms/capability.py
RATIO_MIN, RATIO_MAX = 0.1, 10.0  # bounds of omega (eq. 9): src/hacrl/algorithms/capability.py

# config.yaml leaves out keys that are not set. A missing key has its default in docs/configuration.md.
SETTINGS = """seed learning.lr learning.betas learning.weight_decay learning.max_grad_norm
    learning.updates_per_source method.clip_low method.clip_high method.alpha method.delta method.delta_step
    method.capability_window"""
SETTINGS_WITHOUT_DEFAULT = "learning.updates_per_step method.reward_range"  # missing: not set
ASSUMED: dict[str, tuple[Any, ...]] = {  # key -> values that the audit covers, first what a missing key means
    "pause_collapsed": (False,), "method.name": ("hacpo",), "method.reading": ("paper",),
    "method.kl_coefficient": (0,), "method.capability_measure": ("mean_reward",),
    "method.learn_stop_token": (True,), "method.minibatch_order": ("mixed",),
    "method.ratio_length": ("source",), "method.capability_baseline": (True,),
    "method.cross_baseline": ("source",), "method.baseline_overshoot": ("own_mean",),
    "method.discrepancy": (True,), "method.cross_clip": (True,), "method.cross_upper": (1,),
    "rollout.engine": ("transformers",), "rollout.temperature": (1,), "rollout.top_k": (0,),
    "rollout.top_p": (1,), "rollout.resample": (0,), "learning.epochs": (1,),
    "learning.max_cross_rollouts": (None,), "learning.old_policy": ("auto", "sampler"),
    "asynchronous.max_staleness": (0,),
}  # fmt: skip
ASSUMED_OF_AGENTS = {"lora": (None,), "precision": ("auto", "float32"), "engine": (None, "transformers")}
RECORDED = {  # quantity -> its path in a step's metrics of an agent, and the tolerance; {} is a source
    "mean reward": ("rollout.reward", 1e-9),
    "capability P": ("capability", 1e-9),
    "updates": ("learning.updates", 0),
    "responses with advantage 0": ("learning.skipped", 0),
    "dropped responses of {}": ("learning.dropped.{}", 0),
    "own tokens per token of {}": ("learning.retokenised.{}.length_ratio", 1e-9),
    "learnt from {}": ("learning.sources.{}.used", 0),
    "s of {}, mean": ("learning.sources.{}.ratio_mean", 1e-5),
    # The extremes belong to unlikely responses, which rounding in AdamW moves most (see compare_weights).
    "s of {}, smallest": ("learning.sources.{}.ratio_min", 1e-4),
    "s of {}, largest": ("learning.sources.{}.ratio_max", 1e-4),
    "s of {}, share clipped": ("learning.sources.{}.clipped", 1e-9),
    "loss": ("learning.loss", 1e-6),
    "gradient norm": ("learning.grad_norm", 1e-5),
}


def find(tree: Any, path: str, source: str = "", missing: Any = ...) -> Any:
    """Return the value at a dotted path of a nested mapping. {} in the path stands for a source."""
    for part in path.split("."):
        if part.format(source) not in tree:
            return sys.exit(f"the run's folder does not have {path}") if missing is ... else missing
        tree = tree[part.format(source)]
    return tree


def read_settings(run: Path, max_reward: float | None) -> SimpleNamespace:
    """Return the numbers that define a step, and the agents. Refuse a run that the audit does not cover.

    ``max_reward`` is the task's highest reward. `method.reward_range` overrides it.
    """
    if not (run / "config.yaml").is_file():
        sys.exit(f"{run} is not the folder of a run: it has no config.yaml")
    config = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    used = [(key, find(config, key, missing=allowed[0]), allowed) for key, allowed in ASSUMED.items()]
    for one in config["agents"]:
        for key, allowed in ASSUMED_OF_AGENTS.items():
            used.append((f"agents.{one['name']}.{key}", one.get(key, allowed[0]), allowed))
    for key, value, allowed in used:
        if value not in allowed:
            sys.exit(f"{key} is {value!r}: the audit covers {' or '.join(map(repr, allowed))}")
    values = {key: find(config, key) for key in SETTINGS.split()}
    values |= {key: find(config, key, missing=None) for key in SETTINGS_WITHOUT_DEFAULT.split()}
    settings = SimpleNamespace(**{key.rpartition(".")[2]: value for key, value in values.items()})
    settings.min_reward, highest = settings.reward_range or (0.0, None)
    settings.max_reward = max_reward if highest is None else highest
    defaults = {"lr": settings.lr, "revision": "main"}
    settings.agents = [SimpleNamespace(**defaults | one) for one in config["agents"]]
    return settings


def read_lines(path: Path) -> list[Any]:
    """Return the JSON objects of a file, one per line."""
    if not path.is_file():
        sys.exit(f"{path} is missing: the audit needs a run with keep_rollouts=all")
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def read_rollouts(run: Path, step: int, agent: str) -> list[Response]:
    """Return one agent's responses of a step, in the order of the log."""
    rows = read_lines(run / ROLLOUTS.format(step=step, agent=agent))
    if any(len(row["segments"]) != 1 or row["logprob"] is None for row in rows):
        sys.exit("the audit covers single-turn responses with finite log-probabilities")
    return [Response(row, row["segments"][0]) for row in rows]


def read_metrics(run: Path, step: int) -> dict[str, Any]:
    """Return each agent's recorded metrics of a step."""
    found: dict[int, dict[str, Any]] = {line["step"]: line["agents"] for line in read_lines(run / METRICS)}
    return found[step] if step in found else sys.exit(f"step {step} is not in {run / METRICS}")


def read_checkpoint(run: Path, step: int) -> tuple[dict[str, list[float]], dict[str, dict[str, Tensor]]]:
    """Return every agent's capability history, and its weights and AdamW moments, after ``step`` steps.

    A tensor's name is NUMBER.KIND. NUMBER counts the model's parameters. KIND is ``master`` (the float32
    weight), ``exp_avg`` (mean of its gradients), ``exp_avg_sq`` (mean of their squares), or ``step``.
    """
    folder = run / CHECKPOINT.format(step=step)
    if not folder.is_dir():
        sys.exit(
            f"{folder} is missing: the audit needs the checkpoints before and after the step. Train with "
            "checkpoint.every=1 and checkpoint.keep_last=STEPS"
        )
    history = json.loads((folder / HISTORY).read_text("utf-8"))["capabilities"]
    return history, {k: load_file(folder / TENSORS.format(agent=k)) for k in history}


def model_folder(reference: str) -> str:
    """Return the folder or hub id of a model in the config."""
    if not reference.startswith("bundled:"):
        return reference
    for config in BUNDLED.rglob(reference.replace(":", "/") + "/config.json"):
        return str(config.parent)
    return sys.exit(f"{reference!r} is not in {BUNDLED}: give its folder by --model AGENT=FOLDER")


# ---- Responses, and how a learner sees them.


class Response:
    """One verified response of one agent: a line of the rollout log."""

    def __init__(self, row: dict[str, Any], segment: dict[str, Any]) -> None:
        self.source, self.problem, self.reward = row["agent"], row["problem"], row["reward"]
        self.turns = [*row.get("context", ()), {"role": "user", "content": row["prompt"]}]
        self.stopped = row["finish_reason"] == "stop"  # by its stop token
        self.text = row["text"] + segment.get("stop_text", "")  # learners learn to write a stop string
        self.tokenizer = row["tokenizer"]  # fingerprint: agents with equal ones have equal token ids
        self.prompt_ids, self.ids = row["prompt_ids"], segment["token_ids"]  # in the source's tokens
        self.logprobs = segment["token_logprobs"]  # log pi_j_old of each token
        self.logprob = row["logprob"]  # their sum, as logged


@dataclass(frozen=True)
class Sample:
    """A response as the learner sees it: in the learner's tokens, with the learner's advantage."""

    response: Response
    advantage: float
    prompt_ids: list[int]
    ids: list[int]


class Agent:
    """A transformers model in float32 with its tokenizer. ``fingerprint`` is the tokenizer's in the log."""

    def __init__(self, about: SimpleNamespace, folder: str, fingerprint: str) -> None:
        self.name, self.fingerprint, self.template_args = about.name, fingerprint, about.chat_template_args
        model = AutoModelForCausalLM.from_pretrained(folder, revision=about.revision, dtype=torch.float32)
        self.model = model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, revision=about.revision)
        self.use_template = about.chat_template and self.tokenizer.chat_template is not None
        self.special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        self.longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", math.inf)

    def prompt_ids(self, response: Response) -> list[int]:
        """Return the prompt in this agent's tokens."""
        if self.use_template:
            return self._tokens(self._rendered(response.turns, add_generation_prompt=True))
        if len(response.turns) > 1:
            sys.exit(f"{response.problem!r}: turns before a prompt need a chat template")
        ids: list[int] = self.tokenizer(response.turns[0]["content"]).input_ids
        return ids[:-1] if ids[-1] == self.tokenizer.eos_token_id else ids

    def stop_id(self) -> int:
        """Return the token that ends this agent's responses: the chat template's end of turn, else eos."""
        after = ""
        if self.use_template:
            turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "answer"}]
            after = self._rendered(turns).rpartition("answer")[2]
        return next((i for i in self._tokens(after) if i in self.special), self.tokenizer.eos_token_id)

    def encode(self, text: str, prompt_ids: list[int]) -> list[int] | None:
        """Return a text in this agent's tokens, as a continuation of the prompt; None if that is impossible.

        Some tokenizers put a space before the first word of a text. A leading character prevents the space;
        its tokens are cut off again.
        """
        for lead in ("", ":", "\n"):
            before = self._tokens(lead, split_special_tokens=True)
            whole = self._tokens(lead + text, split_special_tokens=True)
            ids = whole[len(before) :]
            is_plain = whole[: len(before)] == before and self.special.isdisjoint(ids)
            if is_plain and self.decode(ids, prompt_ids) == text:
                return ids
        return None

    def decode(self, ids: list[int], prompt_ids: list[int]) -> str:
        """Return the text that response tokens add to the prompt."""
        prompt, whole = self.tokenizer.decode(prompt_ids), self.tokenizer.decode(prompt_ids + ids)
        return str(whole[len(prompt) :] if whole.startswith(prompt) else self.tokenizer.decode(ids))

    def response_ids(self, response: Response) -> list[int] | None:
        """Return a response in this agent's tokens; None if the learner drops the response.

        If the tokenizers are equal, the token ids stay as they are. Otherwise this agent encodes the text,
        and appends its stop token if the source generated a stop token. A response that does not fit is
        dropped, never cut.
        """
        ids, prompt_ids = response.ids, self.prompt_ids(response)
        if response.tokenizer != self.fingerprint:
            ids = self.encode(response.text, prompt_ids)
            if ids is None or "\ufffd" in response.text:  # bytes that are no character
                return None
            ids = ids + [self.stop_id()] * response.stopped
        return None if len(prompt_ids) + len(ids) > self.longest else ids or None

    def _rendered(self, turns: list[dict[str, str]], **options: bool) -> str:
        return self.tokenizer.apply_chat_template(turns, tokenize=False, **options, **self.template_args)

    def _tokens(self, text: str, **options: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, **options).input_ids if text else []


def forward_passes(model: Any, samples: Sequence[Sample]) -> Iterator[list[tuple[Sample, Tensor]]]:
    """Run the model on at most 32 samples at a time. Yield each sample with its tokens' log-probabilities.

    Each response token's log-probability is given all tokens before that token. Padding comes last, where a
    causal model does not see the padding. The number 32 changes results by rounding only.
    """
    for part in (samples[i : i + 32] for i in range(0, len(samples), 32)):
        rows = [sample.prompt_ids + sample.ids for sample in part]
        width = max(map(len, rows))
        input_ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits.float()
        chosen = logits.log_softmax(dim=-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        spans = [slice(len(one.prompt_ids) - 1, len(row) - 1) for one, row in zip(part, rows, strict=True)]
        yield [(sample, chosen[i, spans[i]]) for i, sample in enumerate(part)]


# ---- The method: capabilities, advantages, ratios, loss.


def capability_history(before: Sequence[float], rewards: Sequence[float], settings: Any) -> list[float]:
    """Return the mean rewards of the last K steps, this one included. P_k (eq. 8) is their mean."""
    capability = max(mean(rewards) - settings.min_reward, CAPABILITY_FLOOR)
    return [*before, capability][-settings.capability_window :]


def omega(k: str, j: str, capability: Mapping[str, float]) -> float:
    """Return the capability ratio P_k / P_j (eq. 9), clamped."""
    return min(max(capability[k] / capability[j], RATIO_MIN), RATIO_MAX)


def baseline(k: str, rewards: Mapping[str, Sequence[float]], capability: Any, settings: Any) -> float:
    """Return mu_k (eq. 6), agent k's expected reward; its own mean reward if mu_k exceeds the highest one."""
    mu = mean([omega(k, j, capability) * mean(values) for j, values in rewards.items()])
    is_too_high = settings.max_reward is not None and mu > settings.max_reward
    return mean(rewards[k]) if is_too_high else mu


def advantages(
    k: str, rewards: Mapping[str, Sequence[float]], capability: Mapping[str, float], settings: Any
) -> dict[str, list[float]]:
    """Return learner k's advantages of all sources' responses to one prompt.

    A_i^j = (R_i - mu_j) / sigma_joint (eq. 7). For another source j, A~ = omega(j, k) * A_i^j (eq. 10).
    """
    pooled = [reward for values in rewards.values() for reward in values]
    if min(pooled) == max(pooled):  # equal rewards teach nothing
        return {j: [0.0] * len(values) for j, values in rewards.items()}
    sigma, found = statistics.stdev(pooled), {}
    for j, values in rewards.items():
        mu = baseline(j, rewards, capability, settings)
        weight = 1.0 if j == k else omega(j, k, capability)
        found[j] = [weight * (reward - mu) / (sigma + STD_EPSILON) for reward in values]
    return found


def sequence_ratio(logprobs: Tensor, response: Response) -> Tensor:
    """Return s = (pi_k(y) / pi_j_old(y))^(1/|y|) (eq. 11), with |y| in the source's tokens."""
    return ((logprobs.sum() - math.fsum(response.logprobs)) / len(response.ids)).exp()


def sample_loss(s: Tensor, sample: Sample, k: str, u: int, settings: Any) -> tuple[Tensor, bool]:
    """Return minus one response's objective (eq. 12-14, 47-53), and whether clipping removed its gradient.

    Own response: min(s A, clip(s) A), as in GSPO. Another's: c * stopgrad(c)^alpha * A~, where c is s clipped
    to [1 - delta + u * delta_step, 1]. u is the number of updates that the learner has made in this step.
    """
    if sample.response.source == k:
        plain = s * sample.advantage
        clipped = s.clamp(1 - settings.clip_low, 1 + settings.clip_high) * sample.advantage
        return -torch.minimum(plain, clipped), bool(plain > clipped)
    lower = 1 - settings.delta + u * settings.delta_step
    c = s.clamp(lower, 1)
    return -c * c.detach() ** settings.alpha * sample.advantage, not lower <= float(s.detach()) <= 1


# ---- The updates of one step.


def minibatches(samples: Sequence[Sample], k: str, step: int, settings: Any) -> list[list[Sample]]:
    """Return the samples of each update: all samples shuffled, then cut into equal parts.

    Python's generator shuffles. Its seed comes from the run's seed, "learn", the learner and the step, joined
    by the character 0x1f: the first 8 bytes of their SHA-256, big-endian, shifted right by one bit. Part i of
    n begins at sample len * i // n. An empty part makes no update.
    """
    digest = hashlib.sha256(f"{settings.seed}\x1flearn\x1f{k}\x1f{step}".encode()).digest()
    shuffled = list(samples)
    random.Random(int.from_bytes(digest[:8], "big") >> 1).shuffle(shuffled)
    updates = settings.updates_per_step or settings.updates_per_source * len(settings.agents)
    edges = [len(shuffled) * i // updates for i in range(updates + 1)]
    return [shuffled[start:end] for start, end in pairwise(edges) if start < end]


class AdamW:
    """AdamW with bias correction. ``saved`` holds the tensors of a checkpoint; it is empty before step 1."""

    def __init__(self, model: Any, lr: float, settings: Any, saved: Mapping[str, Tensor]) -> None:
        self.weights = list(model.parameters())
        self.lr, self.settings, self.steps = lr, settings, int(saved.get("0.step", 0))
        self.means = [torch.zeros_like(weight) for weight in self.weights]
        self.squares = [torch.zeros_like(weight) for weight in self.weights]
        self.is_clear = [torch.ones_like(weight, dtype=torch.bool) for weight in self.weights]
        for i, weight in enumerate(self.weights if saved else ()):
            weight.data.copy_(saved[f"{i}.master"])
            self.means[i].copy_(saved[f"{i}.exp_avg"])
            self.squares[i].copy_(saved[f"{i}.exp_avg_sq"])
        self.before = joined(self.weights).clone()

    @torch.no_grad()
    def clip_gradients(self) -> float:
        """Scale the gradients so that their joint norm is at most max_grad_norm. Return the norm before."""
        norm = math.sqrt(math.fsum(float(weight.grad.double().square().sum()) for weight in self.weights))
        for weight in self.weights:
            weight.grad *= min(1.0, self.settings.max_grad_norm / (norm + 1e-6))
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Move the weights. Note which gradients are far larger than rounding (see compare_weights)."""
        self.steps += 1
        beta1, beta2 = self.settings.betas
        largest = max(float(weight.grad.abs().max()) for weight in self.weights)
        for i, weight in enumerate(self.weights):
            self.is_clear[i] &= weight.grad.abs() >= 1e-3 * largest
            self.means[i] += (1 - beta1) * (weight.grad - self.means[i])
            self.squares[i] += (1 - beta2) * (weight.grad.square() - self.squares[i])
            scale = (self.squares[i] / (1 - beta2**self.steps)).sqrt() + 1e-8
            weight *= 1 - self.lr * self.settings.weight_decay
            weight -= self.lr * self.means[i] / (1 - beta1**self.steps) / scale


def learn(
    learner: Agent, batches: Sequence[Sequence[Sample]], optimizer: AdamW, settings: Any
) -> dict[str, float]:
    """Make one update per mini-batch. Return the quantities of RECORDED.

    An update's loss is the mean over its mini-batch. A response with advantage 0 counts with loss 0.
    """
    losses, norms, skipped = [], [], 0
    ratios: dict[str, list[tuple[float, bool]]] = {}  # source -> s of each response, and whether clipped
    for u, batch in enumerate(batches):
        active = [sample for sample in batch if sample.advantage != 0]
        skipped += len(batch) - len(active)
        losses.append(0.0)
        for weight in optimizer.weights:
            weight.grad = torch.zeros_like(weight)
        for part in forward_passes(learner.model, active):
            loss = torch.zeros(())
            for sample, logprobs in part:
                s = sequence_ratio(logprobs, sample.response)
                one, is_clipped = sample_loss(s, sample, learner.name, u, settings)
                loss = loss + one / len(batch)
                ratios.setdefault(sample.response.source, []).append((float(s.detach()), is_clipped))
            loss.backward()
            losses[-1] += float(loss.detach())
        norms.append(optimizer.clip_gradients())
        optimizer.step()
    found = {"updates": len(losses), "responses with advantage 0": skipped}
    for j, rows in ratios.items():
        s, clipped = zip(*rows, strict=True)
        found |= {f"learnt from {j}": len(s), f"s of {j}, mean": mean(s), f"s of {j}, smallest": min(s)}
        found |= {f"s of {j}, largest": max(s), f"s of {j}, share clipped": mean(clipped)}
    return found | {"loss": mean(losses), "gradient norm": mean(norms)}


# ---- The audit.

ROW = "{:12} {:36} {:>15} {:>15} {:>11} {:>10} {}"


@dataclass
class Table:
    """The recorded numbers beside the recomputed ones."""

    rows: list[tuple[str, str, float, float]] = field(default_factory=list)  # difference, tolerance

    def add(self, agent: str, quantity: str, recorded: Any, recomputed: Any, tolerance: float) -> None:
        """Compare and print two numbers or arrays. Different shapes and missing numbers fail."""
        theirs, ours = (numpy.asarray(one, dtype=numpy.float64) for one in (recorded, recomputed))
        is_comparable = theirs.shape == ours.shape
        difference = float(numpy.max(numpy.abs(theirs - ours), initial=0.0)) if is_comparable else math.nan
        self.rows.append((agent, quantity, difference, tolerance))
        texts = [f"{one.size} numbers" if one.ndim else f"{one:.7g}" for one in (theirs, ours)]
        verdict = "PASS" if difference <= tolerance else "FAIL"
        print(ROW.format(agent, quantity, *texts, f"{difference:.1e}", f"{tolerance:.1e}", verdict))

    @property
    def failed(self) -> list[tuple[str, str]]:
        """Agent and quantity of every row that fails."""
        return [(agent, quantity) for agent, quantity, gap, most in self.rows if not gap <= most]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def joined(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def compare_log(table: Table, learner: Agent, own: Sequence[Response]) -> None:
    """Compare an agent's logged responses with its tokenizer, and with its model before the step."""
    k, prompts = learner.name, [learner.prompt_ids(response) for response in own]
    logged = [token for response in own for token in response.prompt_ids]
    table.add(k, "prompt tokens", logged, [token for ids in prompts for token in ids], 0)
    texts = [learner.decode(one.ids[: len(one.ids) - one.stopped], one.prompt_ids) for one in own]
    same = sum(text == one.text for text, one in zip(texts, own, strict=True))
    table.add(k, "texts equal to their tokens", len(own), same, 0)
    samples = [Sample(one, 0.0, ids, one.ids) for one, ids in zip(own, prompts, strict=True)]
    with torch.no_grad():
        found = [logprobs for part in forward_passes(learner.model, samples) for _, logprobs in part]
    logprobs = numpy.array([logprob for one in own for logprob in one.logprobs])
    size = 1.0 + numpy.abs(logprobs)  # float32 rounds larger numbers more
    table.add(k, "log pi of own tokens / (1+|log pi|)", logprobs / size, joined(found).numpy() / size, 1e-5)
    pairs = [(mean(one.logprobs), float(ours.mean())) for one, ours in zip(own, found, strict=True)]
    table.add(k, "log pi of own responses / |y|", *zip(*pairs, strict=True), 1e-5)
    sums = [math.fsum(one.logprobs) for one in own]
    table.add(k, "log pi of own responses as logged", [one.logprob for one in own], sums, 1e-9)


def compare_metrics(table: Table, k: str, metrics: Any, found: dict[str, float], sources: list[str]) -> None:
    """Compare every quantity of learner k that the metrics or the audit have, for each source."""
    for quantity, (path, tolerance) in RECORDED.items():
        for j in sources if "{}" in quantity else [""]:
            recorded = find(metrics, path, j, missing=None)
            if isinstance(recorded, dict):  # reason -> how many
                recorded = sum(recorded.values())
            pair = [recorded, found.get(quantity.format(j))]
            if pair != [None, None]:
                numbers = [math.nan if one is None else one for one in pair]
                table.add(k, quantity.format(j), *numbers, tolerance)


def compare_weights(table: Table, k: str, optimizer: AdamW, after: Mapping[str, Tensor]) -> None:
    """Compare the checkpoint after the step. AdamW's moments are sums of the step's clipped gradients.

    AdamW divides by the size of the gradient. So a gradient that is rounding alone may move its weight by any
    amount up to lr. The audit compares single weights where all gradients of the step are far larger than
    rounding. For all weights together, the audit compares the length of the move.
    """

    def recorded(kind: str) -> Tensor:
        return joined(after[f"{i}.{kind}"] for i in range(len(optimizer.weights)))

    for kind, found in (("exp_avg", optimizer.means), ("exp_avg_sq", optimizer.squares)):
        moments = recorded(kind)
        table.add(k, f"gradients ({kind})", moments, joined(found), 1e-4 * float(moments.abs().max()))
    theirs, ours, is_clear = recorded("master"), joined(optimizer.weights), joined(optimizer.is_clear)
    tolerance = 2e-3 * optimizer.lr + 2**-22 * float(ours.abs().max())  # the latter: float32 rounding
    table.add(k, "weights with clear gradients", theirs[is_clear], ours[is_clear], tolerance)
    moved, gap = float((theirs - optimizer.before).norm()), float((theirs - ours).norm())
    table.add(k, "all weights: gap / length of move", 0.0, gap / moved if moved else gap, 0.05)


def samples_of(
    learner: Agent, groups: Iterable[dict[str, list[Response]]], capability: dict[str, float], settings: Any
) -> tuple[list[Sample], Counter[str]]:
    """Return a learner's samples of a step, by prompt and source, and the number dropped of each source."""
    samples, dropped = [], Counter[str]()
    for group in groups:
        rewards = {j: [one.reward for one in responses] for j, responses in group.items()}
        for j, values in advantages(learner.name, rewards, capability, settings).items():
            for response, advantage in zip(group[j], values, strict=True):
                ids = learner.response_ids(response)
                if ids is None:
                    dropped[j] += 1
                else:
                    samples.append(Sample(response, advantage, learner.prompt_ids(response), ids))
    return samples, dropped


def audit(run: Path, step: int, models: Mapping[str, str], max_reward: float | None = 1.0) -> Table:
    """Recompute a step. ``models`` has folders of initial models that are not where the config says.

    ``max_reward`` is the task's highest reward, for a run whose config does not set it.
    """
    settings, metrics = read_settings(run, max_reward), read_metrics(run, step)
    names = sorted(about.name for about in settings.agents)
    log = {k: read_rollouts(run, step, k) for k in names}
    groups: dict[str, dict[str, list[Response]]] = {}  # problem -> source -> responses
    for k in names:
        for response in log[k]:
            groups.setdefault(response.problem, {}).setdefault(k, []).append(response)
    history_before, before = read_checkpoint(run, step - 1) if step > 1 else ({}, {})
    history_after, after = read_checkpoint(run, step)
    rewards = {k: [response.reward for response in log[k]] for k in names}
    history = {k: capability_history(history_before.get(k, []), rewards[k], settings) for k in names}
    capability = {k: mean(history[k]) for k in names}
    recorded_capability = {k: find(metrics[k], RECORDED["capability P"][0]) for k in names}

    table = Table()
    print(ROW.format("agent", "quantity", "recorded", "recomputed", "difference", "tolerance", "").rstrip())
    for about in settings.agents:
        k = about.name
        learner = Agent(about, models.get(k) or model_folder(about.model), log[k][0].tokenizer)
        optimizer = AdamW(learner.model, about.lr, settings, before.get(k, {}))
        compare_log(table, learner, log[k])
        table.add(k, "capability history", history_after[k], history[k], 1e-9)
        for j in (j for j in names if j != k):
            ratios = [omega(j, k, one) for one in (recorded_capability, capability)]
            table.add(k, f"omega({j}, {k})", *ratios, 1e-9)
        samples, dropped = samples_of(learner, groups.values(), capability, settings)
        found = learn(learner, minibatches(samples, k, step, settings), optimizer, settings)
        found |= {"mean reward": mean(rewards[k]), "capability P": capability[k]}
        found |= {f"dropped responses of {j}": number for j, number in dropped.items()}
        for j in (j for j in names if log[j][0].tokenizer != learner.fingerprint):
            lengths = [len(one.ids) / len(one.response.ids) for one in samples if one.response.source == j]
            found[f"own tokens per token of {j}"] = mean(lengths)
        compare_metrics(table, k, metrics[k], found, names)
        compare_weights(table, k, optimizer, after[k])
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Recompute one training step of a run, without hacrl.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--step", type=int, required=True, help="which step, from 1")
    parser.add_argument("--model", action="append", default=[], metavar="AGENT=FOLDER", help="initial model")
    parser.add_argument("--max-reward", default="1", help="the task's highest reward, or none (default: 1)")
    given = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    max_reward = None if given.max_reward == "none" else float(given.max_reward)
    table = audit(given.run, given.step, dict(one.split("=", 1) for one in given.model), max_reward)
    print(f"{len(table.rows) - len(table.failed)} of {len(table.rows)} rows pass")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
