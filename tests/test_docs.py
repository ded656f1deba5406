"""The documents agree with the repository: links, files, names, commands, recipes and config keys."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import draw_architecture
import pytest
import typer
import write_command_line_reference
import yaml

from hacrl.cli.main import app
from hacrl.config.load import (
    apply_override,
    build_config,
    load_config,
    parse_yaml,
    read_recipe,
    shipped_recipes,
)
from hacrl.config.reference import describe_settings
from hacrl.config.schema import AgentSettings, RunConfig, VllmSettings
from hacrl.engines.base import SyncReport
from hacrl.evaluation.results import PairResult
from hacrl.plugins import load_plugin
from hacrl.runs.resume import FREE_KEYS
from hacrl.studies.variants import variant_recipe
from hacrl.tasks.gym.retries import gym_retries_task
from hacrl.tasks.registry import GYM_PREFIX, RETRIES_PREFIX, TASKS
from hacrl.training.metrics import LearnReport
from hacrl.training.trainer import Trainer
from tests.test_repository import LAYERS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "hacrl"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
FOLDERS = "src|tests|docs|recipes|examples|scripts|benchmarks|requirements"
# Files and commands that a user has, or that a document makes up as examples.
USERS_FILES = {"my_rewards.py", "rewards.py", "my_tasks.py", "recipe.yaml", "my.yaml"}
GYM_PREFIXES = (GYM_PREFIX, RETRIES_PREFIX)
ENTRY_POINT_GROUP = re.compile(r'^ENTRY_POINTS = "([\w.]+)"', re.MULTILINE)

documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def blocks(text: str, *languages: str) -> list[str]:
    """The contents of code blocks of these languages, with the indent of a block in a list removed."""
    found = re.findall(r"^( *)```([\w -]*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [
        re.sub(f"^{indent}", "", content, flags=re.MULTILINE)
        for indent, language, content in found
        if language in languages
    ]


def prose(text: str) -> str:
    """The text without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def code_spans(text: str) -> list[str]:
    return [span.replace("\n", " ") for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(text))]


def written_by_users(text: str) -> set[str]:
    """Names of files that code blocks of the document begin with: ``# rewards.py``."""
    return set(re.findall(r"^# ([\w./-]+\.\w+)$", text, re.MULTILINE)) | USERS_FILES


# Links and files


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@documents
def test_relative_links_lead_somewhere(path: Path):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists():
            wrong.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(file):
            wrong.append(f"{target}: no such heading")
    assert wrong == []


def test_the_link_check_finds_anchors():
    assert "a-whole-step-against-trl" in anchors(ROOT / "docs" / "performance.md")
    assert "no-such-heading" not in anchors(ROOT / "docs" / "performance.md")


@documents
def test_files_exist(path: Path):
    """Paths below the repository's folders anywhere, and names of Python and Markdown files in backticks."""
    text = path.read_text("utf-8")
    wrong = []
    for name in re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*-]*\w)", text):
        if not any(ROOT.glob(name)) and name not in written_by_users(text):
            wrong.append(name)
    for span in code_spans(text):
        if not re.fullmatch(r"[\w./*-]+\.(py|md|yaml|toml)", span) or span in written_by_users(text):
            continue
        folders = (ROOT / "tests", SOURCE, ROOT / "docs")
        found = any(any(folder.glob(f"**/{span.lstrip('/')}")) for folder in folders)
        if not found and not any(ROOT.glob(span)) and Path(span).name not in RUN_FILES:
            wrong.append(span)
    assert wrong == []


RUN_FILES = {"config.yaml", "results.md", "study.md"}  # of a run, an evaluation, a study


def pages_in(entries: Any) -> list[str]:
    """The pages of a part of the site's navigation, from top to bottom."""
    if isinstance(entries, str):
        return [entries]
    parts = entries if isinstance(entries, list) else entries.values()
    return [page for part in parts for page in pages_in(part)]


def test_the_navigation_has_every_page_once():
    pages = pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    made = ["contributing.md"]  # scripts/site_hooks.py makes this page
    assert sorted(pages) == sorted([path.name for path in (ROOT / "docs").glob("*.md")] + made)


def test_pages_and_pictures_that_scripts_write_are_current():
    page = (ROOT / "docs" / "command_line.md").read_text("utf-8")
    assert page == write_command_line_reference.command_line_page(), (
        "run scripts/write_command_line_reference.py"
    )
    picture = draw_architecture.PICTURE.read_text("utf-8")
    assert picture == draw_architecture.picture(), "run scripts/draw_architecture.py"


def texts_in_the_code() -> str:
    """All string literals of the package, those with placeholders too, one per line."""
    found = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_messages_in_the_troubleshooting_guide_are_in_the_code():
    """A code span with a space in the first column of its tables is part of a message of hacrl."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    spans = [span for cell in rows for span in re.findall(r"`([^`]+)`", cell) if " " in span]
    assert len(spans) >= 30
    code = texts_in_the_code()
    foreign = {"Illegal instruction"}  # the operating system's
    parts = [part.strip() for span in spans if span not in foreign for part in span.split("...")]
    assert [part for part in parts if part not in code] == []


@documents
def test_python_blocks_are_python(path: Path):
    for block in blocks(path.read_text("utf-8"), "python", "python no-run"):
        ast.parse(textwrap.dedent(block))


# The pages whose Python blocks tests run, and the tests. README: a method, and a model from the hub.
RUN_BY = {
    "start_cpu.md": "tests/test_start_page.py",
    "run_folder.md": "tests/test_start_page.py",
    "rollout_log.md": "tests/test_start_page.py",
    "tasks.md": "tests/test_docs.py",
    "verification.md": "tests/test_docs.py",
    "python_api.md": "tests/api/test_docs.py",
    "environments.md": "tests/environments/test_guide.py",
    "extending.md": "tests/test_extending.py",
}


def test_every_python_block_is_run_by_a_test():
    with_code = {
        path.name
        for path in DOCUMENTS
        if any("def step" not in block for block in blocks(path.read_text("utf-8"), "python"))
    }
    assert with_code - {"README.md"} == RUN_BY.keys()
    assert [test for page, test in RUN_BY.items() if page not in (ROOT / test).read_text("utf-8")] == []


def test_the_blocks_of_tasks_and_verification_run():
    def run(name: str) -> dict[str, Any]:
        [block] = blocks((ROOT / "docs" / name).read_text("utf-8"), "python")
        scope: dict[str, Any] = {}
        exec(block, scope)
        return scope

    assert run("tasks.md")["accuracy"](["so 12", "13"], ["12", "12"]) == [1.0, 0.0]
    run("verification.md")


def resolve(name: str) -> Any:
    """What a dotted name of hacrl stands for."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return found
    raise AttributeError(name)


@documents
def test_names_of_hacrl_exist(path: Path):
    groups = {
        group for file in SOURCE.rglob("*.py") for group in ENTRY_POINT_GROUP.findall(file.read_text("utf-8"))
    }
    names = re.findall(r"(?<![\w./-])hacrl(?:\.\w+)+", path.read_text("utf-8"))
    wrong = []
    for name in sorted(set(names) - groups):
        try:
            resolve(name)
        except AttributeError:
            wrong.append(name)
    assert wrong == []


def test_the_paper_map_names_functions_and_tests_that_exist():
    text = (ROOT / "docs" / "paper_map.md").read_text("utf-8")
    table = text.partition("## Equation → function → test\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 15
    wrong = []
    for _, _, functions, tests in rows:
        for name in re.findall(r"`([\w./]+)`", functions):
            if name.startswith("scripts/"):
                continue  # test_files_exist
            try:
                resolve(f"hacrl.{name}")
            except AttributeError:
                wrong.append(name)
        for name in re.findall(r"`([\w./]+)`", tests):
            places = (ROOT / "tests" / "algorithms" / name, ROOT / name)
            if not any(place.is_file() for place in places):
                wrong.append(name)
    assert wrong == []


# Code and the tree


def test_the_step_is_printed_as_it_is():
    """The README and docs/architecture.md show the trainer's step."""
    step = inspect.getsource(Trainer.step)
    for name in ("README.md", "docs/architecture.md"):
        shown = [block for block in blocks((ROOT / name).read_text("utf-8"), "python") if "def step" in block]
        assert len(shown) == 1, name
        assert inspect.cleandoc("\n" + step) == inspect.cleandoc("\n" + shown[0]), name


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md"])
def test_the_tree_is_printed_as_it_is(name: str):
    """The block that begins with ``hacrl/`` or ``src/hacrl/`` has every package, from top to bottom."""
    trees = [block for block in blocks((ROOT / name).read_text("utf-8"), "") if "hacrl/\n" in block[:12]]
    assert len(trees) == 1
    shown = re.findall(r"^  (\w+)/ ", trees[0], re.MULTILINE)
    packages = {file.parent.name for file in SOURCE.glob("*/__init__.py")}
    assert set(shown) == packages
    assert shown == [layer for layer in LAYERS if layer in packages]


# Commands


def commands(text: str) -> list[list[str]]:
    """Every ``hacrl`` command of shell blocks and code spans, as words."""
    lines = [block.replace("\\\n", "") for block in blocks(text, "", "sh", "bash")]
    lines += [span for span in code_spans(text) if span.startswith("hacrl ")]
    found = []
    for block in lines:
        for line in logical_lines(block):
            shell = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            shell.whitespace_split = True
            words: list[str] = []
            for word in [*shell, ";"]:
                if word.strip(";&|"):
                    words.append(word)
                    continue
                while words and (words[0] == "do" or re.fullmatch(r"\w+=\S*", words[0])):
                    del words[0]
                if words[:1] == ["hacrl"]:
                    found.append(words[1:])
                words = []
    return found


def logical_lines(block: str) -> list[str]:
    """Lines with ``hacrl``; a quoted argument or a ``for`` may span several."""
    lines: list[str] = []
    for line in block.splitlines():
        is_open = lines and (lines[-1].count("'") % 2 or re.match(r"for .*[^;]$", lines[-1]))
        if is_open and "done" not in lines[-1]:
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return [line for line in lines if re.search(r"\bhacrl ", line) and "..." not in line.partition("#")[0]]


def parse(words: list[str]) -> dict[str, Any]:
    """Parse a command without running it; return its parameters."""
    group = typer.main.get_command(app)
    context = group.make_context("hacrl", list(words), resilient_parsing=False)
    name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    return {"command": name, **command.make_context(name, rest, parent=context).params}


def check_command(words: list[str]) -> None:
    """Parse one command; build the config of a recipe that exists, for every variant."""
    if len(words) == 1 and not words[0].startswith("-"):  # a command by its name, as in "`hacrl eval`"
        assert words[0] in typer.main.get_command(app).commands, words
        return
    parameters = parse(words)
    path = parameters.get("config")
    if path is None or not (str(path) in shipped_recipes() or path.is_file()):
        return
    overrides = parameters["overrides"] or []
    if parameters["command"] != "compare":
        load_config(path, overrides)
        return
    recipe = read_recipe(path)
    for override in overrides:
        apply_override(recipe, override)
    for variant in parameters["variants"].split(","):
        build_config({**variant_recipe(recipe, variant.strip()), "output": "x"}, f"variant {variant}")


@documents
def test_commands_parse(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    wrong = []
    for words in commands(path.read_text("utf-8").replace("$kind", "size")):
        try:
            check_command(words)
        except Exception as error:
            wrong.append(f"hacrl {' '.join(words)}: {error or type(error).__name__}")
    assert wrong == []


def test_the_command_check_finds_commands_and_errors():
    block = "```\nA=1 hacrl eval runs/x --on task  # why\nhacrl train size \\\n  lr=1; hacrl demo\n```\n"
    text = f"{block}`hacrl agents`"
    assert commands(text) == [
        ["eval", "runs/x", "--on", "task"],
        ["train", "size", "lr=1"],
        ["demo"],
        ["agents"],
    ]
    check_command(["train", "size", "steps=3"])
    for wrong in (["train", "size", "--no-such-option"], ["train", "size", "no_such_key=1"], ["no-such"]):
        with pytest.raises((Exception, AssertionError)):
            check_command(wrong)


@documents
def test_options_of_scripts_exist(path: Path):
    """Every option of a ``python benchmarks/...`` or ``python scripts/...`` command is in that file."""
    text = path.read_text("utf-8").replace("\\\n", "").replace("\n", "\n ")
    wrong = []
    for file, rest in re.findall(r"python ((?:benchmarks|scripts)/\w+\.py)([^`#\n]*)", text):
        source = (ROOT / file).read_text("utf-8")
        wrong += [f"{file} {flag}" for flag in re.findall(r" (--[\w-]+)", rest) if f'"{flag}"' not in source]
    assert wrong == []


# Recipes and config keys

KEYS = {setting.key for setting in describe_settings()}
SECTIONS = {key.partition(".")[0].removesuffix("[]") for key in KEYS if "." in key}
AGENT_SECTIONS = {"vllm", "lora"}
# Keys of metrics.jsonl and results.json that begin like a section of the config.
REPORTED = (
    {f"learning.{field.name}" for field in fields(LearnReport)}
    | {f"engine.{field.name}" for field in fields(SyncReport)}
    | {f"evaluation.{field.name}" for field in fields(PairResult)}
)


def config_key(span: str) -> str | None:
    """The key that a code span names, in the form of ``describe_settings``; None if it names none."""
    found = re.match(r"([a-z_]+(?:\[\])?(?:\.[\w*-]+)+)(?:$|[=: ])", span)
    if found is None:
        return None
    key = re.sub(r"^agents(\[\])?\.", "agents[].", found[1])
    if key.startswith("agents[].") and not found[1].startswith("agents[]."):
        key = f"agents[].{key.split('.', 2)[2]}" if key.count(".") > 1 else key  # agents.NAME.lr
    key = re.sub(r"^agent_defaults\.", "agents[].", key)
    if key.partition(".")[0] in AGENT_SECTIONS:
        key = f"agents[].{key}"
    return key if key.partition(".")[0].removesuffix("[]") in SECTIONS else None


def is_key(key: str) -> bool:
    """Whether there is such a key, a section of that name, or a mapping that takes any key."""
    mappings = ("task.options.", "agents[].vllm.engine_args.", "agents[].chat_template_args.")
    if key.startswith(mappings):
        return True
    key = key.removesuffix(".*")
    return key in KEYS or any(known.startswith(f"{key}.") for known in KEYS)


@documents
def test_config_keys_exist(path: Path):
    keys = {span: config_key(span) for span in code_spans(path.read_text("utf-8"))}
    wrong = [span for span, key in keys.items() if key and not is_key(key) and span not in REPORTED]
    assert wrong == []


def test_the_key_check_knows_keys():
    assert config_key("learning.lr=2e-6") == "learning.lr"
    assert config_key("agents.small.vllm.url") == "agents[].vllm.url"
    assert config_key("vllm.memory: 0.4") == "agents[].vllm.memory"
    assert config_key("trainer.train") is None
    assert is_key("agents[].vllm.url")
    assert is_key("checkpoint.*")
    assert not is_key("learning.no_such_key")
    assert not is_key("rollouts.keep")


def complete(data: dict[str, Any]) -> dict[str, Any]:
    """A mapping of a document as a whole recipe: a part gets what is missing."""
    names = {field.name for field in fields(RunConfig)} | {"agent_defaults"}
    if not data.keys() & names and data.keys() <= {field.name for field in fields(AgentSettings)}:
        data = {"agent_defaults": data}  # keys of an agent, as `vllm: {python: ...}`
    agents = [{"name": "first", "model": "bundled:qwen-small-a"}, {"name": "second", "model": "x/y"}]
    data = {"agents": agents, "output": "x", **data}
    model = {"model": "bundled:qwen-small-a"}
    filled = [agent if "endpoint" in agent else {**model, **agent} for agent in data["agents"]]
    return {**data, "agents": filled}


@documents
def test_yaml_builds(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every YAML block, and every code span that is a mapping with a key of the config."""
    text = path.read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    for block in blocks(text, "python"):  # a recipe may name the code of a document
        if name := re.match(r"# (\w+\.py)\n", block):
            Path(name[1]).write_text(block, encoding="utf-8")
    keys = {field.name for field in (*fields(RunConfig), *fields(AgentSettings))} | {"agent_defaults"}
    spans = [span for span in code_spans(text) if re.match(r"(\w+): ", span) and "..." not in span]
    wrong = []
    for written in blocks(text, "yaml") + [span for span in spans if span.partition(":")[0] in keys]:
        try:
            build_config(complete(parse_yaml(written, "block")), written.strip().splitlines()[0])
        except Exception as error:
            wrong.append(str(error))
    assert wrong == []


def task_parameters(name: str) -> set[str]:
    """The options that a built-in task takes."""
    own = own_parameters(name)
    if "options" not in own:
        return own
    return own - {"options"} | own_parameters("environment")  # a bundled task with an environment


def own_parameters(name: str) -> set[str]:
    """The parameters of a built-in task's class or function; ``options`` stands for all others."""
    if name.startswith("gym:"):
        from hacrl.tasks.gym.task import GymTask as Factory
    elif name.startswith("gym_retries:"):
        Factory = gym_retries_task
    else:
        Factory = load_plugin("task", name, TASKS, "hacrl.tasks", key="task.name")
    return set(inspect.signature(Factory).parameters) - {"name", "kind"}


def test_options_of_tasks_exist():
    """In YAML blocks that name a built-in task, and in the tables of docs/tasks.md, which are complete."""
    text = (ROOT / "docs" / "tasks.md").read_text("utf-8")
    for block in [block for path in DOCUMENTS for block in blocks(path.read_text("utf-8"), "yaml")]:
        task = parse_yaml(block, "block").get("task")
        if isinstance(task, dict) and (task["name"] in TASKS or task["name"].startswith(GYM_PREFIXES)):
            assert task.get("options", {}).keys() <= task_parameters(task["name"]), block
    for heading, name in (
        ("## `arithmetic`: built-in sums", "arithmetic"),
        ("## `boxed`: maths from a data set", "boxed"),
        ("## `gym:NAME`: procedural reasoning", "gym:chain_sum"),
        ("## `reward`: your own functions", "reward"),
    ):
        assert first_column(text, heading) == task_parameters(name), name


def test_options_of_bundled_tasks_are_listed():
    text = (ROOT / "docs" / "bundled_environments.md").read_text("utf-8")
    common = {"size", "test_size", "seed"}
    assert first_column(text, "Options of all but `written_calculator` and `verifiers`:") == common
    for name in ("python", "sqlite", "dungeon"):
        assert first_column(text, f"## `{name}`") | common == own_parameters(name) - {"options"}, name
    retries = own_parameters("gym_retries:chain_sum") - own_parameters("gym:chain_sum")
    assert first_column(text, "## `gym_retries:NAME`") == retries - {"options"}
    assert first_column(text, "## verifiers") == own_parameters("verifiers") - {"options"}
    listed = first_column(text, "# Bundled tasks, and environments of other packages")
    others = {"arithmetic", "boxed", "math", "gsm8k", "reward", "environment"}
    assert listed - {"gym_retries:NAME"} == TASKS.keys() - others


def test_options_of_eval_are_named():
    text = (ROOT / "docs" / "evaluation.md").read_text("utf-8")
    group = typer.main.get_command(app)
    options = {option for parameter in group.commands["eval"].params for option in parameter.opts}
    missing = [option for option in options if option.startswith("--") and option not in text]
    assert missing == []


def first_column(text: str, heading: str) -> set[str]:
    """The code spans in the first column of the first table below a heading."""
    section = text.partition(f"{heading}\n")[2]
    table = re.search(r"^\|.*?(?=\n[^|])", section, re.DOTALL | re.MULTILINE)
    assert table is not None
    return {name for row in table[0].splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_tables_of_keys_are_complete():
    names = {record: {field.name for field in fields(record)} for record in (AgentSettings, VllmSettings)}
    agents = (ROOT / "docs" / "agents.md").read_text("utf-8")
    assert first_column(agents, "# Agents") == names[AgentSettings]
    vllm = (ROOT / "docs" / "vllm.md").read_text("utf-8")
    assert first_column(vllm, "## All settings") == names[VllmSettings]


def test_the_keys_that_a_resumed_run_may_change_are_listed():
    text = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    listed = text.partition("Free to change:")[2].partition(".\n")[0]
    assert set(code_spans(listed)) == set(FREE_KEYS)


def test_the_fields_of_metrics_are_listed():
    """docs/agents.md lists what a learner reports about each source."""
    text = (ROOT / "docs" / "agents.md").read_text("utf-8")
    keys = {key.partition(".")[0] for key in first_column(text, "## Other agents' text")}
    assert keys <= {field.name for field in fields(LearnReport)}
