"""How much memory an agent will need, worked out from its config.json alone: no weights are loaded.

What stays (weights, master weights, gradients, moments, reference) is exact but for a few buffers. What comes
and goes (the cache of a decoding batch, activations, logits) is an estimate for transformers' usual decoder
layers; on one GPU it was between 9% below and 35% above what was measured. The CUDA context and what the
allocator wastes come on top.

Shapes of the paper's models, from their config.json: enough to size a run without the hub.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hacrl.config.schema import AgentSettings
from hacrl.errors import ModelError
from hacrl.models.compile import WORTH_IT
from hacrl.models.lm_head import MOST_COMPILED_LOGITS, MOST_LOGITS
from hacrl.models.loading import torch_precision
from hacrl.models.lora import add_adapters

FLOAT32 = 4  # bytes
MOMENTS = 2  # Adam's, both float32
# float32 copies of the logits when their log-sum-exp is differentiated: the saved one and three on the way
LOGIT_COPIES = 4
FILTERED_LOGIT_COPIES = (
    12  # top-k and top-p sort them first: values, positions (two copies' worth), sums, ...
)
PREFILLED_TOKENS = 16384  # of prompts that are computed at a time on a GPU: enough to keep it busy
SAMPLED_LOGIT_COPIES = 4  # while decoding: float32, log-probabilities, probabilities, random numbers


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Responses that are generated side by side."""

    prompts: int
    responses: int
    prompt_tokens: int  # of the longest prompt
    new_tokens: int  # at most

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its response."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What an agent has to do that takes memory besides its weights."""

    decodings: tuple[Decoding, ...]  # those of training and of evaluation
    learnt_tokens: int  # in one forward pass of learning
    longest_sample: int  # tokens of the longest prompt and response learnt from
    filtered: bool = False  # top-k or top-p are in use
    reference: bool = False  # there is a KL term
    compiled: bool | None = None  # layers are, in learning; None: where they are by default
    whole_logits: bool = False  # those of a forward pass exist all at once; else in pieces


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Numbers of weights; tied ones count once, adapters are apart."""

    base: int
    adapters: int
    trainable: int
    largest: int  # of a single trained tensor

    @property
    def total(self) -> int:
        """All of the agent's weights."""
        return self.base + self.adapters


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes by part. Of rollout, learning and update, one happens at a time."""

    agent: str
    counts: ParameterCounts
    precision: str  # of the weights
    weights: int
    masters: int
    gradients: int
    moments: int
    reference: int
    cache: int  # keys and values of all responses side by side, at their longest
    decoding: int  # what else decoding needs at its peak
    activations: int  # what all layers keep for the backward pass
    logits: int  # at the beginning of the backward pass ...
    backward: (
        int  # ... and after it: gradients of the largest tensor, and a checkpointed layer computed again
    )
    update: int  # temporary tensors of the optimizer
    engine: int = 0  # of an engine beside the learner that never gives its memory back ...
    taken_by_engine: int = 0  # ... or of any; one that does has it in place of the cache
    layer_sum: int = 0  # float32 gradients of a layer's largest matrix
    head_sum: int = 0  # of an output layer by itself: they come first, when all activations are there

    @property
    def persistent(self) -> int:
        """What is held from the first update to the end."""
        return self.weights + self.masters + self.gradients + self.moments + self.reference + self.engine

    @property
    def rollout(self) -> int:
        """At the longest point of decoding."""
        return self.cache + self.decoding

    @property
    def learning(self) -> int:
        """In the largest forward and backward pass."""
        return self.activations + max(self.logits, self.backward)

    @property
    def transient(self) -> int:
        """The largest of what comes and goes."""
        return max(self.rollout, self.learning, self.update)

    @property
    def peak(self) -> int:
        """With a device of its own."""
        return self.persistent + self.transient


def peak_together(footprints: Iterable[Footprint]) -> int:
    """Several agents on one device keep what is theirs, and take turns with the rest."""
    held = list(footprints)
    return sum(one.persistent for one in held) + max((one.transient for one in held), default=0)


def agent_footprint(
    settings: AgentSettings, config: Any, counts: ParameterCounts, device: str, workload: Workload
) -> Footprint:
    """The memory of one agent whose model has this (transformers) config; ``device`` is "cpu" or "cuda"."""
    dtype = torch_precision(settings, config, device)
    width = dtype.itemsize
    weights = counts.base * width + counts.adapters * FLOAT32
    full, spared = settings.lora is None, settings.gradient_checkpointing
    copies = FILTERED_LOGIT_COPIES if workload.filtered else LOGIT_COPIES
    layer = _Layer(config, width)
    plainly = layer.saved(settings, workload.longest_sample, device)
    compiles = _compiles(settings, width, counts, device, workload)
    saved = layer.saved_compiled(settings) if compiles else plainly
    logits = workload.learnt_tokens * layer.vocabulary
    tied_gradients = 2 * counts.largest * width if full else 0  # embeddings get some from both ends
    decodings = [
        _decoding_bytes(layer, decoding, workload.filtered, device) for decoding in workload.decodings
    ]
    cache, decoding = max(decodings, key=sum, default=(0, 0))
    return Footprint(
        agent=settings.name,
        counts=counts,
        precision=str(dtype).removeprefix("torch."),
        weights=weights,
        masters=counts.trainable * FLOAT32 if full and width < FLOAT32 else 0,
        gradients=counts.trainable * FLOAT32,
        moments=counts.trainable * FLOAT32 * MOMENTS,
        reference=weights if workload.reference and full else 0,
        cache=cache,
        decoding=decoding,
        activations=workload.learnt_tokens * layer.layers * (layer.hidden * width if spared else saved),
        logits=_logit_bytes(logits, copies, workload, width if compiles else None, tied_gradients, device),
        backward=tied_gradients + workload.learnt_tokens * saved * spared,
        layer_sum=layer.hidden * layer.inner * FLOAT32,
        head_sum=0 if _is_tied(config) else counts.largest * FLOAT32,
        # on a CPU the optimizer makes one temporary tensor after the other, on a GPU the fused one makes none
        update=FLOAT32 * counts.largest if device == "cpu" else 0,
    )


def _compiles(
    settings: AgentSettings, width: int, counts: ParameterCounts, device: str, workload: Workload
) -> bool:
    """As :func:`hacrl.models.compile.worth_compiling` finds out from the model itself."""
    if workload.compiled is not None:
        return workload.compiled
    packs = device != "cpu" and width < FLOAT32 and settings.attention in (None, "sdpa")
    return packs and counts.total >= WORTH_IT


def _logit_bytes(
    logits: int, copies: int, work: Workload, compiled: int | None, gradients: int, device: str
) -> int:
    """In pieces, if they are many and can be; ``compiled``: bytes of a number, if the pieces are.

    Pieces that a GPU keeps where it has room are not counted: they take only what is left over.
    """
    if work.whole_logits:
        return logits * FLOAT32 * copies
    if compiled and not work.filtered:  # a piece, which on a GPU becomes its gradient where it is
        return (2 if device == "cpu" else 1) * compiled * min(logits, MOST_COMPILED_LOGITS) + gradients
    in_pieces = logits > MOST_LOGITS  # then those of a piece once more in the weights' precision, both ways
    return min(logits, MOST_LOGITS) * FLOAT32 * (copies + in_pieces)


def _is_tied(config: Any) -> bool:
    """Whether embeddings are the output layer: then its gradient comes with theirs, at the end of a pass."""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


def changes_logits(config: Any) -> bool:
    """Whether a model is known to cap or scale what its output layer gives."""
    text = config.get_text_config()
    values = (
        getattr(text, key, None) for key in ("final_logit_softcapping", "logits_scaling", "logit_scale")
    )
    return any(value not in (None, 1) for value in values)


def count_parameters(settings: AgentSettings, config: Any) -> ParameterCounts:
    """Exact numbers, from the model built without storage."""
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
    return ParameterCounts(
        base=base,
        adapters=sum(sizes) - base,
        trainable=sum(trained),
        largest=max(trained, default=0),
    )


class _Layer:
    """Widths of one decoder layer, whatever the config calls them."""

    def __init__(self, config: Any, width: int) -> None:
        text = config.get_text_config()
        heads = text.num_attention_heads
        head = getattr(text, "head_dim", None) or text.hidden_size // heads
        self.width = width  # bytes of a number
        self.hidden: int = text.hidden_size
        self.heads: int = heads
        self.query: int = heads * head
        self.key: int = (getattr(text, "num_key_value_heads", None) or heads) * head
        self.inner: int = _inner_width(text)
        self.layers: int = text.num_hidden_layers
        self.vocabulary: int = text.vocab_size

    @property
    def cached(self) -> int:
        """Bytes of keys and values per token, in all layers."""
        return 2 * self.layers * self.key * self.width

    def saved(self, settings: AgentSettings, longest: int, device: str) -> int:
        """Bytes a layer keeps per token for its backward pass."""
        width = self.width
        norms = 2 * (FLOAT32 + 2 * width) * self.hidden  # input in float32, scaled, and what comes of it
        norms += (FLOAT32 + width) * (self.query + self.key)  # of queries and keys, where a model has them
        attention = width * (3 * self.query + 2 * self.key)  # queries, keys, values, outputs in two layouts
        if settings.attention == "eager":  # scores and, in float32 and rounded, their softmax
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
        """The same if the layer is compiled: what matrix products and attention give, and the two sums.

        Norms, activations and products of the gate are computed again.
        """
        products = self.query + 2 * self.key + 2 * self.inner
        attention = 2 * self.query + self.key  # its queries and keys, turned, and what comes of it
        return self.width * (2 * self.hidden + products + attention) + self._adapters(settings)

    def _adapters(self, settings: AgentSettings) -> int:
        """Adapters are float32: each gets its own float32 copy of what goes into its layer."""
        copies = FLOAT32 * (5 * self.hidden + self.query + self.inner)
        return copies if settings.lora is not None and self.width < FLOAT32 else 0


def _inner_width(text: Any) -> int:
    """Of the feed-forward part; of a mixture of experts, what one token passes through."""
    experts = getattr(text, "num_experts_per_tok", None)
    if experts and getattr(text, "moe_intermediate_size", None):
        return int(experts * text.moe_intermediate_size)
    for key in ("intermediate_size", "ffn_dim", "n_inner"):
        if getattr(text, key, None):
            return int(getattr(text, key))
    return 4 * int(text.hidden_size)


def _decoding_bytes(layer: _Layer, decoding: Decoding, filtered: bool, device: str) -> tuple[int, int]:
    """The cache when responses are longest, and what else is there at the larger of two peaks.

    The one is a pass over prompts, the other a token's. On a GPU the cache is there from the beginning; on a
    CPU the last token is the largest: keys and values of a layer are copied to append one, and repeated for
    every head that shares them.
    """
    width = layer.width
    cache = decoding.responses * decoding.longest * layer.cached
    copies = FILTERED_LOGIT_COPIES if filtered else SAMPLED_LOGIT_COPIES
    token = decoding.responses * layer.vocabulary * (FLOAT32 * copies + width)
    per_token = width * (3 * layer.inner + 2 * layer.query + 2 * layer.key)
    per_token += (FLOAT32 + 3 * width) * layer.hidden + layer.cached
    prompts = decoding.prompts * decoding.prompt_tokens
    if device != "cpu":
        most = max(PREFILLED_TOKENS, decoding.prompt_tokens)
        return cache, max(token, min(prompts, most) * per_token)
    shared = layer.query // layer.key
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
    """A transformers config with the model's shape, stored in bfloat16 as on the hub; None if not known."""
    from transformers import AutoConfig

    shape = KNOWN_SHAPES.get(model)
    return None if shape is None else AutoConfig.for_model(**shape, dtype="bfloat16")
