"""Tokenizers that never turn untrusted text into special tokens."""

import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from streamrag.backends.special_token_guard import break_matches, folded
from streamrag.core import LengthUnit, Turn, plain_chat
from streamrag.errors import ConfigurationError, MissingDependencyError, ModelError
from streamrag.support.bounded_reading import without_lone_surrogates

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # `owner/name` or `name`, as on the Hugging Face hub
MARKER = re.compile(r"\[/?[A-Z_]{2,40}\]|<{1,2}/?[A-Z_]{2,40}>{1,2}|<\|[^\s<>|]{1,40}\|>|</?[a-z]{1,10}>")
"""Markers of turns and their parts in a chat template: `[INST]`, `<<SYS>>`, `<|user|>`, `</s>`."""


def local_model_path(model: str | os.PathLike[str]) -> Path | None:
    """Return the absolute path of a `model` that exists here, or None for the name of one on the Hugging Face hub.

    :raises ModelError: when `model` does not exist, and is a Path or no valid name: that must not cause a download.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path.resolve()
    if isinstance(model, str) and HUB_NAME.fullmatch(model) and not model.startswith("."):
        return None
    raise ModelError(f"there is no model at {path}. Give an existing folder, or a model on the hub as owner/name")


class HuggingFaceTokenizer:
    """The tokenizer of a model, from a local folder or the Hugging Face hub.

    Construct it in a thread: loading the files takes seconds the first time.

    :raises MissingDependencyError: when transformers is not installed.
    :raises ModelError: when there is no usable tokenizer.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, revision: str | None = None, trust_remote_code: bool = False
    ) -> None:
        path = local_model_path(model)
        self._name = str(model)
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise MissingDependencyError("transformers", "pip install transformers") from None
        try:
            self.whole: Any = AutoTokenizer.from_pretrained(
                str(path or model),
                revision=revision,
                trust_remote_code=trust_remote_code,
                local_files_only=path is not None,
            )
            """The tokenizer of transformers."""
            self._fast, self._plain = _fast_copies(self.whole)
            if not self._fast:  # check now that it can split special tokens
                self.whole.encode("a", add_special_tokens=False, split_special_tokens=True)
            bos_id, first_id, eos_id = self.whole.bos_token_id, self.whole.encode("a")[0], self.whole.eos_token_id
        except Exception as error:
            raise ModelError(f"the tokenizer of {model} cannot be loaded: {error}") from error
        self.bos_text: str = self.whole.bos_token if bos_id == first_id else ""
        """Beginning of a prompt without chat template, for `encode(..., allow_special=True)`; often empty."""
        self.added_token_ids: frozenset[int] = frozenset(self.whole.get_added_vocab().values())
        """Ids that no text is encoded to: special tokens, and other tokens added to the vocabulary."""
        markers = set(MARKER.findall(str(self.whole.chat_template or ""))).difference(self.whole.get_added_vocab())
        self._markers = _breaking(map(folded, markers))
        unknown_id = self.whole.unk_token_id  # for text that the vocabulary cannot express
        self._forbidden_ids = self.added_token_ids - ({unknown_id} if unknown_id not in (bos_id, eos_id) else set())
        self._broken: re.Pattern[str] | None = None
        if not self._fast:
            self._broken = _breaking(self._found_in_text(self.whole.get_added_vocab()))
            if unbroken := self._found_in_text(self.whole.get_added_vocab()):
                raise ModelError(
                    f"the tokenizer of {model} turns text into special tokens, even with a space inside: "
                    f"{', '.join(map(repr, unbroken[:5]))}"
                )

    @classmethod
    def of_engine(cls, model: str | os.PathLike[str], engine_args: Mapping[str, Any]) -> "HuggingFaceTokenizer":
        """Load the engine's own tokenizer and revision, if `engine_args` name them, or else those of the model."""
        return cls(
            engine_args.get("tokenizer") or model,
            revision=engine_args.get("tokenizer_revision") or engine_args.get("revision"),
            trust_remote_code=engine_args.get("trust_remote_code", False),
        )

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Return the token ids of `text`, with no tokens added at its beginning or end.

        With `allow_special`, added tokens (`<|end|>`, `<think>`) get their ids. Otherwise look-alikes of them are plain
        text, and a space breaks the markers of the chat template that are plain text, such as Llama 2's `[INST]`. For
        tokenizers in Python, such as Kimi's, that find added tokens in any text, a space also breaks look-alikes, and
        ids of added tokens that still come are dropped. Lone surrogates become U+FFFD.
        """
        text = without_lone_surrogates(text)
        if self._markers and not allow_special:
            text = break_matches(self._markers, text)
        if self._fast:
            tokenizer = self._fast if allow_special else self._plain
            # A batch of one: `encode` would hold the GIL.
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
            return list(encoding.ids)
        if allow_special:
            return list(self.whole.encode(text, add_special_tokens=False, split_special_tokens=False))
        # Drop special tokens that a custom tokenizer finds in any other spelling.
        return [token_id for token_id in self._encode_slowly(text) if token_id not in self._forbidden_ids]

    def _encode_slowly(self, text: str) -> list[int]:
        text = self._broken.sub(r"\g<0> ", text) if self._broken else text
        return list(self.whole.encode(text, add_special_tokens=False, split_special_tokens=True))

    def _found_in_text(self, tokens: Iterable[str]) -> list[str]:
        """Return the `tokens` that become special ids between letters, or fail there, with special tokens off."""
        found = []
        for token in tokens:
            try:
                is_found = not self._forbidden_ids.isdisjoint(self._encode_slowly(f"a{token}b"))
            except ValueError:  # tiktoken's error
                is_found = True
            if is_found:
                found.append(token)
        return found

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, including special tokens."""
        if self._fast:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=False))
        return str(self.whole.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render_chat(self, turns: Sequence[Turn]) -> str:
        """Return the text of `turns` in the model's chat template, up to the beginning of the answer.

        Without a template this is `core.plain_chat`, after the beginning-of-text token if the model has one. If the
        template refuses, drops or moves system turns, as Mistral's to the end, the first user turn begins with them.

        :raises ConfigurationError: when the template refuses the turns themselves.
        """
        if not self.whole.chat_template:
            return self.bos_text + plain_chat(turns)
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        if not self.keeps_system([turn.role for turn in turns]):
            messages = fold_system(messages)
        try:
            return self.render(messages)
        except (TypeError, ValueError) as error:
            roles = ", ".join(turn.role for turn in turns)
            raise ConfigurationError(
                f"the chat template of {self._name} refuses turns of the roles {roles}: {error}"
            ) from error

    def keeps_system(
        self, roles: Sequence[str] = ("system", "user", "assistant", "user"), tools: Sequence[Any] = ()
    ) -> bool:
        """Whether no role is "system", or the template repeats the text of each turn of `roles` once and in order."""
        if "system" not in roles:
            return True
        messages = [{"role": role, "content": f"@@turn-{number}@@"} for number, role in enumerate(roles)]
        with suppress(TypeError, ValueError):
            numbers = re.findall(r"@@turn-(\d+)@@", self.render(messages, tools))
            return numbers == [str(number) for number in range(len(roles))]
        return False

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
        """Return `messages` in the chat template and the beginning of an answer; ValueError if it refuses them."""
        from jinja2 import TemplateError

        options = {"tokenize": False, "add_generation_prompt": True}
        try:
            return str(self.whole.apply_chat_template(messages, tools=tools or None, **options))
        except (TemplateError, RecursionError) as error:
            raise ValueError(str(error)) from error


class CodePointTokenizer:
    """A tokenizer for servers whose tokenizer is not available. Its ids are Unicode code points.

    Lengths then count characters. A text has at least as many characters as tokens in all common vocabularies, so a
    model's length in tokens is never exceeded. There are no special tokens and no chat template.
    """

    unit: LengthUnit = "characters"

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Return the code points of `text`; lone surrogates become U+FFFD."""
        return [ord(character) for character in without_lone_surrogates(text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these code points."""
        return "".join(map(chr, token_ids))

    def render_chat(self, turns: Sequence[Turn]) -> str:
        """Return the turns in the plain layout, because only the server knows the chat template."""
        return plain_chat(turns)


def fold_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with all system texts in front of the first user message, or as a new first user message."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [dict(message) for message in messages if message["role"] != "system"]
    first = next((message for message in others if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": "\n\n".join(texts)}, *others]
    first["content"] = "\n\n".join([*texts, first["content"]])
    return others


def _breaking(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern of the first character of each of these texts, where its rest follows; None without texts."""
    patterns = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in sorted(texts) if text]
    return re.compile("|".join(patterns)) if patterns else None


def _fast_copies(tokenizer: Any) -> tuple[Any, Any]:
    """Return two copies of a fast tokenizer that add and cut no tokens: one with added tokens, one with them as text.

    (None, None) for a tokenizer that is not from the tokenizers library.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return None, None
    from tokenizers import Tokenizer

    spec = json.loads(fast.to_str()) | {"post_processor": None, "truncation": None, "padding": None}
    added = {token["content"] for token in spec["added_tokens"]}
    plain = spec | {"added_tokens": [], "model": _without_tokens(spec["model"], added)}
    return Tokenizer.from_str(json.dumps(spec)), Tokenizer.from_str(json.dumps(plain))


def _without_tokens(model: dict[str, Any], added: set[str]) -> dict[str, Any]:
    """Return a model of the tokenizers library that cannot produce these tokens from text, in the form of its JSON.

    Removing them from the added tokens is not enough: they often are in the vocabulary too. Unigram finds them there,
    as special tokens have the best score of all, and so does BPE with `ignore_merges`. So Unigram's are renamed, and
    others removed with their merges, except the unknown token.
    """
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: an id is a position, so rename the tokens to random names
        return model | {
            "vocab": [[secrets.token_hex(16) if piece in added else piece, score] for piece, score in vocab]
        }
    removed = added - {model.get("unk_token")}  # required by the model, for text that it cannot express
    reduced = model | {"vocab": {token: number for token, number in vocab.items() if token not in removed}}
    if "merges" in model:
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        reduced["merges"] = [merge for merge in merges if removed.isdisjoint((*merge, "".join(merge)))]
    return reduced
