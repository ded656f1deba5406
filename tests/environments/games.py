"""Well-behaved environments of both forms."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np


class Bank:
    """An account: tools of every kind."""

    currency = "EUR"  # not a method, so no tool

    def __init__(self, balance: int = 0) -> None:
        self.balance = balance
        self.done = False
        self.loop: Any = None

    def reset(self, balance: int | None = None, **row: Any) -> str | None:
        self.row = row
        if balance is None:
            return None
        self.balance = balance
        return f"You have {balance}."

    def deposit(self, amount: int) -> int:
        """Put money into the account.

        Args:
            amount: How much.

        Returns:
            The balance.
        """
        self.balance += amount
        return self.balance

    async def convert(self, rate: float, currency: str = "USD") -> dict[str, float]:
        """Give the balance in another currency.

        Args:
            rate: Units of it that one unit of the account's is worth.
            currency: Its name.
        """
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()
        await asyncio.sleep(0)
        return {currency: self.balance * rate}

    def leave(self) -> None:
        """End the visit."""
        self.done = True

    def read_row(self) -> str:
        """Return the rest of the row."""
        return str(sorted(self.row.items()))

    @property
    def broken(self) -> str:
        raise RuntimeError("properties are not looked at")

    def _audit(self) -> None:
        """Do nothing that is public."""

    async def get_reward(self) -> float:
        return self.balance / 10


class Guess:
    """Guess a number: the text form."""

    def reset(self, secret: int) -> None:
        self.secret, self.tries = secret, 0

    async def observe(self) -> str:
        return "Guess a number."

    def step(self, text: str) -> tuple[str, float, bool]:
        self.tries += 1
        if int(text) == self.secret:
            return "Right.", 1.0 / self.tries, True
        return "Higher." if int(text) < self.secret else "Lower.", 0.0, False


class Gymnasium:
    """Steps as in Gymnasium and in Gym: no ``observe``, and more than three values."""

    def reset(self, seed: int = 0) -> str:
        return f"seed {seed}"

    def step(self, text: str) -> tuple:
        return {
            "go": ("on", 0, False, False, {}),
            "fall": ("ended", -1, True, False, {}),
            "wait": ("cut", 0.5, False, True, {}),
            "old": (None, 1, True, {}),
        }[text]

    def render(self) -> None:
        """Not a tool, as text environments have none."""


class OneTool:
    """A tool that is called ``step`` makes no text environment."""

    def reset(self) -> None:
        pass

    def step(self, direction: str) -> str:
        """Take a step.

        Args:
            direction: Where to.
        """
        return direction


class Dice:
    """Draw from the global generators."""

    def reset(self, **row: Any) -> str:
        return self.roll()

    def roll(self) -> str:
        """Roll."""
        return f"{random.random()} {np.random.random()} {hash('text')}"


class Crowd:
    """Note how many calls run at once."""

    def reset(self, folder: str) -> str:
        own = Path(folder) / str(os.getpid())
        own.touch()
        count = len(list(Path(folder).iterdir()))
        time.sleep(0.02)
        own.unlink()
        return str(count)


class Sleeper:
    """Sleep in a thread of this process until the test wakes it."""

    wake = threading.Event()

    def reset(self, seconds: float) -> str:
        self.wake.wait(seconds)
        return str(os.getpid())


class Limit:
    def reset(self) -> str:
        return str(resource.getrlimit(resource.RLIMIT_AS)[1])


class NoReset:
    def move(self) -> None:
        """Move."""


class NoHint:
    def reset(self) -> None:
        pass

    def move(self, x) -> None:
        """Move.

        Args:
            x: Where to.
        """


def make_bank(balance: int) -> Bank:
    return Bank(balance)
