"""Whether a manifest makes sense: checked once, after its signature and before any chunk is asked.

Pure. A manifest that passes can be laid out as a safetensors file without any further check.
"""

from __future__ import annotations

from math import prod

from echo2_mesh import limits
from echo2_mesh.core.holdings import blobs_of
from echo2_mesh.errors import PeerError
from echo2_mesh.wire.messages import Manifest
from echo2_mesh.wire.types import ChunkKind

DTYPE_SIZE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of one element, by safetensors' names."""


def check_manifest(manifest: Manifest) -> None:
    """Refuse a manifest whose parts contradict one another.

    Raises:
        PeerError: unknown dtype, a tensor of the wrong size or outside the data, overlapping or
            equally named tensors, files or aliases, or chunks of a kind that does not fit.
    """
    _check_tensors(manifest)
    names = {span.name for span in manifest.tensors}
    seen = set(names)
    for alias, stored in manifest.tied:
        if alias in seen or stored not in names:
            raise PeerError(f"Manifest: '{alias}' cannot be tied to '{stored}'.")
        seen.add(alias)
    _check_patches(manifest)
    files = [file.name for file in manifest.files]
    if len(set(files)) != len(files):
        raise PeerError("Manifest: two files have one name.")
    count = len(blobs_of(manifest))
    if not 0 < count <= limits.MANIFEST_CHUNKS_MAX:
        raise PeerError(f"Manifest: {count} blobs; 1 to {limits.MANIFEST_CHUNKS_MAX} are legal.")
    if any(ref.kind is not ChunkKind.FILE for file in manifest.files for ref in file.chunks):
        raise PeerError("Manifest: a file has a chunk of another kind.")


def _check_tensors(manifest: Manifest) -> None:
    if any(ref.kind is not ChunkKind.FULL for ref in manifest.chunks):
        raise PeerError("Manifest: a data chunk is of another kind than 'full'.")
    end_bytes = 0
    for span in sorted(manifest.tensors, key=lambda s: (s.offset_bytes, s.size_bytes)):
        element_bytes = DTYPE_SIZE_BYTES.get(span.dtype)
        if element_bytes is None:
            raise PeerError(f"Manifest: tensor '{span.name}' has unknown dtype '{span.dtype}'.")
        if prod(span.shape) * element_bytes != span.size_bytes:
            raise PeerError(f"Manifest: tensor '{span.name}' does not have the size of its shape.")
        if span.offset_bytes != end_bytes:
            raise PeerError(f"Manifest: tensor '{span.name}' overlaps another or leaves a hole.")
        end_bytes = span.offset_bytes + span.size_bytes
    if len({span.name for span in manifest.tensors}) != len(manifest.tensors):
        raise PeerError("Manifest: two tensors have one name.")
    data_bytes = sum(ref.size_bytes for ref in manifest.chunks)
    if data_bytes != end_bytes:
        raise PeerError(f"Manifest: {data_bytes} bytes of chunks for {end_bytes} of tensors.")


def _check_patches(manifest: Manifest) -> None:
    for patch in manifest.patches:
        name = f"the patch {patch.base} -> {patch.version}"
        if not patch.base < patch.version <= manifest.version:
            raise PeerError(f"Manifest: {name} does not lead to version {manifest.version}.")
        # A step that changed nothing leaves two versions with the same weights, so an earlier
        # patch may end in these too; one that ends in this version must.
        if patch.version == manifest.version and patch.state_digest != manifest.state_digest:
            raise PeerError(f"Manifest: {name} ends in other weights than its version's.")
        end = 0
        for chunk in patch.chunks:
            if chunk.ref.kind is not ChunkKind.PATCH:
                raise PeerError(f"Manifest: {name} has a chunk of kind '{chunk.ref.kind.value}'.")
            if chunk.first < end or chunk.first + chunk.count > len(manifest.chunks):
                raise PeerError(f"Manifest: chunks of {name} overlap or lie outside the data.")
            end = chunk.first + chunk.count
