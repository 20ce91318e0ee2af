"""Envelopes of any message, and every one-bit change of them."""

import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from echo2_mesh.errors import PeerError
from echo2_mesh.identity import Identity, verify
from echo2_mesh.wire.codec import seal, unseal
from echo2_mesh.wire.messages import KINDS

ALICE = Identity(bytes([1] * 32))
RUN = "run-0123"
KIND_STRATEGIES = {}


def values(kind: inspect.Type) -> st.SearchStrategy[typing.Any]:
    """Every legal value of a wire type, small where it may be."""
    match kind:
        case inspect.Metadata():
            return values(kind.type)
        case inspect.IntType():
            return st.integers(kind.ge or 0, kind.le)
        case inspect.FloatType():
            low = kind.gt if kind.gt is not None else kind.ge
            return st.floats(low, kind.le, exclude_min=kind.gt is not None)
        case inspect.StrType() if kind.pattern and "(?!" in kind.pattern:
            return st.from_regex(kind.pattern.removesuffix(r"$(?!\n)") + r"\Z")
        case inspect.StrType():
            longest = min(kind.max_length or 20, 20)
            legal = st.characters(exclude_categories=("Cs",))
            return st.text(legal, min_size=kind.min_length or 0, max_size=longest)
        case inspect.BytesType():
            least = kind.min_length or 0
            return st.binary(min_size=least, max_size=max(least, min(kind.max_length or 40, 40)))
        case inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case inspect.NoneType():
            return st.none()
        case inspect.UnionType():
            return st.one_of([values(option) for option in kind.types])
        case inspect.VarTupleType():
            least = kind.min_length or 0
            return st.lists(values(kind.item_type), min_size=least, max_size=least + 2).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case inspect.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=2)
        case inspect.StructType():
            fields = {field.name: values(field.type) for field in kind.fields}
            if "run_id" in fields:
                fields["run_id"] = st.just(RUN)
            return st.builds(kind.cls, **fields)
    if isinstance(kind, inspect.BoolType):
        return st.booleans()
    raise AssertionError(kind)


MESSAGES = st.one_of([values(inspect.type_info(kind)) for kind in KINDS.values()])


def sealed(message):
    return seal(message, run_id=RUN, sender=ALICE.node, sign=ALICE.sign)


def opened(raw):
    return unseal(raw, run_id=RUN, verify=verify, size_bytes_max=1 << 20)


@given(MESSAGES)
@settings(deadline=None)
def test_every_legal_message_survives_its_envelope(message):
    result = opened(sealed(message))
    assert type(result.message) is type(message)
    assert result.message == message


@given(MESSAGES, st.data())
@settings(deadline=None)
def test_any_flipped_bit_of_an_envelope_is_refused(message, data):
    raw = bytearray(sealed(message))
    position = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[position // 8] ^= 1 << position % 8
    with pytest.raises(PeerError):
        opened(bytes(raw))


def test_every_single_flipped_bit_of_one_envelope_is_refused():
    raw = sealed(KINDS["goodbye"](incarnation_unix_ms=1, why="bye"))
    for position in range(8 * len(raw)):
        spoilt = bytearray(raw)
        spoilt[position // 8] ^= 1 << position % 8
        with pytest.raises(PeerError):
            opened(bytes(spoilt))


@given(st.binary(max_size=400))
@settings(deadline=None)
def test_arbitrary_bytes_are_refused_and_never_raise_anything_else(raw):
    with pytest.raises(PeerError):
        opened(raw)


@given(
    st.sampled_from(sorted(KINDS)),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text()
        | st.binary(),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
        ),
        max_leaves=12,
    ),
)
@settings(deadline=None)
def test_a_signed_payload_of_any_content_is_a_legal_message_or_refused(kind, content):
    from echo2_mesh.wire.codec import Envelope, signed_bytes

    payload = msgspec.msgpack.encode(content)
    signature = ALICE.sign(signed_bytes(kind, RUN, ALICE.node, payload))
    raw = msgspec.msgpack.encode(
        Envelope(
            v=1, kind=kind, run_id=RUN, sender=ALICE.node, payload=payload, signature=signature
        )
    )
    try:
        result = opened(raw)
    except PeerError:
        return
    assert isinstance(result.message, KINDS[kind])
    assert isinstance(content, dict)
