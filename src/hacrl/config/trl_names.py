"""TRL's names, and what hacrl has for each: one table for error messages, ``docs/from_trl.md`` and a test.

The names are those of ``GRPOConfig`` (with the fields it takes over from ``TrainingArguments``), of the
parameters of ``GRPOTrainer``, and of its methods and attributes, in TRL 1.16. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["works", "renamed", "differs", "absent"]


@dataclass(frozen=True)
class TrlName:
    """One of TRL's names.

    ``works``: HACRLConfig or HACRLTrainer has the name, too. ``renamed``: the value carries over to ``here``.
    ``differs``: ``here`` serves the purpose, and the note says how. ``absent``: the note says why.
    """

    name: str
    kind: Kind
    here: str = ""  # a key of a recipe such as learning.lr; for the trainer and its members, what to write
    note: str = ""


def _table(
    works: dict[str, tuple[str, str]],
    renamed: dict[str, str],
    differs: dict[str, tuple[str, str]],
    absent: dict[str, str],
) -> dict[str, TrlName]:
    """Return name -> row. Names with one row between them are separated by spaces."""
    kinds: dict[Kind, dict[str, tuple[str, str]]] = {
        "works": works,
        "renamed": {name: (here, "") for name, here in renamed.items()},
        "differs": differs,
        "absent": {names: ("", note) for names, note in absent.items()},
    }
    return {
        name: TrlName(name, kind, here or (name if kind == "works" else ""), note)
        for kind, rows in kinds.items()
        for names, (here, note) in rows.items()
        for name in names.split()
    }


_NO_PARALLELISM = "a learner lives on one GPU; agents may be on several (`agents[].device`)"
_NO_LOADER = "problems are read once and stay in memory; there is no data loader"
_NO_LOSS = "hacrl has the losses of GRPO, DAPO, Dr. GRPO, GSPO and HACPO, and methods of your own"
_TRUNCATED_WEIGHT = "with an engine of other numerics, own responses are weighted by min(ratio, cap)"

CONFIG_NAMES = _table(
    works={
        "seed project": ("", ""),
        "reward_weights": ("task.options.weights", ""),
        "report_to": ("trackers", ""),
    },
    renamed={
        "output_dir": "output",
        "learning_rate": "learning.lr",
        "weight_decay": "learning.weight_decay",
        "max_grad_norm": "learning.max_grad_norm",
        "mask_truncated_completions": "learning.mask_truncated",
        "num_generations": "rollout.rollouts_per_prompt",
        "num_generations_eval": "evaluation.samples_per_problem",
        "max_completion_length": "rollout.max_new_tokens",
        "temperature": "rollout.temperature",
        "top_p": "rollout.top_p",
        "top_k": "rollout.top_k",
        "num_iterations": "learning.epochs",
        "beta": "method.kl_coefficient",
        "epsilon": "method.clip_low",
        "epsilon_high": "method.clip_high",
        "gradient_checkpointing": "agent_defaults.gradient_checkpointing",
        "trust_remote_code": "agent_defaults.trust_remote_code",
        "chat_template_kwargs": "agent_defaults.chat_template_args",
        "torch_compile": "learning.compile",
        "save_total_limit": "checkpoint.keep_last",
        "vllm_importance_sampling_clip_max": "learning.mismatch_cap",
        "vllm_importance_sampling_cap": "learning.mismatch_cap",
        "vllm_gpu_memory_utilization": "agent_defaults.vllm.memory",
        "vllm_enable_sleep_mode": "agent_defaults.vllm.sleep",
        "vllm_server_base_url": "agent_defaults.vllm.url",
    },
    differs={
        "max_tool_calling_iterations": (
            "episodes",
            "`{'max_turns': ...}`: turns of the agent, so one more than rounds of tool calls; in a recipe "
            "`task.options.max_turns`",
        ),
        "max_steps": ("steps", "TRL counts optimizer steps, hacrl batches of rollouts"),
        "num_train_epochs": ("steps", "problems x epochs / `rollout.prompts_per_step`"),
        "per_device_train_batch_size": (
            "learning.micro_batch_tokens",
            "tokens of one pass: memory, not the result. The batch is `rollout.prompts_per_step` x "
            "`rollout.rollouts_per_prompt`",
        ),
        "gradient_accumulation_steps": (
            "learning.updates_per_source",
            "updates on one batch of rollouts; accumulation follows from `learning.micro_batch_tokens`",
        ),
        "generation_batch_size": (
            "rollout.prompts_per_step",
            "prompts, not responses: divide by `rollout.rollouts_per_prompt`",
        ),
        "steps_per_generation": (
            "learning.updates_per_source",
            "optimizer steps on one batch: divide by TRL's `gradient_accumulation_steps`",
        ),
        "per_device_eval_batch_size": ("rollout.max_batch", "responses generated side by side, everywhere"),
        "lr_scheduler_type": ("learning.schedule", "`constant`, `linear` or `cosine`"),
        "lr_scheduler_kwargs": ("learning.lr_floor", "share of the learning rate that a schedule falls to"),
        "warmup_steps": ("learning.warmup", "steps of hacrl; below 1: a share of the run"),
        "adam_beta1 adam_beta2": ("learning.betas", "both in one list"),
        "bf16 fp16 bf16_full_eval fp16_full_eval model_init_kwargs": (
            "agent_defaults.precision",
            "`auto`, `float32` or `bfloat16`; weights are trained through float32 masters. `attention`, "
            "`revision` and `trust_remote_code` are keys of an agent, too",
        ),
        "use_cpu": ("device", "`cpu`"),
        "torch_compile_backend torch_compile_mode": ("learning.compile", "true or false"),
        "auto_find_batch_size": ("learning.micro_batch_tokens", "halved by itself when memory runs out"),
        "eval_strategy eval_steps": ("evaluation.every", "steps; 0: only before and after training"),
        "eval_on_start eval_delay do_eval": (
            "evaluation.problems",
            "agents are evaluated before and after training; 0: never",
        ),
        "save_strategy save_steps": ("checkpoint.every", "steps; every checkpoint resumes exactly"),
        "load_best_model_at_end metric_for_best_model greater_is_better": (
            "checkpoint.keep_best",
            "keeps the checkpoints with the best mean accuracy; the saved agents are the last ones",
        ),
        "run_name": ("output", "a run's name in trackers is its folder's"),
        "log_completions num_completions_to_print log_unique_prompts": (
            "logged_rollouts",
            "responses per agent and step in trackers; the rollout log has all of them",
        ),
        "disable_tqdm": ("progress", "the opposite, in Python"),
        "resume_from_checkpoint": ("resume", "`HACRLConfig(resume=True)`, or `hacrl resume RUN`"),
        "importance_sampling_level": ("method", "`sequence` is `gspo`, `token` is `grpo`"),
        "loss_type": (
            "method.aggregation",
            "of grpo and gspo: `grpo` is `response`, `dapo` and `bnpo` are `token`, `dr_grpo` is `constant`; "
            + _NO_LOSS,
        ),
        "scale_rewards": ("method.divide_by_std", "of grpo and gspo; true or false, within a prompt's group"),
        "delta": (
            "method.clip_high",
            "hacrl has no second upper bound. Its own `method.delta` is another thing: whose responses an "
            "agent learns from",
        ),
        "use_vllm": ("rollout.engine", "`vllm`, or an agent's own `engine`"),
        "vllm_mode": ("agent_defaults.vllm.mode", "`auto`, `child` or `server`"),
        "vllm_server_host vllm_server_port": ("agent_defaults.vllm.url", "`http://HOST:PORT`"),
        "vllm_tensor_parallel_size": ("agent_defaults.vllm.devices", "a list of GPUs"),
        "vllm_max_model_length vllm_model_impl vllm_structured_outputs_regex": (
            "agent_defaults.vllm.engine_args",
            "any argument of vLLM by its name there",
        ),
        "vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_min": (
            "learning.mismatch_cap",
            _TRUNCATED_WEIGHT,
        ),
        "use_transformers_continuous_batching transformers_continuous_batching_config "
        "use_transformers_paged": (
            "rollout.max_batch",
            "the transformers engine always batches continuously",
        ),
        "push_to_hub hub_model_id hub_token hub_private_repo hub_strategy hub_always_push hub_revision": (
            "output",
            "hacrl uploads nothing. Each trained agent is a plain folder in OUTPUT/agents: "
            "`hf upload NAME OUTPUT/agents/AGENT`",
        ),
        "generation_kwargs": (
            "rollout.stop",
            "stop strings, with every engine; else only `temperature`, `top_k` and `top_p`",
        ),
        "min_p repetition_penalty": (
            "rollout.top_p",
            "hacrl samples with temperature, top_k and top_p, under which it knows every probability",
        ),
        "fsdp fsdp_config deepspeed parallelism_config accelerator_config": (
            "agents[].device",
            _NO_PARALLELISM,
        ),
        "top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max "
        "entropy_coef_delta entropy_target off_policy_mask_threshold use_bias_correction_kl "
        "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg "
        "vespo_lambda_neg": (
            "method.name",
            f"{_NO_LOSS} (`module:attribute`)",
        ),
        "multi_objective_aggregation": ("reward_weights", "weighted rewards are summed, then normalised"),
    },
    absent={
        "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level "
        "log_level_replica include_num_input_tokens_seen include_for_metrics skip_memory_metrics": (
            "every step is logged, in full"
        ),
        "save_only_model save_on_each_node enable_jit_checkpoint ignore_data_skip "
        "restore_callback_states_from_checkpoint": (
            "a checkpoint always holds all that an exact resume needs, and a signal always saves one"
        ),
        "shuffle_dataset data_seed train_sampling_strategy length_column_name": (
            "problems are shuffled by `seed`, each used once before any is repeated"
        ),
        "full_determinism tf32": "equal configs give equal runs on one machine",
        "optim optim_args optim_target_modules adam_epsilon": (
            "the optimizer is AdamW with epsilon 1e-8, on all trained weights"
        ),
        "disable_dropout": "dropout is always off: the learner's policy must be the sampler's",
        "cast_lm_head_to_fp32": "log-probabilities are always computed in float32",
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps": (
            "the reference is the model that training started from"
        ),
        "router_aux_loss_coef": "experts' routers have no loss of their own",
        "log_multimodal": "models read and write text",
        "log_completions_hub_repo trackio_space_id trackio_bucket_id trackio_static_space_id": (
            "hacrl uploads nothing by itself; trackers have their own settings"
        ),
        "vllm_server_timeout vllm_group_port ds3_gather_for_generation": (
            "hacrl chooses it, see the pages on vLLM and on performance"
        ),
        "cache_implementation use_cache pad_to_multiple_of torch_empty_cache_steps use_liger_kernel "
        "liger_kernel_config gradient_checkpointing_kwargs average_tokens_across_devices": (
            "hacrl's own kernels, packing and caches choose it"
        ),
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order": _NO_LOADER,
        "remove_unused_columns label_names": "every column goes to the reward functions",
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
        "ddp_timeout local_rank": _NO_PARALLELISM,
        "label_smoothing_factor neftune_noise_alpha prediction_loss_only eval_do_concat_batches "
        "eval_use_gather_object eval_accumulation_steps batch_eval_metrics do_train do_predict debug": (
            "it has no meaning for rollouts that are verified"
        ),
    },
)

# Names that TRL had in earlier versions, and that are still in scripts.
EARLIER_NAMES = _table(
    works={},
    renamed={"max_prompt_length": "rollout.max_prompt_tokens"},
    differs={"warmup_ratio": ("learning.warmup", "a share below 1, or a number of steps")},
    absent={},
)

TRAINER_NAMES = _table(
    works={
        "reward_funcs": ("", "functions, plain or async; no reward models"),
        "train_dataset eval_dataset": ("", "also rows, a file, or a hub id"),
        "args": ("", "a HACRLConfig"),
        "callbacks": ("", "hacrl's, and those of transformers"),
        "environment_factory": ("", "or a dict of them; their episodes run in processes of their own"),
        "peft_config": (
            "",
            "a LoraConfig for all agents that hacrl loads: `r`, `lora_alpha`, `target_modules`",
        ),
    },
    renamed={},
    differs={
        "model": ("agents", "a list: `agents=[model, ...]`, one or more"),
        "processing_class": (
            "agents",
            "a loaded model comes with its tokenizer: `agents=[(model, tokenizer)]`",
        ),
        "reward_processing_classes": ("reward_funcs", "a function that calls your reward model"),
        "optimizers": ("args", "`HACRLConfig(learning={...})`: AdamW with warm-up and schedule"),
        "quantization_config": (
            "peft_config",
            "quantised models are not trained; adapters and `learning.offload` save memory, too",
        ),
        "tools rollout_func": (
            "environment_factory",
            "a class whose public methods are the tools (docs/environments.md)",
        ),
    },
    absent={},
)

MEMBER_NAMES = _table(
    works={
        "train": ("", "`resume_from_checkpoint` goes with `HACRLConfig(resume=True)`"),
        "evaluate": ("", "every agent alone; returns agent -> accuracy"),
        "save_model": ("", "every agent into FOLDER/NAME; the default folder is OUTPUT/agents"),
        "add_callback remove_callback pop_callback": ("", ""),
        "state": ("", "`global_step`, `max_steps`, `log_history`"),
    },
    renamed={},
    differs={
        "model model_wrapped processing_class get_num_trainable_parameters": (
            "trainer.agents[NAME].model",
            "and `.tokenizer`: one for each agent",
        ),
        "args": ("trainer.config", "the resolved config"),
        "push_to_hub init_hf_repo create_model_card push_in_progress": (
            "trainer.save_model(FOLDER)",
            "then `hf upload NAME FOLDER/AGENT`, or `trainer.agents[NAME].model.push_to_hub(...)`",
        ),
        "log log_metrics save_metrics metrics_format": (
            "trainer.state.log_history",
            "and `metrics.jsonl` in the run's folder; reward functions have `log_metric`",
        ),
        "save_state store_flos": ("HACRLConfig(checkpoint={...})", "a run saves its state by itself"),
        "predict prediction_step evaluation_loop": (
            "trainer.evaluate()",
            "or `hacrl eval RUN --on FILE`, which also saves every response",
        ),
        "train_dataset eval_dataset data_collator get_train_dataloader get_eval_dataloader "
        "get_test_dataloader get_batch_samples num_examples get_total_train_batch_size": (
            "trainer.config.rollout",
            "problems and batches; the rollout log has every problem that was used",
        ),
        "reward_funcs reward_func_names reward_processing_classes chat_template": (
            "trainer.config.task",
            "and `trainer.agents[NAME].tokenizer`",
        ),
        "optimizer lr_scheduler create_optimizer create_scheduler create_optimizer_and_scheduler "
        "get_optimizer_cls_and_kwargs get_optimizer_group get_decay_parameter_names get_learning_rates "
        "optimizer_cls_and_kwargs": ("HACRLConfig(learning={...})", "every agent has its own AdamW"),
        "compute_loss training_step compute_loss_func compute_loss_context_manager compute_objective "
        "get_high_entropy_mask get_off_policy_mask get_gamma_weights epsilon_low aux_loss_enabled "
        "loss_is_scaled_for_ga": (
            'HACRLConfig(method="module:attribute")',
            "a method of your own has `advantages` and `loss`",
        ),
        "environments environment_factories tools": (
            "trainer.config.task",
            "the environments live in processes of their own; the rollout log has what they said",
        ),
        "rollout_func vllm_generation generation_config "
        "eos_token_ids continuous_batching_config async_loop async_loop_thread async_loop_ready_event": (
            "HACRLConfig(rollout={...})",
            "an engine of your own generates: `rollout.engine`",
        ),
        "control": ("trainer.stop()", "ends training after the step under way"),
        "is_world_process_zero is_local_process_zero": (
            "trainer.train()",
            "a script runs in one process, so there is nothing to ask",
        ),
        "ref_model": ("HACRLConfig(method={...})", "`kl_coefficient` brings the reference, one per agent"),
        "callback_handler call_model_init model_init compute_metrics preprocess_logits_for_metrics "
        "hyperparameter_search hp_name hp_search_backend hp_space objective": (
            "hacrl compare",
            "tries methods, settings and seeds; the trainer itself has no such thing",
        ),
    },
    absent={
        "accelerator autocast_smart_context_manager create_accelerator_and_postprocess floating_point_ops "
        "current_flos current_gradient_accumulation_steps end get_cp_size get_sp_size get_tp_size "
        "set_initial_training_values can_return_loss commit_scheduler gather_function "
        "is_deepspeed_enabled is_distributed_loading_by_transformers is_fsdp_enabled is_fsdp_xla_enabled "
        "is_fsdp_xla_v1_enabled is_fsdp_xla_v2_enabled is_in_train is_model_parallel label_smoother "
        "model_accepts_loss_kwargs model_preparation_time neftune_hook_handle place_model_on_device": (
            "an internal part of the transformers Trainer, on which hacrl is not built"
        ),
    },
)


def config_answer(name: str) -> str | None:
    """Return what a user of one of ``GRPOConfig``'s names should know; None if it is none of them."""
    row = CONFIG_NAMES.get(name) or EARLIER_NAMES.get(name)
    return None if row is None else _answer(row)


def trainer_answer(name: str) -> str | None:
    """Return what a user of a parameter of ``GRPOTrainer`` should know; None if it is none of them."""
    row = TRAINER_NAMES.get(name)
    return None if row is None else _answer(row)


def member_answer(name: str) -> str | None:
    """Return what a user of a method or attribute of ``GRPOTrainer`` should know; None if it is none."""
    row = MEMBER_NAMES.get(name)
    return None if row is None else _answer(row)


def _answer(row: TrlName) -> str:
    note = row.note.replace("`", "")
    if row.kind == "absent":
        return f"TRL's {row.name} has no counterpart here: {note}"
    more = f" ({note})" if note else ""
    return f"TRL's {row.name} is {row.here} here{more}"
