"""A ticket survives being pasted, and nothing that differs in one character is taken for it."""

import string

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echo2_mesh.errors import UsageError
from echo2_mesh.identity import Identity
from echo2_mesh.wire.ticket import RunTicket, read_ticket, write_ticket

LEARNER = Identity(bytes([3] * 32)).node
TICKETS = st.builds(
    RunTicket,
    run_id=st.from_regex(r"[a-z0-9][a-z0-9-]{1,62}", fullmatch=True),
    learner=st.just(LEARNER),
    addresses=st.lists(st.text("abc/:.0123", min_size=1, max_size=40), max_size=4).map(tuple),
    manifest=st.none() | st.binary(min_size=32, max_size=32),
    secret=st.none() | st.binary(min_size=16, max_size=64),
    expires_unix_s=st.none() | st.integers(10, 2**53),
)


@given(TICKETS)
def test_every_ticket_comes_back(ticket):
    assert read_ticket(write_ticket(ticket), now_unix_s=0) == ticket


@given(TICKETS, st.data())
@settings(max_examples=300)
def test_any_single_changed_character_is_refused(ticket, data):
    word = write_ticket(ticket)
    at = data.draw(st.integers(0, len(word) - 1))
    other = data.draw(st.sampled_from(string.ascii_lowercase + string.digits) | st.characters())
    assume(other.lower() != word[at] or not other.isascii())
    with pytest.raises(UsageError):
        read_ticket(word[:at] + other + word[at + 1 :], now_unix_s=0)


@given(TICKETS, st.data())
def test_a_missing_or_a_doubled_character_is_refused(ticket, data):
    word = write_ticket(ticket)
    at = data.draw(st.integers(0, len(word) - 1))
    for spoilt in (word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:]):
        with pytest.raises(UsageError):
            read_ticket(spoilt, now_unix_s=0)


@given(st.text())
def test_arbitrary_text_is_refused_and_never_raises_anything_else(text):
    with pytest.raises(UsageError):
        read_ticket(text, now_unix_s=0)
