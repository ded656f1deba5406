"""Nothing that hacrl reads can run code: the source uses no loader that could."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "hacrl"
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {
    "torch.load",
    "torch.save",
    "torch.jit.load",
    "pandas.read_pickle",
    "pd.read_pickle",
    "runpy.run_path",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
YAML = {"load", "load_all", "full_load", "unsafe_load", "full_load_all", "unsafe_load_all"}
UNSAFE_LOADERS = {"Loader", "FullLoader", "UnsafeLoader", "CLoader", "CFullLoader", "CUnsafeLoader"}


def unsafe_in(text: str) -> set[str]:
    """Return the calls in a module's source that could run code hidden in data."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & MODULES
            if node.module in ("torch", "torch.serialization"):
                found |= {f"torch.{alias.name}" for alias in node.names} & CALLS
            if node.module == "yaml":
                found |= {f"yaml.{alias.name}" for alias in node.names if alias.name in YAML | UNSAFE_LOADERS}
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            found |= {name} & CALLS
            if name.startswith("yaml.") and name.split(".")[-1] in YAML | UNSAFE_LOADERS:
                found.add(name)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                found |= {node.func.id} & BUILTINS
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and not _is(keyword.value, False):
                    found.add("allow_pickle")
                if keyword.arg == "use_safetensors" and not _is(keyword.value, True):
                    found.add("use_safetensors")
            if any(_is(argument, "pickle") for argument in node.args):
                found.add("pickle")  # import_module("pickle")
    return found


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and (type(node.value), node.value) == (type(value), value)


def test_no_module_uses_an_unsafe_loader():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        unsafe = unsafe_in(path.read_text("utf-8"))
        if unsafe:
            found[path.relative_to(SOURCE).as_posix()] = unsafe
    # the one file that runs a model's code, after the kernel has taken every other right from its process
    assert found == {"environments/bundled/sandbox_child.py": {"compile", "eval", "exec"}}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pickle", {"pickle"}),
        ("def f():\n    from cloudpickle import loads", {"cloudpickle"}),
        ("import_module('pickle')", {"pickle"}),
        ("x = torch.load(path, weights_only=True)", {"torch.load"}),
        ("from torch import save", {"torch.save"}),
        ("np.load(path, allow_pickle=True)", {"allow_pickle"}),
        ("np.load(path, allow_pickle=False)", set()),
        ("yaml.load(text, yaml.Loader)", {"yaml.load", "yaml.Loader"}),
        ("class L(yaml.SafeLoader): pass", set()),
        ("eval(text)", {"eval"}),
        ("model.eval()", set()),
        ("from_pretrained(model, use_safetensors=False)", {"use_safetensors"}),
    ],
)
def test_the_search_finds_such_loaders(text, found):
    assert unsafe_in(text) == found


def test_every_model_is_loaded_from_safetensors_alone():
    """By default, transformers loads pickles if there are no safetensors."""
    loads = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "from_pretrained" and "Model" in ast.unparse(node.func.value):
                keywords = {keyword.arg for keyword in node.keywords}
                loads.append(
                    (path.relative_to(SOURCE).as_posix(), bool(keywords & {"use_safetensors", "gguf_file"}))
                )
    assert loads == [("models/loading.py", True), ("models/smollm2.py", True)]
