"""The options of ``hacrl eval``. Imports nothing heavy: the command line reads it for ``--help``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET",
        help="A run's folder (all its agents), one agent's folder, any Hugging Face folder or id, or "
        "bundled:NAME.",
    ),
]
On = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Separated by commas: math500, math, gsm8k, aime2025, amc23, minerva, olympiad; task: the "
        "held-out split of the run's own task (default for runs); arithmetic; gym:NAME; or a file of "
        "problems (.jsonl, .json, .csv or .parquet with the columns problem and answer).",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder with math500.jsonl, gsm8k.test.jsonl, ...; default: the Hugging Face hub."),
]
Before = Annotated[bool, typer.Option("--before", help="Also evaluate each agent as it was before training.")]
Samples = Annotated[
    int | None,
    typer.Option(
        min=1, help="Responses to each problem, the k of avg@k; default 1 (aime2025: 30; task: the run's)."
    ),
]
PassAt = Annotated[
    str | None,
    typer.Option(
        metavar="K,K,...", help="Also pass@K and best@K; default: K = samples, if there are several."
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="0 is greedy; default: greedy for 1 sample, 1.0 for several (task: the run's evaluation's).",
    ),
]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that make up this share.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Longest response; default 8192 (task: the run's), or what the context leaves."),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Only so many problems: always the same random choice.")
]
Prompt = Annotated[
    str | None,
    typer.Option(
        help="How a problem is put, with {problem} in it; default: the paper's, which asks for a box."
    ),
]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Engine = Annotated[
    str,
    typer.Option(
        help="What generates: transformers; vllm (with the run's vllm settings); or module:attribute."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Batch = Annotated[
    int | None, typer.Option(min=1, help="Responses decoded side by side; default 64 (task: the run's).")
]
Output = Annotated[
    Path | None, typer.Option(help="Folder; default RUN/evaluations/NAMES, or evaluations/MODEL/NAMES.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier evaluation in that folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on the last line.")]
