"""Keep the output of libraries out of the terminal, where it would break our progress display."""

from __future__ import annotations


def silence_transformers() -> None:
    """Turn off transformers' progress bars and warnings for this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
