"""The vectors of tickets in `proto/vectors/ticket.json`, made from fixed seeds.

Called by `scripts/schema` alone; `proto/ticket.md` lists the names of the refusals.
"""

from __future__ import annotations

import base64
from typing import Any

import blake3
import msgspec
from wire_vectors import ACTOR, LEARNER, RUN_ID, SECRET, digest, plain

from echo2_mesh import limits
from echo2_mesh.wire.ticket import RunTicket, admission_proof, write_ticket

NOW_UNIX_S = 1_800_000_000


def ticket_vectors() -> dict[str, Any]:
    """Content of `proto/vectors/ticket.json`."""
    least = RunTicket(run_id=RUN_ID, learner=LEARNER.node, addresses=())
    full = RunTicket(
        run_id=RUN_ID,
        learner=LEARNER.node,
        addresses=(f"/ip4/192.0.2.7/tcp/4201/p2p/{LEARNER.node}", "/dns4/example.org/tcp/4201"),
        manifest=digest("manifest"),
        secret=SECRET,
        expires_unix_s=NOW_UNIX_S + 3600,
    )
    word, long_word = write_ticket(least), write_ticket(full)
    middle = len(long_word) // 2
    golden = [
        {"name": "only what is needed", "text": word, "meaning": plain(least)},
        {"name": "everything", "text": long_word, "meaning": plain(full)},
        {
            "name": "wrapped and in capitals",
            "text": f"  {long_word[:40].upper()}\n   {long_word[40:]}\r\n",
            "meaning": plain(full),
        },
    ]
    other = "b" if long_word[middle] == "a" else "a"
    expired = msgspec.structs.replace(full, expires_unix_s=NOW_UNIX_S)
    rejects = [
        ("nothing", "", "ticket"),
        ("another word", "hello", "ticket"),
        ("a sign that no ticket has", long_word[:middle] + "!" + long_word[middle + 1 :], "ticket"),
        ("a letter changed", long_word[:middle] + other + long_word[middle + 1 :], "damaged"),
        ("the last letter missing", long_word[:-1], "damaged"),
        ("a letter too many", long_word + "a", "damaged"),
        ("unused bits of the last letter set", _loose_end(word), "damaged"),
        ("version 2", word.replace("echo2v1x", "echo2v2x"), "version"),
        ("expired this second", write_ticket(expired), "expired"),
        ("a content that is no map", _word(b"\x90"), "content"),
        (
            "a content without a learner",
            _word(msgspec.msgpack.encode({"run_id": RUN_ID})),
            "content",
        ),
        (
            "a secret of 15 bytes",
            _word(msgspec.msgpack.encode(msgspec.structs.replace(full, secret=b"\0" * 15))),
            "content",
        ),
        ("twice as long as any ticket", "echo2v1x" + "a" * 16_400, "oversize"),
    ]
    proof = admission_proof(SECRET, run_id=RUN_ID, node=ACTOR.node)
    return {
        "now_unix_s": NOW_UNIX_S,
        "golden": golden,
        "must_reject": [{"name": n, "text": t, "refusal": refusal} for n, t, refusal in rejects],
        "admission": {
            "secret": SECRET.hex(),
            "run_id": RUN_ID,
            "node": ACTOR.node,
            "proof": proof.hex(),
        },
    }


def _word(body: bytes) -> str:
    """A ticket with a right checksum around any content."""
    prefix = f"echo2v{limits.NETWORK_VERSION}x"
    checksum = blake3.blake3(prefix.encode() + body).digest()[:4]
    return prefix + base64.b32encode(body + checksum).decode().rstrip("=").lower()


def _loose_end(word: str) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    changed = word[:-1] + letters[letters.index(word[-1]) ^ 1]
    coded = changed.removeprefix(f"echo2v{limits.NETWORK_VERSION}x")
    assert len(coded) % 8, "the sample must not fill its last group of eight letters"
    return changed
