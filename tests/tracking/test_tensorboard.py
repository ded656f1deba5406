"""Read back with TensorBoard's own reader, and shown by its own Markdown renderer."""

from __future__ import annotations

import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hacrl.config.load import config_to_yaml
from hacrl.tracking.registry import make_trackers
from tests.tracking.scenario import AGENTS, EXPECTED, NASTY, NOTES, SHOWN, config, play

pytest.importorskip("tensorboard")


class Preformatted(HTMLParser):
    """The text a browser would show in each ``<pre>``."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: list[str] = []
        self._inside = False

    def handle_starttag(self, tag, attrs):
        if tag == "pre":
            self._inside = True
            self.texts.append("")
        else:
            assert not self._inside, f"<{tag}> in the middle of plain text"

    def handle_endtag(self, tag):
        if tag == "pre":
            self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.texts[-1] += data


def shown(markdown: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.plugin_util import markdown_to_safe_html
    parser = Preformatted()
    parser.feed(markdown_to_safe_html(markdown))
    parser.close()
    return parser.texts


def events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run = config(folder, "tensorboard")
    [tracker] = make_trackers(run, folder)
    assert list(folder.iterdir()) == []  # nothing is written before the run begins
    play(tracker)
    assert [path.name for path in folder.iterdir()] == ["tensorboard"]
    return run, events(folder / "tensorboard")


def test_all_numbers_arrive_at_their_steps(tracked):
    _, accumulator = tracked
    for name, values in EXPECTED.items():
        assert {event.step: event.value for event in accumulator.Scalars(name)} == values, name


def texts(accumulator, tag: str) -> dict[int, str]:
    tensors = accumulator.Tensors(f"{tag}/text_summary")
    return {event.step: event.tensor_proto.string_val[0].decode() for event in tensors}


@pytest.mark.parametrize("agent", AGENTS)
def test_rollouts_are_shown_unchanged(tracked, agent):
    _, accumulator = tracked
    by_step = texts(accumulator, f"{agent}/rollouts")
    assert sorted(by_step) == [1, 2]
    for markdown in by_step.values():
        responses = [text for name, text in SHOWN if name == agent]
        prompts = ["[system]\nBe brief.\n[user]\nask 0", "ask 1"]
        assert shown(markdown) == [prompts[0], responses[0], prompts[1], responses[1]]
        assert "<strong>" in _html(markdown)  # headings are rendered, only the texts are not


def _html(markdown: str) -> str:
    from tensorboard.plugin_util import markdown_to_safe_html

    return markdown_to_safe_html(markdown)


def test_without_escaping_the_text_would_be_changed():
    """The measure can tell: in TensorBoard's own rendering of the bare text, heading and fence are gone."""
    bare = _html(NASTY)
    assert "<h1>head</h1>" in bare
    assert "```" not in bare


def test_notes_are_shown_unchanged(tracked):
    _, accumulator = tracked
    found = {step: shown(markdown) for step, markdown in texts(accumulator, "notes").items()}
    assert found == {step: [note] for step, note in NOTES.items()}


def test_the_config_is_there(tracked):
    run, accumulator = tracked
    assert shown(texts(accumulator, "config")[0]) == [config_to_yaml(run)]
