"""YAML as people expect it: ``1e-6`` is a number, and a key that stands twice is an error.

The text is not trusted: only plain values come of it, and a small text cannot become a huge value.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from hacrl.config.plain import DEEPEST, MOST_VALUES, one_line, shown
from hacrl.errors import ConfigError

# PyYAML follows YAML 1.1, in which 1e-6 is text. One way only to match any text: no search takes long.
_FLOAT = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


class _Loader(yaml.SafeLoader):
    """Safe loader with YAML 1.2 floats and without duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {shown(key)} must be text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {shown(key)} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what :class:`_Loader` reads back as itself: text such as ``1e-6`` is quoted."""


_Loader.add_implicit_resolver(*_FLOAT)
_Dumper.add_implicit_resolver(*_FLOAT)


def parse_yaml(text: str, source: str) -> Any:
    """Parse untrusted YAML text; ``source`` names it in errors."""
    loader = _Loader("")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _weight(node, {}, 0) > MOST_VALUES:
            raise ConfigError(
                f"{source} is not a recipe: with its aliases it has more than {MOST_VALUES:,} values"
            )
        return loader.construct_document(node)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        # PyYAML lets the errors of its own constructors through: IndexError for !!int "", and so on
        raise ConfigError(f"{source} is not valid YAML: {one_line(_told(error))}") from error
    finally:
        loader.dispose()


def dump_yaml(data: Any) -> str:
    """YAML that :func:`parse_yaml` reads back as the same plain data."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _weight(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """How many values a node stands for once aliases and merges are written out."""
    if depth > 2 * DEEPEST:
        raise RecursionError
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # until it is known, for a node that contains itself
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for entry in inside for part in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_weight(part, known, depth + 1) for part in parts)
    return known[id(node)]


def _told(error: Exception) -> str:
    """What is wrong and where, without PyYAML's excerpt of the text."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        said = ", ".join(part for part in (error.context, error.problem) if part)
        return re.sub(r"tag:yaml\.org,2002:", "!!", said) + where
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason} (character {error.position + 1})"
    return f"a value does not fit its tag ({type(error).__name__}: {error})"
