"""Questions that a short program answers: counting, sums over numbers with a property, sequences, texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import permutations

from hacrl.environments.bundled.rows import Row, draw_rows

PROMPT = "{question}\nWrite Python code to find out, and submit the final answer alone with the tool submit."
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "zu")

Question = tuple[str, str]  # text and answer


def python_problems(*, size: int, test_size: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Return training and test rows with the columns ``prompt`` and ``answer``."""

    def draw(rng: random.Random) -> Row:
        question, answer = rng.choice(TEMPLATES)(rng)
        return {"prompt": PROMPT.replace("{question}", question), "answer": answer}

    return draw_rows("python", draw, size=size, test_size=test_size, seed=seed)


def is_prime(number: int) -> bool:
    """Return whether a number is prime."""
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def digit_sum(number: int) -> int:
    """Return the sum of a number's decimal digits."""
    return sum(map(int, str(number)))


def collatz_steps(number: int) -> int:
    """Return how often the Collatz rule must be applied until 1 is reached."""
    steps = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


def recurrence(first: int, second: int, factors: tuple[int, int], modulus: int, term: int) -> int:
    """Return a term of a(n) = (p a(n-1) + q a(n-2)) mod m with the given a(1) and a(2)."""
    older, newer = first % modulus, second % modulus
    for _ in range(term - 2):
        older, newer = newer, (factors[0] * newer + factors[1] * older) % modulus
    return newer if term > 1 else older


def change_ways(total: int, coins: Sequence[int]) -> int:
    """Return in how many ways coins add up to a total; the order of coins does not count."""
    ways = [1] + [0] * total
    for coin in coins:
        for amount in range(coin, total + 1):
            ways[amount] += ways[amount - coin]
    return ways[total]


def _primes(rng: random.Random) -> Question:
    low = rng.randint(10, 600)
    high = low + rng.randint(80, 500)
    total = sum(number for number in range(low, high + 1) if is_prime(number))
    return f"What is the sum of all prime numbers from {low} to {high}, both included?", str(total)


def _divisible(rng: random.Random) -> Question:
    high, divisor, wanted = rng.randint(2000, 20000), rng.randint(3, 19), rng.randint(8, 20)
    count = sum(digit_sum(number) == wanted for number in range(divisor, high + 1, divisor))
    return (
        f"How many whole numbers from 1 to {high} are divisible by {divisor} and have a digit sum of "
        f"{wanted}?",
        str(count),
    )


def _collatz(rng: random.Random) -> Question:
    low = rng.randint(20, 3000)
    high = low + rng.randint(20, 120)
    best = max(range(low, high + 1), key=lambda number: (collatz_steps(number), -number))
    return (
        "Collatz's rule halves an even number, and makes 3n + 1 of an odd number n. Which number from "
        f"{low} to {high} needs the most steps to reach 1? If several do, give the smallest."
    ), str(best)


def _recurrence(rng: random.Random) -> Question:
    first, second, term = rng.randint(1, 9), rng.randint(1, 9), rng.randint(30, 200)
    factors, modulus = (rng.randint(1, 7), rng.randint(1, 7)), rng.randint(97, 9973)
    return (
        f"A sequence begins with a(1) = {first} and a(2) = {second}, and a(n) = ({factors[0]} a(n-1) + "
        f"{factors[1]} a(n-2)) mod {modulus}. What is a({term})?"
    ), str(recurrence(first, second, factors, modulus, term))


def _coins(rng: random.Random) -> Question:
    coins, total = sorted(rng.sample(range(2, 30), rng.randint(3, 5))), rng.randint(60, 240)
    listed = ", ".join(map(str, coins[:-1]))
    return (
        f"In how many ways can coins worth {listed} and {coins[-1]} add up to {total}? The order of the "
        "coins does not count, and each may be used any number of times."
    ), str(change_ways(total, coins))


def _letters(rng: random.Random) -> Question:
    words = [
        "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4))) for _ in range(rng.randint(8, 14))
    ]
    chosen = sorted(words, key=lambda word: (-len(set(word)), word))[0]
    return (
        f"Which of these words has the most different letters? {' '.join(words)}. If several have, give the "
        "one that comes first in the alphabet."
    ), chosen


def _vowels(rng: random.Random) -> Question:
    text = "".join(rng.choice(LETTERS) for _ in range(rng.randint(40, 70)))
    kept = "".join(letter for letter in text if letter not in "aeiou")[::-1][::2]
    return (
        f'Take the text "{text}". Leave out all vowels (a, e, i, o, u), reverse what is left, and keep every '
        "second letter, beginning with the first. Which text results?"
    ), kept


def _arrangements(rng: random.Random) -> Question:
    digits = [rng.randint(1, 9) for _ in range(5)]
    divisor = rng.randint(3, 13)
    found = {int("".join(map(str, order))) for order in permutations(digits)}
    count = sum(number % divisor == 0 for number in found)
    listed = ", ".join(map(str, digits))
    return (
        f"How many different five-digit numbers that use each of the digits {listed} exactly once are "
        f"divisible by {divisor}?"
    ), str(count)


TEMPLATES: tuple[Callable[[random.Random], Question], ...] = (
    _primes,
    _divisible,
    _collatz,
    _recurrence,
    _coins,
    _letters,
    _vowels,
    _arrangements,
)
