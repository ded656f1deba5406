"""Draw docs/images/architecture.svg, the picture of one training step.

Text stands only in filled boxes, and lines have a middle tone: the picture reads on light and dark pages.

python scripts/draw_architecture.py
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "architecture.svg"
WIDTH, HEIGHT = 1000, 470
AGENTS = (  # name, model and tokenizer, colour of its rollouts, pale fill of its boxes
    ("agent A", "its own model and tokenizer", "#2f6fb0", "#dbe9f6"),
    ("agent B", "another model and tokenizer", "#b3561f", "#f9e3d3"),
    ("agent C", "any number of agents", "#3b7f47", "#dcefdd"),
)
LANE_TOP, LANE_HEIGHT, LANE_STEP = 16, 116, 132
LOG_LEFT, LOG_WIDTH = 470, 130
LOG_TEXT = ("rollout log", "every agent's", "verified rollouts,", "on disk")
LINE, INK, PAPER = "#808a96", "#1b1f24", "#eef0f3"


def box(left: float, top: float, width: float, height: float, fill: str, *lines: str) -> str:
    """Return a rounded box with centred lines; the first one is bold."""
    shapes = [
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="8" fill="{fill}" '
        f'stroke="{LINE}" stroke-width="1"/>'
    ]
    first = top + height / 2 - 9 * (len(lines) - 1) + 5
    for number, line in enumerate(lines):
        weight = ' font-weight="600"' if number == 0 else ' font-size="13"'
        x, y = left + width / 2, first + 18 * number
        shapes.append(f'<text x="{x}" y="{y}" text-anchor="middle" fill="{INK}"{weight}>{line}</text>')
    return "\n".join(shapes)


def pill(left: float, top: float, width: float, colour: str, text: str) -> str:
    """Return a small filled label with white text."""
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="22" rx="11" fill="{colour}"/>\n'
        f'<text x="{left + width / 2}" y="{top + 15.5}" text-anchor="middle" fill="#ffffff" '
        f'font-size="13">{text}</text>'
    )


def arrow(path: str, colour: str = LINE, width: float = 1.8, dashed: bool = False) -> str:
    """Return a line along ``path`` that ends in an arrow head."""
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    head = f"head-{colour.lstrip('#')}"
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes} '
        f'marker-end="url(#{head})"/>'
    )


def head(colour: str) -> str:
    """Return the arrow head of one colour."""
    return (
        f'<marker id="head-{colour.lstrip("#")}" viewBox="0 0 10 10" refX="8.5" refY="5" markerWidth="11" '
        f'markerHeight="11" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0,0.8 L9,5 L0,9.2 z" fill="{colour}"/></marker>'
    )


def lane(number: int) -> list[str]:
    """Return one agent: generate, verify, learn, and the new weights that go back to its engine."""
    name, kind, colour, pale = AGENTS[number]
    top = LANE_TOP + LANE_STEP * number
    row = top + 36  # top of the boxes
    middle = row + 24
    return [
        f'<rect x="150" y="{top}" width="834" height="{LANE_HEIGHT}" rx="12" fill="{colour}" '
        f'fill-opacity="0.10" stroke="{colour}" stroke-opacity="0.55"/>',
        pill(164, top + 8, 70, colour, name),
        pill(242, top + 8, 222, colour, kind),
        box(166, row, 130, 48, pale, "engine", "generates"),
        box(340, row, 90, 48, pale, "verifier", "rewards"),
        box(706, row, 138, 48, pale, "learner", "updates the model"),
        arrow(f"M 130 {middle} L 162 {middle}"),
        arrow(f"M 296 {middle} L 336 {middle}", colour),
        arrow(f"M 430 {middle} L {LOG_LEFT - 4} {middle}", colour, 2.6),
        arrow(f"M 844 {middle} H 916 V {top + 103} H 231 V {row + 52}", colour, dashed=True),
        pill(858, top + 68, 116, colour, "new weights"),
    ]


def lessons() -> list[str]:
    """Return the arrows from the log to the learners: every agent's rollouts reach every learner."""
    shapes = []
    for learner in range(len(AGENTS)):
        middle = LANE_TOP + LANE_STEP * learner + 60
        for source, (_, _, colour, _) in enumerate(AGENTS):
            y = middle + 14 * (source - 1)
            width = 2.8 if source == learner else 1.6
            shapes.append(arrow(f"M {LOG_LEFT + LOG_WIDTH} {y} L 702 {y}", colour, width))
    return shapes


def picture() -> str:
    """Return the whole SVG."""
    log_height = LANE_STEP * 2 + LANE_HEIGHT
    colours = [LINE, *(colour for _, _, colour, _ in AGENTS)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="Helvetica, Arial, Liberation Sans, sans-serif" font-size="15">',
        "<title>All agents answer the same problems; every learner learns from all verified rollouts</title>",
        f"<defs>{''.join(map(head, colours))}</defs>",
        *(shape for number in range(len(AGENTS)) for shape in lane(number)),
        *lessons(),
        box(14, LANE_TOP + LANE_STEP, 96, LANE_HEIGHT, PAPER, "problems", "the same", "for all agents"),
        f'<path d="M 130 75 V 341 M 110 208 H 130" stroke="{LINE}" stroke-width="1.8"/>',
        box(LOG_LEFT, LANE_TOP, LOG_WIDTH, log_height, PAPER, *LOG_TEXT),
        box(LOG_LEFT - 50, 420, LOG_WIDTH + 100, 44, PAPER, "capabilities", "one number per agent"),
        arrow(f"M {LOG_LEFT + LOG_WIDTH / 2} {LANE_TOP + log_height} V 416"),
        box(706, 420, 278, 44, PAPER, "HACPO", "weighs and clips the rollouts of others"),
        arrow("M 650 442 H 702"),
        arrow(f"M 775 420 V {LANE_TOP + log_height + 3}"),
    ]
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
