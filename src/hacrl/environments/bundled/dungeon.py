"""A text game with hidden state: find the key, open the door, take the treasure.

The rooms form a tree. One room, behind a locked door, holds the treasure; another holds the key. The agent
sees the room it is in and must remember the way. Layout, names and places follow from the row's seed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from hacrl.environments.bundled.rows import Row, draw_rows
from hacrl.errors import TaskError
from hacrl.seeding import derive_seed

DIRECTIONS = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}
OPPOSITE = {"north": "south", "east": "west", "south": "north", "west": "east"}
ROOMS = tuple(
    "cellar kitchen chapel library armoury gallery stable pantry study crypt tower hall workshop attic vault "  # noqa: SIM905
    "garden".split()
)
MOST_ROOMS = len(ROOMS)
PROMPT = (
    "Dungeon {number}. A treasure lies behind a locked door, and the key is somewhere else. Find the "
    "treasure and take it within {moves} moves. Answer with one command at a time, alone on the last line: "
    "go north, go east, go south, go west, take key, unlock door, take treasure, look.\n"
)
Place = tuple[int, int]


@dataclass(frozen=True)
class Dungeon:
    """One dungeon: names of rooms by place, and where things are."""

    rooms: dict[Place, str]
    exits: dict[Place, dict[str, Place]]
    start: Place
    key: Place
    door: tuple[Place, str]  # the room in front of the door, and the door's direction
    treasure: Place  # the room behind the door

    def shortest(self) -> int:
        """Return the number of commands of the shortest solution."""
        to_key = self._distance(self.start, self.key)
        to_door = self._distance(self.key, self.door[0])
        return to_key + 1 + to_door + 1 + 1 + 1  # take key, unlock door, go, take treasure

    def _distance(self, start: Place, end: Place) -> int:
        """Return the number of moves from one room to another without going through the door."""
        distances = {start: 0}
        queue = deque([start])
        while queue:
            place = queue.popleft()
            for following in self.exits[place].values():
                if following not in distances and following != self.treasure:
                    distances[following] = distances[place] + 1
                    queue.append(following)
        return distances[end]


def make_dungeon(seed: int, rooms: int) -> Dungeon:
    """Return the dungeon of a seed. Equal arguments give equal dungeons on every machine."""
    if type(rooms) is not int or not 3 <= rooms <= MOST_ROOMS:
        raise TaskError(f"rooms={rooms!r}: must be a whole number from 3 to {MOST_ROOMS}")
    rng = random.Random(derive_seed(seed, "dungeon", rooms))
    names = rng.sample(ROOMS, rooms)
    places: list[Place] = [(0, 0)]
    exits: dict[Place, dict[str, Place]] = {(0, 0): {}}
    while len(places) < rooms:
        origin, direction = rng.choice(places), rng.choice(list(DIRECTIONS))
        place = (origin[0] + DIRECTIONS[direction][0], origin[1] + DIRECTIONS[direction][1])
        if place in exits:
            continue
        places.append(place)
        exits[origin][direction] = place
        exits[place] = {OPPOSITE[direction]: origin}
    # Behind the door must be a room that leads nowhere else, or rooms behind it could not be reached.
    treasure = rng.choice([place for place in places[1:] if len(exits[place]) == 1])
    back, front = next(iter(exits[treasure].items()))
    others = [place for place in places if place != treasure]
    start = rng.choice(others)
    key = rng.choice([place for place in others if place != start])
    return Dungeon(
        rooms=dict(zip(places, names, strict=True)),
        exits=exits,
        start=start,
        key=key,
        door=(front, OPPOSITE[back]),
        treasure=treasure,
    )


class DungeonGame:
    """The text form: one command a turn; reward 1 for the treasure, which ends the game."""

    def __init__(self) -> None:
        self._dungeon = make_dungeon(0, 3)
        self._begin(self._dungeon, 1)

    def _begin(self, dungeon: Dungeon, moves: int) -> None:
        self._dungeon = dungeon
        self._place = dungeon.start
        self._has_key = False
        self._is_open = False
        self._moves_left = moves

    def reset(self, seed: int = 0, rooms: int = 5, moves: int = 20, **row: Any) -> str:
        """Begin the game of a seed; return what the agent sees first."""
        self._begin(make_dungeon(int(seed), int(rooms)), int(moves))
        return self._description()

    def step(self, text: str) -> tuple[str, float, bool]:
        """Carry out the command on the last line of the text; return observation, reward and end."""
        self._moves_left -= 1
        observation, found = self._carry_out(command_in(text))
        if found:
            return observation, 1.0, True
        if self._moves_left <= 0:
            return f"{observation} You are out of moves.", 0.0, True
        return observation, 0.0, False

    def _carry_out(self, command: str) -> tuple[str, bool]:
        verb, _, thing = command.partition(" ")
        if verb == "go" and thing in DIRECTIONS:
            return self._go(thing), False
        if command == "look":
            return self._description(), False
        if command == "take key":
            if self._place != self._dungeon.key or self._has_key:
                return "There is no key here.", False
            self._has_key = True
            return "You have the key.", False
        if command == "unlock door":
            return self._unlock(), False
        if command == "take treasure":
            if self._place != self._dungeon.treasure:
                return "There is no treasure here.", False
            return "You have the treasure.", True
        return "That is no command.", False

    def _go(self, direction: str) -> str:
        following = self._dungeon.exits[self._place].get(direction)
        if following is None:
            return f"There is no way {direction}."
        if following == self._dungeon.treasure and not self._is_open:
            return "The door is locked."
        self._place = following
        return self._description()

    def _unlock(self) -> str:
        if self._place != self._dungeon.door[0]:
            return "There is no door here."
        if self._is_open:
            return "The door is open already."
        if not self._has_key:
            return "You have no key."
        self._is_open = True
        return "The door is open."

    def _description(self) -> str:
        dungeon = self._dungeon
        ways = [way for way in DIRECTIONS if way in dungeon.exits[self._place]]
        parts = [f"You are in the {dungeon.rooms[self._place]}.", f"Ways: {', '.join(ways)}."]
        if self._place == dungeon.door[0]:
            state = "open" if self._is_open else "locked"
            parts.append(f"The door to the {dungeon.door[1]} is {state}.")
        if self._place == dungeon.key and not self._has_key:
            parts.append("A key lies here.")
        if self._place == dungeon.treasure:
            parts.append("The treasure lies here.")
        return " ".join(parts)


def command_in(text: str) -> str:
    """Return the last line that is not blank, in lower case, without punctuation around it."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    return " ".join(lines[-1].casefold().strip(" \t>.!`*\"'").split())


def dungeon_rows(
    *, size: int, test_size: int, seed: int, rooms: int = 5, spare_moves: int = 12
) -> tuple[list[Row], list[Row]]:
    """Return training and test rows with the columns ``prompt``, ``answer``, ``seed``, ``rooms``, ``moves``.

    The answer is the number of commands of the shortest solution; ``spare_moves`` more are allowed.
    """
    if type(spare_moves) is not int or spare_moves < 0:
        raise TaskError(f"spare_moves={spare_moves!r}: must be a whole number of at least 0")
    make_dungeon(0, rooms)  # refuses a wrong number of rooms
    layouts: set[str] = set()

    def draw(rng: random.Random) -> Row:
        while True:
            number = rng.randrange(10**6)
            dungeon = make_dungeon(number, rooms)
            if (layout := repr(dungeon)) not in layouts:
                break
        layouts.add(layout)
        shortest = dungeon.shortest()
        moves = shortest + spare_moves
        prompt = PROMPT.replace("{number}", str(number)).replace("{moves}", str(moves))
        return {"prompt": prompt, "answer": str(shortest), "seed": number, "rooms": rooms, "moves": moves}

    return draw_rows("dungeon", draw, size=size, test_size=test_size, seed=seed)
