"""An environment written with OpenEnv's own classes: guess a number that reset draws from the seed."""

from __future__ import annotations

import random
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    number: int = Field(description="the guess")


class Move(Action):
    x: int
    y: int


class Hint(Observation):
    hint: str = ""


class Board(Observation):
    x: int = 0
    y: int = 0


class NumberGame(Environment[Guess, Hint, State]):
    def __init__(self, largest: int = 100) -> None:
        super().__init__()
        self.largest = largest
        self.hidden = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Hint:  # type: ignore[override]
        self.hidden = random.Random(seed).randint(1, self.largest)
        return Hint(hint=f"Guess a number from 1 to {self.largest}.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        if action.number == self.hidden:
            return Hint(hint="Right.", reward=1.0, done=True, metadata={"secret": self.hidden})
        return Hint(hint="Higher." if action.number < self.hidden else "Lower.", reward=-0.25)

    @property
    def state(self) -> State:
        return State()


class Walk(Environment[Move, Board, State]):
    def __init__(self) -> None:
        super().__init__()
        self.x = self.y = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Board:
        self.x, self.y = int(kwargs.get("start", 0)), 0
        return Board(x=self.x, y=self.y)

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Board:
        self.x, self.y = self.x + action.x, self.y + action.y
        return Board(x=self.x, y=self.y, reward=float(self.x == 3), done=self.x == 3)

    @property
    def state(self) -> State:
        return State()
