"""An agent's tokenizer and chat template: encode prompts, and convert responses between text and tokens."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from hacrl.config.values import shown
from hacrl.errors import ModelError, TaskError
from hacrl.models.chat_rendering import Piece, joined
from hacrl.plain_text import half_character
from hacrl.types import Problem, Tool, Turn

if TYPE_CHECKING:
    from hacrl.models.dialect import Dialect

_NEUTRAL_LEADS = (":", "\n")  # characters that rarely merge with the text that follows
_MARKER = "answer"  # stands for a response when a chat template is rendered to see how turns end
BROKEN_CHARACTER = "\ufffd"  # what incomplete UTF-8 decodes to
ENCODED_AT_ONCE = 128  # prompts, while the longest one is sought
MOST_ADDED_TOKENS = 64  # that a tokenizer adds to a prompt: its first and last tokens, spaces between pieces
PROMPT_CACHE_SIZE = 65536  # every step encodes the same prompt several times

# A fast tokenizer is switched between encoding control tokens and encoding them as text, and must not be in
# use meanwhile. Agents of the Python API may share one, and an asynchronous run uses it in several threads.
_IN_USE: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()

PlainIds = dict[str, tuple[int, ...]]  # text -> its tokens, with control tokens in it encoded as plain text


class TurnEnd(NamedTuple):
    """The token with which an assistant's turn ends."""

    id: int
    text: str


class _Prompt(NamedTuple):
    """What a prompt consists of, before it is rendered."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    opening: str = ""  # what an environment's reset adds


class TextCodec:
    """A tokenizer, an optional chat template, and the tokens that end a response. Needs no weights."""

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        generation_config: Any,  # of transformers; its eos_token_id ends responses, too
        context_length: int | None,  # most tokens that the model can attend to, if known
        use_chat_template: bool = True,
        chat_template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.use_chat_template = use_chat_template and tokenizer.chat_template is not None
        self.chat_template_args = dict(chat_template_args or {})
        self._generation_config = generation_config
        self._in_use = _IN_USE.setdefault(tokenizer, threading.RLock())
        self._prompt_ids: dict[_Prompt, tuple[int, ...]] = {}  # oldest first
        self._most_tokens = lru_cache(maxsize=PROMPT_CACHE_SIZE)(self._count_bytes)
        self._prompt_text = lru_cache(maxsize=PROMPT_CACHE_SIZE)(self._decode)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a response: the tokenizer's, the generation config's, the chat template's.

        A base model often comes with a chat template whose turns end with a token that is not its eos.
        """
        candidates = (self.tokenizer.eos_token_id, *self._configured_stop_ids, self._turn_end_id)
        return frozenset(int(token) for token in candidates if token is not None)

    @property
    def _configured_stop_ids(self) -> list[int]:
        configured = self._generation_config.eos_token_id
        listed = configured if isinstance(configured, list) else [configured]
        return [token for token in listed if token is not None]

    @cached_property
    def stop_id(self) -> int:
        """The token that ends this agent's responses: the one that its chat template puts there, else eos."""
        return int(self.tokenizer.eos_token_id if self._turn_end_id is None else self._turn_end_id)

    @cached_property
    def _turn_end_id(self) -> int | None:
        """The first control token the chat template puts after a response; None without a template."""
        if not self.use_chat_template:
            return None
        answered = self.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARKER}])
        _, shown, after = answered.rpartition(_MARKER)
        if not shown:  # the template leaves out responses, so it has no ending for them
            return None
        ending = self.tokenizer(after, add_special_tokens=False).input_ids
        control = self._special_ids.union(self._configured_stop_ids)
        return next((int(token) for token in ending if token in control), None)

    @cached_property
    def turn_end(self) -> TurnEnd | None:
        """The control token that the chat template puts after a response; None without one."""
        if self._turn_end_id is None:
            return None
        return TurnEnd(self._turn_end_id, self.tokenizer.convert_ids_to_tokens(self._turn_end_id))

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """A hash, equal for two agents exactly if the same ids are the same text for both.

        Chat template, stop token, and the tokenizer's padding and truncation settings do not count.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            identity = repr(sorted(self.tokenizer.get_vocab().items()))
        else:
            state = json.loads(backend.to_str())
            kept = {key: value for key, value in state.items() if key not in ("padding", "truncation")}
            identity = json.dumps(kept, sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()

    @cached_property
    def dialect(self) -> Dialect:
        """How the agent writes tool calls and conversations with an environment."""
        from hacrl.models.dialect import Dialect

        return Dialect(self)

    def encode_prompt(self, problem: Problem, opening: str = "") -> tuple[int, ...]:
        """Return the prompt's tokens, rendered with the agent's chat template if it has one.

        The prompt describes the problem's tools. ``opening``: what an environment's reset adds to the
        question; control tokens spelled out in it are encoded as text.
        """
        return self._encode_prompts([problem], opening)[0]

    def encode_prompts(self, problems: Sequence[Problem]) -> list[tuple[int, ...]]:
        """Return the tokens of each problem's prompt. One call of the tokenizer encodes all new prompts."""
        return self._encode_prompts(problems)

    def _encode_prompts(self, problems: Sequence[Problem], opening: str = "") -> list[tuple[int, ...]]:
        asked = [_checked_prompt(problem, opening) for problem in problems]
        found = {prompt: ids for prompt in asked if (ids := self._prompt_ids.get(prompt)) is not None}
        new = [prompt for prompt in dict.fromkeys(asked) if prompt not in found]
        if new:
            found.update(zip(new, self._encode_all_pieces(new), strict=True))
            self._remember({prompt: found[prompt] for prompt in new})
        for problem, prompt in zip(problems, asked, strict=True):
            if not found[prompt]:
                raise TaskError(f"problem {problem.id!r} is an empty prompt for agent {self.name!r}")
        return [found[prompt] for prompt in asked]

    def _remember(self, prompts: Mapping[_Prompt, tuple[int, ...]]) -> None:
        """Cache prompts, and forget the oldest ones if there are too many."""
        with self._in_use:
            self._prompt_ids.update(prompts)
            excess = max(0, len(self._prompt_ids) - PROMPT_CACHE_SIZE)
            for prompt in list(islice(self._prompt_ids, excess)):
                del self._prompt_ids[prompt]

    def _encode_all_pieces(self, prompts: Sequence[_Prompt]) -> list[tuple[int, ...]]:
        adds = not self.use_chat_template
        pieces = [self.dialect.prompt_pieces(*prompt) for prompt in prompts]
        plain = [number for number, one in enumerate(pieces) if not any(piece.is_foreign for piece in one)]
        encoded = dict(zip(plain, self._encode_all([joined(pieces[n]) for n in plain], adds), strict=True))
        for number in range(len(pieces)):
            if number not in encoded:
                encoded[number] = self.encode_pieces(pieces[number], add_special_tokens=adds)
        listed = [encoded[number] for number in range(len(pieces))]
        if self.use_chat_template:
            return listed
        eos = self.tokenizer.eos_token_id
        # some tokenizers append eos to every text, but the response is still to come
        return [ids[:-1] if ids and ids[-1] == eos else ids for ids in listed]

    def _encode_all(self, texts: list[str], add_special_tokens: bool) -> list[tuple[int, ...]]:
        if not texts:
            return []
        options = {"return_attention_mask": False, "return_token_type_ids": False}
        with self._in_use:
            encoded = self.tokenizer(texts, add_special_tokens=add_special_tokens, **options)
        return [*map(tuple, encoded.input_ids)]

    def longest_prompt(self, problems: Sequence[Problem]) -> int:
        """Return the most tokens of a problem's prompt, 0 without problems.

        A tokenizer that writes bytes makes at most one token of a byte. So only the prompts with the most
        bytes are encoded, up to the first that has fewer bytes than the longest prompt has tokens.
        """
        if not self._writes_bytes:
            return max(map(len, self.encode_prompts(problems)), default=0)
        bounds = [self._most_tokens(_checked_prompt(problem)) for problem in problems]
        by_bound = sorted(range(len(bounds)), key=lambda number: -bounds[number])
        longest = 0
        for start in range(0, len(by_bound), ENCODED_AT_ONCE):
            numbers = by_bound[start : start + ENCODED_AT_ONCE]
            if bounds[numbers[0]] <= longest:
                break
            encoded = self.encode_prompts([problems[number] for number in numbers])
            longest = max(longest, *map(len, encoded))
        return longest

    def _count_bytes(self, prompt: _Prompt) -> int:
        """Return the bytes that the tokenizer writes, and what it may add."""
        text = joined(self.dialect.prompt_pieces(*prompt))
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        written = text if normalizer is None else normalizer.normalize_str(text)
        return len(written.encode()) + MOST_ADDED_TOKENS

    @cached_property
    def _writes_bytes(self) -> bool:
        """Whether every byte of a text is in some token, so that no character is left out."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return False
        is_byte_level = type(backend.decoder).__name__ == "ByteLevel"
        return is_byte_level or bool(getattr(backend.model, "byte_fallback", False))

    def encode_pieces(self, pieces: Sequence[Piece], *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Return the tokens of a text. Control tokens spelled out in foreign pieces are encoded as text."""
        ids = self._encode(joined(pieces), add_special_tokens)
        if not any(piece.is_foreign for piece in pieces):
            return ids
        trusted = self._encode(
            joined([piece for piece in pieces if not piece.is_foreign]), add_special_tokens
        )
        if self._control_tokens(ids) == self._control_tokens(trusted):
            return ids  # the tokens that the whole text has
        return self._encode_apart(pieces, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        with self._in_use:
            return tuple(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids)

    def _control_tokens(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._special_ids]

    def _encode_apart(self, pieces: Sequence[Piece], add_special_tokens: bool) -> tuple[int, ...]:
        """Return the control tokens of trusted pieces, and the text between them encoded as plain text."""
        ids = list(self._encode("", add_special_tokens))
        waiting = ""
        for piece in pieces:
            parts = [piece.text] if piece.is_foreign else self._control_pattern.split(piece.text)
            for number, part in enumerate(parts):  # every second part is a control token
                if number % 2:
                    ids += [*self._plain_ids(waiting), int(self.tokenizer.convert_tokens_to_ids(part))]
                    waiting = ""
                else:
                    waiting += part
        return (*ids, *self._plain_ids(waiting))

    def _plain_ids(self, text: str) -> tuple[int, ...]:
        known: PlainIds = {}
        self._encode_plain([text], known)
        return known[text]

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        names = sorted(self.tokenizer.convert_ids_to_tokens(sorted(self._special_ids)), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)()")

    def encode_continuation(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """Return the tokens of a text that continues another one.

        Characters that the tokenizer lacks become its unknown token, or nothing.
        """
        text = joined(pieces)
        if self._control_pattern.search("".join(piece.text for piece in pieces if not piece.is_foreign)):
            return self.encode_pieces(pieces)
        (encoded,) = self.encode_responses([text], [self._plain_ids(_NEUTRAL_LEADS[0])])
        if encoded is not None:
            return encoded
        controls = self.control_ids - {self.tokenizer.unk_token_id}
        return tuple(token for token in self._plain_ids(text) if token not in controls)

    def can_encode(self, texts: Sequence[str]) -> bool:
        """Return whether the tokenizer can write all texts without losing a character."""
        before = self._plain_ids(_NEUTRAL_LEADS[0])
        return all(ids is not None for ids in self.encode_responses(texts, [before] * len(texts)))

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return a conversation as the chat template writes it. Raise ModelError if the template cannot."""
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, **options, **self.chat_template_args
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:  # a template is a program
            roles = ", ".join(message["role"] for message in messages)
            given = f" and chat_template_args={self.chat_template_args}" if self.chat_template_args else ""
            system = "leave the system prompt out, or " if messages[0]["role"] == "system" else ""
            raise ModelError(
                f"agent {self.name!r}: its chat template cannot write a conversation of {roles}{given}: "
                f"{error}; {system}set agents.{self.name}.chat_template=false to ask in plain text"
            ) from error
        return text

    def encode_responses(
        self, texts: Sequence[str], prompts: Sequence[Sequence[int]], known: PlainIds | None = None
    ) -> list[tuple[int, ...] | None]:
        """Return each text's tokens as a continuation of its prompt; None for a text that cannot be encoded.

        Sentencepiece tokenizers put a space before the first word of a text. So if a text does not decode to
        itself, it is encoded again behind a neutral character, whose tokens are then cut off. ``known``
        caches encoded texts for all agents with this tokenizer.
        """
        known = {} if known is None else known
        encoded: list[tuple[int, ...] | None] = [None] * len(texts)
        left = [i for i, text in enumerate(texts) if half_character(text) is None]
        for lead in ("", *_NEUTRAL_LEADS):
            self._encode_plain([lead, *(lead + texts[i] for i in left)], known)
            lead_ids = known[lead] if lead else ()
            cut = len(lead_ids)
            led = ((i, known[lead + texts[i]]) for i in left)
            candidates = {
                i: ids[cut:]
                for i, ids in led
                if ids[:cut] == lead_ids and self.control_ids.isdisjoint(ids[cut:])
            }
            decoded = self.decode_responses(list(candidates.values()), [prompts[i] for i in candidates])
            for (i, ids), text in zip(candidates.items(), decoded, strict=True):
                if text == texts[i]:
                    encoded[i] = ids
            left = [i for i in left if encoded[i] is None]
            if not left:
                break
        return encoded

    def _encode_plain(self, texts: Iterable[str], known: PlainIds) -> None:
        """Add the texts' tokens to ``known``. Control tokens spelled out in a text are encoded as text."""
        new = [text for text in dict.fromkeys(texts) if text not in known]
        if new:
            options = {"return_attention_mask": False, "return_token_type_ids": False}
            with self._in_use:
                encoded = self.tokenizer(new, add_special_tokens=False, split_special_tokens=True, **options)
            known.update(zip(new, map(tuple, encoded.input_ids), strict=True))

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Control tokens, which are not text. Some tokenizers (unigram) can still produce them from text."""
        return self.stop_ids | self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """Tokens marked as special, with or without a role such as eos."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        marked = {int(index) for index, token in added.items() if token.special}
        return frozenset(marked.union(self.tokenizer.all_special_ids))

    def decode_responses(
        self, responses: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]
    ) -> list[str]:
        """Return the text that each response adds to its prompt, with the first token's leading space."""
        befores = [self._prompt_text(tuple(prompt)) for prompt in prompts]
        texts: list[str | None] = [None] * len(responses)
        whole = [i for i, before in enumerate(befores) if not self._decodes_alone(before)]
        joined = self._decode_all([[*prompts[i], *responses[i]] for i in whole])
        for i, text in zip(whole, joined, strict=True):
            if text.startswith(befores[i]):
                texts[i] = text[len(befores[i]) :]
        alone = [i for i, text in enumerate(texts) if text is None]
        for i, text in zip(alone, self._decode_all([responses[i] for i in alone]), strict=True):
            texts[i] = text
        return [text for text in texts if text is not None]

    def _decodes_alone(self, prompt: str) -> bool:
        """Return whether a continuation of this prompt decodes to the same text without the prompt.

        That is so if the decoder only joins the tokens' pieces, unless the prompt ends inside a character.
        """
        return self._joins_pieces and not prompt.endswith(BROKEN_CHARACTER)

    @cached_property
    def _joins_pieces(self) -> bool:
        return self._has_plain_decoder and type(self.tokenizer.backend_tokenizer.decoder).__name__ in (
            "ByteLevel",
            "Fuse",
        )

    @cached_property
    def _has_plain_decoder(self) -> bool:
        """Whether the tokenizers library alone decodes; some models' tokenizer classes add Python code."""
        from transformers import PreTrainedTokenizerFast

        kind, plain = type(self.tokenizer), PreTrainedTokenizerFast
        return issubclass(kind, plain) and all(
            getattr(kind, method) is getattr(plain, method) for method in ("decode", "_decode")
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decode_all([token_ids])[0]

    def _decode_all(self, listed: Sequence[Sequence[int]]) -> list[str]:
        texts: list[str]
        with self._in_use:
            if self._has_plain_decoder:
                backend = self.tokenizer.backend_tokenizer
                texts = backend.decode_batch([list(ids) for ids in listed], skip_special_tokens=False)
            else:
                texts = [
                    self.tokenizer.decode(
                        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
                    )
                    for ids in listed
                ]
        return texts


def _checked_prompt(problem: Problem, opening: str = "") -> _Prompt:
    """Return what a problem's prompt consists of. Raise TaskError for text that no tokenizer can read."""
    turns = (*problem.context, Turn("user", problem.prompt))
    for turn in turns:
        if (half := half_character(turn.content)) is not None:
            raise TaskError(
                f"problem {shown(problem.prompt)}: the {turn.role}'s text contains half a character, "
                f"U+{ord(half):04X}, which no tokenizer can read; correct the data"
            )
    return _Prompt(turns, problem.tools, opening)


def plain_conversation(turns: Sequence[Turn]) -> str:
    """Return turns as plain text, for models without a chat template: each turn starts on a new line.

    A single turn stays unchanged, so that a task decides every character of a base model's prompt.
    """
    text = ""
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        text += turn.content
        if following is not None:
            text += "\n" if turn.role == "user" else "\n\n"
    return text if len(turns) == 1 else text + "\n"


def context_length(config: Any) -> int | None:
    """Return the most tokens that a model can attend to, or None if its config does not say."""
    length: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length
