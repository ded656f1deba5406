"""The options of ``hacrl eval``. This module is part of ``--help``, so it imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET",
        help="The folder of a run or of a study (evaluates all their agents), the folder of one agent, any "
        "Hugging Face folder or id, or bundled:NAME.",
    ),
]
On = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Benchmarks, separated by commas: math500, math, gsm8k, aime2025, amc23, minerva, olympiad, "
        "arithmetic, calculator, python, sqlite, dungeon, gym:NAME, task (the held-out problems of the run's "
        "task; the default for runs), or a "
        "file of problems (.jsonl, .json, .csv or .parquet with the columns problem and answer).",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the benchmarks' files math500.jsonl, gsm8k.test.jsonl, ...; default: the Hugging "
        "Face hub."
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        metavar="PURPOSE=NAME,...",
        help="Columns of a file of --on that have other names, e.g. problem=question,answer=gold; also id. "
        "Dots reach into nested values: answer=meta.gold.",
    ),
]
Before = Annotated[bool, typer.Option("--before", help="Also evaluate each agent as it was before training.")]
Samples = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Responses per problem, the k of avg@k. Default: 1; 30 for aime2025; for task as in the run.",
    ),
]
PassAt = Annotated[
    str | None,
    typer.Option(
        metavar="K,K,...",
        help="Report pass@K and best@K too. Default: K = samples, if that is more than 1.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Sampling temperature; 0 is greedy. Default: 0 for 1 sample, 1.0 for several; for task as in "
        "the run's evaluation.",
    ),
]
TopP = Annotated[
    float, typer.Option(help="Top-p sampling: use the likeliest tokens with this total probability.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="Text that ends a response; may be given several times. Default: rollout.stop of the model's "
        "run, else none.",
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest response in tokens. Default: 8192, or less if the model's context is shorter; for task "
        "as in the run.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1, help="Evaluate on this number of problems, chosen at random but always the same ones."
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option(
        help="Prompt template that contains {problem}. Default: the paper's, which asks for the answer in "
        "\\boxed{}."
    ),
]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Engine = Annotated[
    str,
    typer.Option(help="Engine that generates: transformers, vllm, or module:attribute of your own."),
]
Device = Annotated[str, typer.Option(help="Device of the models: auto, cpu, cuda or cuda:N.")]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Responses generated at a time. Default: 64; for task as in the run."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the results. Default: RUN/evaluations/BENCHMARKS, or evaluations/MODEL/BENCHMARKS."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier evaluation in the folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on the last line.")]
