"""Recompute one whole training step of a real run, and compare every number with what the run recorded.

    hacrl train model steps=2 checkpoint.every=1 output=runs/audited
    python examples/audit_step.py runs/audited --step 1
    python examples/audit_step.py runs/audited --step 2

The script never imports hacrl. transformers runs the models; everything else is below: a second description
of HACPO (arXiv 2603.02604), one function per concept. From the run's folder it reads the config, the rollout
log (docs/rollout_log.md) and the checkpoint before the step (before step 1: the initial models). It computes
the step's metrics and the weights after it, and compares them with metrics.jsonl and the next checkpoint.

A run that is to be audited keeps its rollouts (`rollouts.keep: all`) and the checkpoints before and after
the step (`checkpoint.every: 1`, `checkpoint.keep_last`: the number of `steps`). The audit covers single-turn
HACPO in float32 with all weights trained and the paper's reading of every option (`ASSUMED`). For any other
run it names the key. The exit code is 0 if all rows pass, else 1.
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
from collections.abc import Iterable, Mapping, Sequence
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

# ---- Names in a run's folder and config. Nothing after this part depends on them.

ROLLOUTS, METRICS = "rollouts/step-{step:06d}/{agent}.jsonl", "metrics.jsonl"
CHECKPOINT, HISTORY, TENSORS = "checkpoints/step-{step:06d}", "trainer.json", "agent-{agent}.safetensors"
BUNDLED = Path(__file__).resolve().parent.parent / "src" / "hacrl"  # the models "bundled:NAME" are in here
SETTINGS = """seed learning.lr learning.beta1 learning.beta2 learning.weight_decay learning.max_grad_norm
    learning.updates_per_source learning.updates_per_step method.clip_low method.clip_high method.alpha
    method.delta method.delta_step method.max_reward method.std.epsilon method.capability.window
    method.capability.floor method.capability.ratio_min method.capability.ratio_max"""
ASSUMED: dict[str, tuple[Any, ...]] = {  # config key -> values the audit covers; a key may be missing
    "method.name": ("hacpo",), "method.kl_coefficient": (0,), "method.std.unbiased": (True,),
    "method.capability.measure": ("mean_reward",), "method.capability.reward_min": (0,),
    "method.capability_baseline": (True,), "method.cross_baseline": ("source",),
    "method.baseline_overshoot": ("own_mean",), "method.discrepancy": (True,),
    "method.ratio_length": ("source",), "method.exponent_on": ("clipped",),
    "method.cross_clip": (True,), "method.cross_upper": (1,), "rollout.engine": ("transformers",),
    "rollout.temperature": (1,), "rollout.top_k": (0,), "rollout.top_p": (1,),
    "learning.epochs": (1,), "learning.max_cross_rollouts": (None,), "learning.minibatch_order": ("mixed",),
    "learning.learn_stop_token": (True,), "learning.old_policy": ("auto", "sampler"),
}  # fmt: skip
ASSUMED_OF_AGENTS = {"lora": (None,), "precision": ("auto", "float32"), "engine": (None, "transformers")}
RECORDED = {  # quantity -> where a step's metrics of an agent have it, and the tolerance; {} is a source
    "mean reward": ("rollout.reward", 1e-9),
    "capability P": ("capability", 1e-9),
    "updates": ("learning.updates", 0),
    "responses with advantage 0": ("learning.skipped", 0),
    "dropped responses of {}": ("learning.dropped.{}", 0),
    "own tokens per token of {}": ("learning.retokenised.{}.length_ratio", 1e-9),
    "learnt from {}": ("learning.sources.{}.used", 0),
    "s of {}, mean": ("learning.sources.{}.ratio_mean", 1e-5),
    # of very unlikely responses after the first update: AdamW has moved some weights by rounding (see below)
    "s of {}, smallest": ("learning.sources.{}.ratio_min", 1e-4),
    "s of {}, largest": ("learning.sources.{}.ratio_max", 1e-4),
    "s of {}, share clipped": ("learning.sources.{}.clipped", 1e-9),
    "loss": ("learning.loss", 1e-6),
    "gradient norm": ("learning.grad_norm", 1e-5),
}


def find(tree: Any, path: str, source: str = "", missing: Any = ...) -> Any:
    """Return what a nested mapping has at a dotted path, in which {} stands for a source."""
    for part in path.split("."):
        if part.format(source) not in tree:
            if missing is ...:
                sys.exit(f"the run's folder does not have {path}")
            return missing
        tree = tree[part.format(source)]
    return tree


def read_settings(run: Path) -> SimpleNamespace:
    """Return the numbers that define a step, and the agents. Refuse a run that the audit does not cover."""
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
    numbers = {key.rpartition(".")[2]: find(config, key) for key in SETTINGS.split()}
    return SimpleNamespace(agents=[SimpleNamespace(**one) for one in config["agents"]], **numbers)


def read_lines(path: Path) -> list[Any]:
    """Return the JSON objects of a file, one a line."""
    if not path.is_file():
        sys.exit(f"{path} is missing: a run that is to be audited has rollouts.keep=all")
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def read_rollouts(run: Path, step: int, agent: str) -> list[Response]:
    """Return one agent's responses of a step, in the order in which they were sampled."""
    rows = read_lines(run / ROLLOUTS.format(step=step, agent=agent))
    if any(len(row["segments"]) != 1 or row["logprob"] is None for row in rows):
        sys.exit("the audit covers single-turn responses with finite log-probabilities")
    return [Response(row, row["segments"][0]) for row in rows]


def read_metrics(run: Path, step: int) -> dict[str, Any]:
    """Return what the run recorded about each agent in a step."""
    found: dict[int, dict[str, Any]] = {line["step"]: line["agents"] for line in read_lines(run / METRICS)}
    return found[step] if step in found else sys.exit(f"step {step} is not in {run / METRICS}")


def read_checkpoint(run: Path, step: int) -> tuple[dict[str, list[float]], dict[str, dict[str, Tensor]]]:
    """Return capability histories, and every agent's float32 weights and AdamW moments, after ``step`` steps.

    A tensor's name is NUMBER.KIND: the number of the parameter in the model's order, and the weight itself
    (``master``), the mean of its gradients (``exp_avg``), of their squares (``exp_avg_sq``), or ``step``.
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
    """Return the folder or hub id that a model in the config stands for."""
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
        self.text, self.stopped = row["text"], row["finish_reason"] == "stop"  # stopped: by its stop token
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
    """A plain transformers model with its tokenizer. ``fingerprint``: the tokenizer's in the log."""

    def __init__(self, about: SimpleNamespace, folder: str, fingerprint: str) -> None:
        self.name, self.fingerprint, self.template_args = about.name, fingerprint, about.chat_template_args
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
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

        Some tokenizers put a space before the first word of a text. A character that stands before the text,
        and is cut off again, prevents that.
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
        """Return a response in this agent's tokens; None if it is dropped: no response is cut to fit.

        Its tokens stay as they are where the tokenizer is the same. Otherwise its text is encoded, and this
        agent's stop token is appended if the source stopped by itself.
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


def log_probabilities(model: Any, samples: Sequence[Sample]) -> list[Tensor]:
    """Return the log-probability of every response token given everything before it; a tensor per sample."""
    rows = [sample.prompt_ids + sample.ids for sample in samples]
    width = max(map(len, rows))  # padding comes last, where a causal model does not see it
    input_ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits.float()
    chosen = logits.log_softmax(dim=-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return [chosen[i, len(one.prompt_ids) - 1 : len(rows[i]) - 1] for i, one in enumerate(samples)]


def in_parts(samples: Sequence[Sample], size: int = 32) -> Iterable[Sequence[Sample]]:
    """Yield as many samples as one forward pass takes. The size changes results by rounding only."""
    return (samples[i : i + size] for i in range(0, len(samples), size))


# ---- The method: capabilities, advantages, ratios, loss.


def capability_history(before: Sequence[float], rewards: Sequence[float], settings: Any) -> list[float]:
    """Return the mean rewards of the last K steps, this one included. P_k (eq. 8) is their mean."""
    return [*before, max(mean(rewards), settings.floor)][-settings.window :]


def omega(k: str, j: str, capability: Mapping[str, float], settings: Any) -> float:
    """Return the capability ratio P_k / P_j (eq. 9), clamped."""
    return min(max(capability[k] / capability[j], settings.ratio_min), settings.ratio_max)


def baseline(k: str, rewards: Mapping[str, Sequence[float]], capability: Any, settings: Any) -> float:
    """Return mu_k (eq. 6), what agent k should earn here; its own mean if that is above any reward."""
    mu = mean([omega(k, j, capability, settings) * mean(values) for j, values in rewards.items()])
    is_too_high = settings.max_reward is not None and mu > settings.max_reward
    return mean(rewards[k]) if is_too_high else mu


def advantages(
    k: str, rewards: Mapping[str, Sequence[float]], capability: Mapping[str, float], settings: Any
) -> dict[str, list[float]]:
    """Return learner k's advantages of all sources' responses to one prompt.

    A_i^j = (R_i - mu_j) / sigma_joint (eq. 7); others' count A~ = omega(j, k) * A_i^j (eq. 10).
    """
    pooled = [reward for values in rewards.values() for reward in values]
    sigma = statistics.stdev(pooled) if len(pooled) > 1 else 0.0
    seen = {}
    for j, values in rewards.items():
        mu = baseline(j, rewards, capability, settings)
        weight = 1.0 if j == k else omega(j, k, capability, settings)
        seen[j] = [weight * (reward - mu) / (sigma + settings.epsilon) for reward in values]
        if min(pooled) == max(pooled):  # equal rewards teach nothing
            seen[j] = [0.0] * len(values)
    return seen


def sequence_ratio(logprobs: Tensor, response: Response) -> Tensor:
    """Return s = (pi_k(y) / pi_j_old(y))^(1/|y|) (eq. 11), with |y| in the source's tokens."""
    return ((logprobs.sum() - math.fsum(response.logprobs)) / len(response.ids)).exp()


def sample_loss(s: Tensor, sample: Sample, k: str, u: int, settings: Any) -> tuple[Tensor, bool]:
    """Return minus one response's objective (eq. 12-14, 47-53), and whether clipping took its gradient.

    Own: min(s A, clip(s) A), as in GSPO. Others': c * stopgrad(c)^alpha * A~, where c is s clipped to
    [1 - delta + u * delta_step, 1] and u is the number of updates already made in this step.
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

    Specification: Python's generator shuffles, with a seed of (run's seed, "learn", learner, step): these
    parts joined by the character 0x1f, of their SHA-256 the first 8 bytes, big-endian, shifted right by one
    bit. Part i of n begins at sample len * i // n. An empty part makes no update.
    """
    digest = hashlib.sha256(f"{settings.seed}\x1flearn\x1f{k}\x1f{step}".encode()).digest()
    shuffled = list(samples)
    random.Random(int.from_bytes(digest[:8], "big") >> 1).shuffle(shuffled)
    updates = settings.updates_per_step or settings.updates_per_source * len(settings.agents)
    edges = [len(shuffled) * i // updates for i in range(updates + 1)]
    return [shuffled[start:end] for start, end in pairwise(edges) if start < end]


class AdamW:
    """AdamW with bias correction, written out; ``saved`` are the tensors of a checkpoint, if there is one."""

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
        """Move the weights. Note which gradients stand out from rounding: AdamW magnifies small ones."""
        self.steps += 1
        beta1, beta2 = self.settings.beta1, self.settings.beta2
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
    """Make one update per mini-batch. Return what the run records of them.

    An update's loss is the mean over its mini-batch. A response with advantage 0 counts there, with loss 0.
    """
    losses, norms, skipped = [], [], 0
    ratios: dict[str, list[tuple[float, bool]]] = {}  # source -> s of each response, and whether clipped
    for u, batch in enumerate(batches):
        active = [sample for sample in batch if sample.advantage != 0]
        skipped += len(batch) - len(active)
        losses.append(0.0)
        for weight in optimizer.weights:
            weight.grad = torch.zeros_like(weight)
        for part in in_parts(active):
            loss = torch.zeros(())
            for sample, logprobs in zip(part, log_probabilities(learner.model, part), strict=True):
                s = sequence_ratio(logprobs, sample.response)
                one, is_clipped = sample_loss(s, sample, learner.name, u, settings)
                loss = loss + one / len(batch)
                ratios.setdefault(sample.response.source, []).append((float(s.detach()), is_clipped))
            loss.backward()
            losses[-1] += float(loss.detach())
        norms.append(optimizer.clip_gradients())
        optimizer.step()
    seen = {"updates": len(losses), "responses with advantage 0": skipped}
    for j, rows in ratios.items():
        s, clipped = zip(*rows, strict=True)
        seen |= {f"learnt from {j}": len(s), f"s of {j}, mean": mean(s), f"s of {j}, smallest": min(s)}
        seen |= {f"s of {j}, largest": max(s), f"s of {j}, share clipped": mean(clipped)}
    return seen | {"loss": mean(losses), "gradient norm": mean(norms)}


# ---- The audit.

ROW = "{:12} {:34} {:>15} {:>15} {:>11} {:>10} {}"


@dataclass
class Table:
    """What the run recorded beside what this script computed."""

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
    """Compare the log of an agent's own responses with its tokenizer, and its model before the step."""
    k, prompts = learner.name, [learner.prompt_ids(response) for response in own]
    logged = [token for response in own for token in response.prompt_ids]
    table.add(k, "prompt tokens", logged, [token for ids in prompts for token in ids], 0)
    texts = [learner.decode(one.ids[: len(one.ids) - one.stopped], one.prompt_ids) for one in own]
    same = sum(text == one.text for text, one in zip(texts, own, strict=True))
    table.add(k, "texts equal to their tokens", len(own), same, 0)
    samples = [Sample(one, 0.0, ids, one.ids) for one, ids in zip(own, prompts, strict=True)]
    with torch.no_grad():
        found = [one for part in in_parts(samples) for one in log_probabilities(learner.model, part)]
    logprobs = numpy.array([logprob for one in own for logprob in one.logprobs])
    size = 1.0 + numpy.abs(logprobs)  # float32 rounds the logits of unlikely tokens by more
    table.add(k, "log pi of own tokens", logprobs / size, joined(found).numpy() / size, 1e-5)
    pairs = [(mean(one.logprobs), float(ours.mean())) for one, ours in zip(own, found, strict=True)]
    table.add(k, "log pi of own responses / |y|", *zip(*pairs, strict=True), 1e-5)
    sums = [math.fsum(one.logprobs) for one in own]
    table.add(k, "log pi of own responses as logged", [one.logprob for one in own], sums, 1e-9)


def compare_metrics(table: Table, k: str, metrics: Any, seen: dict[str, float], sources: list[str]) -> None:
    """Compare all quantities that the step's metrics or the audit have of learner k, for each source."""
    for quantity, (path, tolerance) in RECORDED.items():
        for j in sources if "{}" in quantity else [""]:
            recorded = find(metrics, path, j, missing=None)
            if isinstance(recorded, dict):  # reason -> how many
                recorded = sum(recorded.values())
            pair = [recorded, seen.get(quantity.format(j))]
            if pair != [None, None]:
                numbers = [math.nan if one is None else one for one in pair]
                table.add(k, quantity.format(j), *numbers, tolerance)


def compare_weights(table: Table, k: str, optimizer: AdamW, after: Mapping[str, Tensor]) -> None:
    """Compare the checkpoint after the step. AdamW's moments are sums of the step's clipped gradients.

    AdamW turns a gradient as small as rounding into a move of any size up to lr. So weights are compared one
    by one where all gradients of the step are clear of rounding, and as a whole by the length of the move.
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
    """Return a learner's samples of a step, by prompt and source; and how many of each source are dropped."""
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
    """Recompute a step. ``models``: folders of initial models that are not where the config says.

    ``max_reward`` is the task's, for a run whose config leaves it to the task.
    """
    settings, metrics = read_settings(run), read_metrics(run, step)
    if settings.max_reward is None:
        settings.max_reward = max_reward
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
        optimizer = AdamW(learner.model, about.lr or settings.lr, settings, before.get(k, {}))
        compare_log(table, learner, log[k])
        table.add(k, "capability history", history_after[k], history[k], 1e-9)
        for j in (j for j in names if j != k):
            ratios = [omega(j, k, one, settings) for one in (recorded_capability, capability)]
            table.add(k, f"omega({j}, {k})", *ratios, 1e-9)
        samples, dropped = samples_of(learner, groups.values(), capability, settings)
        seen = learn(learner, minibatches(samples, k, step, settings), optimizer, settings)
        seen |= {"mean reward": mean(rewards[k]), "capability P": capability[k]}
        seen |= {f"dropped responses of {j}": number for j, number in dropped.items()}
        for j in (j for j in names if log[j][0].tokenizer != learner.fingerprint):
            lengths = [len(one.ids) / len(one.response.ids) for one in samples if one.response.source == j]
            seen[f"own tokens per token of {j}"] = mean(lengths)
        compare_metrics(table, k, metrics[k], seen, names)
        compare_weights(table, k, optimizer, after[k])
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Recompute one training step of a run, without hacrl.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--step", type=int, required=True, help="which step, from 1")
    parser.add_argument("--model", action="append", default=[], metavar="AGENT=FOLDER", help="initial model")
    parser.add_argument("--max-reward", default="1", help="the task's largest reward, or none (default: 1)")
    given = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    max_reward = None if given.max_reward == "none" else float(given.max_reward)
    table = audit(given.run, given.step, dict(one.split("=", 1) for one in given.model), max_reward)
    print(f"{len(table.rows) - len(table.failed)} of {len(table.rows)} rows pass")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
