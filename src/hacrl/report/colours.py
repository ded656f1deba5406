"""The colours of agents and methods, the same in every plot and page.

Readers with a colour vision deficiency can tell them apart. Methods have Okabe and Ito's colours and, for
ablations, Tol's muted ones. Agents have Tol's, so that no colour of a page is both an agent and a method.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

METHOD_COLOURS = {
    "hacpo": "#D55E00",
    "gspo": "#0072B2",
    "naive": "#CC79A7",
    "grpo": "#009E73",
    "gspo_x2": "#56B4E9",
    "gspo_same_updates": "#E69F00",
    "hacpo_no_baseline": "#882255",
    "hacpo_no_discrepancy": "#332288",
    "hacpo_alpha_0": "#999933",
    "hacpo_alpha_2": "#117733",
    "hacpo_alpha_3": "#44AA99",
    "hacpo_no_clip": "#AA4499",
    "hacpo_no_stepwise": "#661100",
    "success_gated": "#6699CC",
    "xgrpo": "#888888",
    "ftis": "#DDCC77",
    "sapo": "#CC6677",
    "s2l_po": "#88CCEE",
    "aligned": "#000000",
}
AGENT_COLOURS = (
    "#332288",
    "#44AA99",
    "#CC6677",
    "#999933",
    "#AA4499",
    "#117733",
    "#882255",
    "#6699CC",
    "#661100",
    "#888888",
)
OTHER_COLOUR = "#777777"  # of a name without an entry
BEFORE_COLOUR = "#BBBBBB"
LINE_STYLES = ("-", "--", ":", "-.")  # of variants that differ in overrides only, e.g. gspo@lr=1e-4


def method_colour(variant: str) -> str:
    """Return the colour of a method or variant. Overrides (``gspo@lr=1e-4``) do not change it."""
    return METHOD_COLOURS.get(variant.partition("@")[0], OTHER_COLOUR)


def line_styles(variants: Sequence[str]) -> dict[str, str]:
    """Return a line style for each variant; variants of equal colour get different ones."""
    styles: dict[str, str] = {}
    for variant in variants:
        same_colour = sum(method_colour(other) == method_colour(variant) for other in styles)
        styles[variant] = LINE_STYLES[same_colour % len(LINE_STYLES)]
    return styles


def agent_colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each agent, in the order in which the agents are first named."""
    distinct = list(dict.fromkeys(names))
    return {name: AGENT_COLOURS[i % len(AGENT_COLOURS)] for i, name in enumerate(distinct)}
