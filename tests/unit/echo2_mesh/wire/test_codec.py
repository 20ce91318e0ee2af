"""The envelope: order of trust and what each refusal says. Bytes are checked by the vectors."""

import subprocess
import sys

import msgspec
import pytest

from echo2_mesh import limits
from echo2_mesh.errors import PeerError
from echo2_mesh.identity import Identity, verify
from echo2_mesh.wire.codec import Envelope, seal, signed_bytes, unseal
from echo2_mesh.wire.messages import KIND_OF, KINDS, Done, Goodbye, Manifest, Probe, TaskSpec
from echo2_mesh.wire.types import Digest, PolicyVersion

RUN = "run-0123"
ALICE, BOB = Identity(bytes([1] * 32)), Identity(bytes([2] * 32))
ZERO = Digest(bytes(32))


def sealed(message=None, *, run_id=RUN, by=ALICE):
    return seal(message or Done(), run_id=run_id, sender=by.node, sign=by.sign)


def opened(raw, *, run_id=RUN, check=verify, limit=limits.ASK_SIZE_BYTES_MAX):
    return unseal(raw, run_id=run_id, verify=check, size_bytes_max=limit)


def test_a_sealed_message_comes_back_with_its_sender_and_its_own_bytes():
    raw = sealed(Goodbye(incarnation_unix_ms=5, why="tired"))
    result = opened(raw)
    assert result.message == Goodbye(incarnation_unix_ms=5, why="tired")
    assert (result.sender, result.raw) == (ALICE.node, raw)


def test_the_cover_costs_less_than_the_bound_says():
    assert len(sealed(run_id="r" * 63)) - 1 <= limits.ENVELOPE_OVERHEAD_BYTES_MAX


def test_size_is_checked_before_anything_is_decoded():
    with pytest.raises(PeerError, match="11 bytes refused: the limit is 10"):
        opened(b"\xc1" * 11, limit=10)


def test_the_signature_is_checked_before_the_payload_has_a_meaning():
    kind, payload = "done", b"\xc1 never legal"
    raw = msgspec.msgpack.encode(
        Envelope(
            v=1, kind=kind, run_id=RUN, sender=ALICE.node, payload=payload, signature=bytes(64)
        )
    )
    with pytest.raises(PeerError, match="Bad signature"):
        opened(raw)


def test_no_signature_is_checked_for_another_run():
    def fail(*_):
        pytest.fail("a signature of another run was checked")

    with pytest.raises(PeerError, match="this node is in run 'run-0123'"):
        opened(sealed(run_id="run-9999"), check=fail)


def test_nobody_can_speak_for_another():
    cover = msgspec.msgpack.decode(sealed(), type=Envelope)
    forged = msgspec.msgpack.encode(msgspec.structs.replace(cover, sender=BOB.node))
    with pytest.raises(PeerError, match="Bad signature"):
        opened(forged)


def test_a_manifest_of_another_run_in_this_runs_cover_is_refused():
    manifest = Manifest(
        run_id="run-9999",
        version=PolicyVersion(0),
        chunks=(),
        tensors=(),
        files=(),
        state_digest=ZERO,
        tokenizer_digest=ZERO,
        template_digest=ZERO,
        task=TaskSpec(task_id="t", args_json="{}", digest=ZERO),
        probe=Probe(token_ids=bytes(8), logprobs=bytes(4)),
    )
    with pytest.raises(PeerError, match="manifest of run 'run-9999'"):
        opened(sealed(manifest))


def test_another_network_version_says_to_update():
    cover = msgspec.msgpack.decode(sealed(), type=Envelope)
    raw = msgspec.msgpack.encode(msgspec.structs.replace(cover, v=2))
    with pytest.raises(PeerError, match="version 2; this node speaks 1") as caught:
        opened(raw)
    assert "pip install -U echo2" in caught.value.hint


def test_a_kind_with_control_characters_is_shown_escaped():
    cover = msgspec.msgpack.decode(sealed(), type=Envelope)
    raw = msgspec.msgpack.encode(msgspec.structs.replace(cover, kind="\x1b[2J"))
    with pytest.raises(PeerError, match=r"'\\x1b\[2J'"):
        opened(raw)


def test_no_two_headers_share_signed_bytes():
    assert signed_bytes("ab", "c", "d", b"") != signed_bytes("a", "bc", "d", b"")
    assert signed_bytes("a", "b", "cd", b"") != signed_bytes("a", "b", "c", b"d")


def test_each_kind_names_one_struct_that_cannot_change():
    assert len(KIND_OF) == len(KINDS)
    for kind, struct in KINDS.items():
        assert KIND_OF[struct] == kind
        assert struct.__struct_config__.frozen


def test_the_wire_can_be_imported_without_anything_that_waits():
    code = (
        "import sys, echo2_mesh.wire.messages, echo2_mesh.wire.codec, echo2_mesh.wire.ticket\n"
        "print({'trio', 'libp2p', 'torch', 'socket', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
