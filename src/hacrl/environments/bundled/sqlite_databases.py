"""Small generated databases: a shop, a school, a library. Schema and rows follow from a seed."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable

from hacrl.seeding import derive_seed

FIRST_NAMES = tuple(
    "Ada Bela Cora Dario Edda Filip Gala Henk Ida Jan Kira Luca Mara Nils Olga Pavel Rhea Silas Tove "  # noqa: SIM905
    "Ugo".split()
)
LAST_NAMES = tuple(
    "Abel Brandt Costa Dvorak Evans Fischer Garcia Horvat Ivanov Jensen Kaya Lind Meyer Novak Okafor".split()  # noqa: SIM905
)
CITIES = ("Bergen", "Cadiz", "Delft", "Essen", "Faro", "Ghent", "Husum", "Izmir")
Fill = Callable[[sqlite3.Connection, random.Random], None]

_SHOP = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, since INTEGER);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, price INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers(id),
  product_id INTEGER REFERENCES products(id), quantity INTEGER, year INTEGER);
"""
_SCHOOL = """
CREATE TABLE teachers (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE courses (id INTEGER PRIMARY KEY, title TEXT, subject TEXT, hours INTEGER,
  teacher_id INTEGER REFERENCES teachers(id));
CREATE TABLE students (id INTEGER PRIMARY KEY, name TEXT, city TEXT, birth_year INTEGER);
CREATE TABLE grades (student_id INTEGER REFERENCES students(id), course_id INTEGER REFERENCES courses(id),
  points INTEGER);
"""
_LIBRARY = """
CREATE TABLE authors (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE books (id INTEGER PRIMARY KEY, title TEXT, genre TEXT, pages INTEGER, year INTEGER,
  author_id INTEGER REFERENCES authors(id));
CREATE TABLE members (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE loans (book_id INTEGER REFERENCES books(id), member_id INTEGER REFERENCES members(id),
  days INTEGER);
"""


def build_database(kind: str, seed: int) -> sqlite3.Connection:
    """Return a connection to a new database in memory. Equal arguments give equal databases everywhere."""
    schema, fill = SCHEMAS[kind]
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.executescript(schema)
    connection.execute("BEGIN")
    fill(connection, random.Random(derive_seed(seed, "database", kind)))
    connection.execute("COMMIT")
    return connection


def describe_schema(connection: sqlite3.Connection) -> str:
    """Return the statements that made the tables, with the number of rows of each."""
    lines = []
    for name, sql in connection.execute(
        "SELECT name, sql FROM sqlite_schema WHERE type = 'table' ORDER BY rowid"
    ):
        (rows,) = connection.execute(f"SELECT COUNT(*) FROM {name}").fetchone()
        lines.append(f"{' '.join(sql.split())}; -- {rows} rows")
    return "\n".join(lines)


def _people(rng: random.Random, count: int) -> list[str]:
    """Return different full names."""
    every = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    return rng.sample(every, count)


def _insert(connection: sqlite3.Connection, table: str, rows: list[tuple[object, ...]]) -> None:
    connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def _fill_shop(connection: sqlite3.Connection, rng: random.Random) -> None:
    categories = {
        "furniture": ("desk", "chair", "shelf", "stool", "bench"),
        "kitchen": ("pan", "kettle", "knife", "bowl", "grater"),
        "garden": ("spade", "rake", "hose", "lantern", "pot"),
        "office": ("stapler", "binder", "folder", "pen set", "calendar"),
    }
    customers = _people(rng, rng.randint(25, 60))
    _insert(
        connection,
        "customers",
        [(i, name, rng.choice(CITIES), rng.randint(2005, 2024)) for i, name in enumerate(customers, 1)],
    )
    products = [(name, category) for category, names in categories.items() for name in names]
    rng.shuffle(products)
    _insert(
        connection,
        "products",
        [(i, name, category, rng.randint(3, 240)) for i, (name, category) in enumerate(products, 1)],
    )
    _insert(
        connection,
        "orders",
        [
            (
                i,
                rng.randint(1, len(customers)),
                rng.randint(1, len(products)),
                rng.randint(1, 9),
                rng.randint(2018, 2024),
            )
            for i in range(1, rng.randint(250, 600))
        ],
    )


def _fill_school(connection: sqlite3.Connection, rng: random.Random) -> None:
    subjects = ("biology", "history", "music", "physics", "geography")
    teachers, students = _people(rng, rng.randint(6, 12)), _people(rng, rng.randint(40, 80))
    _insert(connection, "teachers", [(i, name, rng.choice(CITIES)) for i, name in enumerate(teachers, 1)])
    titles = [f"{subject} {level}" for subject in subjects for level in ("A", "B", "C", "D")]
    _insert(
        connection,
        "courses",
        [
            (i, title, title.split()[0], rng.randint(20, 90), rng.randint(1, len(teachers)))
            for i, title in enumerate(titles, 1)
        ],
    )
    _insert(
        connection,
        "students",
        [(i, name, rng.choice(CITIES), rng.randint(2001, 2009)) for i, name in enumerate(students, 1)],
    )
    grades: list[tuple[object, ...]] = []
    for student in range(1, len(students) + 1):
        taken = rng.sample(range(1, len(titles) + 1), rng.randint(3, 9))
        grades += [(student, course, rng.randint(0, 100)) for course in taken]
    _insert(connection, "grades", grades)


def _fill_library(connection: sqlite3.Connection, rng: random.Random) -> None:
    genres = ("novel", "poetry", "travel", "crime", "science")
    first, second = (
        ("Red", "Silent", "Last", "Hidden", "Northern", "Broken"),
        ("River", "House", "Garden", "Winter", "Letter", "Map"),
    )
    titles = [f"The {one} {two}" for one in first for two in second]
    rng.shuffle(titles)
    authors, members = _people(rng, rng.randint(10, 18)), _people(rng, rng.randint(30, 70))
    _insert(connection, "authors", [(i, name, rng.choice(CITIES)) for i, name in enumerate(authors, 1)])
    _insert(
        connection,
        "books",
        [
            (
                i,
                title,
                rng.choice(genres),
                rng.randint(80, 900),
                rng.randint(1950, 2024),
                rng.randint(1, len(authors)),
            )
            for i, title in enumerate(titles, 1)
        ],
    )
    _insert(connection, "members", [(i, name, rng.choice(CITIES)) for i, name in enumerate(members, 1)])
    _insert(
        connection,
        "loans",
        [
            (rng.randint(1, len(titles)), rng.randint(1, len(members)), rng.randint(1, 60))
            for _ in range(rng.randint(200, 450))
        ],
    )


SCHEMAS: dict[str, tuple[str, Fill]] = {
    "shop": (_SHOP, _fill_shop),
    "school": (_SCHOOL, _fill_school),
    "library": (_LIBRARY, _fill_library),
}
