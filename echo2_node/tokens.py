"""Text to token ids and back, with what travels beside a model and nothing heavier.

Reads a Hugging Face folder through the `tokenizers` package and renders its chat template with a
sandboxed jinja2; never loads torch or transformers. The learner encodes prompts and decodes what
actors sent before it scores; actors decode to score. The two digests say that both use the same
files; a token is never derived twice from text.
"""

from __future__ import annotations

import array
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from echo2_mesh import limits
from echo2_mesh.errors import PeerError, UsageError
from echo2_mesh.wire.types import Digest

FILE_BYTES_MAX = 128 * limits.MIB
"""A larger tokenizer.json is refused unread; the largest in use have some 35 MB."""
TEMPLATE_CHARACTERS_MAX = 256 * limits.KIB
PROMPT_CHARACTERS_MAX = 16 * limits.PROMPT_TOKENS_MAX

_RESTORE = "Restore the folder, or point [model] path at another one."
_TODAY = datetime.date(2026, 1, 1)
"""Templates may print the date; a fixed one keeps a prompt the same on every host and day."""


class TokenCodec:
    """One model's tokenizer and chat template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: Callable[[str], str] | None,
        eos_ids: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.eos_ids = eos_ids
        """Ids that end a completion."""
        self.vocabulary = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        """Ids run from 0 to below this; a model's embedding may have more rows."""

    @classmethod
    def load(cls, folder: Path) -> TokenCodec:
        """Read the tokenizer of a model folder.

        Raises:
            UsageError: a file is missing or damaged, or the template cannot be compiled.
        """
        raw = _read(folder / "tokenizer.json")
        try:
            tokenizer = Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise UsageError(
                f"{folder / 'tokenizer.json'} is not a tokenizer: {str(error)[:200]}.", _RESTORE
            ) from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        source = _template_source(folder)
        template = None if source is None else _compile(source, _special_tokens(folder), folder)
        return cls(tokenizer, template=template, eos_ids=_eos_ids(folder, tokenizer))

    def encode_prompt(self, text: str) -> bytes:
        """int32[P] little-endian of a prompt, put through the chat template if there is one.

        Raises:
            UsageError: the tokenizer has no token for it, or the prompt is too long.
        """
        if self._template is not None:
            text = self._template(text)
        if len(text) > PROMPT_CHARACTERS_MAX:
            raise UsageError(
                f"A prompt of {len(text)} characters is above {PROMPT_CHARACTERS_MAX}.",
                "Choose another task or shorter items.",
            )
        try:
            # A template writes the beginning-of-text token itself.
            ids = self._tokenizer.encode(text, add_special_tokens=self._template is None).ids
        except Exception as error:  # as in `load`
            raise UsageError(
                f"The model's tokenizer cannot encode the prompt '{text[:80]}': {error}.",
                "The task needs a model whose alphabet covers it.",
            ) from error
        if not 0 < len(ids) <= limits.PROMPT_TOKENS_MAX:
            raise UsageError(
                f"The prompt '{text[:80]}' has {len(ids)} tokens; legal are 1 to "
                f"{limits.PROMPT_TOKENS_MAX}.",
                "Choose another task or shorter items.",
            )
        return pack_ids(ids)

    def decode(self, token_ids: bytes) -> str:
        """Text of int32[T] little-endian ids, special tokens removed.

        Raises:
            PeerError: not whole int32s, or an id that is not in the vocabulary.
        """
        ids = unpack_ids(token_ids)
        for token_id in ids:
            if not 0 <= token_id < self.vocabulary:
                raise PeerError(
                    f"Token id {token_id} lies outside the vocabulary of {self.vocabulary}."
                )
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


def pack_ids(ids: list[int]) -> bytes:
    """int32 little-endian bytes of token ids."""
    packed = array.array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(token_ids: bytes) -> list[int]:
    """Token ids of int32 little-endian bytes.

    Raises:
        PeerError: the length is not a multiple of four.
    """
    if len(token_ids) % 4:
        raise PeerError(f"{len(token_ids)} bytes are not whole int32 token ids.")
    packed = array.array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def tokenizer_digest(folder: Path) -> Digest:
    """Names how a folder turns ids into text and where a completion ends.

    Raises:
        UsageError: the tokenizer is missing or damaged.
    """
    raw = _read(folder / "tokenizer.json")
    eos = sorted(TokenCodec.load(folder).eos_ids)
    return _digest(b"echo2 tokenizer\x00", raw, json.dumps(eos).encode())


def template_digest(folder: Path) -> Digest:
    """Names a folder's chat template; folders without one share a digest.

    Raises:
        UsageError: the file that holds it is damaged.
    """
    source = _template_source(folder)
    if source is None:
        return _digest(b"echo2 template\x00")
    special = json.dumps(_special_tokens(folder), sort_keys=True)
    return _digest(b"echo2 template\x00", source.encode(), special.encode())


def build_character_tokenizer(alphabet: str) -> dict[str, bytes]:
    """Files of a tokenizer with one token a character: `<pad>` is 0, `<eos>` is 1.

    Characters follow in the order of their first appearance. A character outside the alphabet
    cannot be encoded. Loadable by `TokenCodec`, transformers and vLLM.
    """
    special = ("<pad>", "<eos>")
    vocabulary = {token: index for index, token in enumerate((*special, *dict.fromkeys(alphabet)))}
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    split = {"pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **flags} for index, token in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", **split},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, indent=1).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=1).encode(),
    }


def _digest(domain: bytes, *fields: bytes) -> Digest:
    hasher = blake3.blake3(domain)
    for field in fields:
        hasher.update(len(field).to_bytes(8, "big"))
        hasher.update(field)
    return Digest(hasher.digest())


def _read(path: Path) -> bytes:
    try:
        size_bytes = path.stat().st_size
        if size_bytes > FILE_BYTES_MAX:
            raise UsageError(
                f"{path} has {size_bytes} bytes, above the limit of {FILE_BYTES_MAX}.", _RESTORE
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(
            f"The model folder {path.parent} has no {path.name}.",
            "Echo-2 needs a Hugging Face folder with a fast tokenizer.",
        ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}.", _RESTORE) from error


def _read_json(path: Path) -> dict[str, Any]:
    """The file's table; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        data = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}.", _RESTORE) from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} must hold a JSON object.", _RESTORE)
    return data


def _special_tokens(folder: Path) -> dict[str, str]:
    """bos_token and the like, as a template may use them."""
    tokens = {}
    settings = _read_json(folder / "tokenizer_config.json")
    for data in (_read_json(folder / "special_tokens_map.json"), settings):
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = data.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def _eos_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The first of generation_config, config and tokenizer_config that names any wins."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if ids and all(type(token_id) is int and token_id >= 0 for token_id in ids):
            return frozenset(ids)
    eos_id = tokenizer.token_to_id(_special_tokens(folder).get("eos_token", ""))
    return frozenset() if eos_id is None else frozenset({eos_id})


def _template_source(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    source: object
    if path.exists():
        try:
            source = _read(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} is not text: {error}.", _RESTORE) from error
    else:
        path = folder / "tokenizer_config.json"
        source = _read_json(path).get("chat_template")
        if isinstance(source, list):
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str) or len(source) > TEMPLATE_CHARACTERS_MAX:
        raise UsageError(f"The chat template in {path} is not text of a legal length.", _RESTORE)
    return source


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model wrote, for loss masks; here only its body matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _compile(source: str, special_tokens: dict[str, str], folder: Path) -> Callable[[str], str]:
    """A function from a user's message to the text that the model continues."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _TODAY.strftime
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, indent=options.get("indent")
    )
    try:
        template = environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        raise UsageError(
            f"The chat template of {folder} cannot be compiled: {error}.", _RESTORE
        ) from error

    def render(prompt: str) -> str:
        try:
            return template.render(
                messages=[{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **special_tokens,
            )
        except Exception as error:  # a template is a program and may fail in any way
            raise UsageError(
                f"The chat template of {folder} refuses a user's message: {error}.", _RESTORE
            ) from error

    return render
