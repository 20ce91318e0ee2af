"""What the learner says of a policy version. Imported through `wire.messages`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from echo2_mesh import limits
from echo2_mesh.wire.blocks import ChunkRef, Value
from echo2_mesh.wire.types import (
    CountField,
    DigestField,
    NameField,
    RunIdField,
    SizeField,
    TensorNameField,
    VersionField,
)


class TensorSpan(Value, frozen=True, kw_only=True):
    """A tensor inside a version's data section, in safetensors' dtype names and byte order.

    The data section is the concatenation of the manifest's chunks; `offset_bytes` counts from
    its start, so a safetensors header plus the chunks in order is a valid safetensors file.
    """

    name: TensorNameField
    dtype: NameField
    shape: Annotated[tuple[CountField, ...], Meta(max_length=16)]
    offset_bytes: SizeField
    size_bytes: SizeField


class FileRef(Value, frozen=True, kw_only=True):
    """A file that travels with the model, cut into blobs; `name` is a bare file name."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$(?!\n)")]
    chunks: Annotated[tuple[ChunkRef, ...], Meta(max_length=4096)]


class Probe(Value, frozen=True, kw_only=True):
    """Log-probs of a fixed sequence under the published weights: an engine must match them.

    `token_ids` int32 bytes [T]; `logprobs` float32 bytes [T-1], entry i for token i+1.
    """

    token_ids: Annotated[bytes, Meta(min_length=8, max_length=4 * limits.PROBE_TOKENS_MAX)]
    logprobs: Annotated[bytes, Meta(min_length=4, max_length=4 * limits.PROBE_TOKENS_MAX)]


class TaskSpec(Value, frozen=True, kw_only=True):
    """The task an actor must have to score: same code and arguments, same digest."""

    task_id: NameField
    args_json: Annotated[str, Meta(max_length=16 * limits.KIB)]
    digest: DigestField


class PatchChunk(Value, frozen=True, kw_only=True):
    """One blob of kind `patch`: rewrites the data chunks [first, first + count)."""

    ref: ChunkRef
    first: CountField
    count: Annotated[int, Meta(ge=1, le=limits.MANIFEST_CHUNKS_MAX)]


class Patch(Value, frozen=True, kw_only=True):
    """The lossless difference between two versions whose data sections are cut alike.

    Data chunks that no patch chunk names are equal in both. A version is known by its state
    digest here, not by its number: a patch never applies to other weights of the same number.
    """

    base: VersionField
    base_digest: DigestField
    version: VersionField
    state_digest: DigestField
    chunks: Annotated[tuple[PatchChunk, ...], Meta(max_length=limits.MANIFEST_CHUNKS_MAX)]


class Manifest(Value, frozen=True, kw_only=True):
    """One policy version, complete: its blob's digest names the policy. Signed by the learner."""

    run_id: RunIdField
    version: VersionField
    chunks: Annotated[tuple[ChunkRef, ...], Meta(max_length=limits.MANIFEST_CHUNKS_MAX)]
    """The data section, cut at the same places as that of every version a patch starts from."""
    patches: Annotated[tuple[Patch, ...], Meta(max_length=limits.MANIFEST_PATCHES_MAX)] = ()
    """Ways to this version from older ones: any chain of them that ends here is as good as the
    full chunks, and must give exactly them."""
    tensors: Annotated[tuple[TensorSpan, ...], Meta(max_length=limits.MANIFEST_TENSORS_MAX)]
    tied: Annotated[
        tuple[tuple[TensorNameField, TensorNameField], ...],
        Meta(max_length=limits.MANIFEST_TENSORS_MAX),
    ] = ()
    """(alias, stored name): tied tensors are stored once."""
    files: Annotated[tuple[FileRef, ...], Meta(max_length=limits.MANIFEST_FILES_MAX)]
    state_digest: DigestField
    """BLAKE3 over the whole data section."""
    tokenizer_digest: DigestField
    template_digest: DigestField
    task: TaskSpec
    probe: Probe
    created_unix_ms: CountField = 0


class Announce(Value, frozen=True, kw_only=True):
    """Gossip: version `version` exists and `manifest` names it. Signed by the learner only.

    `incarnation_unix_ms` is the learner process's start: a resumed learner announces again.
    """

    version: VersionField
    manifest: ChunkRef
    size_bytes: SizeField
    incarnation_unix_ms: CountField
