"""Memory estimates: persistent memory against real learners, transient memory against hand computations."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AgentSettings, HacpoSettings, LearningSettings, LoraSettings
from hacrl.errors import ModelError
from hacrl.models.agent import Agent
from hacrl.models.footprint import (
    KNOWN_SHAPES,
    Decoding,
    Footprint,
    ParameterCounts,
    Workload,
    changes_logits,
    count_parameters,
    known_config,
    peak_together,
)
from hacrl.models.loading import load_model
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample, Sampling
from tests.models.footprints import LLAMA_3B, QWEN3_1_7B, QWEN3_4B, footprint_of, settings
from tests.support.tiny import char_agent, pair_agent


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [(QWEN3_1_7B, 1_720_574_976), (QWEN3_4B, 4_022_468_096), (LLAMA_3B, 3_212_749_824)],
)
def test_parameters_of_known_models(shape, parameters):
    counts = count_parameters(settings(), AutoConfig.for_model(**shape))
    assert counts == ParameterCounts(
        base=parameters,
        adapters=0,
        trainable=parameters,
        largest=shape["vocab_size"] * shape["hidden_size"],  # the embeddings
    )


def test_adapters_of_a_known_model():
    # rank x (in + out) of each linear layer, query 4096 and key 1024 wide; the head gets none:
    # q 2560+4096, k and v 2560+1024, o 4096+2560, gate and up 2560+9728, down 9728+2560
    per_layer = 16 * (2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728))
    counts = count_parameters(settings(lora=LoraSettings(rank=16)), AutoConfig.for_model(**QWEN3_4B))
    assert counts.adapters == counts.trainable == 36 * per_layer == 33_030_144
    assert counts.base == 4_022_468_096
    assert counts.total == 4_055_498_240


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("Qwen/Qwen3-1.7B-Base", 1_720_574_976),
        ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
    ],
)
def test_built_in_shapes(model, parameters):
    config = known_config(model)
    assert count_parameters(settings(), config).total == parameters
    assert footprint_of(config, device="cuda").precision == "bfloat16"  # as on the hub


def test_all_built_in_shapes_are_complete_and_others_unknown():
    keys = set(QWEN3_4B) | {"max_position_embeddings"}
    assert {name: set(shape) for name, shape in KNOWN_SHAPES.items()} == dict.fromkeys(KNOWN_SHAPES, keys)
    assert known_config("somebody/else") is None


CASES = [
    {},
    {"precision": "bfloat16"},
    {"lora": LoraSettings(rank=2)},
    {"precision": "bfloat16", "lora": LoraSettings(rank=2)},
    {"precision": "bfloat16", "lora": LoraSettings(rank=2, targets=("q_proj",))},
]


@pytest.mark.parametrize("kl", [0.0, 0.001])
@pytest.mark.parametrize("options", CASES, ids=["float32", "bfloat16", "lora", "lora-bf16", "lora-q"])
@pytest.mark.parametrize("make", [char_agent, pair_agent])
def test_persistent_memory_equals_a_real_learners(make, options, kl, tmp_path):
    start = make()
    start.save(tmp_path)
    agent_settings = AgentSettings(name="a", model=str(tmp_path), **options)
    agent = Agent("a", load_model(agent_settings, start.tokenizer, "cpu"), start.tokenizer)
    method = make_method(HacpoSettings(kl_coefficient=kl))
    learner = Learner(agent, method, LearningSettings(), Sampling(4))
    learner.learn([LearnerSample((5,), (6, 7), (-1.0, -1.0), -2.0, 2, "a", True, 1.0)], updates=1, seed=0)

    estimate = footprint_of(
        AutoConfig.from_pretrained(tmp_path),
        Workload(decodings=(), learnt_tokens=0, longest_sample=0, reference=kl > 0),
        **options,
    )
    model, optimizer = agent.model, learner.optimizer
    masters = optimizer.masters
    own = {parameter.data_ptr() for parameter in model.parameters()}
    moments = [
        state[key]
        for piece in optimizer.blocks
        for state in piece.adamw.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    copy = [*learner._reference._model.parameters()] if kl and "lora" not in options else []
    assert estimate.weights == size_of(model.parameters())
    assert estimate.masters == size_of(master for master in masters if master.data_ptr() not in own)
    assert estimate.gradients == size_of(optimizer.gradients)
    assert all(parameter.grad is None for parameter in model.parameters() if parameter.dtype != torch.float32)
    assert estimate.moments == size_of(moments) > 0
    assert estimate.reference == size_of(copy)
    assert estimate.counts.trainable == sum(master.numel() for master in masters)


def size_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_bytes_of_a_full_bfloat16_agent():
    estimate = footprint_of(
        AutoConfig.for_model(**QWEN3_4B),
        Workload(decodings=(), learnt_tokens=0, longest_sample=0, reference=True),
        precision="bfloat16",
    )
    # 2 weights + 4 masters + 4 gradients + 8 moments + 2 reference
    assert estimate.persistent == 20 * 4_022_468_096


def test_cache_of_keys_and_values():
    decoding = Decoding(prompts=8, responses=64, prompt_tokens=1024, new_tokens=4096)
    work = Workload(decodings=(decoding,), learnt_tokens=0, longest_sample=0)
    qwen = footprint_of(AutoConfig.for_model(**QWEN3_4B), work, precision="bfloat16")
    # 64 responses x 5120 tokens x 36 layers x 8 heads x 128 x (keys, values) x 2 bytes: 45 GiB exactly
    assert qwen.cache == 64 * 5120 * 36 * 8 * 128 * 2 * 2 == 45 * 2**30
    # one layer is 1.25 GiB: its keys copied (0.625), both repeated for 4 heads each (5); logits 64 x 151936,
    # 4 x float32 and the model's own
    assert qwen.decoding == int(5.625 * 2**30) + 64 * 151936 * 18
    wide = footprint_of(AutoConfig.for_model(**QWEN3_4B), work, precision="float32")
    assert wide.cache == 2 * qwen.cache


def test_the_larger_of_two_decodings_counts():
    short = Decoding(prompts=64, responses=64, prompt_tokens=100, new_tokens=100)
    long = Decoding(prompts=64, responses=64, prompt_tokens=100, new_tokens=200)
    work = [
        Workload(decodings=d, learnt_tokens=0, longest_sample=0)
        for d in ((short, long), (long, short), (long,))
    ]
    first, second, alone = (footprint_of(AutoConfig.for_model(**LLAMA_3B), one) for one in work)
    assert first.rollout == second.rollout == alone.rollout


def test_many_long_prompts_with_short_answers_peak_in_their_first_pass():
    decoding = Decoding(prompts=64, responses=64, prompt_tokens=1000, new_tokens=1)
    work = Workload(decodings=(decoding,), learnt_tokens=0, longest_sample=0)
    estimate = footprint_of(AutoConfig.for_model(**LLAMA_3B), work, precision="bfloat16")
    # per token: 2 x (3 x 8192 + 2 x 3072 + 2 x 1024) + (4 + 6) x 3072 and the cache, 28 x 2 x 1024 x 2
    assert estimate.rollout == 64_000 * (65_536 + 30_720 + 114_688)


def test_logits_and_activations_of_learning():
    work = Workload(decodings=(), learnt_tokens=5120, longest_sample=5120)
    config = AutoConfig.for_model(**QWEN3_4B)
    whole = footprint_of(config, work, precision="bfloat16")
    spared = footprint_of(config, work, precision="bfloat16", gradient_checkpointing=True)
    assert whole.logits == spared.logits == 2**26 * 4 * 5  # in chunks: all would be nine times that
    # a layer keeps per token: two norms of 2560 (float32, bfloat16 twice), those of queries and keys
    # (float32, bfloat16), queries and outputs (3 x 4096), keys and values (2 x 1024), and 4 x 9728
    layer = 2 * 8 * 2560 + 6 * 5120 + 2 * (3 * 4096 + 2 * 1024) + 2 * 4 * 9728
    assert layer == 178_176
    largest = 2 * 151936 * 2560 * 2  # gradients of the embeddings, from both ends
    assert (whole.activations, whole.backward) == (5120 * 36 * layer, largest)
    assert (spared.activations, spared.backward) == (5120 * 36 * 2560 * 2, largest + 5120 * layer)
    assert spared.learning == spared.activations + spared.backward  # 2.3 GiB against 1.3 of logits
    few = Workload(decodings=(), learnt_tokens=400, longest_sample=400)
    assert footprint_of(config, few, precision="bfloat16").logits == 400 * 151936 * 4 * 4
    adapted = footprint_of(config, work, precision="bfloat16", lora=LoraSettings())
    assert adapted.learning == adapted.activations + adapted.logits  # no gradient of the embeddings


def test_compiled_logits_exist_in_16_bits_alone():
    work = Workload(decodings=(), learnt_tokens=5120, longest_sample=5120, compiled=True)
    config = AutoConfig.for_model(**QWEN3_4B)
    both_ends = 2 * 151936 * 2560 * 2  # two gradients of the tied embeddings
    # a chunk and its gradient, which overwrites the chunk on a GPU
    assert footprint_of(config, work, precision="bfloat16").logits == 2**28 * 2 * 2 + both_ends
    assert footprint_of(config, work, "cuda", precision="bfloat16").logits == 2**28 * 2 + both_ends
    adapted = footprint_of(config, work, precision="bfloat16", lora=LoraSettings())
    assert adapted.logits == 2**28 * 2 * 2
    filtered = Workload(decodings=(), learnt_tokens=5120, longest_sample=5120, compiled=True, filtered=True)
    assert footprint_of(config, filtered, precision="bfloat16").logits == 2**26 * 4 * 13


def test_logits_that_are_capped_or_scaled_exist_all_at_once():
    work = Workload(decodings=(), learnt_tokens=5120, longest_sample=5120, compiled=True, whole_logits=True)
    config = AutoConfig.for_model(**QWEN3_4B)
    assert footprint_of(config, work, precision="bfloat16").logits == 5120 * 151936 * 4 * 4
    assert not changes_logits(config)
    assert changes_logits(AutoConfig.for_model("gemma2"))  # final_logit_softcapping 30
    assert not changes_logits(AutoConfig.for_model("gemma2", final_logit_softcapping=None))
    assert changes_logits(AutoConfig.for_model("granite", logits_scaling=8.0))
    assert not changes_logits(AutoConfig.for_model("granite"))  # 1.0
    assert changes_logits(AutoConfig.for_model("cohere"))  # logit_scale 0.0625


def test_top_k_and_top_p_need_more_logit_copies():
    plain = Workload(decodings=(), learnt_tokens=100, longest_sample=100)
    filtered = Workload(decodings=(), learnt_tokens=100, longest_sample=100, filtered=True)
    config = AutoConfig.for_model(**QWEN3_4B)
    assert footprint_of(config, filtered).logits == 3 * footprint_of(config, plain).logits


def test_eager_attention_saves_its_scores():
    work = Workload(decodings=(), learnt_tokens=1000, longest_sample=500)
    config = AutoConfig.for_model(**LLAMA_3B)
    more = footprint_of(config, work, precision="bfloat16", attention="eager").activations
    # 1000 tokens x 28 layers x 24 heads x 500 positions x (4 + 2 + 2)
    assert more - footprint_of(config, work, precision="bfloat16").activations == 1000 * 28 * 24 * 500 * 8


def test_shared_heads_in_float32_are_not_fused_on_a_gpu():
    work = Workload(decodings=(), learnt_tokens=1000, longest_sample=500, compiled=False)

    def activations(device: str, **options) -> int:
        return footprint_of(AutoConfig.for_model(**LLAMA_3B), work, device, **options).activations

    usual = activations("cpu")
    assert activations("cuda", precision="float32") - usual == 1000 * 28 * 24 * 500 * 4  # as with eager
    assert activations("cuda", precision="float32", attention="flash_attention_2") == usual
    assert activations("cuda", precision="bfloat16") == activations("cpu", precision="bfloat16")


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig], ids=["qwen3", "llama"])
def test_activations_against_tensors_saved_by_autograd(kind, dtype, lora):
    """Tensors saved by two more layers: the estimate is never below their size, nor far above."""
    tokens = 128

    def config(layers: int):
        return kind(
            hidden_size=160,
            intermediate_size=608,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=64,
        )

    def kept(layers: int) -> int:
        from hacrl.models.lora import add_adapters

        model = AutoModelForCausalLM.from_config(config(layers)).to(getattr(torch, dtype))
        if lora is not None:
            model = add_adapters(model, settings(lora=lora), seed=0)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        storages = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
            assert output.logits.requires_grad
        return sum(storages.values())

    def estimated(layers: int) -> int:
        work = Workload(decodings=(), learnt_tokens=tokens, longest_sample=tokens)
        return footprint_of(config(layers), work, precision=dtype, lora=lora).activations

    real, estimate = kept(4) - kept(2), estimated(4) - estimated(2)
    assert real <= estimate <= 1.4 * real


def test_agents_on_one_device_add_persistent_and_share_transient_memory():
    def one(persistent: int, cache: int, logits: int, update: int) -> Footprint:
        counts = ParameterCounts(base=1, adapters=0, trainable=1, largest=1)
        parts = dict.fromkeys(
            ("masters", "gradients", "moments", "reference", "decoding", "activations", "backward"), 0
        )
        return Footprint(
            agent="a",
            counts=counts,
            precision="float32",
            weights=persistent,
            cache=cache,
            logits=logits,
            update=update,
            **parts,
        )

    first, second = one(100, 10, 30, 5), one(50, 7, 8, 40)
    assert (first.peak, second.peak) == (130, 90)
    assert peak_together([first, second]) == 190  # 100 + 50 + 40
    assert peak_together([]) == 0


def test_the_fused_optimizer_makes_no_temporary_tensors():
    config = AutoConfig.for_model(**LLAMA_3B)
    assert footprint_of(config, device="cuda").update == 0
    assert footprint_of(config, device="cpu").update == 4 * 128256 * 3072


def test_a_model_that_is_no_language_model_is_refused():
    with pytest.raises(ModelError, match="agent 'a': 'x' is not a causal language model"):
        count_parameters(settings(), AutoConfig.for_model("vit"))
