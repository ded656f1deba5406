"""Whatever an environment does, nothing is lost but its own episode."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hacrl.environments.interface import EnvironmentLimits, EnvironmentSource, Outcome
from hacrl.environments.pool import EnvironmentPool
from hacrl.environments.process_backend import ProcessEpisode
from hacrl.environments.process_tree import descendants, is_stopped
from hacrl.errors import TaskError
from tests.environments.helpers import (
    PATIENCE,
    call,
    finish,
    marked_processes,
    only,
    parent_of,
    play,
    problem,
    processes_settle,
    say,
)

HOSTILE = "tests.environments.hostile:Hostile"
VALUES = "tests.environments.hostile:make_anything"
NEIGHBOUR, VICTIM = 0, 1
PROCESSES = 3  # the zygote; the neighbour's supervisor and environment


@pytest.fixture(scope="module")
def shared_mark() -> Iterator[str]:
    """An environment variable that everything inherits that the shared pool starts."""
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HACRL_TEST_MARK", mark)
        yield mark


@pytest.fixture(scope="module")
def shared_pool(shared_mark: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    """A pool with an episode under way; it must leave nothing in the end."""
    folder = tmp_path_factory.mktemp("episodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder))
        with EnvironmentPool(HOSTILE, EnvironmentLimits(memory=0.1, processes=20)) as pool:
            play(pool, NEIGHBOUR)
            yield pool
    assert marked_processes(shared_mark) == []
    assert list(folder.iterdir()) == []


@pytest.fixture
def pool(shared_pool: EnvironmentPool, shared_mark: str) -> Iterator[EnvironmentPool]:
    """The shared pool. Its episode under way must not notice anything."""
    before = int(call(shared_pool, NEIGHBOUR, ("call", "{}")).turns[0].content)
    yield shared_pool
    assert call(shared_pool, NEIGHBOUR, ("call", "{}")).turns[0].content == str(before + 1)
    assert processes_settle(shared_mark, PROCESSES)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """An environment variable that everything inherits that a test starts."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("HACRL_TEST_MARK", mark)
    return mark


ENDINGS = {
    "raise_error": r"raised ValueError: no \x1b[31msuch\x1b[0m level (hostile.py, line ",
    "exit_python": "raised SystemExit: 3 (hostile.py, line",
    "interrupt": "raised KeyboardInterrupt:  (hostile.py, line",
    "bad_text": "raised Error: an error without a text (hostile.py, line",
    "exit_at_once": "ended its process (exit code 7)",
    "exit_as_if_all_were_well": "ended its process (exit code 0)",
    "leave_daemon_and_exit": "ended its process (exit code 6)",
    "abort": "died (signal 6)",
    "segfault": "died (signal 11)",
    "kill_itself": "died (signal 9: perhaps for want of memory)",
    "kill_parent": "lost its supervisor",
    "kill_parent_and_leave_daemon": "lost its supervisor",
    "terminate_parent": "ended its process (exit code 5)",
    "bomb": "started more than 20 processes (the limit is processes)",
    "bomb_in_own_sessions": "started more than 20 processes (the limit is processes)",
    "fill_memory": "ran out of memory (the limit is memory)",
    "close_everything": "ended its process (exit code 1)",
    "close_everything_and_sleep": "closed the connection of its process",
    "write_everywhere": "sent something else than a reply",
    "write_nested_json": "sent something else than a reply",
    "announce_a_long_message": "sent more than a reply can be",
}


@pytest.mark.parametrize("attack", ENDINGS)
def test_an_attack_ends_its_own_episode(pool: EnvironmentPool, shared_mark: str, attack: str):
    outcome = play(pool, VICTIM, where="reset", attack=attack)
    assert outcome.failure.startswith(ENDINGS[attack])
    assert outcome.failure_kind == "crash"
    assert (outcome.opening, outcome.turns, outcome.reward) == ("", (), None)
    with pytest.raises(ValueError, match="there is no episode with the key 1"):
        pool.finish(VICTIM)
    assert processes_settle(shared_mark, PROCESSES)


@pytest.mark.parametrize("where", ["tool", "reward"])
@pytest.mark.parametrize("attack", ["exit_at_once", "kill_parent", "bomb", "fill_memory"])
def test_attacks_in_tools_and_rewards(pool: EnvironmentPool, shared_mark: str, where: str, attack: str):
    assert play(pool, VICTIM, where=where, attack=attack).failure == ""
    outcome = call(pool, VICTIM, ("call", "{}")) if where == "tool" else finish(pool, VICTIM)
    assert (outcome.failure.startswith(ENDINGS[attack]), outcome.failure_kind) == (True, "crash")
    assert processes_settle(shared_mark, PROCESSES)


@pytest.mark.parametrize(
    "attack",
    [
        "close_standard_streams",
        "print_a_lot",
        "open_sockets",
        "leave_child",
        "leave_daemon",
        "leave_program",
        "leave_files",
        "leave_nested_folders",
    ],
)
def test_what_does_no_harm_is_no_failure(pool: EnvironmentPool, shared_mark: str, attack: str):
    """Processes may run on between calls; they end with the episode."""
    assert play(pool, VICTIM, where="tool", attack=attack).failure == ""
    outcome = call(pool, VICTIM, ("call", "{}"))
    assert (outcome.turns[0].content, outcome.tool_errors) == ("1", 0)
    left_behind = attack in ("leave_child", "leave_daemon", "leave_program")
    assert len(marked_processes(shared_mark)) == PROCESSES + 2 + left_behind
    assert finish(pool, VICTIM).reward == 1.0
    assert processes_settle(shared_mark, PROCESSES)


def test_a_daemon_that_nobody_could_adopt(mark: str):
    """Zygote and supervisor are killed. The pool finds what is left by its mark when it closes."""
    with EnvironmentPool(HOSTILE) as pool:
        outcome = play(pool, VICTIM, where="reset", attack="kill_all_who_could_clean_up")
        assert outcome.failure == "lost its supervisor"
        assert processes_settle(mark, 1)
    assert marked_processes(mark) == []


def test_what_episodes_print_goes_nowhere(pool: EnvironmentPool, shared_mark: str):
    play(pool, VICTIM, where="tool", attack="print_a_lot")
    assert call(pool, VICTIM, ("call", "{}")).tool_errors == 0
    for pid in marked_processes(shared_mark):
        assert {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)} == {"/dev/null"}
    pool.discard(VICTIM)


def test_temporary_files_go_with_their_episode(pool: EnvironmentPool, shared_mark: str):
    (folder,) = Path(tempfile.gettempdir()).iterdir()
    before = set(folder.iterdir())
    play(pool, VICTIM, where="tool", attack="leave_files")
    (own,) = set(folder.iterdir()) - before
    call(pool, VICTIM, ("call", "{}"))
    assert len(list(own.iterdir())) == 1
    pool.discard(VICTIM)
    assert processes_settle(shared_mark, PROCESSES)
    assert set(folder.iterdir()) == before


def test_kernels_that_list_no_children(monkeypatch: pytest.MonkeyPatch):
    """The slower way finds the same processes, whatever their names."""
    program = "import os; os.fork(); os.fork(); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        while len(found := descendants(process.pid)) < 3:
            pass
        monkeypatch.setattr("hacrl.environments.process_tree._LISTS_CHILDREN", False)
        assert sorted(descendants(process.pid)) == sorted(found)
        process.kill()
        for pid in found:
            os.kill(pid, signal.SIGKILL)


def test_the_end_of_the_zygote(mark: str):
    """Episodes under way go on; the next one starts another zygote."""
    with EnvironmentPool(HOSTILE) as pool:
        play(pool, NEIGHBOUR)
        outcome = play(pool, VICTIM, where="reset", attack="kill_grandparent")
        assert outcome.failure == "ended its process (exit code 9)"
        assert processes_settle(mark, PROCESSES - 1)
        assert call(pool, NEIGHBOUR, ("call", "{}")).turns[0].content == "1"
        assert play(pool, VICTIM).failure == ""
        assert call(pool, NEIGHBOUR, ("call", "{}")).turns[0].content == "2"
        assert len(marked_processes(mark)) == PROCESSES + 2
    assert marked_processes(mark) == []


def test_a_thread_that_writes_at_any_time(pool: EnvironmentPool, shared_mark: str):
    play(pool, VICTIM, where="reset", attack="write_from_a_thread")
    assert processes_settle(shared_mark, PROCESSES)
    pool.discard(VICTIM)


def test_episodes_end_without_a_final_call(pool: EnvironmentPool, shared_mark: str):
    play(pool, VICTIM, where="reset", attack="leave_daemon")
    pool.discard(VICTIM)
    assert processes_settle(shared_mark, PROCESSES)
    pool.discard(VICTIM)
    pool.start(VICTIM, problem(where="reset", attack="sleep"))
    assert pool.wait(0.01) == []
    pool.discard(VICTIM)
    assert pool.pending == 0
    assert processes_settle(shared_mark, PROCESSES)


def test_a_tool_that_raises_is_no_failure(pool: EnvironmentPool):
    for attack, text in (
        ("raise_error", "no \x1b[31msuch\x1b[0m level"),
        ("bad_text", "an error without a text"),
    ):
        play(pool, VICTIM, where="tool", attack=attack)
        outcome = call(pool, VICTIM, ("call", "{}"), ("call", '{"speed": 1}'), ("jump", "{}"), ("call", "[1"))
        contents = [turn.content for turn in outcome.turns]
        assert contents[0] == str({"error": text})
        assert "unexpected keyword argument 'speed'" in contents[1]
        assert contents[2] == "{'error': 'Tool jump not found.'}"
        assert [turn.tool for turn in outcome.turns] == ["call", "call", "jump", "call"]
        assert {turn.role for turn in outcome.turns} == {"tool"}
        assert (outcome.tool_errors, outcome.failure) == (4, "")
        assert finish(pool, VICTIM).reward == 1.0


@pytest.mark.parametrize(
    "attack", ["sleep", "ignore_signals_and_spin", "stop_itself", "wait_for_ever", "fill_memory_and_catch"]
)
def test_hanging(mark: str, attack: str):
    with EnvironmentPool(HOSTILE, EnvironmentLimits(call_seconds=0.2, memory=0.1)) as pool:
        outcome = play(pool, VICTIM, where="reset", attack=attack)
        assert outcome.failure == "did not answer within 0.2 s (the limit is call_seconds)"
        assert outcome.failure_kind == "timeout"
        assert outcome.seconds >= 0.2
        assert processes_settle(mark, 1)
    assert marked_processes(mark) == []


def test_an_episode_has_a_limit_of_its_own(mark: str):
    with EnvironmentPool(HOSTILE, EnvironmentLimits(episode_seconds=0.3)) as pool:
        outcome = play(pool, VICTIM, where="reset", attack="sleep")
        assert outcome.failure == "took more than 0.3 s in all (the limit is episode_seconds)"
        assert outcome.failure_kind == "timeout"


def test_a_supervisor_that_is_stopped(mark: str, monkeypatch: pytest.MonkeyPatch):
    """The pool's own clock ends the episode, and the zygote kills what the supervisor does not."""
    monkeypatch.setattr(ProcessEpisode, "grace", 0.1)
    with EnvironmentPool(HOSTILE, EnvironmentLimits(call_seconds=0.5)) as pool:
        outcome = play(pool, VICTIM, where="reset", attack="stop_parent")
        assert outcome.failure_kind == "timeout"
        assert processes_settle(mark, 1)
        # A supervisor that is stopped between calls is killed when the pool closes.
    assert marked_processes(mark) == []


def test_a_zygote_that_is_stopped(mark: str, monkeypatch: pytest.MonkeyPatch):
    with EnvironmentPool(HOSTILE) as pool:
        play(pool, NEIGHBOUR)
        parents = {pid: parent_of(pid) for pid in marked_processes(mark)}
        (zygote,) = [pid for pid in parents if parents[pid] == os.getpid()]
        os.kill(zygote, signal.SIGSTOP)
        while not is_stopped(zygote):
            pass
        assert play(pool, VICTIM).failure == ""  # by a new zygote
        assert call(pool, NEIGHBOUR, ("call", "{}")).turns[0].content == "1"
    assert marked_processes(mark) == []


def test_a_zygote_that_is_stopped_before_it_forks(mark: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ProcessEpisode, "grace", 0.1)
    monkeypatch.setattr("hacrl.environments.process_backend.is_stopped", lambda pid: False)
    monkeypatch.setattr("hacrl.environments.process_backend.END_SECONDS", 0.2)
    with EnvironmentPool(HOSTILE, EnvironmentLimits(call_seconds=0.2)) as pool:
        pool.check()
        assert processes_settle(mark, 1)
        os.kill(*marked_processes(mark), signal.SIGSTOP)
        pool.start(VICTIM, problem())
        assert only(pool, VICTIM).failure_kind == "timeout"
    assert marked_processes(mark) == []


def test_a_zygote_that_reads_nothing(mark: str, monkeypatch: pytest.MonkeyPatch):
    """The socket's buffer fills up; a new zygote starts the episodes that are left."""
    monkeypatch.setattr(ProcessEpisode, "grace", 0.1)
    monkeypatch.setattr("hacrl.environments.process_backend.GRACE_SECONDS", 0.1)
    monkeypatch.setattr("hacrl.environments.process_backend.is_stopped", lambda pid: False)
    count = 400  # more than the buffer holds
    limits = EnvironmentLimits(call_seconds=100, episode_seconds=None, running_calls=count)
    with EnvironmentPool(HOSTILE, limits) as pool:
        pool.check()
        assert processes_settle(mark, 1)
        os.kill(*marked_processes(mark), signal.SIGSTOP)
        for key in range(count):
            pool.start(key, problem())
        outcomes = {}
        while not any(outcome.failure == "" for outcome in outcomes.values()):
            outcomes |= dict(pool.wait(PATIENCE))
        lost = [outcome.failure for outcome in outcomes.values() if outcome.failure]
        assert set(lost) == {"lost its supervisor"}
    assert marked_processes(mark) == []


@pytest.fixture(scope="module")
def values() -> Iterator[EnvironmentPool]:
    names = {name: EnvironmentSource(VALUES, {"name": name}) for name in ("Values", "TextValues")}
    with EnvironmentPool(names, EnvironmentLimits(observation_characters=40)) as pool:
        yield pool


def play_value(pool: EnvironmentPool, **row: object) -> Outcome:
    pool.start(VICTIM, problem(environment="Values", **row))
    return only(pool, VICTIM)


def test_a_very_long_observation_is_cut(values: EnvironmentPool):
    expected = "x" * 40 + "\n[cut: 100000000 characters in all]"
    assert play_value(values, where="reset", value="long").opening == expected
    assert call(values, VICTIM, ("get", "{}")).turns[0].content == expected
    values.discard(VICTIM)


def test_text_that_tokenizers_cannot_hold(values: EnvironmentPool):
    expected = "\x1b[2J\x1b]0;title\x07\u202e\ufffd\ufffd\ufffd \U0001f600 end"
    assert play_value(values, where="reset", value="escapes").opening == expected
    assert call(values, VICTIM, ("get", "{}")).turns[0].content == expected
    values.discard(VICTIM)


@pytest.mark.parametrize(
    ("where", "value", "failure"),
    [
        ("reset", "list", "began with an observation of type list; hacrl reads text only"),
        ("reward", "error", "raised ZeroDivisionError: division by zero (hostile.py, line "),
        ("reward", "nan", "get_reward gave nan as the reward, which is not finite"),
        ("reward", "text", "get_reward gave 'high' as the reward, which is no number"),
        ("reward", "none", "get_reward gave None as the reward, which is no number"),
    ],
)
def test_values_of_the_wrong_kind(values: EnvironmentPool, where: str, value: str, failure: str):
    outcome = play_value(values, where=where, value=value)
    if where == "reward":
        outcome = finish(values, VICTIM)
    assert (outcome.failure.startswith(failure), outcome.failure_kind) == (True, "crash")


@pytest.mark.parametrize(
    ("value", "failure"),
    [
        ("('seen', 0.5)", "step must return (observation, reward, done)"),
        ("'seen'", "step must return (observation, reward, done)"),
        ("(1, 0.5, False)", "step returned an observation of type int; hacrl reads text only"),
        ("('seen', float('inf'), False)", "step gave inf as the reward, which is not finite"),
        ("1 / 0", "raised ZeroDivisionError: division by zero (<string>, line 1)"),
    ],
)
def test_steps_of_the_wrong_kind(values: EnvironmentPool, value: str, failure: str):
    values.start(VICTIM, problem(environment="TextValues"))
    assert only(values, VICTIM).opening == "begin"
    outcome = say(values, VICTIM, value)
    assert (outcome.failure, outcome.failure_kind) == (failure, "crash")


def test_an_environment_that_cannot_be_made(mark: str):
    for attack, cause in (("exit_at_once", r"exit code 7"), ("raise_error", "raised ValueError: no")):
        source = EnvironmentSource(HOSTILE, {"at_once": attack})
        with EnvironmentPool({"game": source}) as pool:
            with pytest.raises(
                TaskError, match=rf"^task.options.environment.game: the environment .*{cause}"
            ):
                pool.check()
            assert processes_settle(mark, 1)
    assert marked_processes(mark) == []


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("raise OSError('no disk')", "cannot be imported: OSError: no disk"),
        ("import os; os._exit(4)", "the process that imported .* ended: exit code 4"),
        ("import sys; sys.exit('bye')", "the process that imported .* ended: bye"),
        ("Env = 3", "is not a class or function"),
        ("class Envy: pass", "did you mean 'Envy'"),
    ],
)
def test_a_module_that_cannot_be_imported(tmp_path: Path, mark: str, line: str, cause: str):
    (tmp_path / "env.py").write_text(line)
    with EnvironmentPool(f"{tmp_path}/env.py:Env") as pool, pytest.raises(TaskError, match=cause):
        pool.start(VICTIM, problem())
    assert marked_processes(mark) == []


def test_nothing_is_left_if_the_trainer_is_killed(mark: str):
    """Episodes are under way, one of them with a daemon, when the process that holds the pool is killed."""
    program = (
        "import os, signal\n"
        "from tests.environments.helpers import *\n"
        f"pool = EnvironmentPool({HOSTILE!r})\n"
        "play(pool, 0, where='reset', attack='leave_daemon')\n"
        "pool.start(1, problem(where='reset', attack='sleep'))\n"
        "assert pool.wait(0.1) == []\n"
        "print('ready', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "ready\n")
    assert processes_settle(mark, 0)
