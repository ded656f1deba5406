"""Turn off the progress bars of the libraries that hacrl uses."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def library_bars_off() -> Iterator[None]:
    """Within the block, show no progress bars of transformers, huggingface_hub and datasets.

    ``datasets`` is not imported for this: where hacrl imports it, its bars follow transformers'.
    """
    from huggingface_hub import utils as hub
    from transformers.utils import logging

    bars_of_transformers = logging.is_progress_bar_enabled()
    others: list[Any] = [hub, *([sys.modules["datasets"]] if "datasets" in sys.modules else [])]
    shown = [library for library in others if not library.are_progress_bars_disabled()]
    _without_warnings(logging.disable_progress_bar)
    for library in others:
        _without_warnings(library.disable_progress_bars)
    try:
        yield
    finally:
        if bars_of_transformers:
            _without_warnings(logging.enable_progress_bar)  # those of huggingface_hub, too
        for library in others:
            switch = library.enable_progress_bars if library in shown else library.disable_progress_bars
            _without_warnings(switch)


def _without_warnings(switch: Callable[[], object]) -> None:
    """Call a switch, which warns if an environment variable of the library overrules it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        switch()
