"""Seconds of the parts of a step on a cluster, scaled from what was measured on one H200 and two CPU cores.

Every number of :class:`Costs` names its source. "docs/performance.md" is a measurement of this repository,
"benchmarks/record_traffic.py" prints the numbers of records; those marked ASSUMED were never measured here,
because nothing of hacrl has run on two GPUs or two hosts. :func:`times_of` holds the rules of scaling.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOKENS, FEW_TOKENS, BUSY = 32_768, 4_096, 2e13  # learning.micro_batch_tokens, as hacrl chooses them


@dataclass(frozen=True)
class Model:
    """A dense decoder."""

    parameters: float
    layers: int
    kv_bytes: int  # of one token in all layers, 16 bits
    width: int  # query heads x head size


# kv_bytes: 2 (keys, values) x layers x heads of keys x head size x 2 bytes
MODELS = {
    "135m": Model(0.135e9, 30, 23_040, 576),  # SmolLM2
    "270m": Model(0.268e9, 18, 18_432, 1024),  # Gemma 3
    "0.5b": Model(0.5e9, 22, 28_160, 1280),  # the Llama shape of benchmarks/shapes.py
    "0.6b": Model(0.596e9, 28, 114_688, 2048),  # Qwen3
    "1.7b": Model(1.72e9, 28, 114_688, 2048),
    "4b": Model(4.02e9, 36, 147_456, 4096),
    "7b": Model(7.6e9, 28, 57_344, 3584),  # Qwen2.5
    "8b": Model(8.19e9, 36, 147_456, 4096),
    "14b": Model(14.8e9, 40, 163_840, 5120),
    "32b": Model(32.8e9, 64, 262_144, 8192),
    "70b": Model(70.6e9, 80, 327_680, 8192),  # Llama 3
}


@dataclass(frozen=True)
class Costs:
    """Speeds of devices, and seconds of what does not scale with them."""

    # The GPU. docs/performance.md, first paragraph: 734 to 810 TFLOP/s for a matrix product, 4.2 TB/s.
    flops: float = 770e12
    memory: float = 4.2e12
    # Decoding. Seconds per layer and decode step that no batch hides: fitted to "Growth with the batch" in
    # docs/performance.md (0.6B, 28 layers, 367 tokens of context, 1 to 512 responses: 2.4 to 7.8 ms).
    layer_latency: float = 72e-6
    # vLLM's own time per decode step: 256 x 256 tokens at 27,798 tokens/s are 9.2 ms a step, of which the
    # rule above explains 4.5 (docs/performance.md, "Rollouts").
    vllm_step: float = 4.7e-3
    # Learning. Share of the GPU's speed: 0.6B 57% in the step of 4.52 s, 1.7B 54% (6.8 s, offload: stream).
    learning: float = 0.55
    # Gradient checkpointing: 8.36 s instead of 6.8 s (benchmarks/measured/learn_hacrl_stream.json).
    checkpointing: float = 1.23
    # Bytes per weight that AdamW reads and writes: master 4+4, moments 8+8, gradient 4, copy in 16 bits 2.
    optimizer_bytes: float = 30.0
    # Weight sync with its check on one GPU: 0.22 s for 0.6B, 0.24 s for 4B (docs/performance.md, ipc).
    sync: float = 0.216
    sync_per_parameter: float = 6e-12
    # Records, per response token (benchmarks/record_traffic.py: 512 rollouts x 256 tokens, one core).
    record_bytes: float = 20.1  # pickled, log-probabilities and text included
    record_put: float = 0.110e-6
    record_get: float = 0.091e-6
    log_write: float = 0.164e-6
    learnt_write: float = 0.086e-6  # the log of what a learner made of a rollout in other tokens
    # Another agent's text in a learner's tokens: 0.55 s for 1,024 x 300 tokens, and the learner's samples:
    # 0.23 s for 1,000 rollouts of 300 tokens (benchmarks/retokenising.py, benchmarks/many_agents.py).
    retokenise: float = 1.8e-6
    prepare: float = 0.77e-6
    # Length of another agent's response in a learner's tokens: 0.9 to 1.4 times with real tokenizers
    # (docs/results.md), 1.33 with random weights (docs/performance.md).
    foreign_length: float = 1.0
    # ASSUMED: all links. 80% of NVLink 4's 450 GB/s each way, 80% of one 400 Gb/s port for each GPU; the
    # latency of an all-reduce inside a host.
    nvlink: float = 360e9
    network: float = 40e9
    all_reduce: float = 10e-6


@dataclass(frozen=True)
class Lengths:
    """Response lengths: lognormal, cut at ``longest``. ``sigma`` 0 makes all lengths equal the median."""

    median: float
    sigma: float
    longest: int


@dataclass(frozen=True)
class Plan:
    """One agent: its model, its GPUs and its share of the work of a step."""

    name: str
    model: Model
    ranks: int = 1
    engines: int = 1
    tensor_parallel: int = 1
    colocated: bool = True  # engines are on the learner's GPUs and take turns with it
    engine: str = "vllm"
    slots: int = 256  # responses that one engine decodes at a time
    prompts: int = 128
    responses: int = 8  # G
    prompt_tokens: int = 150
    lengths: Lengths = Lengths(1024, 0.0, 1024)
    updates: int = 1  # of a step
    verify: float = 0.0052  # CPU seconds: 193 answers/s by one worker, half symbolic (docs/verification.md)
    verifiers: int = 8
    tokenizer: str = ""
    checkpointing: bool = False
    micro_batch: int | None = None  # tokens of a rank; None: as hacrl chooses
    gpus_of: str | None = None  # take turns on the GPUs of this agent; None: GPUs of its own

    @property
    def device(self) -> str:
        """The agent that the GPUs are named after."""
        return self.gpus_of or self.name

    @property
    def gpus(self) -> int:
        """GPUs of learner and engines."""
        engines = self.engines * self.tensor_parallel
        return max(self.ranks, engines) if self.colocated else self.ranks + engines


@dataclass(frozen=True)
class Times:
    """What the simulation needs of one agent: seconds only."""

    decode: float  # of a decode step, whatever the batch
    read_weights: float  # of a decode step, hidden behind ...
    per_response: float  # ... the arithmetic of as many responses
    per_context: float  # of a decode step, per token in the KV cache
    prefill: float  # per prompt
    learn: float  # per token that the learner computes
    micro_batch: int  # tokens of all ranks together between two sums of gradients
    gather: float  # communication of one micro-batch; overlaps with learning
    update: float  # per optimizer step
    sync: float


def micro_batch_tokens(parameters: float) -> int:
    """Return what a rank computes at a time: enough to keep the GPU busy, as hacrl chooses it."""
    tokens = FEW_TOKENS
    while tokens < MOST_TOKENS and tokens * parameters < BUSY:
        tokens *= 2
    return tokens


def times_of(plan: Plan, costs: Costs, gpus_per_host: int = 8) -> Times:
    """Scale the measured costs to an agent.

    - A decode step takes a latency per layer, reads all weights or computes on all responses (the slower of
      the two), and reads the KV cache. Tensor parallelism divides all but the latency, and adds two
      all-reduces per layer.
    - Learning takes 6 FLOPs per weight and token, and attention to half of the sequence.
    - A rank receives every weight twice and sends every gradient once per micro-batch: 2 + 2 + 4 bytes.
    - Ranks within a host talk over NVLink, others over the network. So do learner and engines.
    """
    model, tensor_parallel, ranks = plan.model, plan.tensor_parallel, plan.ranks
    parameters, flops, memory = model.parameters, costs.flops, costs.memory
    latency = costs.layer_latency * model.layers + (costs.vllm_step if plan.engine == "vllm" else 0.0)
    if tensor_parallel > 1:
        latency += 2 * model.layers * costs.all_reduce
    context = plan.prompt_tokens + plan.lengths.median / 2
    learning = 6 * parameters + 12 * model.layers * model.width * context
    learning *= costs.checkpointing if plan.checkpointing else 1.0
    link = costs.nvlink if ranks <= gpus_per_host else costs.network
    others = (ranks - 1) / ranks
    tokens = plan.micro_batch or micro_batch_tokens(parameters)
    sync = costs.sync + costs.sync_per_parameter * parameters + 2 * parameters * others / link
    if not plan.colocated:
        sync += 2 * parameters / (costs.nvlink if plan.gpus <= gpus_per_host else costs.network)
    return Times(
        decode=latency,
        read_weights=2 * parameters / memory / tensor_parallel,
        per_response=2 * parameters / flops / tensor_parallel,
        per_context=model.kv_bytes / memory / tensor_parallel,
        prefill=2 * parameters * plan.prompt_tokens / (costs.learning * flops) / tensor_parallel,
        learn=learning / (costs.learning * flops) / ranks,
        micro_batch=tokens * ranks,
        gather=8 * parameters * others / link,
        update=costs.optimizer_bytes * parameters / ranks / memory,
        sync=sync,
    )
