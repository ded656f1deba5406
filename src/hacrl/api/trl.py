"""Answer TRL's names in scripts that were written for ``GRPOTrainer``: say what hacrl calls them.

:mod:`hacrl.config.trl_names` has the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from hacrl.config.trl_names import CONFIG_NAMES, config_answer, member_answer, trainer_answer
from hacrl.config.values import shown
from hacrl.errors import ConfigError

_SECTIONS = ("agent_defaults", "method", "rollout", "learning", "asynchronous", "evaluation", "checkpoint")


def refuse_config_keys(given: Mapping[str, Any], known: Iterable[str], source: str = "HACRLConfig") -> None:
    """Raise ConfigError if there are keys that HACRLConfig does not have; say what to write instead."""
    if not given:
        return
    carried, lines = [], []
    for name, value in given.items():
        row = CONFIG_NAMES.get(name)
        if row is not None and row.kind in ("renamed", "works"):
            carried.append((row.name if row.kind == "works" else row.here, value))
        elif (answer := config_answer(name)) is not None:
            lines.append(answer)
        else:
            lines.append(f"{name}: unknown key{_nearest(name, known)}")
    if carried:
        names = ", ".join(name for name in given if (row := CONFIG_NAMES.get(name)) and row.kind == "renamed")
        lines.insert(0, f"TRL's {names} are written as {_written(carried)}")
    raise ConfigError(f"{source}:" + "".join(f"\n  {line}" for line in lines))


def check_args(args: Any, config: type) -> None:
    """Raise ConfigError if ``args`` is not a HACRLConfig; translate a GRPOConfig."""
    if isinstance(args, config):
        return
    if args is None:
        raise ConfigError('args: missing; give HACRLConfig(output="runs/NAME", ...)')
    if type(args).__name__ != "GRPOConfig" or not dataclasses.is_dataclass(args):
        raise ConfigError(f"args: must be a hacrl.HACRLConfig, not {type(args).__name__}")
    refuse_config_keys(_changed(args), (), f"args: {type(args).__name__} of TRL is not a hacrl.HACRLConfig")


def _changed(args: Any) -> dict[str, Any]:
    """Return the fields of a GRPOConfig that its author has set, with the folder first.

    Its constructor computes some fields from others, so the comparison is with a config of the defaults.
    """
    needed = {name: getattr(args, name) for name in ("use_cpu", "bf16", "fp16")}  # else it may refuse a CPU
    default = type(args)(output_dir=args.output_dir, **needed)
    usual = {"use_cpu": False, "bf16": True, "fp16": False}
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    return {"output_dir": args.output_dir} | {
        name: value
        for name, value in values.items()
        if name in CONFIG_NAMES and value != usual.get(name, getattr(default, name))
    }


def refuse_trainer_arguments(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ConfigError if there are arguments that HACRLTrainer does not have."""
    if not given:
        return
    lines = []
    for name in given:
        answer = trainer_answer(name)
        if answer is None and (of_config := config_answer(name)) is not None:
            answer = f"{of_config}; it belongs to args=HACRLConfig(...)"
        lines.append(answer or f"{name}: unknown argument{_nearest(name, known)}")
    raise ConfigError("HACRLTrainer:" + "".join(f"\n  {line}" for line in lines))


def missing_member(trainer: object, name: str) -> AttributeError:
    """Return the error for an attribute that the trainer does not have."""
    answer = None if name.startswith("_") else member_answer(name)
    message = f"{type(trainer).__name__!r} object has no attribute {name!r}"
    return AttributeError(f"{message}: {answer}" if answer else message, name=name, obj=trainer)


def check_resume_argument(given: bool | str | None, resumes: bool, output: str) -> None:
    """Check ``train(resume_from_checkpoint=...)``: HACRLConfig decides it, before the models load."""
    if not given or (resumes and given is True):
        return
    if not resumes:
        raise ConfigError(
            "resume_from_checkpoint: a run is resumed by HACRLConfig(resume=True, ...), which checks it "
            "before models load"
        )
    raise ConfigError(
        f"resume_from_checkpoint={given!r}: HACRLConfig(resume=True) continues from the newest checkpoint of "
        f"{output}; give True, or leave the argument out"
    )


def lora_section(peft_config: Any) -> dict[str, Any]:
    """Return the ``lora`` section for a ``LoraConfig``. Raise ConfigError for what hacrl would not do."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError("peft_config needs peft: pip install 'hacrl[lora]'") from error
    if not isinstance(peft_config, LoraConfig):
        raise ConfigError(f"peft_config: must be a peft.LoraConfig, not {type(peft_config).__name__}")
    if peft_config.target_modules is None:
        raise ConfigError(
            "peft_config.target_modules: missing; say which layers: 'all-linear' (hacrl's own default), or "
            "their names"
        )
    taken = {"r", "lora_alpha", "target_modules", "task_type", "base_model_name_or_path", "peft_version"}
    plain = LoraConfig()
    other = [
        field.name
        for field in dataclasses.fields(peft_config)
        if field.name not in taken and getattr(peft_config, field.name) != getattr(plain, field.name)
    ]
    if other:
        raise ConfigError(
            f"peft_config.{other[0]}={shown(getattr(peft_config, other[0]))}: hacrl makes adapters of r, "
            "lora_alpha and target_modules; for others give your model: agents=[(model, tokenizer)]"
        )
    targets = peft_config.target_modules
    return {
        "rank": peft_config.r,
        "alpha": float(peft_config.lora_alpha),
        "targets": targets if isinstance(targets, str) else sorted(targets),
    }


def _written(keys: list[tuple[str, Any]]) -> str:
    """Return the call of HACRLConfig with these dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in keys:
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return f"HACRLConfig({', '.join(f'{key}={value!r}' for key, value in tree.items())})"


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(names)}"
