"""Progress bars of other libraries do not reach a user who asked for no progress."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from huggingface_hub import utils as hub
from huggingface_hub.utils import tqdm as hub_bar
from transformers.utils import logging

from hacrl import HACRLTrainer
from hacrl.tracking.library_bars import library_bars_off
from tests.api.conftest import ROWS, has_digit, small


@pytest.fixture(autouse=True)
def shown_again():
    """Other tests may have turned the bars off for the process, as the command line does."""
    before = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    datasets.enable_progress_bars()
    yield
    (logging.enable_progress_bar if before else logging.disable_progress_bar)()


def test_without_progress_nothing_is_printed(
    models: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "data"))
    saved.to_json(str(tmp_path / "layout" / "train.jsonl"))
    capfd.readouterr()
    folders = [str(tmp_path / "data"), str(tmp_path / "layout")]
    for number, folder in enumerate(folders):
        trainer = HACRLTrainer(
            list(models.values()),
            reward_funcs=has_digit,
            train_dataset=folder,
            eval_dataset=ROWS[:2],
            args=small(tmp_path / str(number), steps=1),
        )
        trainer.train()
        trainer.evaluate()
        trainer.save_model(tmp_path / "saved")
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()
    assert not hub.are_progress_bars_disabled()
    assert not datasets.are_progress_bars_disabled()


def test_the_bars_are_there_without_the_block(capfd: pytest.CaptureFixture[str]) -> None:
    """The check above can fail: these bars print here."""
    for show in (logging.tqdm, hub_bar, datasets.utils.tqdm):
        with library_bars_off():
            list(show([1, 2]))
        assert capfd.readouterr().err == ""
        list(show([1, 2]))
        assert "2/2" in capfd.readouterr().err


def test_what_a_user_has_turned_off_stays_off() -> None:
    hub.disable_progress_bars()
    with library_bars_off():
        pass
    assert hub.are_progress_bars_disabled()
    assert logging.is_progress_bar_enabled()
