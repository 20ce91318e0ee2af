"""One pasteable word: each way to spoil it has its own sentence."""

import msgspec
import pytest

from echo2_mesh import limits
from echo2_mesh.errors import UsageError
from echo2_mesh.identity import Identity
from echo2_mesh.wire.ticket import RunTicket, admission_proof, read_ticket, write_ticket

LEARNER = Identity(bytes([3] * 32))
TICKET = RunTicket(
    run_id="run-0123",
    learner=LEARNER.node,
    addresses=(f"/ip4/192.0.2.1/tcp/4201/p2p/{LEARNER.node}",),
    secret=b"s" * 16,
    expires_unix_s=1000,
)
WORD = write_ticket(TICKET)


def test_a_ticket_comes_back_from_letters_and_digits():
    assert WORD.isalnum()
    assert WORD.isascii()
    assert read_ticket(WORD, now_unix_s=0) == TICKET


@pytest.mark.parametrize("width", [1, 7, 72])
@pytest.mark.parametrize("end", ["\n", "\r\n", " ", "\n    "])
def test_wrapping_does_no_harm(width, end):
    wrapped = end.join(WORD[at : at + width] for at in range(0, len(WORD), width))
    if len(wrapped) <= 2 * limits.TICKET_CHARACTERS_MAX:
        assert read_ticket(f"\n{wrapped}\n", now_unix_s=0) == TICKET


def test_it_is_good_until_the_second_it_expires():
    assert read_ticket(WORD, now_unix_s=999.9) == TICKET
    with pytest.raises(UsageError, match=r"expired 2\.0 hours ago"):
        read_ticket(WORD, now_unix_s=1000 + 7200)


def test_a_ticket_without_an_end_does_not_expire():
    ticket = msgspec.structs.replace(TICKET, expires_unix_s=None)
    assert read_ticket(write_ticket(ticket), now_unix_s=1e12) == ticket


@pytest.mark.parametrize(("version", "advice"), [(0, "update of its learner"), (2, "pip install")])
def test_another_version_says_who_must_update(version, advice):
    word = WORD.replace("echo2v1x", f"echo2v{version}x")
    with pytest.raises(UsageError, match=f"network version {version}") as caught:
        read_ticket(word, now_unix_s=0)
    assert advice in caught.value.hint


def test_a_letter_of_another_alphabet_is_not_its_ascii_twin():
    assert "\N{KELVIN SIGN}".lower() == "k"
    with pytest.raises(UsageError, match="is not an Echo-2 ticket"):
        read_ticket(WORD.replace("k", "\N{KELVIN SIGN}", 1), now_unix_s=0)


def test_the_longest_legal_ticket_fits():
    ticket = RunTicket(
        run_id="r" * 63,
        learner=LEARNER.node,
        addresses=tuple("a" * limits.ADDRESS_CHARACTERS_MAX for _ in range(limits.ADDRESSES_MAX)),
        manifest=b"m" * 32,
        secret=b"s" * 64,
        expires_unix_s=2**53,
    )
    assert read_ticket(write_ticket(ticket), now_unix_s=0) == ticket


def test_the_secret_is_in_no_message_and_no_representation():
    assert "ssss" not in repr(TICKET)
    for word in (WORD[:-1], WORD.replace("x", "!"), WORD + "a"):
        with pytest.raises(UsageError) as caught:
            read_ticket(word, now_unix_s=0)
        assert WORD[30:] not in str(caught.value)


def test_an_admission_proof_is_of_one_node_in_one_run():
    node, other = LEARNER.node, Identity(bytes([4] * 32)).node
    proof = admission_proof(b"s" * 16, run_id="run-0123", node=node)
    assert len(proof) == 32
    assert proof != admission_proof(b"s" * 16, run_id="run-0123", node=other)
    assert proof != admission_proof(b"s" * 16, run_id="run-0124", node=node)
    assert proof != admission_proof(b"t" * 16, run_id="run-0123", node=node)
