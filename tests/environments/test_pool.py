"""Episodes of well-behaved environments: both forms, many at once, in processes and in threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hacrl.environments.interface import EnvironmentLimits, EnvironmentSource
from hacrl.environments.pool import EnvironmentPool
from hacrl.environments.references import reference_of
from hacrl.errors import TaskError
from hacrl.plugins import load_reference
from hacrl.types import Problem, Turn
from tests.environments import games
from tests.environments.helpers import PATIENCE, call, finish, only, play, problem, say

GAMES = "tests.environments.games"


@pytest.fixture(params=["process", "thread"])
def bank(request: pytest.FixtureRequest) -> EnvironmentPool:
    """A pool whose environments run in processes, and one that runs in threads."""
    return EnvironmentPool(games.Bank if request.param == "process" else lambda: games.Bank())


def test_an_episode_with_tools(bank: EnvironmentPool):
    with bank as pool:
        outcome = play(pool, 7, balance=3, purpose="rent")
        assert (outcome.call, outcome.opening, outcome.failure) == ("start", "You have 3.", "")
        outcome = call(pool, 7, ("deposit", '{"amount": 4}'), ("convert", '{"rate": 0.5}'))
        assert outcome.turns == (
            Turn("tool", "7", tool="deposit"),
            Turn("tool", "{'USD': 3.5}", tool="convert"),
        )
        assert (outcome.call, outcome.reward, outcome.done, outcome.tool_errors) == ("act", None, False, 0)
        outcome = call(pool, 7, ("read_row", "{}"), ("convert", '{"rate": 2, "currency": "CHF"}'))
        assert outcome.turns[0].content == "[('answer', '12'), ('prompt', 'question'), ('purpose', 'rent')]"
        assert outcome.turns[1].content == "{'CHF': 14}"
        assert call(pool, 7, ("leave", "{}")).done
        outcome = finish(pool, 7)
        assert (outcome.call, outcome.reward, outcome.turns) == ("finish", 0.7, ())
        assert play(pool, 7).opening == ""  # None
        assert pool.pending == 0


def test_only_methods_are_tools(bank: EnvironmentPool):
    with bank as pool:
        description = pool.describe()
        assert [tool.name for tool in pool.tools()] == ["convert", "deposit", "leave", "read_row"]
        assert (description.is_text, description.has_reward, description.required_columns) == (
            False,
            True,
            (),
        )
        play(pool, 0, balance=1)
        results = call(pool, 0, *((name, "{}") for name in ("_audit", "reset", "get_reward", "broken")))
        assert results.tool_errors == 4
        assert finish(pool, 0).reward == 0.1


def test_an_episode_by_text():
    """Two tries: a reward of 1/2. Without get_reward there is none in the end."""
    with EnvironmentPool(games.Guess) as pool:
        assert pool.is_text()
        assert pool.tools() == ()
        assert pool.describe().required_columns == ("secret",)
        assert play(pool, 0, secret=5).opening == "Guess a number."
        outcome = say(pool, 0, "3")
        assert outcome.turns == (Turn("user", "Higher."),)
        assert (outcome.reward, outcome.done) == (0.0, False)
        outcome = say(pool, 0, "5")
        assert (outcome.turns, outcome.reward, outcome.done) == ((Turn("user", "Right."),), 0.5, True)
        assert finish(pool, 0).reward is None
        assert play(pool, 0).failure.startswith("raised TypeError: Guess.reset() missing 1 required")


def test_steps_with_more_values():
    with EnvironmentPool(games.Gymnasium) as pool:
        assert pool.is_text()
        assert play(pool, 0, seed=4, other="left out").opening == "seed 4"
        outcomes = [say(pool, 0, text) for text in ("go", "fall", "wait", "old")]
        assert [outcome.turns[0].content for outcome in outcomes] == ["on", "ended", "cut", ""]
        assert [outcome.reward for outcome in outcomes] == [0.0, -1.0, 0.5, 1.0]
        assert [outcome.done for outcome in outcomes] == [False, True, True, True]


def test_a_tool_with_the_name_step():
    with EnvironmentPool(games.OneTool) as pool:
        assert [tool.name for tool in pool.tools()] == ["step"]
        play(pool, 0)
        assert call(pool, 0, ("step", '{"direction": "north"}')).turns[0].content == "north"
        assert finish(pool, 0).reward is None


def test_several_environments_with_options():
    sources = {
        "poor": f"{GAMES}:make_bank",
        "rich": EnvironmentSource(games.make_bank, {"balance": 50}),
        "game": games.Guess,
    }
    with EnvironmentPool(
        {**sources, "poor": EnvironmentSource(f"{GAMES}:make_bank", {"balance": 5})}
    ) as pool:
        assert pool.names == ("poor", "rich", "game")
        pool.check()
        assert [pool.is_text(name) for name in pool.names] == [False, False, True]
        for key, name in enumerate(("poor", "rich")):
            pool.start(key, problem(environment=name, purpose="rent"))
            assert only(pool, key).failure == ""
        contents = [call(pool, key, ("read_row", "{}")).turns[0].content for key in (0, 1)]
        assert contents == ["[('answer', '12'), ('prompt', 'question'), ('purpose', 'rent')]"] * 2
        assert [finish(pool, key).reward for key in (0, 1)] == [0.5, 5.0]
        with pytest.raises(
            TaskError, match=r"no environment 'gane'; did you mean 'game'\? Valid names: poor, rich"
        ):
            pool.start(2, problem(environment="gane"))
    with EnvironmentPool(f"{GAMES}:make_bank") as pool, pytest.raises(TaskError, match=r"balance"):
        pool.check()


def test_the_column_that_selects_the_environment_is_not_passed_on():
    row = Problem("p", "q", "", fields={"environment": "bank"}, environment="bank")
    expected = {True: "[('prompt', 'q')]", False: "[('environment', 'bank'), ('prompt', 'q')]"}
    for has_names, content in expected.items():
        with EnvironmentPool({"bank": games.Bank} if has_names else games.Bank) as pool:
            pool.start(0, row)
            assert only(pool, 0).failure == ""
            assert call(pool, 0, ("read_row", "{}")).turns[0].content == content


def test_episodes_of_a_problem_start_alike():
    with EnvironmentPool(games.Dice) as pool:
        keys = {0: ("a", 0), 1: ("a", 0), 2: ("b", 0), 3: ("a", 1)}
        for key, (name, seed) in keys.items():
            pool.start(key, problem(name), seed)
        openings = {}
        while pool.pending:
            openings |= {key: outcome.opening.split() for key, outcome in pool.wait(PATIENCE)}
        assert openings[0] == openings[1]
        for part in (0, 1):  # Python's and numpy's generator
            assert len({openings[key][part] for key in (0, 2, 3)}) == 3
        assert len({openings[key][2] for key in keys}) == 1  # the hash of a text
        assert call(pool, 0, ("roll", "{}")) != call(pool, 0, ("roll", "{}"))
        assert call(pool, 1, ("roll", "{}")).turns != call(pool, 0, ("roll", "{}")).turns
    with EnvironmentPool(games.Dice) as pool:
        assert play(pool, 0).opening != ""
        pool.start(1, problem("a"))
        assert only(pool, 1).opening.split() == openings[0]  # in another process, too


def test_many_at_once_within_a_limit(tmp_path: Path):
    with EnvironmentPool(games.Crowd, EnvironmentLimits(running_calls=2)) as pool:
        for key in range(9):
            pool.start(key, problem(folder=str(tmp_path)))
        pool.discard(8)  # it waits
        assert pool.pending == 8
        outcomes = {}
        while pool.pending:
            outcomes |= dict(pool.wait(PATIENCE))
        assert sorted(outcomes) == list(range(8))
        assert max(int(outcome.opening) for outcome in outcomes.values()) <= 2


def test_waiting():
    with EnvironmentPool(games.Guess) as pool:
        assert pool.wait() == []  # nothing is under way
        pool.start(0, problem(secret=1))
        with pytest.raises(ValueError, match="the key 0 is under way"):
            pool.start(0, problem(secret=1))
        with pytest.raises(ValueError, match="the key 0 has not answered the last call"):
            pool.finish(0)
        assert [key for key, _ in pool.wait()] == [0]
        with pytest.raises(ValueError, match="no episode with the key 1"):
            pool.act(1, Turn("assistant", ""))
        pool.close()
        with pytest.raises(ValueError, match="no episode with the key 0"):
            pool.finish(0)
        assert play(pool, 0, secret=1).failure == ""  # a later use starts anew


def test_long_messages_both_ways():
    """More than a socket's buffer holds."""
    long = "a" * 3_000_000
    with EnvironmentPool(games.OneTool, EnvironmentLimits(observation_characters=10**7)) as pool:
        play(pool, 0, text=long)
        outcome = call(pool, 0, ("step", json.dumps({"direction": long})), ("step", '{"direction": "on"}'))
        assert [len(turn.content) for turn in outcome.turns] == [3_000_000, 2]


def test_threads_for_what_cannot_be_imported():
    limits = EnvironmentLimits(call_seconds=0.2)
    with EnvironmentPool({"nap": lambda: games.Sleeper()}, limits) as pool:
        (note,) = pool.notes
        assert note.startswith("task.options.environment.nap: episodes of test_threads_for_what_cannot_be")
        assert "hangs cannot be stopped" in note
        pool.start(0, problem(environment="nap", seconds=1000))
        outcome = only(pool, 0)
        assert outcome.failure == "did not answer within 0.2 s (the limit is call_seconds)"
        assert outcome.failure_kind == "timeout"
        pool.start(0, problem(environment="nap", seconds=0))
        assert only(pool, 0).opening == str(os.getpid())
        games.Sleeper.wake.set()
    games.Sleeper.wake.clear()


def test_notes_are_for_threads_only():
    assert EnvironmentPool({"a": games.Bank, "b": f"{GAMES}:Guess"}).notes == ()


def test_how_another_process_imports_a_factory(tmp_path: Path):
    (tmp_path / "mine.py").write_text("class Env:\n    class Inner: pass\n")
    loaded = load_reference(f"{tmp_path}/mine.py:Env", "key", TaskError)
    assert reference_of(loaded) == f"{tmp_path}/mine.py:Env"
    assert reference_of(loaded.Inner) == f"{tmp_path}/mine.py:Env.Inner"
    assert reference_of(games.Bank) == f"{GAMES}:Bank"
    assert reference_of(games.make_bank) == f"{GAMES}:make_bank"
    namespace: dict = {"__name__": "__main__"}
    exec("class Env: pass", namespace)

    class Local:
        pass

    for factory in (Local, lambda: games.Bank(), games.Bank().deposit, namespace["Env"]):
        assert reference_of(factory) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "names no environment"),
        (3, "3 is not a class or function that makes an environment"),
        ("games", "'games' is not package.module:attribute or path/to/file.py:attribute"),
        (EnvironmentSource(games.Bank, {"balance": {1}}), "the options must be plain JSON values"),
        (f"{GAMES}:Bonk", "has no 'Bonk'; did you mean"),
        ("no_such_module:Env", "no_such_module cannot be imported: ModuleNotFoundError"),
        (games.NoReset, "the environment of type NoReset has no method reset"),
        (
            games.NoHint,
            "the environment cannot describe its tools: the tool 'move': the argument 'x' has no type hint",
        ),
        (EnvironmentSource(games.Bank, {"money": 1}), "unexpected keyword argument 'money'"),
    ],
)
def test_what_cannot_be_an_environment(given: object, message: str):
    with pytest.raises(TaskError, match=rf"^task\.options\.environment: .*{message}"):
        EnvironmentPool(given).check()  # type: ignore[arg-type]


def test_wrong_limits():
    with pytest.raises(ValueError, match="call_seconds must be a positive number, not 0"):
        EnvironmentLimits(call_seconds=0)
    with pytest.raises(ValueError, match="processes must be at least 1, not 0"):
        EnvironmentLimits(processes=0)


def test_the_limit_on_memory():
    """A limit that hacrl itself has been given is never raised."""
    program = (
        "import resource\n"
        "from tests.environments.helpers import *\n"
        "from hacrl.environments.interface import EnvironmentLimits\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))\n"
        "for memory in (None, 100, 1):\n"
        "    limits = EnvironmentLimits(memory=memory)\n"
        "    with EnvironmentPool('tests.environments.games:Limit', limits) as pool:\n"
        "        print(int(play(pool, 0).opening) / 2**30)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == ""
    *unchanged, limited = map(float, done.stdout.split())
    assert unchanged == [8.0, 8.0]
    assert 1.0 < limited < 2.0  # beyond what the imported modules take


def test_a_fork_of_the_trainer_leaves_episodes_alone():
    program = (
        "import os\n"
        "from tests.environments import games\n"
        "from tests.environments.helpers import *\n"
        "pool = EnvironmentPool(games.Bank)\n"
        "play(pool, 0, balance=1)\n"
        "if os.fork() == 0:\n"
        "    pool.close()\n"
        "    play(pool, 0, balance=3)\n"
        "    pool.close()\n"
        "    os._exit(0)\n"
        "assert os.wait()[1] == 0\n"
        "print(call(pool, 0, ('deposit', '{\"amount\": 1}')).turns[0].content)\n"
        "pool.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_a_script_ends_with_episodes_under_way():
    """Threads that hang and processes do not keep the interpreter from ending."""
    program = (
        "import time\n"
        "from tests.environments.helpers import *\n"
        "class Hang:\n"
        "    def reset(self): time.sleep(1000)\n"
        "pools = [EnvironmentPool(Hang), EnvironmentPool('tests.environments.hostile:Hostile')]\n"
        "for pool in pools:\n"
        "    pool.start(0, problem(where='reset', attack='sleep'))\n"
        "    print(pool.wait(0.05), len(pool.notes))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("[] 1\n[] 0\n", "")
