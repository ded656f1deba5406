"""The command line. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hacrl import __version__
from hacrl.cli import eval_options as options
from hacrl.cli import exit_codes
from hacrl.errors import HacrlError

app = typer.Typer(
    name="hacrl",
    help="Train several different LLMs together, so that every verified rollout teaches all of them.",
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
        Path, typer.Option(help="Folder for the two runs, the table and the plot; a free name is chosen.")
    ] = Path("runs/hacrl-demo"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; default: the demo's own.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON on the last line.")] = False,
) -> None:
    """Bundled tiny agents, HACPO together against GSPO alone: about a minute on a CPU, no downloads."""
    from hacrl.cli.demo import run_demo

    run_demo(output, seed, steps, as_json=json_)


@app.command()
def train(
    config: Annotated[
        Path,
        typer.Argument(
            help="A recipe: a YAML file, or the name of one that comes with hacrl (demo, size, ...)."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="e.g. steps=50 learning.lr=2e-6 agents.NAME.lr=1e-6"),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an earlier run in the same folder.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check all but the weights, print config and memory, stop.",
        ),
    ] = False,
) -> None:
    """Train the agents of a recipe; the run's folder is runs/RECIPE unless output= says otherwise."""
    from hacrl.cli.train import run_training

    run_training(config, overrides or [], overwrite, dry_run)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="The folder of a run, e.g. runs/size.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="e.g. steps=200; what makes it another run is refused."),
    ] = None,
) -> None:
    """Go on with a run where it stopped, was killed, or ended."""
    from hacrl.cli.train import resume_training

    resume_training(run, overrides or [])


@app.command()
def compare(
    config: Annotated[
        Path,
        typer.Argument(
            help="A recipe: a YAML file, or the name of one that comes with hacrl (demo, size, ...)."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides for all variants.")
    ] = None,
    variants: Annotated[
        str,
        typer.Option(
            "--methods",
            help="Variants, separated by commas, the first is the reference: hacpo, gspo, grpo, naive, "
            "gspo_x2, gspo_same_updates, hacpo_no_baseline, hacpo_no_discrepancy, hacpo_alpha_0/2/3, "
            "hacpo_no_clip, hacpo_no_stepwise. VARIANT@KEY=VALUE changes a key, e.g. gspo@lr=1e-4.",
        ),
    ] = "gspo,gspo_same_updates,gspo_x2,naive,hacpo",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, a process each.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Folder; finished runs in it are kept.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace runs with other settings.")] = False,
) -> None:
    """The same recipe under several methods and seeds: a table, numbers and a plot."""
    from hacrl.cli.compare import run_comparison

    run_comparison(
        config,
        [name.strip() for name in variants.split(",")],
        seeds,
        jobs,
        output,
        overrides or [],
        overwrite,
    )


@app.command("eval")
def eval_(
    targets: options.Targets,
    on: options.On = None,
    data: options.Data = None,
    before: options.Before = False,
    samples: options.Samples = None,
    pass_at: options.PassAt = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = 1.0,
    max_new_tokens: options.MaxNewTokens = None,
    limit: options.Limit = None,
    prompt: options.Prompt = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    batch: options.Batch = None,
    output: options.Output = None,
    overwrite: options.Overwrite = False,
    json_: options.AsJson = False,
) -> None:
    """Evaluate agents alone on benchmarks. An evaluation that was interrupted goes on."""
    from hacrl.cli.evaluate import evaluation_settings, run_evaluation
    from hacrl.evaluation.plan import EvaluationRequest

    settings = evaluation_settings(
        pass_at,
        samples=samples,
        temperature=temperature,
        top_p=top_p,
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
        prompt=prompt,
        before=before,
        device=device,
        output=output,
        overwrite=overwrite,
    )
    run_evaluation(request, as_json=json_)


@app.command()
def rollouts(
    run: Annotated[Path, typer.Argument(help="The folder of a run, e.g. runs/size.")],
    step: Annotated[int | None, typer.Option(min=1, help="Which step; default: the newest.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only this agent's rollouts.")] = None,
    problem: Annotated[
        str | None, typer.Option(help="Only this problem, by id or by prompt; of all steps.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="Only rollouts with this reward: 1, '<0.5', '>=0.9', ...")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts to show.")] = 10,
) -> None:
    """Show a run's rollouts: every prompt with the answers of all agents together."""
    from hacrl.cli.rollouts import show_rollouts

    show_rollouts(run, step, agent, problem, reward, limit)


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="A recipe: a YAML file, or one that comes with hacrl.")],
    agent: Annotated[str, typer.Argument(help="Which of its agents.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of the recipe.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
) -> None:
    """A vLLM server for one agent, which runs anywhere can use as agents.NAME.vllm.url."""
    from hacrl.config.load import load_config
    from hacrl.engines.vllm.serve import plan_server
    from hacrl.engines.vllm.serve import serve as become_server

    plan = plan_server(load_config(config, overrides or []), agent, host, port)
    for note in plan.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"serving {agent} at {plan.url}: set agents.{agent}.vllm.url to it in the run's recipe")
    become_server(plan)


@app.command()
def agents() -> None:
    """List the tiny agents that come with the package."""
    from hacrl.cli.agents import list_agents

    list_agents()


def main() -> None:
    """Run the command line; a user's mistake is one message, not a traceback."""
    try:
        app()
    except HacrlError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(exit_codes.of_error(error))


if __name__ == "__main__":
    main()
