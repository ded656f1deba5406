"""Random agents in shapes that vLLM supports on a CPU, and comparisons of an engine's results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from hacrl.engines.answering import decode_rollouts
from hacrl.engines.base import Engine, GenerationRequest, Sample, SyncReport
from hacrl.engines.vllm.engine import VllmEngine
from hacrl.models.agent import Agent
from hacrl.models.stop_strings import StopStrings
from hacrl.types import Problem, Rollout, Sampling
from tests.support.forward import plain_logprobs, warped
from tests.support.sevens import problem
from tests.support.tiny import character_tokenizer, pair_tokenizer

PROBLEMS = [problem(prompt) for prompt in ("1:", "(23+14)*2:", "7-4:", "2+3+4+5+6+77:", "0:")]
ONE_TOKEN = problem("7")
CONTEXT = 512
LONG = problem("1" + "+1" * 149 + ":")  # 300 tokens: more than one block of a vLLM cache
STEADY = 1.0  # first number of every embedding, which no layer changes: lm_head can lean on it
MODELS_OWN_EOS = 8  # "5" is what the model's config calls eos; the agent stops at 1


def sample_rollouts(
    engine: Engine,
    problems: Sequence[Problem],
    samples: int,
    sampling: Sampling,
    seed: int,
    on_finished: Callable[[int, Rollout], None] | None = None,
) -> list[Rollout]:
    """Return ``samples`` rollouts per problem; ``on_finished`` gets each one's index and rollout."""
    agent = engine.policy
    assert isinstance(agent, Agent)
    prompts = [agent.encode_prompt(problem) for problem in problems]
    stop_strings = StopStrings(agent, sampling.stop) if sampling.stop else None
    request = GenerationRequest(prompts, samples, sampling, frozenset(agent.stop_ids), seed, stop_strings)

    def decode(finished: Sequence[tuple[int, Sample]]) -> None:
        answered = [(problems[index // samples], sample) for index, sample in finished]
        decoded = decode_rollouts(agent, answered, stop_strings)
        for (index, _), rollout in zip(finished, decoded, strict=True):
            on_finished(index, rollout)

    found = engine.generate(request, None if on_finished is None else decode)
    answered = [(problems[index // samples], sample) for index, sample in enumerate(found)]
    return decode_rollouts(agent, answered, stop_strings)


def probe_prompts(agent: Agent) -> list[tuple[int, ...]]:
    """Return the prompts with which a vLLM engine of the agent proves its weights."""
    return [agent.encode_prompt(problem) for problem in PROBLEMS]


def engine_agent(
    name: str = "ada",
    seed: int = 0,
    tied: bool = False,
    leaning: Mapping[str, float] | None = None,
    stop_ids: Sequence[int] = (1,),
    pairs: bool = False,
) -> Agent:
    """Return a random Qwen3; ``leaning`` makes tokens more likely, e.g. ``{"<eos>": 2}``.

    Heads are 32 wide, the narrowest that vLLM has kernels for on a CPU.
    """
    tokenizer = pair_tokenizer() if pairs else character_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        vocab_size=len(tokenizer),
        eos_token_id=MODELS_OWN_EOS,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():  # a zero vector, as padding has it, is normed to whatever is in its last digits
        model.model.embed_tokens.weight[0].normal_(std=0.2)
    model.generation_config.eos_token_id = list(stop_ids)
    if leaning:
        _lean(model, {tokenizer.convert_tokens_to_ids(token): more for token, more in leaning.items()})
    return Agent(name, model, tokenizer)


@torch.no_grad()
def _lean(model: Any, more: Mapping[int, float]) -> None:
    assert not model.config.tie_word_embeddings
    model.model.embed_tokens.weight[:, 0] = STEADY
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    model.model.norm.weight[0] = 5.0  # about 1 then, whatever else there is: leanings are logits
    model.lm_head.weight[:, 0] = 0
    for token, value in more.items():
        model.lm_head.weight[token, 0] = value


@torch.no_grad()
def change_weights(agent: Agent, seed: int, size: float = 0.2) -> None:
    """Change every weight by a large random amount, and count an update."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in agent.model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    agent.policy_version += 1


def logprob_gap(agent: Agent, rollouts: Sequence[Rollout], sampling: Sampling) -> float:
    """Largest |engine's - plain forward pass's| log-probability of a token."""
    return max(float((given(r) - plain(agent, r, sampling)).abs().max()) for r in rollouts)


def mean_gap(agent: Agent, rollouts: Sequence[Rollout], sampling: Sampling) -> float:
    """Mean |engine's - plain forward pass's| log-probability of a token."""
    return float(torch.cat([(given(r) - plain(agent, r, sampling)).abs() for r in rollouts]).mean())


def given(rollout: Rollout) -> Tensor:
    """Return the engine's log-probabilities."""
    return torch.tensor(rollout.token_logprobs, dtype=torch.float64)


@torch.no_grad()
def plain(agent: Agent, rollout: Rollout, sampling: Sampling) -> Tensor:
    """Return the log-probabilities of a plain forward pass over this sequence."""
    prompt_ids = agent.encode_prompt(rollout.problem)
    return plain_logprobs(agent.model, prompt_ids, rollout.token_ids, sampling).double()


@torch.no_grad()
def next_token_probabilities(agent: Agent, prompt_ids: Sequence[int], sampling: Sampling) -> list[float]:
    """Return the probability of every token of the vocabulary."""
    logits = agent.model(torch.tensor([list(prompt_ids)]), use_cache=False).logits[:, -1]
    return warped(logits, sampling)[0].softmax(dim=-1).tolist()


@torch.no_grad()
def greedy_ids(agent: Agent, prompt_ids: Sequence[int], most: int) -> tuple[int, ...]:
    """Decode greedily, with a forward pass over the whole sequence for every token."""
    said: list[int] = []
    while len(said) < most and not (said and said[-1] in agent.stop_ids):
        logits = agent.model(torch.tensor([[*prompt_ids, *said]]), use_cache=False).logits[0, -1]
        said.append(int(logits.argmax()))
    return tuple(said)


class AlreadyRunning:
    """A vLLM that is already running, so that engines of several agents can use it in turn."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def start(self) -> None:
        """It is."""

    def close(self) -> None:
        """It stays."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def take_for_proven(engine: VllmEngine) -> None:
    """Mark the weights of a fake engine as synced and checked."""
    version = engine.policy.policy_version
    engine._version, engine._report = version, SyncReport(version, "none", 0.0, engine.restarts)
