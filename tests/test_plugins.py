"""One lookup for everything that a recipe names: tasks, trackers, and other kinds of plug-ins."""

from __future__ import annotations

import fractions
from pathlib import Path

import pytest

from hacrl.errors import ConfigError, TaskError
from hacrl.plugins import load_plugin

MARKER = object()
BUILTIN = {"fraction": "fractions:Fraction", "marker": MARKER}
GROUP = "hacrl.test_plugins"


def load(name: str, **options):
    return load_plugin("method", name, BUILTIN, GROUP, key="method.name", **options)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that offers ``third``, and a built-in's name."""
    info = tmp_path / "site" / "others-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\nthird = collections:OrderedDict\nmarker = collections:deque\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


def test_a_builtin_is_imported_by_its_reference_or_returned_as_it_is(package):
    assert load("fraction") is fractions.Fraction
    assert load("marker") is MARKER  # no entry point replaces it


def test_references_and_entry_points_are_imported(package, monkeypatch):
    import collections

    monkeypatch.chdir(package)
    (package / "mine.py").write_text("class Outer:\n    inner = 7\n")
    assert load("collections:Counter") is collections.Counter
    assert load("mine.py:Outer.inner") == 7
    assert load("third") is collections.OrderedDict


def test_an_unknown_name_lists_all_that_are_valid(package):
    with pytest.raises(ConfigError) as caught:
        load("fractoin", other_names=["special:NAME"])
    assert str(caught.value) == (
        "method.name: there is no method 'fractoin'; did you mean 'fraction'? Valid names: fraction, marker, "
        "third, special:NAME, package.module:attribute, path/to/file.py:attribute"
    )
    with pytest.raises(TaskError, match=r"^method.name: there is no method 'xyz'\. Valid names: fraction, "):
        load("xyz", error_type=TaskError)
