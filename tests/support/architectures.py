"""A tiny random model of every causal-LM architecture of interest, and two real training steps with it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from hacrl.config.schema import (
    AgentSettings,
    EvaluationSettings,
    HacpoSettings,
    LearningSettings,
    RolloutSettings,
    RunConfig,
    TaskSettings,
)
from hacrl.engines.hf.batch_decoding import can_share_prompts, decodes_in_step
from hacrl.engines.hf.plain_generation import generates_with_cache
from hacrl.errors import ModelError
from hacrl.models.architecture import Support, TrainingPath, architecture_support
from hacrl.models.loading import load_model, load_tokenizer
from hacrl.models.packing_support import supports_packing
from hacrl.runs.run import run_locally
from hacrl.tasks.registry import TASKS
from tests.support.sevens import SevensTask
from tests.support.tiny import char_agent, character_tokenizer

TOKENIZER = character_tokenizer()
WINDOW = 6  # shorter than a prompt and its response: a wrong window shows
Options = dict[str, Any]
UNEXPECTED = "a trial: the layers do not hand on what packed attention needs"

_TOKENS: Options = {
    "vocab_size": len(TOKENIZER),
    "eos_token_id": TOKENIZER.eos_token_id,
    "pad_token_id": TOKENIZER.pad_token_id,
}
_HEADS: Options = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_GROUPED: Options = {**_HEADS, "num_key_value_heads": 2}
_HEAD_DIM: Options = {**_GROUPED, "head_dim": 8}
_GPT2: Options = {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_EXPERTS: Options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS: Options = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS: Options = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: Options = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_WINDOWS: Options = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_DELTA_NET: Options = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_MAMBA: Options = {
    **_TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "conv_kernel": 4,
    "expand": 2,
}
_MAMBA2_LAYERS: Options = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_VISION: Options = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}

# model_type -> the options of a tiny config. Types that are missing in an older transformers are left out.
ARCHITECTURES: dict[str, Options] = {
    "apertus": _GROUPED,
    "arcee": _HEAD_DIM,
    "bamba": {**_GROUPED, **_MAMBA2_LAYERS, "attn_layer_indices": [1]},
    "bert": _HEADS,
    "biogpt": _HEADS,
    "bitnet": _GROUPED,
    "bloom": {**_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "codegen": {**_GPT2, "rotary_dim": 4},
    "cohere": _GROUPED,
    "cohere2": {**_GROUPED, **_WINDOWS},
    "ctrl": {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "dff": 48},
    "deepseek_v2": {**_GROUPED, **_ROUTED_EXPERTS, **_LATENT},
    "deepseek_v3": {**_GROUPED, **_ROUTED_EXPERTS, **_LATENT},
    "diffllama": _GROUPED,
    "doge": {**_GROUPED, "sliding_window": WINDOW},
    "dots1": {**_HEAD_DIM, **_ROUTED_EXPERTS},
    "ernie4_5": _HEAD_DIM,
    "ernie4_5_moe": {
        **_GROUPED,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
    },
    "exaone4": {**_GROUPED, **_WINDOWS},
    "falcon": {
        **{key: value for key, value in _HEADS.items() if key != "intermediate_size"},
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "falcon_h1": {**_HEAD_DIM, **_MAMBA2_LAYERS, "mamba_d_ssm": 64},
    "falcon_mamba": {**_MAMBA, "time_step_rank": 4},
    "flex_olmo": {**_GROUPED, **_EXPERTS},
    "gemma": _HEAD_DIM,
    "gemma2": {**_HEAD_DIM, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gemma3": {
        "text_config": {**_HEAD_DIM, **_WINDOWS, "query_pre_attn_scalar": 8},
        "vision_config": _VISION,
        "mm_tokens_per_image": 4,
    },
    "gemma3_text": {**_HEAD_DIM, **_WINDOWS, "query_pre_attn_scalar": 8},
    "gemma3n_text": {
        **_HEAD_DIM,
        **_WINDOWS,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": len(TOKENIZER),
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {
        **_HEAD_DIM,
        **_WINDOWS,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": len(TOKENIZER),
    },
    "glm": _HEAD_DIM,
    "glm4": _HEAD_DIM,
    "glm4_moe": {**_HEAD_DIM, **_ROUTED_EXPERTS},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {
        **_TOKENS,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
        "max_position_embeddings": 256,
    },
    "gpt_neox": _HEADS,
    "gpt_oss": {**_HEAD_DIM, **_LOCAL_EXPERTS, **_WINDOWS},
    "gptj": {**_GPT2, "rotary_dim": 4},
    "granite": _GROUPED,
    "granitemoe": {**_GROUPED, **_LOCAL_EXPERTS},
    "granitemoehybrid": {
        **_GROUPED,
        **_LOCAL_EXPERTS,
        **_MAMBA2_LAYERS,
        "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention"],
    },
    "helium": _HEAD_DIM,
    "hunyuan_v1_dense": _HEAD_DIM,
    "hunyuan_v1_moe": {**_HEAD_DIM, "num_experts": 4, "moe_topk": 2},
    "jamba": {
        **_GROUPED,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "jetmoe": {
        **_TOKENS,
        **_LOCAL_EXPERTS,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "kv_channels": 8,
        "intermediate_size": 48,
    },
    "lfm2": {**_GROUPED, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        **_GROUPED,
        **_EXPERTS,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "llama": _HEAD_DIM,
    "llama4_text": {
        **_HEAD_DIM,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "llava": {
        "text_config": {"model_type": "llama", **_HEAD_DIM},
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
        "image_token_index": 5,
    },
    "mamba": {**_MAMBA, "time_step_rank": 4},
    "mamba2": {**_MAMBA, "head_dim": 16, "num_heads": 4, "n_groups": 1, "chunk_size": 8},
    "minimax": {
        **_HEAD_DIM,
        **_LOCAL_EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 8,
    },
    "minimax_m2": {**_HEAD_DIM, **_LOCAL_EXPERTS},
    "ministral": {**_HEAD_DIM, **_WINDOWS},
    "mistral": {**_HEAD_DIM, "sliding_window": WINDOW},
    "mixtral": {**_HEAD_DIM, **_LOCAL_EXPERTS},
    "modernbert-decoder": {
        **_HEADS,
        "bos_token_id": 2,
        "cls_token_id": 2,
        "sep_token_id": 1,
        "local_attention": WINDOW,
        "global_attn_every_n_layers": 2,
    },
    "mpt": {**_TOKENS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "nanochat": _GROUPED,
    "nemotron": _HEAD_DIM,
    "nemotron_h": {
        **_HEAD_DIM,
        "layers_block_type": ["mamba", "attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "olmo3": {**_GROUPED, **_WINDOWS},
    "olmo_hybrid": {**_GROUPED, **_DELTA_NET},
    "olmoe": {**_GROUPED, **_EXPERTS},
    "openai-gpt": _GPT2,
    "opt": {**_HEADS, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": _HEADS,
    "phi": _GROUPED,
    "phi3": _GROUPED,
    "phimoe": {**_GROUPED, **_LOCAL_EXPERTS},
    "qwen2": _GROUPED,
    "qwen2_moe": {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": _HEAD_DIM,
    "qwen3_5": {
        "text_config": {**_HEAD_DIM, **_DELTA_NET},
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
        },
    },
    "qwen3_5_moe_text": {
        **_HEAD_DIM,
        **_EXPERTS,
        **_DELTA_NET,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": {**_HEAD_DIM, **_DELTA_NET},
    "qwen3_moe": {**_HEAD_DIM, **_EXPERTS},
    "qwen3_next": {**_HEAD_DIM, **_EXPERTS, **_DELTA_NET, "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {
        **_GROUPED,
        "attention_window_size": WINDOW,
        "lru_width": 32,
        "block_types": ["recurrent", "attention"],
        "conv1d_width": 4,
    },
    "roberta": _HEADS,
    "rwkv": {
        **_TOKENS,
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "context_length": 256,
        "rescale_every": 1,  # of 2 layers; 6 of 12 and more in published models
    },
    "seed_oss": _HEAD_DIM,
    "smollm3": _GROUPED,
    "stablelm": _GROUPED,
    "starcoder2": {**_GROUPED, "sliding_window": WINDOW},
    "t5": {**_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "vaultgemma": {**_HEAD_DIM, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "xglm": {
        **_TOKENS,
        "d_model": 32,
        "ffn_dim": 48,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 256,
    },
    "xlnet": {**_TOKENS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    "xlstm": {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "chunk_size": 16},
    "zamba": {
        **_GROUPED,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        **_GROUPED,
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid"],
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "chunk_size": 8,
        "hybrid_layer_ids": [1],
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
}
# What a folder of each holds that is loaded as another class, e.g. with an image encoder
_SAVED_CLASSES = {
    "bert": "BertForMaskedLM",
    "llava": "LlavaForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "roberta": "RobertaForMaskedLM",
    "t5": "T5ForConditionalGeneration",
}


def is_known(name: str) -> bool:
    """Return whether the installed transformers has this architecture."""
    return name in transformers.CONFIG_MAPPING


def causal_class_name(name: str) -> str:
    """Return the name of transformers' causal language model of this type, "" if there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name, ""))


def tiny_config(name: str, **changes: Any) -> Any:
    """Return the config of a tiny model."""
    options = dict(ARCHITECTURES[name])
    if name not in ("gemma3", "llava", "qwen3_5", "t5") and "bos_token_id" not in options:
        options["bos_token_id"] = TOKENIZER.eos_token_id
    return transformers.AutoConfig.for_model(name, **{**options, **changes})


def tiny_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny random model with weights so large that a wrong mask, position or state shows."""
    torch.manual_seed(seed)
    config = tiny_config(name, **changes)
    if name in _SAVED_CLASSES:
        model = getattr(transformers, _SAVED_CLASSES[name])(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4)
    return model.eval()


def save_tiny(name: str, folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """Write a tiny model with a character tokenizer as a Hugging Face folder."""
    tiny_model(name, **changes).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Trained:
    """What two steps with a tiny model have shown."""

    expected: Support  # what the config says
    path: TrainingPath  # of the model that was trained, or "refused"
    reason: str = ""
    generation: str = ""  # how its responses are generated
    largest_gap: float = 0.0  # between sampler and learner at one token, in nats
    moved: float = 0.0  # largest change of a weight that was saved


def two_steps(name: str, folder: pathlib.Path) -> Trained:
    """Train a tiny model of this architecture for two HACPO steps beside a Qwen3, from folders."""
    settings = AgentSettings(name="tiny", model=str(save_tiny(name, folder / "start")))
    char_agent("partner", seed=1).save(folder / "partner")
    expected = architecture_support(transformers.AutoConfig.from_pretrained(settings.model))
    try:
        with sevens_task():
            result = run_locally(two_agents(settings, folder))
    except ModelError as error:
        return Trained(expected, "refused", expected.reason or str(error))
    steps = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    before = load_tiny(settings)
    after = dict(load_tiny(replace(settings, model=str(result.folder / "agents/tiny"))).named_parameters())
    path = "packed" if supports_packing(before) else "plain"
    return Trained(
        expected,
        path,
        expected.reason if path == expected.path else UNEXPECTED,
        _generation(before),
        max(step["agents"]["tiny"]["learning"]["sampler_gap_max"] for step in steps),
        max(float((after[key] - old).abs().max().detach()) for key, old in before.named_parameters()),
    )


def _generation(model: Any) -> str:
    """Return how the transformers engine generates with this model on a CPU."""
    if can_share_prompts(model):
        return "shared prompts"
    if decodes_in_step(model):
        return "padded rows"
    return "`generate`" if generates_with_cache(model) else "`generate` without a cache"


def load_tiny(settings: AgentSettings) -> Any:
    """Load a tiny model as an agent's model."""
    return load_model(settings, load_tokenizer(settings), "cpu")


def two_agents(settings: AgentSettings, folder: pathlib.Path, **changes: Any) -> RunConfig:
    """Return a run of two short steps; random agents sometimes solve its task."""
    options: Mapping[str, Any] = {
        "agents": (settings, AgentSettings(name="partner", model=str(folder / "partner"))),
        "output": str(folder / "run"),
        "steps": 2,
        "device": "cpu",
        "threads": 1,
        "task": TaskSettings(name="sevens"),
        # random agents are far from each other: bounds so wide that others' rollouts do teach
        "method": HacpoSettings(clip_low=0.2, clip_high=0.28, delta=0.9, delta_step=0.01, cross_upper=10.0),
        "rollout": RolloutSettings(prompts_per_step=4, rollouts_per_prompt=4, max_new_tokens=12),
        "learning": LearningSettings(lr=1e-3),
        "evaluation": EvaluationSettings(problems=0),
        **changes,
    }
    return RunConfig(**options)


@contextmanager
def sevens_task() -> Iterator[None]:
    """Make the task "sevens" known within the block."""
    tasks: dict[str, Callable[..., Any]] = TASKS  # type: ignore[assignment]
    missing = "sevens" not in tasks
    if missing:
        tasks["sevens"] = SevensTask
    try:
        yield
    finally:
        if missing:
            del tasks["sevens"]
