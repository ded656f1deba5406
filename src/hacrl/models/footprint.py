"""Estimate how much memory an agent needs from its config.json alone, without loading weights.

Persistent memory (weights, master weights, gradients, moments, reference) is exact except for a few buffers.
Transient memory (key-value cache, activations, logits) is an estimate for transformers' usual decoder layers:
on one GPU, 9% below to 35% above measured numbers. The CUDA context and the allocator's overhead come on top.

The shapes of the paper's models are listed here, so that their runs can be sized without the hub.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hacrl.config.schema import AgentSettings
from hacrl.errors import ModelError
from hacrl.models.architecture import architecture_support, holds_scores
from hacrl.models.compile import MIN_PARAMETERS_TO_COMPILE
from hacrl.models.lm_head import MAX_COMPILED_LOGITS, MAX_LOGITS
from hacrl.models.loading import torch_precision
from hacrl.models.lora import add_adapters
from hacrl.models.recurrent_layers import recurrent_layers

FLOAT32 = 4  # bytes
MOMENTS = 2  # Adam's, both float32
# float32 copies of the logits when their log-sum-exp is differentiated: the saved one and three temporary
# ones
LOGIT_COPIES = 4
FILTERED_LOGIT_COPIES = 12  # top-k and top-p sort logits: values, indices (as large as two copies), sums, ...
PREFILL_TOKENS = 16384  # prompt tokens that are prefilled at a time on a GPU: enough to keep it busy
SAMPLED_LOGIT_COPIES = 4  # while decoding: float32, log-probabilities, probabilities, random numbers


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """A batch of responses that are generated at the same time."""

    prompts: int
    responses: int
    prompt_tokens: int  # of the longest prompt
    new_tokens: int  # per response, at most

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its response."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of an agent that needs transient memory."""

    decodings: tuple[Decoding, ...]  # of training and of evaluation
    learnt_tokens: int  # in one forward pass of learning
    longest_sample: int  # most tokens of a prompt and response that are trained on
    filtered: bool = False  # top-k or top-p is in use
    reference: bool = False  # there is a KL term
    compiled: bool | None = None  # whether learning compiles the layers; None: the default
    whole_logits: bool = False  # all logits of a forward pass exist at once, not in chunks


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Numbers of weights. Tied weights count once; adapters count separately."""

    base: int
    adapters: int
    trainable: int
    largest: int  # size of the largest trained tensor

    @property
    def total(self) -> int:
        """The number of all weights, adapters included."""
        return self.base + self.adapters


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes by purpose. Rollout, learning and update never happen at the same time."""

    agent: str
    counts: ParameterCounts
    precision: str  # of the weights
    weights: int
    masters: int
    gradients: int
    moments: int
    reference: int
    cache: int  # keys and values of all responses at their greatest length
    decoding: int  # temporary tensors at decoding's peak
    activations: int  # tensors that all layers save for the backward pass
    logits: int  # at the beginning of the backward pass
    backward: int  # later in the backward pass: the largest tensor's gradients, a recomputed layer
    update: int  # temporary tensors of the optimizer
    engine: int = 0  # of a separate engine that never releases its memory
    taken_by_engine: int = 0  # of any separate engine; if it releases memory, this replaces the cache
    layer_sum: int = 0  # float32 gradients of a layer's largest matrix
    head_sum: int = 0  # float32 gradients of an untied output layer; they come while all activations exist
    gathered: int = 0  # layers that a rank of several has gathered, and their gradients
    copy: int = 0  # whole weights on rank 0 of several while it generates
    host: int = 0  # of the machine's memory, for all ranks: what fsdp.cpu_offload keeps there

    @property
    def persistent(self) -> int:
        """Memory held from the first update to the end."""
        return self.weights + self.masters + self.gradients + self.moments + self.reference + self.engine

    @property
    def rollout(self) -> int:
        """Transient memory when responses are longest."""
        return self.copy + self.cache + self.decoding

    @property
    def learning(self) -> int:
        """Transient memory of the largest forward and backward pass."""
        return self.gathered + self.activations + max(self.logits, self.backward)

    @property
    def transient(self) -> int:
        """The largest transient memory."""
        return max(self.rollout, self.learning, self.update)

    @property
    def peak(self) -> int:
        """Peak memory on a device that the agent does not share."""
        return self.persistent + self.transient


def peak_together(footprints: Iterable[Footprint]) -> int:
    """Return the peak of agents on one device: all persistent memory, one agent's transient memory."""
    agents = list(footprints)
    return sum(agent.persistent for agent in agents) + max((agent.transient for agent in agents), default=0)


def agent_footprint(
    settings: AgentSettings, config: Any, counts: ParameterCounts, device: str, workload: Workload
) -> Footprint:
    """Return the memory of an agent whose model has this transformers config; ``device``: "cpu" or "cuda"."""
    dtype = torch_precision(settings, config, device)
    width = dtype.itemsize
    weights = counts.base * width + counts.adapters * FLOAT32
    trains_all, checkpointing = settings.lora is None, settings.gradient_checkpointing
    copies = FILTERED_LOGIT_COPIES if workload.filtered else LOGIT_COPIES
    layer = _Layer(config, width)
    uncompiled = layer.saved(settings, workload.longest_sample, device)
    packs = architecture_support(config, settings.attention).path == "packed"
    compiles = _compiles(width, counts, device, workload, packs)
    saved = layer.saved_compiled(settings) if compiles else uncompiled
    logits = workload.learnt_tokens * layer.vocabulary
    tied_gradients = (
        2 * counts.largest * width if trains_all else 0
    )  # tied embeddings get gradients from both ends of the model
    decodings = [
        _decoding_bytes(layer, decoding, workload.filtered, device) for decoding in workload.decodings
    ]
    cache, decoding = max(decodings, key=sum, default=(0, 0))
    whole = Footprint(
        agent=settings.name,
        counts=counts,
        precision=str(dtype).removeprefix("torch."),
        weights=weights,
        masters=counts.trainable * FLOAT32 if trains_all and width < FLOAT32 else 0,
        gradients=counts.trainable * FLOAT32,
        moments=counts.trainable * FLOAT32 * MOMENTS,
        reference=weights if workload.reference and trains_all else 0,
        cache=cache,
        decoding=decoding,
        activations=workload.learnt_tokens
        * (layer.layers * layer.hidden * width if checkpointing else layer.layers * saved + layer.recurrent),
        logits=_logit_bytes(logits, copies, workload, width if compiles else None, tied_gradients, device),
        backward=tied_gradients + workload.learnt_tokens * (saved + layer.recurrence) * checkpointing,
        layer_sum=layer.hidden * layer.inner * FLOAT32,
        head_sum=0 if _is_tied(config) else counts.largest * FLOAT32,
        # a CPU's optimizer makes one temporary tensor at a time, a GPU's fused optimizer makes none
        update=FLOAT32 * counts.largest if device == "cpu" else 0,
    )
    if settings.frozen:
        return replace(
            whole, reference=0, activations=0, logits=0, backward=0, layer_sum=0, head_sum=0, update=0
        )
    # the ranks of an agent on a CPU share the machine's memory: together they need what one process would
    return whole if settings.ranks == 1 or device == "cpu" else _of_rank(whole, settings, layer.layers, width)


def _of_rank(whole: Footprint, settings: AgentSettings, layers: int, width: int) -> Footprint:
    """Return the memory of rank 0 of an agent whose weights are sharded over its ranks."""
    counts, ranks = whole.counts, settings.ranks
    trained = counts.trainable * FLOAT32  # shards are float32: they are the master weights
    weights = trained + (counts.total - counts.trainable) * width
    kept = [weights, whole.gradients, whole.moments]
    on_device = [0, 0, 0] if settings.fsdp.cpu_offload else [-(-size // ranks) for size in kept]
    # FSDP2 gathers a layer while it computes the one before. Embeddings and an untied output layer are
    # gathered for the whole pass. A unit's gradients are whole until they are summed over ranks in float32.
    ends = counts.largest * (2 if whole.head_sum else 1)
    layer = max(0, counts.base - ends) // max(1, layers)
    largest = max(layer, ends) if settings.lora is None else 0
    return replace(
        whole,
        weights=on_device[0],
        masters=0,
        gradients=on_device[1],
        moments=on_device[2],
        reference=-(-whole.reference // ranks),
        gathered=(ends + 2 * layer) * width + largest * (width + FLOAT32),
        copy=whole.weights,
        host=sum(kept) if settings.fsdp.cpu_offload else 0,
    )


def _compiles(width: int, counts: ParameterCounts, device: str, workload: Workload, packs: bool) -> bool:
    """Return whether learning compiles the layers, as compiles_by_default does for a loaded model."""
    if workload.compiled is not None:
        return workload.compiled
    has_kernel = device != "cpu" and width < FLOAT32 and packs
    return has_kernel and counts.total >= MIN_PARAMETERS_TO_COMPILE


def _logit_bytes(
    logits: int, copies: int, work: Workload, compiled: int | None, gradients: int, device: str
) -> int:
    """Return the bytes of logits and of what is computed from them.

    ``compiled``: bytes of a number if chunks are compiled, else None. The logit cache is not counted, because
    it only uses spare memory.
    """
    if work.whole_logits:
        return logits * FLOAT32 * copies
    if compiled and not work.filtered:  # one chunk, which on a GPU is overwritten with its gradient
        return (2 if device == "cpu" else 1) * compiled * min(logits, MAX_COMPILED_LOGITS) + gradients
    in_chunks = logits > MAX_LOGITS  # then also a chunk's logits and gradients in the weights' precision
    return min(logits, MAX_LOGITS) * FLOAT32 * (copies + in_chunks)


def _is_tied(config: Any) -> bool:
    """Return whether the output layer is the embeddings, so that its gradient is complete only at the end."""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


def changes_logits(config: Any) -> bool:
    """Return whether the config says that the model caps or scales its logits."""
    text = config.get_text_config()
    values = (
        getattr(text, key, None) for key in ("final_logit_softcapping", "logits_scaling", "logit_scale")
    )
    return any(value not in (None, 1) for value in values)


def count_parameters(settings: AgentSettings, config: Any) -> ParameterCounts:
    """Return exact numbers of weights, counted on a model without storage."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
    except ValueError as error:
        raise ModelError(
            f"agent {settings.name!r}: {settings.model!r} is not a causal language model: {error}"
        ) from error
    base = sum(parameter.numel() for parameter in model.parameters())
    if settings.lora is not None:
        model = add_adapters(model, settings, seed=0)
    sizes = [parameter.numel() for parameter in model.parameters()]
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    trained = [] if settings.frozen else trained
    return ParameterCounts(
        base=base,
        adapters=sum(sizes) - base,
        trainable=sum(trained),
        largest=max(trained, default=0),
    )


class _Layer:
    """The widths of one decoder layer, under whatever names the config has them."""

    def __init__(self, config: Any, width: int) -> None:
        text = config.get_text_config()
        heads = _largest(text, "num_attention_heads")  # 0: no layer attends
        head = (_largest(text, "head_dim") or text.hidden_size // heads) if heads else 0
        self.width = width  # bytes of a number
        self.hidden: int = text.hidden_size
        self.heads: int = heads
        self.query: int = heads * head
        self.key: int = (_largest(text, "num_key_value_heads") or heads) * head
        self.inner: int = _inner_width(text)
        self.layers: int = text.num_hidden_layers
        self.vocabulary: int = text.vocab_size
        self._config = config
        self._recurrent = recurrent_layers(config)
        # sequences whose state cannot be shared compute their prompts one by one
        self.shares_prompts = self._recurrent.layers == 0

    @property
    def cached(self) -> int:
        """Bytes of keys and values per token, in all layers that attend."""
        return 2 * self._recurrent.attention_layers * self.key * self.width

    @property
    def state(self) -> int:
        """Bytes of recurrent and convolution states per sequence, in all layers."""
        return FLOAT32 * self._recurrent.layers * self._recurrent.state

    @property
    def recurrence(self) -> int:
        """Bytes per token that one recurrent layer saves beside what every layer saves."""
        return FLOAT32 * self._recurrent.saved

    @property
    def recurrent(self) -> int:
        """Return the same for all recurrent layers."""
        return self._recurrent.layers * self.recurrence

    def _holds_scores(self, settings: AgentSettings) -> bool:
        return settings.attention == "eager" or (settings.attention is None and holds_scores(self._config))

    def saved(self, settings: AgentSettings, longest: int, device: str) -> int:
        """Return the bytes per token that a layer saves for its backward pass."""
        width = self.width
        norms = 2 * (FLOAT32 + 2 * width) * self.hidden  # input in float32, scaled input, output
        norms += (FLOAT32 + width) * (self.query + self.key)  # of queries and keys; not all models have them
        attention = width * (3 * self.query + 2 * self.key)  # queries, keys, values, outputs in two layouts
        if self._holds_scores(settings):  # scores and, in float32 and rounded, their softmax
            attention += self.heads * longest * (FLOAT32 + 2 * width)
        elif (
            settings.attention in (None, "sdpa")
            and self.key < self.query
            and (device, width) == ("cuda", FLOAT32)
        ):
            attention += self.heads * longest * FLOAT32  # no fused kernel for shared heads in float32
        gated = 4 * width * self.inner  # gate, its activation, up, their product
        return norms + attention + gated + self._adapters(settings)

    def saved_compiled(self, settings: AgentSettings) -> int:
        """Return the same for a compiled layer: outputs of matrix products and attention, residual sums.

        Norms, activations and the gated product are recomputed.
        """
        products = self.query + 2 * self.key + 2 * self.inner
        attention = 2 * self.query + self.key  # rotated queries and keys, and the output
        return self.width * (2 * self.hidden + products + attention) + self._adapters(settings)

    def _adapters(self, settings: AgentSettings) -> int:
        """Return the bytes of adapters' inputs: each adapter saves a float32 copy of its layer's input."""
        copies = FLOAT32 * (5 * self.hidden + self.query + self.inner)
        return copies if settings.lora is not None and self.width < FLOAT32 else 0


def _largest(text: Any, key: str) -> int:
    """Return a width of the config, the largest if layers differ in it; 0 if the config does not say."""
    try:
        return int(getattr(text, key, None) or 0)
    except RuntimeError:  # transformers' answer for a width that differs from layer to layer
        return max(int(getattr(layer, key, None) or 0) for layer in text.per_layer_config)


def _inner_width(text: Any) -> int:
    """Return the feed-forward width; for a mixture of experts, that of the experts one token uses."""
    experts = getattr(text, "num_experts_per_tok", None)
    if experts and getattr(text, "moe_intermediate_size", None):
        return int(experts * text.moe_intermediate_size)
    for key in ("intermediate_size", "ffn_dim", "n_inner"):
        if width := getattr(text, key, None):
            return int(max(width) if isinstance(width, list | tuple) else width)  # one width per layer
    return 4 * int(text.hidden_size)


def _decoding_bytes(layer: _Layer, decoding: Decoding, filtered: bool, device: str) -> tuple[int, int]:
    """Return the bytes of the key-value cache at its largest, and of temporary tensors at decoding's peak.

    The peak is either the prefill or one token's pass. A GPU has the whole cache from the beginning. On a CPU
    the last token needs most: a layer's keys and values are copied to append one, and repeated for every
    query head.
    """
    width = layer.width
    cache = decoding.responses * (decoding.longest * layer.cached + layer.state)
    copies = FILTERED_LOGIT_COPIES if filtered else SAMPLED_LOGIT_COPIES
    token = decoding.responses * layer.vocabulary * (FLOAT32 * copies + width)
    per_token = width * (3 * layer.inner + 2 * layer.query + 2 * layer.key)
    per_token += (FLOAT32 + 3 * width) * layer.hidden + layer.cached + layer.recurrence
    prompts = (decoding.prompts if layer.shares_prompts else decoding.responses) * decoding.prompt_tokens
    if device != "cpu" and not layer.shares_prompts:
        return cache, max(token, prompts * per_token)
    if device != "cpu":
        prefill = min(prompts, max(PREFILL_TOKENS, decoding.prompt_tokens))
        return cache, max(token, prefill * per_token)
    shared = layer.query // max(1, layer.key)
    one_layer = cache // layer.layers
    last = one_layer // 2 + (one_layer * shared if shared > 1 else 0) + token
    return cache, max(last, prompts * per_token - cache)


_QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
_QWEN3_1_7B = {
    **_QWEN3,
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 6144,
    "tie_word_embeddings": True,
}
_QWEN3_4B = {
    **_QWEN3,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
}
_QWEN3_8B = {
    **_QWEN3,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
_LLAMA_3_2 = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}

KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": {**_QWEN3_1_7B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-1.7B-Base": {**_QWEN3_1_7B, "max_position_embeddings": 32768},
    "Qwen/Qwen3-4B": {**_QWEN3_4B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-4B-Base": {**_QWEN3_4B, "max_position_embeddings": 32768},
    "Qwen/Qwen3-4B-Instruct-2507": {**_QWEN3_4B, "max_position_embeddings": 262144},
    "Qwen/Qwen3-8B": {**_QWEN3_8B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-8B-Base": {**_QWEN3_8B, "max_position_embeddings": 32768},
    "meta-llama/Llama-3.2-1B-Instruct": {
        **_LLAMA_3_2,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
    },
    "meta-llama/Llama-3.2-3B-Instruct": {
        **_LLAMA_3_2,
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
    },
}


def known_config(model: str) -> Any | None:
    """Return a transformers config with the model's shape and dtype on the hub, or None for other models."""
    from transformers import AutoConfig

    shape = KNOWN_SHAPES.get(model)
    return None if shape is None else AutoConfig.for_model(**shape, dtype="bfloat16")
