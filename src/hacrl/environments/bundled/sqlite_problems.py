"""Questions on generated databases whose answer is one value, found by a query that hacrl runs itself."""

from __future__ import annotations

import random
import sqlite3
from functools import lru_cache

from hacrl.environments.bundled.rows import Row, draw_rows
from hacrl.environments.bundled.sqlite_databases import SCHEMAS, build_database

PROMPT = (
    "{question}\nAnswer with the help of database {database}, which you can query in SQL. Submit the answer "
    "alone with the tool submit. Its tables:"
)
# (question, query) by schema. A word in braces is the column from which one value is drawn: {table.column}.
# Every query returns one row with one value; if it is not the only possible answer, the question is left out.
TEMPLATES: dict[str, tuple[tuple[str, str], ...]] = {
    "shop": (
        (
            "How many customers live in {customers.city}?",
            "SELECT COUNT(*) FROM customers WHERE city = '{customers.city}'",
        ),
        (
            "How many pieces of the product {products.name} were ordered in {orders.year}?",
            "SELECT SUM(quantity) FROM orders JOIN products ON products.id = product_id "
            "WHERE name = '{products.name}' AND year = {orders.year}",
        ),
        (
            "What did all orders of products of the category {products.category} in {orders.year} cost "
            "together (price times quantity)?",
            "SELECT SUM(price * quantity) FROM orders JOIN products ON products.id = product_id "
            "WHERE category = '{products.category}' AND year = {orders.year}",
        ),
        (
            "Which customer from {customers.city} has ordered the most pieces? Give the name.",
            "SELECT customers.name, SUM(quantity) AS n FROM customers JOIN orders ON customers.id = "
            "customer_id WHERE city = '{customers.city}' GROUP BY customers.id ORDER BY n DESC LIMIT 2",
        ),
        (
            "How many different products did {customers.name} order?",
            "SELECT COUNT(DISTINCT product_id) FROM orders JOIN customers ON customers.id = customer_id "
            "WHERE name = '{customers.name}'",
        ),
    ),
    "school": (
        (
            "How many students from {students.city} were born in {students.birth_year} or later?",
            "SELECT COUNT(*) FROM students WHERE city = '{students.city}' AND "
            "birth_year >= {students.birth_year}",
        ),
        (
            "What is the highest number of points in the course {courses.title}?",
            "SELECT MAX(points) FROM grades JOIN courses ON courses.id = course_id "
            "WHERE title = '{courses.title}'",
        ),
        (
            "How many grades of at least 50 points are there in courses of {teachers.name}?",
            "SELECT COUNT(*) FROM grades JOIN courses ON courses.id = course_id JOIN teachers ON "
            "teachers.id = teacher_id WHERE points >= 50 AND name = '{teachers.name}'",
        ),
        (
            "Which student from {students.city} has the most points over all courses? Give the name.",
            "SELECT students.name, SUM(points) AS n FROM students JOIN grades ON students.id = student_id "
            "WHERE city = '{students.city}' GROUP BY students.id ORDER BY n DESC LIMIT 2",
        ),
        (
            "How many hours do the courses of {teachers.name} have together?",
            "SELECT SUM(hours) FROM courses JOIN teachers ON teachers.id = teacher_id "
            "WHERE name = '{teachers.name}'",
        ),
    ),
    "library": (
        (
            "How many books of the genre {books.genre} have more than {books.pages} pages?",
            "SELECT COUNT(*) FROM books WHERE genre = '{books.genre}' AND pages > {books.pages}",
        ),
        (
            "How many pages have the books of {authors.name} together?",
            "SELECT SUM(pages) FROM books JOIN authors ON authors.id = author_id "
            "WHERE name = '{authors.name}'",
        ),
        (
            "How many days in all were books of the genre {books.genre} lent to members from {members.city}?",
            "SELECT SUM(days) FROM loans JOIN books ON books.id = book_id JOIN members ON members.id = "
            "member_id WHERE genre = '{books.genre}' AND city = '{members.city}'",
        ),
        (
            "Which book by an author from {authors.city} was lent most often? Give the title.",
            "SELECT title, COUNT(*) AS n FROM loans JOIN books ON books.id = book_id JOIN authors ON "
            "authors.id = author_id WHERE city = '{authors.city}' GROUP BY books.id ORDER BY n DESC LIMIT 2",
        ),
        (
            "How many different members borrowed the book {books.title}?",
            "SELECT COUNT(DISTINCT member_id) FROM loans JOIN books ON books.id = book_id "
            "WHERE title = '{books.title}'",
        ),
    ),
}


def sqlite_problems(
    *, size: int, test_size: int, seed: int, databases: int = 40
) -> tuple[list[Row], list[Row]]:
    """Return training and test rows with the columns ``prompt``, ``answer``, ``database`` and ``schema``.

    ``databases``: how many different databases of each of the three kinds the questions are asked about.
    """

    @lru_cache(maxsize=3 * 64)
    def opened(kind: str, number: int) -> sqlite3.Connection:
        return build_database(kind, number)

    def draw(rng: random.Random) -> Row:
        while True:
            kind = rng.choice(list(SCHEMAS))
            number = rng.randrange(databases)
            template, query = rng.choice(TEMPLATES[kind])
            connection = opened(kind, number)
            question, query = fill(template, query, connection, rng)
            answer = only_answer(connection, query)
            if answer is not None:
                break
        prompt = PROMPT.replace("{question}", question).replace("{database}", f"{kind} {number}")
        return {"prompt": prompt, "answer": answer, "database": number, "schema": kind}

    return draw_rows("sqlite", draw, size=size, test_size=test_size, seed=seed)


def fill(template: str, query: str, connection: sqlite3.Connection, rng: random.Random) -> tuple[str, str]:
    """Replace every ``{table.column}`` of a question and its query by one of the column's values."""
    while "{" in template:
        slot = template[template.index("{") : template.index("}") + 1]
        table, column = slot[1:-1].split(".")
        values = connection.execute(f"SELECT DISTINCT {column} FROM {table} ORDER BY {column}").fetchall()
        value = str(rng.choice(values)[0])
        template, query = template.replace(slot, value), query.replace(slot, value)
    return template, query


def only_answer(connection: sqlite3.Connection, query: str) -> str | None:
    """Return the first value of the first row; None without one, or if two rows share the first place."""
    rows = connection.execute(query).fetchall()
    if not rows or rows[0][0] is None:
        return None
    if len(rows) > 1 and rows[0][1] == rows[1][1]:
        return None
    return str(rows[0][0])
