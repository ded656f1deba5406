#!/usr/bin/env bash
# Run on a machine with one H200 what only a GPU can show of runs beyond one process:
#
#   ray           executor ray against local on the same work: two agents, vLLM engines; at most 5% more
#   fsdp          one rank of FSDP2 against the plain learner: equal numbers, speed, memory
#   asynchronous  asynchronous against synchronous: time a step, and accuracy after equally many rollouts
#
#   scripts/h200_cluster_checks.sh [--tiny] [--out FOLDER] [CHECK ...]
#
# Every check writes a log into the folder (runs/h200_cluster_checks), and ends with a line that says how it
# went. A check that fails does not keep the others from running.
#
# PYTHON       the interpreter with hacrl, by default python
# VLLM_PYTHON  an interpreter with vLLM, if hacrl's own has none
# --tiny       tiny models on a CPU, only to see that everything runs
set -uo pipefail

cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=runs/h200_cluster_checks
tiny=
checks=()
while (($#)); do
    case $1 in
        --tiny) tiny=1 ;;
        --out) out=$2 && shift ;;
        ray | fsdp | asynchronous) checks+=("$1") ;;
        *) echo "unknown argument: $1" >&2 && exit 2 ;;
    esac
    shift
done
((${#checks[@]})) || checks=(ray fsdp asynchronous)
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"

if [[ $tiny ]]; then
    device=cpu
    shapes=(qwen3-tiny llama-tiny)
    work="rollout.prompts_per_step=2 rollout.rollouts_per_prompt=2 rollout.max_new_tokens=8 task.options.letters=16"
    steps=2 repeats=1
    engine='{max_sequences: 8, engine_args: {kv_cache_memory_bytes: 107374182}'
else
    device=cuda
    shapes=(qwen3-0.6b llama-0.5b)
    work="rollout.prompts_per_step=32 rollout.rollouts_per_prompt=8 rollout.max_new_tokens=256 task.options.letters=448"
    steps=10 repeats=3
    engine='{max_sequences: 256'
fi
[[ ${VLLM_PYTHON:-} ]] && engine+=", python: $VLLM_PYTHON"
engine+='}'

# Two agents with random weights and different tokenizers, and a recipe for them.
pair() {
    DEVICE=$device OUT=$out ENGINE=$engine "$python" - "${shapes[@]}" <<'PYTHON'
import os
import sys
from pathlib import Path

import torch
from shapes import make_agent

out, device = Path(os.environ["OUT"]), os.environ["DEVICE"]
dtype = torch.float32 if device == "cpu" else torch.bfloat16
agents = []
for number, shape in enumerate(sys.argv[1:]):
    folder = out / "agents" / shape
    if not (folder / "config.json").exists():
        make_agent(shape, folder, dtype, device, seed=number, stops=False)
    agents.append(f"  - {{name: agent{number}, model: {folder}, engine: vllm}}")
recipe = f"""
device: {device}
task: {{name: "{Path("benchmarks/letters_task.py").resolve()}:Letters"}}
agent_defaults: {{vllm: {os.environ["ENGINE"]}}}
agents:
{chr(10).join(agents)}
method: {{name: hacpo, clip_low: 0.2, clip_high: 0.28}}
learning: {{lr: 1e-6}}
"""
(out / "pair.yaml").write_text(recipe.lstrip())
PYTHON
}

ray() {
    pair && "$python" benchmarks/ray_overhead.py --recipe "$out/pair.yaml" --steps $((steps + 1)) \
        --repeats "$repeats" ray.placement_timeout=600 $work
}

fsdp() {
    if [[ $tiny ]]; then
        "$python" benchmarks/fsdp.py --shape qwen3-tiny --device cpu --prompts 2 --updates 2 --steps 1 \
            --response-tokens 32 --out "$out/fsdp.json"
    else
        "$python" benchmarks/fsdp.py --out "$out/fsdp.json" &&
            "$python" benchmarks/fsdp.py --lora 16 --checkpointing --out "$out/fsdp_lora.json"
    fi
}

asynchronous() {
    if [[ $tiny ]]; then
        "$python" benchmarks/asynchronous.py --recipe model --seeds 1 --folder "$out/asynchronous" \
            steps=2 rollout.prompts_per_step=2 evaluation.problems=4 evaluation.samples_per_problem=1
    else
        "$python" benchmarks/asynchronous.py --recipe model --seeds 5 --folder "$out/asynchronous" \
            device=cuda evaluation.problems=200
    fi
}

failed=0
for check in "${checks[@]}"; do
    log=$out/$check.log
    started=$SECONDS
    if "$check" >"$log" 2>&1; then state="done"; else state="FAILED" failed=1; fi
    echo "$check: $state after $((SECONDS - started)) s, $log"
    tail -n 4 "$log" | sed 's/^/    /'
done
exit $failed
