"""The bundled environments: tools, rewards, and the generated questions."""

from __future__ import annotations

import random
import sqlite3

import pytest

from hacrl.environments.bundled import python_problems, word_problems
from hacrl.environments.bundled.answers import same_answer
from hacrl.environments.bundled.calculator import Calculator
from hacrl.environments.bundled.dungeon import DungeonGame, command_in, dungeon_rows, make_dungeon
from hacrl.environments.bundled.expressions import ExpressionError, calculate
from hacrl.environments.bundled.python_tool import PythonInterpreter
from hacrl.environments.bundled.rows import draw_rows, is_held_out
from hacrl.environments.bundled.sqlite_databases import SCHEMAS, build_database
from hacrl.environments.bundled.sqlite_problems import TEMPLATES, only_answer, sqlite_problems
from hacrl.environments.bundled.sqlite_tool import DatabaseQuestions
from hacrl.errors import TaskError


@pytest.mark.parametrize(
    ("given", "gold", "equal"),
    [
        ("42", "42", True),
        (" $1,200.50. ", "1200.5", True),
        ("042", "42", True),
        ("43", "42", False),
        ("42 apples", "42", False),
        ("1,2", "12", False),  # no separator of thousands
        ("", "", False),
        ("the Red river", "The Red River", True),
        ("'Ada Lind'", "Ada Lind", True),
        ("Ada", "Ada Lind", False),
        ("٤٢", "42", False),
        ("9" * 10_000, "42", False),
    ],
)
def test_answers_are_compared_as_numbers_or_text(given: str, gold: str, equal: bool):
    assert same_answer(given, gold) is equal


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("23+14", "37"),
        ("(12 + 3.5) * 4", "62"),
        ("1,200 × 3 − 600 ÷ 4", "3450"),
        ("0.1 + 0.2", "0.3"),  # exactly, not 0.30000000000000004
        ("10 / 4", "2.5"),
        ("1 / 3", "0.3333333333"),
        ("2^10", "1024"),
        ("-7 // 2", "-4"),
        ("17 % 5", "2"),
        ("2 ** -2", "0.25"),
    ],
)
def test_the_calculator_computes_exactly(expression: str, value: str):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1 / 0", "division by zero"),
        ("9**9**9", "too large"),
        ("10**59 * 10**59", "too large"),
        ("2 ** 0.5", "whole number"),
        ("__import__('os')", "only numbers"),
        ("1e999", "too large"),
        ("3 +", "not an arithmetic expression"),
        ("2(3)", "only numbers"),
        ("(" * 100 + "1" + ")" * 99, "not an arithmetic expression"),
        ("1" * 201, "longer than"),
        ("1 + x", "only numbers"),
        ("٣", "only numbers"),
        ("", "only numbers"),
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic(expression: str, why: str):
    with pytest.raises(ExpressionError, match=why):
        calculate(expression)


def test_calculator_episode():
    environment = Calculator()
    assert environment.reset(prompt="?", answer="62") is None
    assert environment.calculate("15.5 * 4") == "62"
    assert environment.calculate("15.5 * x").startswith("Error: ")
    assert not environment.done
    assert environment.get_reward() == 0.0  # nothing was submitted
    assert environment.submit("$62.0") == "The answer has been submitted."
    assert environment.done
    assert environment.submit("7") == "An answer has been submitted already."
    assert environment.get_reward() == 1.0  # the first submission counts
    environment.reset(answer="62")
    assert not environment.done
    environment.submit(61)  # a model may give a number instead of a text
    assert environment.get_reward() == 0.0


def test_python_episode():
    environment = PythonInterpreter(memory_mb=256)
    environment.reset(answer="328350")
    assert environment.run_python("sum(n * n for n in range(100))") == "328350"
    assert "NameError" in environment.run_python("undefined")
    environment.submit("328350")
    assert environment.get_reward() == 1.0


# --- questions


def rows_of(name: str, **options):
    return {
        "calculator": word_problems.word_problems,
        "python": python_problems.python_problems,
        "sqlite": sqlite_problems,
        "dungeon": dungeon_rows,
    }[name](**options)


@pytest.mark.parametrize("name", ["calculator", "python", "sqlite", "dungeon"])
def test_questions_are_distinct_disjoint_and_follow_from_the_seed(name: str):
    train, test = rows_of(name, size=120, test_size=20, seed=3)
    assert (len(train), len(test)) == (120, 20)
    prompts = [row["prompt"] for row in (*train, *test)]
    assert len(set(prompts)) == 140
    assert rows_of(name, size=120, test_size=20, seed=3) == (train, test)
    other_train, other_test = rows_of(name, size=120, test_size=20, seed=4)
    assert other_train != train
    # No seed moves a question to the other side.
    assert not {row["prompt"] for row in test} & {row["prompt"] for row in other_train}
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in other_test}
    assert all(row["answer"] for row in (*train, *test))


def test_a_generator_with_too_few_questions_says_so():
    def draw(rng: random.Random) -> dict[str, str]:
        return {"prompt": str(rng.randrange(50)), "answer": "0"}

    free = sum(not is_held_out(str(number)) for number in range(50))
    train, _ = draw_rows("few", draw, size=free, test_size=0, seed=0)
    assert len(train) == free
    with pytest.raises(
        TaskError, match=f"few has too few different questions: {free} of {free + 1} for training"
    ):
        draw_rows("few", draw, size=free + 1, test_size=0, seed=0)
    with pytest.raises(TaskError, match="size=0: must be a whole number of at least 1"):
        draw_rows("few", draw, size=0, test_size=0, seed=0)


def test_word_problems_worked_by_hand():
    class Fixed(random.Random):
        """Draws the smallest number and the first choice."""

        def randint(self, low, high):
            return low

        def choice(self, options):
            return options[0]

        def sample(self, population, k):
            return list(population)[:k]

    fixed = Fixed()
    answers = {template.__name__: template(fixed)[1] for template in word_problems.TEMPLATES}
    assert answers == {
        # 12 * 7 + 11 * 13 = 227; pays 50 + (22 + 1) * 10 = 280
        "_shopping": 53,
        # 3 * (21 * 14 + 3 * 28 - 120) = 3 * 258
        "_wages": 774,
        # (17 * 24 - 10) // 6 = 398 // 6
        "_boxes": 66,
        # three times 2 hours at 43 km/h, and 35 km more
        "_travel": 35,
        # 60 less 5% is 57, times 13
        "_percent": 741,
        # 105 + 13 * 12 + 3 * 13 * 12 = 105 + 156 + 468
        "_saving": 729,
        # (14 * 16 - 40) * 12 + 40 * 3 = 184 * 12 + 120
        "_seats": 2328,
        # 3, 6 and 8 years, and three times 3 more
        "_ages": 26,
        # 350 + 7 * (65 - 12) - 2 * 12
        "_tank": 697,
        # 6 * 7 * 12 = 504, at least 20 aside: 484 // 3
        "_teams": 161,
    }


def test_word_problems_have_positive_whole_answers():
    train, _ = rows_of("calculator", size=2000, test_size=0, seed=0)
    assert all(int(row["answer"]) > 0 for row in train)


def test_functions_behind_the_python_questions():
    assert [n for n in range(20) if python_problems.is_prime(n)] == [2, 3, 5, 7, 11, 13, 17, 19]
    assert python_problems.digit_sum(9071) == 17
    assert python_problems.collatz_steps(6) == 8  # 6 3 10 5 16 8 4 2 1
    # 1, 2, then 3*2 + 1*1 = 7, 3*7 + 2 = 23 = 3 mod 10, 3*3 + 7 = 16 = 6 mod 10
    assert python_problems.recurrence(1, 2, (3, 1), 10, 5) == 6
    assert python_problems.change_ways(10, [2, 5]) == 2  # 5+5 and five twos


# --- the dungeon


def test_a_dungeon_from_the_first_room_to_the_treasure():
    dungeon = make_dungeon(4, 4)
    game = DungeonGame()
    seen = game.reset(seed=4, rooms=4, moves=30)
    assert seen.startswith(f"You are in the {dungeon.rooms[dungeon.start]}. Ways: ")
    assert "treasure lies" not in seen
    assert game.step("dance") == ("That is no command.", 0.0, False)
    assert game.step("take treasure") == ("There is no treasure here.", 0.0, False)
    for command in solution(dungeon)[:-1]:
        observation, reward, done = game.step(f"I think.\n> {command.upper()}.")
        assert (reward, done) == (0.0, False), observation
    assert game.step("take treasure") == ("You have the treasure.", 1.0, True)


def solution(dungeon) -> list[str]:
    """The shortest solution, by a search of its own over place, key and door."""
    start = (dungeon.start, False, False)
    ways: dict[tuple, list[str]] = {start: []}
    queue = [start]
    for state in queue:
        place, has_key, is_open = state
        if place == dungeon.treasure:
            return [*ways[state], "take treasure"]
        options = []
        for way, following in dungeon.exits[place].items():
            if following != dungeon.treasure or is_open:
                options.append((f"go {way}", (following, has_key, is_open)))
        if place == dungeon.key:
            options.append(("take key", (place, True, is_open)))
        if place == dungeon.door[0] and has_key:
            options.append(("unlock door", (place, has_key, True)))
        for command, following in options:
            if following not in ways:
                ways[following] = [*ways[state], command]
                queue.append(following)
    raise AssertionError("the dungeon has no solution")


@pytest.mark.parametrize("rooms", [3, 5, 9, 16])
def test_every_dungeon_can_be_solved_in_its_shortest_number_of_moves(rooms: int):
    train, _ = dungeon_rows(size=30, test_size=0, seed=1, rooms=rooms, spare_moves=0)
    for row in train:
        dungeon = make_dungeon(row["seed"], rooms)
        commands = solution(dungeon)
        assert len(commands) == dungeon.shortest() == int(row["answer"]) == row["moves"]
        game = DungeonGame()
        game.reset(**row)
        outcomes = [game.step(command) for command in commands]
        assert outcomes[-1] == ("You have the treasure.", 1.0, True)
        assert all(outcome[1:] == (0.0, False) for outcome in outcomes[:-1])


def test_the_door_and_the_moves_are_limits():
    row = dungeon_rows(size=1, test_size=0, seed=2, rooms=6)[0][0]
    dungeon = make_dungeon(row["seed"], 6)
    game = DungeonGame()
    game.reset(**{**row, "moves": 40})
    for command in [one for one in solution(dungeon) if one not in ("take key", "unlock door")][:-2]:
        game.step(command)
    assert game.step("unlock door")[0] == "You have no key."
    assert game.step(f"go {dungeon.door[1]}")[0] == "The door is locked."
    game.reset(**{**row, "moves": 2})
    assert game.step("look")[2] is False
    observation, reward, done = game.step("look")
    assert observation.endswith("You are out of moves.")
    assert (reward, done) == (0.0, True)


def test_commands_are_the_last_line():
    assert command_in("") == ""
    assert command_in("First I look.\n\n  **Go   North!** \n") == "go north"


def test_a_dungeon_of_a_wrong_size_is_an_error():
    with pytest.raises(TaskError, match="rooms=2: must be a whole number from 3 to 16"):
        dungeon_rows(size=1, test_size=0, seed=0, rooms=2)


# --- databases


@pytest.fixture
def database() -> DatabaseQuestions:
    environment = DatabaseQuestions(instructions=200_000, rows=3)
    environment.reset(answer="5", database=1, schema="library")
    return environment


def test_database_episode():
    environment = DatabaseQuestions()
    row = sqlite_problems(size=1, test_size=0, seed=5)[0][0]
    opening = environment.reset(**row)
    for table, count in [("loans", "rows"), ("orders", "rows"), ("grades", "rows")]:
        if f"CREATE TABLE {table} (" in opening:
            (rows,) = (
                build_database(row["schema"], row["database"])
                .execute(f"SELECT COUNT(*) FROM {table}")
                .fetchone()
            )
            assert f"-- {rows} {count}" in opening
            assert environment.query(f"select count(*) as n from {table}") == f"n\n{rows}"
    environment.submit(row["answer"])
    assert environment.get_reward() == 1.0


def test_every_question_has_one_answer_in_every_kind_of_database():
    for kind, templates in TEMPLATES.items():
        assert kind in SCHEMAS
        train, _ = sqlite_problems(size=200, test_size=0, seed=0)
        asked = [row for row in train if row["schema"] == kind]
        for question, _ in templates:
            start = question.split("{")[0]
            assert any(row["prompt"].startswith(start) for row in asked), question


def test_an_answer_that_two_rows_share_is_none():
    connection = sqlite3.connect(":memory:")
    assert only_answer(connection, "SELECT 'a', 2 UNION ALL SELECT 'b', 1") == "a"
    assert only_answer(connection, "SELECT 'a', 2 UNION ALL SELECT 'b', 2") is None
    assert only_answer(connection, "SELECT NULL") is None
    assert only_answer(connection, "SELECT 1 WHERE 0") is None


@pytest.mark.parametrize(
    "sql",
    [
        "drop table books",
        "delete from books",
        "update books set pages = 1",
        "insert into books(id) values (999) returning id",
        "create temp table x(a)",
        "pragma query_only = off",
        "attach '/tmp/x' as x",
        "begin",
        "commit",
        "vacuum into '/tmp/hacrl-test-database'",
        "select load_extension('x')",
        "select random()",
        "select date('now')",
        "select * from pragma_table_info('books')",
    ],
)
def test_a_query_can_only_read(database: DatabaseQuestions, sql: str):
    before = database.query("select count(*), sum(pages) from books")
    answer = database.query(sql)
    assert answer.startswith("Error: ")
    assert "authori" in answer
    assert database.query("select count(*), sum(pages) from books") == before


def test_queries_are_limited_in_work_rows_and_size(database: DatabaseQuestions):
    endless = "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c"
    assert database.query(endless) == "Error: the query takes too long"
    assert database.query("select 1 as one") == "one\n1"  # the next query has its own limit
    lines = database.query("select id from books order by id").splitlines()
    assert lines == ["id", "1", "2", "3", "(only the first 3 rows)"]
    assert database.query("select zeroblob(1000000000)") == "Error: string or blob too big"
    assert database.query("select id from books where id < 0") == "(no rows)"
    assert database.query("x" * 4001) == "Error: the query is longer than 4000 characters"


@pytest.mark.parametrize(
    "sql", ["", "selec", "select 1; select 2", "\x00select 1", "select '\ud800'", "select ?"]
)
def test_a_wrong_query_is_answered(database: DatabaseQuestions, sql: str):
    assert database.query(sql).startswith(("Error: ", "(no rows)"))


def test_databases_are_equal_everywhere_and_differ_by_seed():
    def content(seed: int) -> list[str]:
        return list(build_database("shop", seed).iterdump())

    assert content(1) == content(1)
    assert content(1) != content(2)
