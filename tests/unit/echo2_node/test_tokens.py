"""Text to ids and back from a model folder, and what happens when the folder is damaged."""

import json
import subprocess
import sys

import pytest

from echo2_mesh.errors import PeerError, UsageError
from echo2_node.tokens import (
    TokenCodec,
    build_character_tokenizer,
    pack_ids,
    template_digest,
    tokenizer_digest,
    unpack_ids,
)

ALPHABET = "0123456789+-*/() =:>\n"


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    for name, content in build_character_tokenizer(ALPHABET).items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def ids(codec, text):
    return unpack_ids(codec.encode_prompt(text))


def test_a_character_tokenizer_has_pad_eos_and_one_id_a_character(folder):
    codec = TokenCodec.load(folder)
    assert ids(codec, ALPHABET) == list(range(2, 2 + len(ALPHABET)))
    assert codec.vocabulary == 2 + len(ALPHABET)
    assert codec.eos_ids == {1}


def test_text_comes_back_exactly_white_space_included(folder):
    codec = TokenCodec.load(folder)
    text = "  3 + 5\n\n ->  8: "
    assert codec.decode(codec.encode_prompt(text)) == text


def test_special_tokens_are_removed_from_text(folder):
    assert TokenCodec.load(folder).decode(pack_ids([0, 2, 3, 1, 0])) == "01"


def test_a_doubled_character_counts_once():
    twice = build_character_tokenizer("abab")
    assert twice == build_character_tokenizer("ab")


def test_a_character_outside_the_alphabet_is_a_usage_error(folder):
    with pytest.raises(UsageError, match="cannot encode the prompt 'x'"):
        TokenCodec.load(folder).encode_prompt("x")


def test_an_empty_prompt_is_refused(folder):
    with pytest.raises(UsageError, match="has 0 tokens"):
        TokenCodec.load(folder).encode_prompt("")


@pytest.mark.parametrize(
    "raw", [b"\1", b"\1\0\0\0\0", pack_ids([23]), pack_ids([-1]), pack_ids([2**31 - 1])]
)
def test_ids_from_a_peer_that_no_vocabulary_has_are_a_peers_error(folder, raw):
    with pytest.raises(PeerError):
        TokenCodec.load(folder).decode(raw)


def test_a_chat_template_wraps_a_users_message(folder):
    write(
        folder,
        "chat_template.jinja",
        "{% for m in messages %}{{ m.role | length }}:{{ m.content }}{% endfor %}\n"
        "{% if add_generation_prompt %}={% endif %}",
    )
    codec = TokenCodec.load(folder)
    assert codec.decode(codec.encode_prompt("12")) == "4:12="


def test_a_template_in_the_tokenizers_settings_is_found(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = [
        {"name": "tool", "template": "0"},
        {"name": "default", "template": "9{{ messages[0].content }}"},
    ]
    for template in ("9{{ messages[0].content }}", named):
        write(folder, "tokenizer_config.json", settings | {"chat_template": template})
        codec = TokenCodec.load(folder)
        assert codec.decode(codec.encode_prompt("1")) == "91"


def test_templates_may_use_what_transformers_gives_them(folder):
    template = (
        "{{ eos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% break %}{% endfor %}{{ strftime_now('%Y') }}{{ ([1] | tojson)[1] }}"
    )
    write(folder, "chat_template.jinja", template)
    codec = TokenCodec.load(folder)
    assert ids(codec, "5") == [1, 7, 4, 2, 4, 8, 3]  # <eos> 5 2026 1


def test_a_first_token_is_added_once_by_the_tokenizer_or_by_the_template(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    first, text = (
        {"SpecialToken": {"id": "<eos>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text],
        "special_tokens": {"<eos>": {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}},
    }
    write(folder, "tokenizer.json", tokenizer)
    assert ids(TokenCodec.load(folder), "0") == [1, 2]
    write(folder, "chat_template.jinja", "{{ eos_token }}{{ messages[0].content }}")
    assert ids(TokenCodec.load(folder), "0") == [1, 2]


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for %}", "cannot be compiled"),
        ("{{ raise_exception('no users') }}", "no users"),
        ("{{ ''.__class__.__mro__ }}", "refuses a user's message"),
        ("{{ messages.append(1) }}", "refuses a user's message"),
        ("{{ 1 / 0 }}", "refuses a user's message"),
        ("{% for i in range(10**9) %}{% endfor %}", "refuses a user's message"),
    ],
)
def test_a_bad_template_is_a_usage_error_and_cannot_reach_out(folder, template, sentence):
    write(folder, "chat_template.jinja", template)
    with pytest.raises(UsageError, match=sentence):
        TokenCodec.load(folder).encode_prompt("1")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {1}),
        ({"config.json": {"eos_token_id": 5}}, {5}),
        (
            {
                "config.json": {"eos_token_id": 5},
                "generation_config.json": {"eos_token_id": [6, 7]},
            },
            {6, 7},
        ),
        ({"config.json": {"eos_token_id": None}}, {1}),
        ({"tokenizer_config.json": {"eos_token": {"content": "<pad>"}}}, {0}),
        ({"tokenizer_config.json": {}}, set()),
    ],
)
def test_where_a_completion_ends(folder, files, expected):
    for name, content in files.items():
        write(folder, name, content)
    assert TokenCodec.load(folder).eos_ids == expected


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": "1.0"}', "\x00"])
def test_a_damaged_tokenizer_is_a_usage_error(folder, content):
    write(folder, "tokenizer.json", content)
    with pytest.raises(UsageError, match="is not a tokenizer"):
        TokenCodec.load(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_damaged_settings_file_is_a_usage_error(folder, name, content):
    write(folder, name, content)
    with pytest.raises(UsageError, match=name):
        TokenCodec.load(folder)


def test_a_missing_tokenizer_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        TokenCodec.load(tmp_path)


def test_the_tokenizers_digest_changes_with_its_file_and_its_end(folder):
    digests = {tokenizer_digest(folder)}
    write(folder, "config.json", {"eos_token_id": 7})
    digests.add(tokenizer_digest(folder))
    (folder / "tokenizer.json").write_bytes(build_character_tokenizer("ab")["tokenizer.json"])
    digests.add(tokenizer_digest(folder))
    assert len(digests) == 3
    assert all(len(digest) == 32 for digest in digests)


def test_the_templates_digest_changes_with_the_template_alone(folder):
    digests = {template_digest(folder)}
    write(folder, "chat_template.jinja", "")
    digests.add(template_digest(folder))
    write(folder, "chat_template.jinja", "{{ messages }}")
    digests.add(template_digest(folder))
    (folder / "tokenizer.json").unlink()
    digests.add(template_digest(folder))
    assert len(digests) == 3


def test_tokens_load_neither_torch_nor_transformers():
    code = (
        "import sys, echo2_node.tokens; print({'torch', 'transformers', 'trio'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
