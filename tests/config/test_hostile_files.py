"""Recipes that would hang, fill the memory or run something are refused in a sentence."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hacrl.config.load import RECIPE_LIMIT, build_config, config_to_yaml, load_config
from hacrl.config.values import DEEPEST, MOST_VALUES, one_line
from hacrl.errors import ConfigError

AGENTS = "agents: [{name: a, model: 'bundled:qwen-large'}]\n"


def doubled(levels: int, entry: str) -> str:
    """Each level names the one below it ten times: 10 to the power of ``levels`` values."""
    lines = ["l0: &l0 {a: 1}"]
    for level in range(1, levels + 1):
        below = ", ".join([f"*l{level - 1}"] * 10)
        lines.append(f"l{level}: &l{level} {entry.format(below)}")
    return AGENTS + "\n".join(lines)


BOMBS = {
    "laughs": (doubled(9, "[{}]"), "with its aliases it has more than 20,000 values"),
    "merges": (doubled(9, "{{<<: [{}]}}"), "with its aliases it has more than 20,000 values"),
    "itself": (AGENTS + "learning: &a {lr: *a}", "with its aliases it has more than 20,000 values"),
    "nested": ("a: " + "[" * 100_000, "nested too deeply"),
    "nested mappings": ("a: " + "{a: " * 20_000, "nested too deeply"),
    "many": ("a: [" + "1," * (MOST_VALUES + 10) + "]", "it has more than 20,000 values"),
    "digits": (AGENTS + "seed: " + "1" * 200_000, "not valid YAML: a value does not fit its tag"),
    "hexadecimal digits": (AGENTS + "seed: 0x" + "f" * 200_000, "seed: only plain, finite values"),
    "spaces": (AGENTS + "project: x" + " " * 200_000 + "y", None),
    "large": ("#" * (RECIPE_LIMIT + 1), "larger than 0.25 MiB"),
    "code": (
        AGENTS + "seed: !!python/object/apply:os.system ['touch ran']",
        "could not determine a constructor",
    ),
    "code in a tag": (AGENTS + "seed: !!python/name:os.system", "could not determine a constructor"),
}
LOAD = """
import sys
from pathlib import Path
from hacrl.config.load import load_config
from hacrl.errors import HacrlError
try:
    load_config(Path(sys.argv[1]))
    print("loaded")
except HacrlError as error:
    print(error)
"""


def limited() -> None:
    """Two gigabytes and a minute of processor time."""
    resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))


@pytest.mark.parametrize("name", BOMBS)
def test_small_files_that_mean_a_lot(name, tmp_path):
    text, words = BOMBS[name]
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    command = [sys.executable, "-c", LOAD, str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=limited, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert (words or "loaded") in done.stdout
    assert (name == "spaces") or "bomb.yaml" in done.stdout
    assert len(done.stdout) < 700
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value",
    ["!!int ''", "!!float ''", "!!bool maybe", "!!timestamp x", "!!binary é", "!!int [1]", "!!omap [1]"],
)
def test_tags_that_do_not_fit(value, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{AGENTS}seed: {value}\n")
    with pytest.raises(ConfigError, match=r"recipe\.yaml is not valid YAML: "):
        load_config(path)


@pytest.mark.parametrize(
    "value", ["!!set {a}", "!!binary YQ==", "2001-01-01", "!!timestamp 2001-01-01", ".inf"]
)
def test_values_that_are_not_plain(value, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{AGENTS}task: {{options: {{limit: {value}}}}}\n")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: task\.options\.limit: only plain, finite values"):
        load_config(path)


def test_where_a_recipe_is_broken_is_said_in_one_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("agents:\n  - {name: a\nsteps: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"config file {path} is not valid YAML: while parsing a flow mapping, "
        "expected ',' or '}', but got ':' (line 3, column 6)"
    )


def nested(levels: int) -> dict:
    value: dict = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def test_what_python_hands_over_is_bounded_too():
    good = {"agents": [{"name": "a", "model": "m"}], "output": "x"}
    itself: dict = {}
    itself["a"] = itself
    for depth in (DEEPEST + 1, 100_000):
        with pytest.raises(ConfigError, match=r"x: task\.options\.a\.\.\.: nested more than 64 levels deep"):
            build_config({**good, "task": {"options": nested(depth)}}, "x")
    assert build_config({**good, "task": {"options": nested(DEEPEST - 3)}}).task.options == nested(
        DEEPEST - 3
    )
    with pytest.raises(ConfigError, match="or in itself"):
        build_config({**good, "task": {"options": itself}})
    with pytest.raises(ConfigError, match=r"config: task\.options\.3: a key must be text"):
        build_config({**good, "task": {"options": {3: 4}}})
    with pytest.raises(
        ConfigError, match="seed: only plain, finite values are allowed, not a number of hundreds"
    ):
        build_config({**good, "seed": 10**5000})
    with pytest.raises(
        ConfigError, match="project: only plain, finite values are allowed, not text with half a"
    ):
        build_config({**good, "project": "\ud800"})


def test_many_and_long_mistakes_make_a_short_message():
    data = {"agents": [], "output": "x", **{f"key{i:02}": 1 for i in range(40)}}
    with pytest.raises(ConfigError) as caught:
        build_config(data, "recipe")
    lines = str(caught.value).split("\n")
    assert (len(lines), lines[0], lines[-1].strip()) == (12, "recipe:", "and 30 more")  # 10 are told
    with pytest.raises(ConfigError) as caught:
        build_config({"agents": [], "output": "x", "steps": "y" * 10**6, "a\nb\x1b[31m": 2})
    assert len(str(caught.value)) < 600
    assert "'a\\nb\\x1b[31m': unknown key" in str(caught.value)
    assert "steps: must be a whole number, not 'yyyyyyyyyy" in str(caught.value)
    assert one_line("a\tb") == "a\\tb"
    assert len(one_line("x" * 10_000)) == 500


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("agents." + "9" * 5000 + ".lr=1", "there is no entry '9999"),
        (
            "agents.a\nb.lr=1",
            r"override 'agents.a\nb.lr': there is no entry 'a\nb'; there are small, large, llama",
        ),
        ("x\x1b[31m=1", r"'x\x1b[31m': unknown key"),
        ("a." * 5000 + "b=1", "demo: a.a.a...: nested more than 64 levels deep"),
        ("seed=" + "1" * 5000, "value of seed is not valid YAML"),
        ("=" * 5000, "must have the form key=value"),
    ],
)
def test_odd_overrides_make_a_short_message(override, words):
    with pytest.raises(ConfigError) as caught:
        load_config(Path("demo"), [override])
    assert words in str(caught.value)
    assert len(str(caught.value)) < 600


def test_text_that_looks_like_a_number_is_written_as_text(tmp_path):
    """A run called 1e3 could not be read back: to YAML 1.1, which the writer follows, that is no number."""
    agents = [{"name": "1e3", "model": "2E+5"}]
    config = build_config({"agents": agents, "output": "1.e5", "project": "0x10", "learning": {"lr": 1e-07}})
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(config), encoding="utf-8")
    assert load_config(path) == config


def no_recipe(kind: str, folder: Path) -> Path:
    """Something that is there and is no recipe."""
    path = folder / "recipe.yaml"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a loop":
        path.symlink_to(path)
    elif kind == "too large":
        with path.open("wb") as file:
            file.truncate(50 * 2**20)
    elif kind == "too long a name":
        return folder / ("x" * 300 + ".yaml")
    else:
        path.write_bytes({"nothing": b"", "binary": bytes(range(256)) * 40, "zeros": b"\0" * 99}[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("a pipe", "is a pipe, not a file"),
        ("a folder", "is a folder, not a file"),
        ("a device", "is a device, not a file"),
        ("a loop", "Too many levels of symbolic links"),
        ("too large", "is larger than 0.25 MiB"),
        ("too long a name", "File name too long"),
        ("nothing", "must be a mapping of keys to values, not empty"),
        ("binary", "is not UTF-8 text (at byte 128)"),
        ("zeros", "is not valid YAML: special characters are not allowed (character 1)"),
    ],
)
def test_the_command_line_refuses_what_is_no_recipe(kind, words, tmp_path):
    path = no_recipe(kind, tmp_path)
    command = [sys.executable, "-m", "hacrl", "train", str(path), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: config file ")
    assert words in line
    assert path.name in line
    assert "Traceback" not in line
