"""The command line. A command imports what it needs, so that ``--help`` is fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hacrl import __version__
from hacrl.cli import eval_options as options
from hacrl.cli import exit_codes
from hacrl.cli.override_command import OverrideCommand
from hacrl.errors import ConfigError, HacrlError

app = typer.Typer(
    name="hacrl",
    help="Train several different LLMs together, so that every verified rollout teaches all of them.",
    epilog="Begin with `hacrl demo`: a minute on a CPU, no downloads. Then `hacrl train size`, or a recipe "
    "of your own, which `hacrl train RECIPE --dry-run` checks without training. `hacrl COMMAND --help` "
    "explains a command.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"hacrl {__version__}")
        raise typer.Exit


@app.command()
def demo(
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for the two runs, the table and the plot; if it exists, a number is added."
        ),
    ] = Path("runs/hacrl-demo"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; default: as in the demo's recipe.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON on the last line.")] = False,
) -> None:
    """Train three tiny agents alone (GSPO) and together (HACPO).

    Takes about a minute on a CPU. The agents come with hacrl, so nothing is downloaded.
    """
    from hacrl.cli.demo import run_demo

    run_demo(output, seed, steps, as_json=json_)


@app.command(cls=OverrideCommand)
def train(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE",
            help="A YAML file, or the name of a recipe that comes with hacrl: demo, size, state, model, "
            "two_models, ...",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the recipe, without dashes: steps=50 lr=2e-6 agents.NAME.lr=1e-6 output=FOLDER.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete an earlier run in the same folder first.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything except the weights, print the config and the memory needed, and stop.",
        ),
    ] = False,
) -> None:
    """Train the agents of a recipe.

    The run is written to the folder runs/RECIPE, or to output=FOLDER: config, metrics, all responses, and
    each trained agent as a plain Hugging Face folder. Ctrl-C saves the run; `hacrl resume` continues it.
    """
    from hacrl.cli.train import run_training

    run_training(config, overrides or [], overwrite, dry_run)


@app.command(cls=OverrideCommand)
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, e.g. runs/size.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the run, e.g. steps=200 in all; those that would make it another run are "
            "refused.",
        ),
    ] = None,
) -> None:
    """Continue a run that was stopped or killed, or add steps to it.

    The run continues from its newest checkpoint and ends with the same numbers as if it had never stopped.
    """
    from hacrl.cli.train import resume_training

    resume_training(run, overrides or [])


@app.command(cls=OverrideCommand)
def compare(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE",
            help="A YAML file, or the name of a recipe that comes with hacrl: demo, size, state, model, "
            "two_models, ...",
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe, for all variants.")
    ] = None,
    variants: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Variants to compare, separated by commas; the first one is the reference. Variants: hacpo, "
            "gspo, grpo, naive, success_gated, xgrpo, ftis, sapo, s2l_po, aligned, gspo_x2, "
            "gspo_same_updates, hacpo_no_baseline, hacpo_no_discrepancy, hacpo_alpha_0, hacpo_alpha_2, "
            "hacpo_alpha_3, hacpo_no_clip, hacpo_no_stepwise. "
            "VARIANT@KEY=VALUE changes a key of the recipe, e.g. gspo@lr=1e-4.",
        ),
    ] = "gspo,gspo_same_updates,gspo_x2,naive,hacpo",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 5,
    jobs: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Number of runs at a time, each in its own process. auto: as many as there are CPU cores "
            "or, on a GPU, as fit by the memory that the first run was measured to need.",
        ),
    ] = "1",
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Also evaluate the agents before and after training on these benchmarks (see hacrl eval), "
            "sampled, with pass@k, and greedy. task: the held-out problems of the recipe's task.",
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Responses per problem of --on: the k of avg@k and pass@k.")
    ] = 8,
    limit: options.Limit = None,
    max_new_tokens: options.MaxNewTokens = None,
    data: options.Data = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the study; finished runs in it are not repeated. Default: runs/compare-RECIPE."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace runs in the folder that had other settings.")
    ] = False,
) -> None:
    """Train a recipe with several methods and seeds and compare them.

    Writes tables, all numbers, and plots. The same command continues a study that was stopped: finished runs
    are not repeated, and an interrupted one continues from its checkpoint if the recipe keeps any.
    """
    from hacrl.cli.compare import jobs_at_a_time, run_comparison
    from hacrl.studies.benchmarks import StudyBenchmarks

    if not on and (limit or max_new_tokens or data):
        raise ConfigError("--limit, --max-new-tokens and --data are of --on: name benchmarks, e.g. --on task")
    benchmarks = StudyBenchmarks(tuple(on), samples, limit, max_new_tokens, data) if on else None
    run_comparison(
        config,
        [name.strip() for name in variants.split(",")],
        seeds,
        jobs_at_a_time(jobs),
        output,
        overrides or [],
        overwrite,
        benchmarks,
    )


@app.command("eval")
def eval_(
    targets: options.Targets,
    on: options.On = None,
    data: options.Data = None,
    columns: options.Columns = None,
    before: options.Before = False,
    samples: options.Samples = None,
    pass_at: options.PassAt = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = 1.0,
    stop: options.Stop = None,
    max_new_tokens: options.MaxNewTokens = None,
    limit: options.Limit = None,
    prompt: options.Prompt = None,
    seed: options.Seed = 0,
    engine: options.Engine = "transformers",
    device: options.Device = "auto",
    batch: options.Batch = None,
    output: options.Output = None,
    overwrite: options.Overwrite = False,
    json_: options.AsJson = False,
) -> None:
    """Evaluate each agent alone on benchmarks.

    The same command continues an evaluation that was interrupted.
    """
    from hacrl.cli.evaluate import evaluation_settings, named_columns, run_evaluation
    from hacrl.evaluation.plan import EvaluationRequest

    settings = evaluation_settings(
        pass_at,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
        stop=tuple(stop) if stop else None,
        max_new_tokens=max_new_tokens,
        limit=limit,
        batch=batch,
        seed=seed,
    )
    request = EvaluationRequest(
        targets=tuple(targets),
        on=tuple(on or ()),
        settings=settings,
        data=data,
        columns=named_columns(columns),
        prompt=prompt,
        before=before,
        engine=engine,
        device=device,
        output=output,
        overwrite=overwrite,
    )
    run_evaluation(request, as_json=json_)


@app.command()
def rollouts(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, e.g. runs/size.")],
    step: Annotated[
        int | None, typer.Option(min=1, help="Show the rollouts of this step; default: the newest step.")
    ] = None,
    agent: Annotated[str | None, typer.Option(help="Show only rollouts of this agent.")] = None,
    problem: Annotated[
        str | None,
        typer.Option(help="Show only this problem (its id or prompt), of all steps unless --step is given."),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="Show only rollouts with this reward: 1, '<0.5', '>=0.9', ...")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of prompts to show.")] = 10,
) -> None:
    """Show a run's prompts, each with the responses of all agents."""
    from hacrl.cli.rollouts import show_rollouts

    show_rollouts(run, step, agent, problem, reward, limit)


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs, of a study or of a demo, e.g. runs/size."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The HTML file; default: report.html in the folder, if it is one."
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write every table as CSV into this folder.")] = None,
    latex: Annotated[
        Path | None, typer.Option(help="Also write every table as LaTeX into this folder.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write figures as SVG and PNG into this folder.")
    ] = None,
) -> None:
    """Make one HTML file that shows runs: curves, who taught whom, and rollouts.

    The file opens from disk in any browser and needs no network.
    """
    from hacrl.cli.report import make_report

    make_report(folders, output, csv, latex, figures)


@app.command()
def watch(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a run, of a study or of a demo, e.g. runs/size."),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on, on this machine only; 0: a free one.")
    ] = 0,
) -> None:
    """Show a run's page while the run is under way.

    The page is served on this machine only, at a secret address that is printed.
    """
    from hacrl.cli.report import watch_run

    watch_run(run, port)


@app.command(cls=OverrideCommand)
def serve(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE",
            help="A YAML file, or the name of a recipe that comes with hacrl: demo, size, state, model, "
            "two_models, ...",
        ),
    ],
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Name of the recipe's agent to serve.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 listens on all addresses.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
) -> None:
    """Start a vLLM server for one agent of a recipe.

    A run on any machine can use the server as agents.NAME.vllm.url.
    """
    from hacrl.config.load import load_config
    from hacrl.engines.vllm.serve import plan_server
    from hacrl.engines.vllm.serve import serve as exec_server

    plan = plan_server(load_config(config, overrides or []), agent, host, port)
    for note in plan.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"serving {agent} at {plan.url}: set agents.{agent}.vllm.url to it in the run's recipe")
    exec_server(plan)


@app.command()
def agents() -> None:
    """List the tiny agents that come with hacrl."""
    from hacrl.cli.agents import list_agents

    list_agents()


def main() -> None:
    """Run the command line; print an error of the user or the run as one message, without a traceback."""
    try:
        app()
    except HacrlError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(exit_codes.of_error(error))


if __name__ == "__main__":
    main()
