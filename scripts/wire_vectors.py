"""The vectors of envelopes in `proto/vectors`, made from fixed seeds: a file a kind, one for all.

Called by `scripts/schema` alone. Golden vectors carry bytes and their meaning; must-reject ones
carry bytes and the name of the refusal (`proto/envelope.md` lists the names).
"""

from __future__ import annotations

import math
import struct
from typing import Any

import blake3
import msgspec

from echo2_mesh import limits
from echo2_mesh.identity import Identity
from echo2_mesh.wire import messages as m
from echo2_mesh.wire.codec import Envelope, signed_bytes
from echo2_mesh.wire.ticket import admission_proof
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion, Reason, Role, StopReason

RUN_ID = "vectors-0123"
LEARNER = Identity(bytes(range(32)))
ACTOR = Identity(bytes(range(32, 64)))
SECRET = bytes(range(64, 80))
LEASE_ID, GROUP_ID = "00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100"

Vector = dict[str, Any]


def digest(text: str) -> Digest:
    return Digest(blake3.blake3(text.encode()).digest())


def int32s(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def float32s(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


CHUNK = m.ChunkRef(kind=ChunkKind.FULL, digest=digest("chunk"), size_bytes=5)
MANIFEST_REF = m.ChunkRef(kind=ChunkKind.MANIFEST, digest=digest("manifest"), size_bytes=8)
PAYLOAD_REF = m.ChunkRef(kind=ChunkKind.TRAJECTORY, digest=digest("inline"), size_bytes=6)
COHORT = m.Cohort(engine="torch", dtype="float32", device="cpu")
DIGESTS = {
    "tokenizer_digest": digest("tokenizer"),
    "template_digest": digest("template"),
    "task_digest": digest("task"),
}
PROBE = m.Probe(token_ids=int32s(2, 3, 4), logprobs=float32s(-0.5, -1.25))
V0, V7 = PolicyVersion(0), PolicyVersion(7)
LEASE = m.Lease(
    lease_id=LEASE_ID,
    group_id=GROUP_ID,
    item_index=12,
    prompt_ids=int32s(2, 3, 12),
    indices=(0, 1),
    group_size=2,
    sampling=m.Sampling(),
    version_min=V0,
    ttl_s=300.0,
)
HEADER = m.TrajectoryHeader(
    lease_id=LEASE_ID,
    group_id=GROUP_ID,
    index=1,
    version_min=V0,
    version_max=V7,
    tokens=5,
    reward=0.5,
    payload=PAYLOAD_REF,
    inline=b"inline",
)
MANIFEST = m.Manifest(
    run_id=RUN_ID,
    version=V7,
    chunks=(CHUNK,),
    tensors=(m.TensorSpan(name="w", dtype="BF16", shape=(1, 2), offset_bytes=0, size_bytes=4),),
    tied=(("lm_head.weight", "w"),),
    files=(m.FileRef(name="config.json", chunks=(CHUNK,)),),
    state_digest=digest("state"),
    tokenizer_digest=digest("tokenizer"),
    template_digest=digest("template"),
    task=m.TaskSpec(task_id="sort_digits", args_json='{"digits":6}', digest=digest("task")),
    probe=PROBE,
    created_unix_ms=1_700_000_000_000,
)
PATCHED_MANIFEST = msgspec.structs.replace(
    MANIFEST,
    patches=(
        m.Patch(
            base=PolicyVersion(6),
            base_digest=digest("state 6"),
            version=V7,
            state_digest=digest("state"),
            chunks=(
                m.PatchChunk(
                    ref=m.ChunkRef(kind=ChunkKind.PATCH, digest=digest("patch"), size_bytes=3),
                    first=0,
                    count=1,
                ),
            ),
        ),
        m.Patch(
            base=PolicyVersion(5),
            base_digest=digest("state 5"),
            version=PolicyVersion(6),
            state_digest=digest("state 6"),
            chunks=(),
        ),
    ),
)
TRAJECTORY = m.Trajectory(
    run_id=RUN_ID,
    lease_id=LEASE_ID,
    group_id=GROUP_ID,
    index=1,
    item_index=12,
    token_ids=int32s(2, 3, 12, 4, 1),
    prompt_length=3,
    loss_mask=bytes((0, 0, 0, 1, 1)),
    logprobs=float32s(0.0, 0.0, 0.0, -0.5, -0.25),
    segments=(
        m.VersionSpan(version=V0, start=3, end=4),
        m.VersionSpan(version=V7, start=4, end=5),
    ),
    reward=0.5,
    metrics={"exact": 0.0},
    stop_reason=StopReason.STOP,
    sampling=m.Sampling(temperature=0.7, top_p=0.9, top_k=20, tokens_max=8, seed=99),
    cohort=COHORT,
    **DIGESTS,
)
HEARTBEAT = m.Heartbeat(
    role=Role.ACTOR, state="generating", incarnation_unix_ms=1_700_000_000_000, sequence=3
)
FULL_HEARTBEAT = msgspec.structs.replace(
    HEARTBEAT,
    name="kitchen",
    addresses=("/ip4/192.0.2.7/tcp/4201",),
    version=V7,
    tokens_per_s=1234.5,
    cohort=COHORT,
    accepted=10,
    refused=2,
    commonest_refusal=Reason.STALE,
    fetched_bytes=5,
    fetch_bytes=10,
    last_error="disk nearly full",
)
REQUEST = m.LeaseRequest(version=V7, groups_max=4, cohort=COHORT, **DIGESTS)

SAMPLES: dict[str, tuple[m.Message, ...]] = {
    "manifest": (MANIFEST, PATCHED_MANIFEST),
    "announce": (
        m.Announce(version=V7, manifest=MANIFEST_REF, size_bytes=9, incarnation_unix_ms=1),
    ),
    "heartbeat": (HEARTBEAT, FULL_HEARTBEAT),
    "goodbye": (m.Goodbye(incarnation_unix_ms=1), m.Goodbye(incarnation_unix_ms=1, why="bye")),
    "lease-request": (
        REQUEST,
        msgspec.structs.replace(
            REQUEST, admission=admission_proof(SECRET, run_id=RUN_ID, node=ACTOR.node)
        ),
    ),
    "lease-grant": (m.LeaseGrant(leases=()), m.LeaseGrant(leases=(LEASE,), run_seed=42)),
    "lease-return": (m.LeaseReturn(lease_ids=(LEASE_ID,), why="leaving"),),
    "rollout-batch": (
        m.RolloutBatch(headers=(HEADER,)),
        m.RolloutBatch(headers=(msgspec.structs.replace(HEADER, inline=None), HEADER)),
    ),
    "trajectory": (TRAJECTORY,),
    "verdicts": (
        m.Verdicts(notes=()),
        m.Verdicts(notes=(m.VerdictNote(lease_id=LEASE_ID, index=1, verdict=Reason.ADMITTED),)),
    ),
    "catch-up": (m.CatchUp(),),
    "caught-up": (m.CaughtUp(), m.CaughtUp(announce=b"envelope", heartbeats=(b"a", b"b"))),
    "reach-ask": (m.ReachAsk(), m.ReachAsk(addresses=("/ip4/192.168.1.5/tcp/4201",))),
    "reach-answer": (
        m.ReachAnswer(),
        m.ReachAnswer(
            observed="/ip4/203.0.113.7/tcp/40211", reached=("/ip4/203.0.113.7/tcp/4201",)
        ),
    ),
    "holdings-ask": (m.HoldingsAsk(manifest=digest("manifest")),),
    "holdings": (m.Holdings(manifest=digest("manifest"), bitmap=bytes((0b00000101,))),),
    "done": (m.Done(),),
    "refusal": (m.Refusal(code="busy", text="Too many questions at once. Ask again in 1 s."),),
    "blob-ask": (m.BlobAsk(digest=digest("chunk"), size_bytes=5),),
    "lane-ask": (
        m.LaneAsk(way=m.LaneWay.DIAL, certificate=digest("certificate"), token=bytes(32)),
        m.LaneAsk(
            way=m.LaneWay.PUNCH,
            places=("/ip4/192.0.2.7/tcp/4202",),
            certificate=digest("certificate"),
            token=bytes(32),
        ),
    ),
    "lane-offer": (
        m.LaneOffer(
            places=("/ip4/192.0.2.8/tcp/4202",),
            certificate=digest("certificate"),
            token=digest("token"),
        ),
    ),
}

ILLEGAL: dict[str, dict[str, dict[str, Any]]] = {
    "manifest": {
        "a negative version": {"version": -1},
        "a digest of 31 bytes": {"state_digest": b"\0" * 31},
        "a file name with a path in it": {"files": [{"name": "../key", "chunks": []}]},
        "a file name that ends in a line break": {"files": [{"name": "key\n", "chunks": []}]},
        "a patch chunk for no data chunk": {
            "patches": [
                {
                    "base": 6,
                    "base_digest": digest("state 6"),
                    "version": 7,
                    "state_digest": digest("state"),
                    "chunks": [
                        {
                            "ref": {"kind": "patch", "digest": digest("patch"), "size_bytes": 3},
                            "first": 0,
                            "count": 0,
                        }
                    ],
                }
            ]
        },
    },
    "announce": {
        "a negative version": {"version": -1},
        "a version above 2^53": {"version": 2**53 + 1},
        "a manifest digest of 33 bytes": {
            "manifest": {"kind": "manifest", "digest": b"\0" * 33, "size_bytes": 1}
        },
        "a chunk above the limit": {
            "manifest": {
                "kind": "manifest",
                "digest": b"\0" * 32,
                "size_bytes": limits.CHUNK_SIZE_BYTES_MAX + 1,
            }
        },
    },
    "heartbeat": {
        "an unknown role": {"role": "king"},
        "a rate that is no number": {"tokens_per_s": math.nan},
        "an infinite rate": {"tokens_per_s": math.inf},
        "too many addresses": {"addresses": ["/ip4/192.0.2.7/tcp/1"] * (limits.ADDRESSES_MAX + 1)},
    },
    "goodbye": {"a negative incarnation": {"incarnation_unix_ms": -1}, "no text": {"why": 5}},
    "lease-request": {
        "a negative version": {"version": -1},
        "no group wanted": {"groups_max": 0},
        "a task digest of 31 bytes": {"task_digest": b"\0" * 31},
    },
    "lease-grant": {
        "a deadline that is no number": {"retry_after_s": math.nan},
        "a lease that is not a map": {"leases": [1]},
    },
    "lease-return": {
        "no lease": {"lease_ids": []},
        "a lease id in capitals": {"lease_ids": [LEASE_ID.upper()]},
    },
    "rollout-batch": {"no header": {"headers": []}, "headers that are a map": {"headers": {}}},
    "trajectory": {
        "a reward that is no number": {"reward": math.nan},
        "an infinite metric": {"metrics": {"exact": math.inf}},
        "a reward that is text": {"reward": "1.0"},
        "no tokens": {"token_ids": b""},
        "a negative index": {"index": -1},
        "an unknown stop reason": {"stop_reason": "bored"},
    },
    "verdicts": {
        "an unknown verdict": {"notes": [{"lease_id": LEASE_ID, "index": 0, "verdict": "maybe"}]},
        "notes that are null": {"notes": None},
    },
    "catch-up": {},
    "caught-up": {"an announce that is text": {"announce": "envelope"}},
    "reach-ask": {
        "an address above the limit": {"addresses": ["/" + "x" * limits.ADDRESS_CHARACTERS_MAX]}
    },
    "reach-answer": {"a place above the limit": {"observed": "x" * 65}},
    "holdings-ask": {"a digest that is text": {"manifest": "0" * 32}},
    "holdings": {"a bitmap above the limit": {"bitmap": b"\0" * 9217}},
    "done": {},
    "refusal": {"an empty code": {"code": ""}, "a text above the limit": {"text": "x" * 513}},
    "blob-ask": {
        "a negative size": {"size_bytes": -1},
        "a size above the limit": {"size_bytes": limits.CHUNK_SIZE_BYTES_MAX + 1},
        "a digest of 31 bytes": {"digest": b"\0" * 31},
    },
    "lane-ask": {
        "a way that is none": {"way": "teleport"},
        "a token of 31 bytes": {"token": b"\0" * 31},
        "more places than the limit": {
            "places": ["/ip4/192.0.2.7/tcp/1"] * (limits.LANE_PLACES_MAX + 1)
        },
    },
    "lane-offer": {
        "a token of 33 bytes": {"token": b"\0" * 33},
        "a certificate of 31 bytes": {"certificate": b"\0" * 31},
        "more places than the limit": {
            "places": ["/ip4/192.0.2.7/tcp/1"] * (limits.LANE_PLACES_MAX + 1)
        },
    },
}


def all_vectors() -> dict[str, dict[str, Any]]:
    """File name to content, for every file of envelopes."""
    files = {kind: _kind_file(kind, samples) for kind, samples in SAMPLES.items()}
    return files | {"envelope": _envelope_file()}


def plain(value: object) -> Any:
    """A message's meaning as JSON: byte strings become {"bytes": hex}, defaults are written out."""
    match value:
        case bytes():
            return {"bytes": value.hex()}
        case dict():
            return {key: plain(entry) for key, entry in value.items()}
        case list() | tuple():
            return [plain(entry) for entry in value]
        case msgspec.Struct():
            return plain(msgspec.to_builtins(value, builtin_types=(bytes,)))
        case _:
            return value


def _cover(
    kind: str, payload: bytes, /, *, identity: Identity = ACTOR, run_id: str = RUN_ID, **fields: Any
) -> dict[str, Any]:
    """An envelope as a map, rightly signed; `fields` are changed after signing."""
    signature = identity.sign(signed_bytes(kind, run_id, identity.node, payload))
    cover = Envelope(
        v=limits.NETWORK_VERSION,
        kind=kind,
        run_id=run_id,
        sender=identity.node,
        payload=payload,
        signature=signature,
    )
    return msgspec.structs.asdict(cover) | fields


def _envelope(kind: str, payload: bytes, /, **changes: Any) -> bytes:
    return msgspec.msgpack.encode(_cover(kind, payload, **changes))


def _reject(name: str, raw: bytes, refusal: str, size_bytes_max: int | None = None) -> Vector:
    return {
        "name": name,
        "envelope": raw.hex(),
        "size_bytes_max": size_bytes_max or limits.ASK_SIZE_BYTES_MAX,
        "refusal": refusal,
    }


def _kind_file(kind: str, samples: tuple[m.Message, ...]) -> dict[str, Any]:
    golden: list[Vector] = []
    for sample in samples:
        identity = LEARNER if kind in ("manifest", "announce", "lease-grant") else ACTOR
        payload = msgspec.msgpack.encode(sample)
        golden.append(
            {
                "name": f"{kind} {len(golden) + 1}",
                "sender": identity.node,
                "payload": payload.hex(),
                "envelope": _envelope(kind, payload, identity=identity).hex(),
                "meaning": plain(sample),
            }
        )
    fields = msgspec.to_builtins(samples[-1], builtin_types=(bytes,))
    payload = msgspec.msgpack.encode(samples[-1])
    newer = msgspec.msgpack.encode(fields | {"from_the_future": [1, {"deep": b"\1"}]})
    golden.append(
        {
            "name": "a field added by a later version is ignored",
            "sender": ACTOR.node,
            "payload": newer.hex(),
            "envelope": _envelope(kind, newer).hex(),
            "meaning": plain(samples[-1]),
        }
    )
    raw = _envelope(kind, payload)
    bad_signature = bytes(64)
    rejects = [
        _reject("larger than its place allows", raw, "oversize", len(raw) - 1),
        _reject(
            "a signature of zeros", _envelope(kind, payload, signature=bad_signature), "signature"
        ),
        _reject(
            "another sender's name", _envelope(kind, payload, sender=LEARNER.node), "signature"
        ),
        _reject("another run's", _envelope(kind, payload, run_id="vectors-9999"), "run"),
        _reject("version 2", _envelope(kind, payload, v=2), "version"),
        _reject("payload with a byte too many", _envelope(kind, payload + b"\0"), "message"),
        _reject("payload without its last byte", _envelope(kind, payload[:-1]), "message"),
        _reject("payload that is a list", _envelope(kind, b"\x90"), "message"),
    ]
    for name, change in ILLEGAL[kind].items():
        illegal = msgspec.msgpack.encode(fields | change)
        rejects.append(_reject(name, _envelope(kind, illegal), "message"))
    for field in m.KINDS[kind].__struct_fields__:
        info = next(f for f in msgspec.structs.fields(m.KINDS[kind]) if f.name == field)
        if info.required:
            partial = {key: value for key, value in fields.items() if key != field}
            illegal = msgspec.msgpack.encode(partial)
            rejects.append(_reject(f"without {field}", _envelope(kind, illegal), "message"))
            break
    return {"run_id": RUN_ID, "kind": kind, "golden": golden, "must_reject": rejects}


def _envelope_file() -> dict[str, Any]:
    payload = msgspec.msgpack.encode(m.Done())
    raw = _envelope("done", payload)
    cover = _cover("done", payload)
    headless = {key: value for key, value in cover.items() if key != "signature"}
    nested = b"\x81\xa4deep" + b"\x91" * 20_000 + b"\xc0"
    golden = {
        "name": "done, with what is signed",
        "sender": ACTOR.node,
        "payload": payload.hex(),
        "envelope": raw.hex(),
        "signed": signed_bytes("done", RUN_ID, ACTOR.node, payload).hex(),
        "seed": ACTOR.seed.hex(),
        "meaning": {},
    }
    rejects = [
        _reject("nothing", b"", "envelope"),
        _reject("a number", b"\x07", "envelope"),
        _reject("a list", msgspec.msgpack.encode(list(cover.values())), "envelope"),
        _reject("without its last byte", raw[:-1], "envelope"),
        _reject("with a byte too many", raw + b"\0", "envelope"),
        _reject("a map that promises 2^32 - 1 entries", b"\xdf\xff\xff\xff\xff", "envelope"),
        _reject("without a signature", msgspec.msgpack.encode(headless), "envelope"),
        _reject(
            "a signature of 63 bytes", _envelope("done", payload, signature=b"\0" * 63), "envelope"
        ),
        _reject("a payload that is text", _envelope("done", payload, payload="{}"), "envelope"),
        _reject("text that is not UTF-8", raw.replace(b"\xa4done", b"\xa4do\xff\xfe"), "envelope"),
        _reject("an extension type", raw.replace(b"\xa1v\x01", b"\xa1v\xd4\x05\x01"), "envelope"),
        _reject(
            "a sender that is no node id", _envelope("done", payload, sender="nobody"), "envelope"
        ),
        _reject(
            "a sender that ends in a line break",
            _envelope("done", payload, sender=ACTOR.node + "\n"),
            "envelope",
        ),
        _reject("a negative version", _envelope("done", payload, v=-1), "envelope"),
        _reject("version 0", _envelope("done", payload, v=0), "version"),
        _reject(
            "version 2, another form", msgspec.msgpack.encode({"v": 2, "body": b""}), "version"
        ),
        _reject("an unknown kind", _envelope("coup", payload), "kind"),
        _reject(
            "another kind than was signed", _envelope("done", payload, kind="catch-up"), "signature"
        ),
        _reject(
            "another payload than was signed",
            _envelope("done", payload, payload=b"\x81\xa1a\1"),
            "signature",
        ),
        _reject("a payload nested 20000 deep", _envelope("done", nested), "message"),
    ]
    return {"run_id": RUN_ID, "kind": "done", "golden": [golden], "must_reject": rejects}
