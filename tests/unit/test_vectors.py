"""`proto/vectors`, read twice: by our codec, and by a reader that knows the documents only.

The independent reader uses the `msgpack`, `base58` and `cryptography` packages, `proto/schema.json`
and the rules of `proto/envelope.md`; it names none of our structs.
"""

import base64
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import base58
import blake3
import msgpack
import msgspec
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from echo2_mesh.errors import PeerError, UsageError
from echo2_mesh.identity import verify
from echo2_mesh.wire.codec import unseal
from echo2_mesh.wire.messages import KINDS
from echo2_mesh.wire.ticket import admission_proof, read_ticket

PROTO = Path(__file__).parents[2] / "proto"
SCHEMA = json.loads((PROTO / "schema.json").read_text())
FILES = {path.stem: json.loads(path.read_text()) for path in (PROTO / "vectors").glob("*.json")}
TICKETS = FILES["ticket"]
ENVELOPES = {name: file for name, file in FILES.items() if name not in ("ticket", "delta")}


def cases(part, files):
    return [
        pytest.param(file, vector, id=f"{name}: {vector['name']}")
        for name, file in sorted(files.items())
        for vector in file[part]
    ]


def plain(value):
    """A decoded value in the form of a vector's `meaning`."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


# --- the independent reader --------------------------------------------------------------------


class Refused(Exception):
    pass


def fits(value, node):
    """True if `value` obeys a node of schema.json."""
    if "$ref" in node:
        return fits(value, SCHEMA["$defs"][node["$ref"].rpartition("/")[2]])
    if "anyOf" in node:
        return any(fits(value, option) for option in node["anyOf"])
    if "enum" in node:
        return value in node["enum"]
    binary = node.get("contentEncoding") == "binary"
    match node.get("type"):
        case "null":
            return value is None
        case "integer":
            return type(value) is int and node["minimum"] <= value <= node["maximum"]
        case "number":
            number = type(value) in (int, float) and math.isfinite(value)
            above = node.get("exclusiveMinimum", -math.inf)
            return (
                number and above < value and node.get("minimum", above) <= value <= node["maximum"]
            )
        case "string":
            return (
                isinstance(value, bytes if binary else str)
                and node.get("minLength", 0) <= len(value) <= node.get("maxLength", math.inf)
                and ("pattern" not in node or re.search(node["pattern"], value) is not None)
            )
        case "boolean":
            return isinstance(value, bool)
        case "array":
            entries = node.get("prefixItems")
            return isinstance(value, list) and (
                len(value) == len(entries) and all(map(fits, value, entries))
                if entries
                else node.get("minItems", 0) <= len(value) <= node.get("maxItems", math.inf)
                and all(fits(entry, node["items"]) for entry in value)
            )
        case "object" if "properties" in node:
            return (
                isinstance(value, dict)
                and all(name in value for name in node["required"])
                and all(
                    fits(v, node["properties"][k])
                    for k, v in value.items()
                    if k in node["properties"]
                )
            )
        case "object":
            return isinstance(value, dict) and all(
                fits(entry, node["additionalProperties"]) for entry in value.values()
            )
    raise AssertionError(f"a node that this reader does not know: {node}")


def unpack(raw, refusal):
    try:
        return msgpack.unpackb(raw, max_map_len=65536, max_array_len=65536)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise Refused(refusal) from error


def signed(cover):
    parts = b"echo2 envelope\0" + SCHEMA["network_version"].to_bytes(4, "big")
    for field in (cover["kind"].encode(), cover["run_id"].encode(), cover["sender"].encode()):
        parts += len(field).to_bytes(4, "big") + field
    return parts + len(cover["payload"]).to_bytes(4, "big") + cover["payload"]


def read_independently(raw, run_id, size_bytes_max):
    """The payload's value, by the rules of proto/envelope.md in their order."""
    if len(raw) > size_bytes_max:
        raise Refused("oversize")
    cover = unpack(raw, "envelope")
    version = cover.get("v") if isinstance(cover, dict) else None
    if type(version) is int and version >= 0 and version != SCHEMA["network_version"]:
        raise Refused("version")
    if not fits(cover, SCHEMA["$defs"]["Envelope"]):
        raise Refused("envelope")
    if cover["kind"] not in SCHEMA["kinds"]:
        raise Refused("kind")
    if cover["run_id"] != run_id:
        raise Refused("run")
    key = Ed25519PublicKey.from_public_bytes(base58.b58decode(cover["sender"])[6:])
    try:
        key.verify(cover["signature"], signed(cover))
    except InvalidSignature:
        raise Refused("signature") from None
    value = unpack(cover["payload"], "message")
    if not fits(value, SCHEMA["kinds"][cover["kind"]]):
        raise Refused("message")
    return value


@pytest.mark.parametrize(("file", "vector"), cases("golden", ENVELOPES))
def test_an_independent_reader_finds_the_meaning_of_a_golden_vector(file, vector):
    raw = bytes.fromhex(vector["envelope"])
    value = read_independently(raw, file["run_id"], SCHEMA["limits"]["ASK_SIZE_BYTES_MAX"])
    assert msgpack.unpackb(raw)["payload"] == bytes.fromhex(vector["payload"])
    assert {key: plain(value[key]) for key in vector["meaning"]} == vector["meaning"]


@pytest.mark.parametrize(("file", "vector"), cases("must_reject", ENVELOPES))
def test_an_independent_reader_refuses_what_must_be_rejected(file, vector):
    raw = bytes.fromhex(vector["envelope"])
    with pytest.raises(Refused, match=f"^{vector['refusal']}$"):
        read_independently(raw, file["run_id"], vector["size_bytes_max"])


def test_an_independent_signer_makes_the_golden_envelope():
    vector = FILES["envelope"]["golden"][0]
    cover = msgpack.unpackb(bytes.fromhex(vector["envelope"]))
    assert signed(cover).hex() == vector["signed"]
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(vector["seed"]))
    assert key.sign(signed(cover)) == cover["signature"]


@pytest.mark.parametrize("vector", TICKETS["golden"], ids=lambda v: v["name"])
def test_an_independent_reader_finds_the_meaning_of_a_ticket(vector):
    word = "".join(vector["text"].split()).lower()
    prefix, coded = word[: len("echo2v1x")], word[len("echo2v1x") :]
    raw = base64.b32decode(coded.upper() + "=" * (-len(coded) % 8))
    assert blake3.blake3(prefix.encode() + raw[:-4]).digest()[:4] == raw[-4:]
    value = msgpack.unpackb(raw[:-4])
    assert fits(value, SCHEMA["$defs"]["RunTicket"])
    assert plain(value) == vector["meaning"]


# --- our codec ---------------------------------------------------------------------------------

SENTENCES = {
    "oversize": "the limit is",
    "envelope": "Not an Echo-2 envelope",
    "version": "network version",
    "kind": "Unknown message kind",
    "run": "this node is in run",
    "signature": "Bad signature",
    "message": "Illegal",
}
TICKET_SENTENCES = {
    "oversize": "shorter than",
    "ticket": "is not an Echo-2 ticket",
    "damaged": "damaged",
    "version": "network version",
    "content": "content is not legal",
    "expired": "expired",
}


@pytest.mark.parametrize(("file", "vector"), cases("golden", ENVELOPES))
def test_our_codec_finds_the_meaning_of_a_golden_vector(file, vector):
    raw = bytes.fromhex(vector["envelope"])
    opened = unseal(raw, run_id=file["run_id"], verify=verify, size_bytes_max=len(raw))
    assert type(opened.message) is KINDS[file["kind"]]
    assert (opened.sender, opened.raw) == (vector["sender"], raw)
    meaning = msgspec.to_builtins(opened.message, builtin_types=(bytes,))
    assert plain(meaning) == vector["meaning"]


@pytest.mark.parametrize(("file", "vector"), cases("must_reject", ENVELOPES))
def test_our_codec_refuses_what_must_be_rejected(file, vector):
    raw, limit = bytes.fromhex(vector["envelope"]), vector["size_bytes_max"]
    with pytest.raises(PeerError, match=SENTENCES[vector["refusal"]]):
        unseal(raw, run_id=file["run_id"], verify=verify, size_bytes_max=limit)


@pytest.mark.parametrize("vector", TICKETS["golden"], ids=lambda v: v["name"])
def test_our_reader_finds_the_meaning_of_a_ticket(vector):
    ticket = read_ticket(vector["text"], now_unix_s=TICKETS["now_unix_s"])
    assert plain(msgspec.to_builtins(ticket, builtin_types=(bytes,))) == vector["meaning"]


@pytest.mark.parametrize("vector", TICKETS["must_reject"], ids=lambda v: v["name"])
def test_our_reader_refuses_tickets_that_must_be_rejected(vector):
    with pytest.raises(UsageError, match=TICKET_SENTENCES[vector["refusal"]]):
        read_ticket(vector["text"], now_unix_s=TICKETS["now_unix_s"])


def test_the_admission_proof_is_the_recorded_one():
    recorded = TICKETS["admission"]
    secret = bytes.fromhex(recorded["secret"])
    proof = admission_proof(secret, run_id=recorded["run_id"], node=recorded["node"])
    assert proof.hex() == recorded["proof"]


def test_every_kind_has_vectors_and_at_least_three_that_must_be_rejected():
    assert set(FILES) == set(KINDS) | {"envelope", "ticket", "delta"}
    assert set(SCHEMA["kinds"]) == set(KINDS)
    for file in FILES.values():
        assert file["golden"]
        assert len(file["must_reject"]) >= 3


def test_schema_and_vectors_are_what_the_code_says():
    script = PROTO.parent / "scripts" / "schema"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
