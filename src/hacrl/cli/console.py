"""Libraries' own progress bars would break ours."""

from __future__ import annotations


def silence_transformers() -> None:
    """Switch off transformers' progress bars and hints for this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
