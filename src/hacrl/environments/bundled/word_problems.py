"""Word problems of two to five steps in the manner of GSM8K, with numbers that invite a calculator.

Every template draws its own numbers and computes the answer from them; all answers are whole numbers. The
texts are hacrl's own: nothing is taken from GSM8K.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from hacrl.environments.bundled.rows import Row, draw_rows

PROMPT = (
    "{question}\nUse the calculator for the arithmetic. Submit the final answer as a plain number with the "
    "tool submit."
)
NAMES = tuple(
    "Amara Ben Chidi Dana Elif Farid Grace Hiro Ines Jonas Kofi Lena Mateo Nadia Omar Priya Quinn Rosa Sven "  # noqa: SIM905
    "Tariq Uma Viktor Wen Yara Zoe".split()
)
GOODS = ("notebooks", "lamps", "mugs", "backpacks", "cushions", "radios", "kites", "candles", "scarves")
FOODS = ("apples", "pears", "muffins", "eggs", "lemons", "carrots", "pancakes", "olives")
PLACES = ("market", "library", "school", "factory", "harbour", "museum", "farm")

Question = tuple[str, int]  # text and answer
Template = Callable[[random.Random], Question]


def word_problems(*, size: int, test_size: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Return training and test rows with the columns ``prompt`` and ``answer``."""

    def draw(rng: random.Random) -> Row:
        question, answer = rng.choice(TEMPLATES)(rng)
        return {"prompt": PROMPT.replace("{question}", question), "answer": str(answer)}

    return draw_rows("calculator", draw, size=size, test_size=test_size, seed=seed)


def _shopping(rng: random.Random) -> Question:
    name, (first, second) = rng.choice(NAMES), rng.sample(GOODS, 2)
    many, more = rng.randint(12, 48), rng.randint(11, 39)
    price, other, paid = rng.randint(7, 38), rng.randint(13, 46), rng.randint(5, 95) * 10
    cost = many * price + more * other
    paid += (cost // 10 + 1) * 10
    return (
        f"{name} buys {many} {first} at ${price} each and {more} {second} at ${other} each, and pays with "
        f"${paid}. How many dollars of change does {name} get?"
    ), paid - cost


def _wages(rng: random.Random) -> Question:
    name, weeks = rng.choice(NAMES), rng.randint(3, 14)
    hours, rate, extra, spent = (
        rng.randint(21, 39),
        rng.randint(14, 37),
        rng.randint(3, 9),
        rng.randint(120, 290),
    )
    return (
        f"{name} works {hours} hours a week for ${rate} an hour. In each of {weeks} weeks {name} also works "
        f"{extra} hours of overtime, paid twice as much, and spends ${spent}. How many dollars are left "
        f"after the {weeks} weeks?"
    ), weeks * (hours * rate + extra * 2 * rate - spent)


def _boxes(rng: random.Random) -> Question:
    food, place = rng.choice(FOODS), rng.choice(PLACES)
    boxes, each, broken, per_bag = (
        rng.randint(17, 58),
        rng.randint(24, 72),
        rng.randint(10, 90),
        rng.randint(6, 16),
    )
    whole = (boxes * each - broken) // per_bag
    return (
        f"A {place} receives {boxes} boxes with {each} {food} each. {broken} of the {food} are thrown away. "
        f"The others are put in bags of {per_bag}. How many full bags are there?"
    ), whole


def _travel(rng: random.Random) -> Question:
    name = rng.choice(NAMES)
    speeds, hours = (
        [rng.randint(43, 97) for _ in range(3)],
        [rng.randint(2, 9) for _ in range(3)],
    )
    parts = [f"{hour} hours at {speed} km/h" for speed, hour in zip(speeds, hours, strict=True)]
    total = sum(speed * hour for speed, hour in zip(speeds, hours, strict=True))
    whole = total + rng.randint(35, 420)
    return (
        f"{name} wants to drive {whole} km and has driven {parts[0]}, {parts[1]} and {parts[2]}. How many km "
        "are left?"
    ), whole - total


def _percent(rng: random.Random) -> Question:
    place, good = rng.choice(PLACES), rng.choice(GOODS)
    price, percent, many = rng.randint(3, 24) * 20, rng.choice((5, 10, 15, 25, 35, 45)), rng.randint(13, 67)
    reduced = price * (100 - percent) // 100
    return (
        f"The {place} sells {good} at ${price} each. Today they cost {percent}% less. How many dollars do "
        f"{many} {good} cost today?"
    ), reduced * many


def _saving(rng: random.Random) -> Question:
    first, second = rng.sample(NAMES, 2)
    start, weekly, other, weeks = (
        rng.randint(105, 890),
        rng.randint(13, 77),
        rng.randint(3, 12),
        rng.randint(12, 51),
    )
    return (
        f"{first} has ${start} and saves ${weekly} every week. {second} has nothing and saves {other} times "
        f"as much as {first} every week. How many dollars do both have together after {weeks} weeks?"
    ), start + weekly * weeks * (1 + other)


def _seats(rng: random.Random) -> Question:
    place = rng.choice(PLACES)
    rows, seats, adult, child = (
        rng.randint(14, 46),
        rng.randint(16, 42),
        rng.randint(12, 29),
        rng.randint(3, 11),
    )
    children = rng.randint(40, rows * seats - 60)
    return (
        f"A theatre in the {place} has {rows} rows of {seats} seats, and all are sold. {children} of the "
        f"visitors are children. A ticket costs ${adult} for an adult and ${child} for a child. How many "
        "dollars were paid for the tickets?"
    ), (rows * seats - children) * adult + children * child


def _ages(rng: random.Random) -> Question:
    names = rng.sample(NAMES, 3)
    youngest, factor, more, years = (
        rng.randint(3, 19),
        rng.randint(2, 4),
        rng.randint(2, 17),
        rng.randint(3, 25),
    )
    middle = youngest * factor
    return (
        f"{names[1]} is {factor} times as old as {names[0]}, and {names[2]} is {more} years older than "
        f"{names[1]}. {names[0]} is {youngest} years old. How old will the three be together in {years} "
        "years?"
    ), youngest + middle + middle + more + 3 * years


def _tank(rng: random.Random) -> Question:
    place = rng.choice(PLACES)
    inflow, outflow, hours = rng.randint(65, 180), rng.randint(12, 55), rng.randint(7, 23)
    start, later = rng.randint(350, 950), rng.randint(2, 6)
    return (
        f"A tank at the {place} holds {start} litres. For {hours} hours, {inflow} litres flow in and "
        f"{outflow} litres flow out every hour. Then only the outflow goes on, for {later} hours. How many "
        "litres are in the tank at the end?"
    ), start + hours * (inflow - outflow) - later * outflow


def _teams(rng: random.Random) -> Question:
    place, good = rng.choice(PLACES), rng.choice(GOODS)
    teams, people, each, returned = (
        rng.randint(6, 28),
        rng.randint(7, 19),
        rng.randint(12, 46),
        rng.randint(20, 80),
    )
    made = teams * people * each
    shops = rng.randint(3, 9)
    kept = (made - returned) // shops
    returned = made - kept * shops
    return (
        f"In a {place}, {teams} teams of {people} people work. Every person makes {each} {good} a day. "
        f"{returned} of a day's {good} are set aside; the others are divided evenly among {shops} shops. How "
        f"many {good} does each shop get?"
    ), kept


TEMPLATES: tuple[Template, ...] = (
    _shopping,
    _wages,
    _boxes,
    _travel,
    _percent,
    _saving,
    _seats,
    _ages,
    _tank,
    _teams,
)
