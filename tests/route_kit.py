"""Histories of versions without bytes: manifests whose chunks are names, for tests of routes."""

import blake3

from echo2_mesh.core.routes import Base
from echo2_mesh.wire.messages import (
    ChunkRef,
    FileRef,
    Manifest,
    Patch,
    PatchChunk,
    Probe,
    TaskSpec,
    TensorSpan,
)
from echo2_mesh.wire.types import ChunkKind, Digest


def digest(*words):
    return Digest(blake3.blake3(repr(words).encode()).digest())


class History:
    """Versions 0, 1, ...: `changes[v]` are the data chunks that version v + 1 changed.

    Args:
        spans: patch chunks cover so many data chunks at most.
        skips: lengths of the patches that exist beside the single steps.
    """

    def __init__(self, chunks, changes, *, spans=2, skips=(), chunk_bytes=1000, patch_bytes=10):
        self.count = chunks
        self.chunk_bytes = chunk_bytes
        self.patch_bytes = patch_bytes
        self.states = [tuple(0 for _ in range(chunks))]
        """Per version: the version that changed each data chunk last."""
        for version, changed in enumerate(changes, start=1):
            self.states.append(
                tuple(version if i in changed else old for i, old in enumerate(self.states[-1]))
            )
        lengths = (1, *skips)
        self.patches = tuple(
            self._patch(version - length, version, spans)
            for version in range(len(self.states) - 1, 0, -1)
            for length in lengths
            if version - length >= 0
        )

    def state_digest(self, version):
        return digest("state", self.states[version])

    def refs(self, version):
        return tuple(
            ChunkRef(
                kind=ChunkKind.FULL,
                digest=digest("data", index, changed),
                size_bytes=self.chunk_bytes,
            )
            for index, changed in enumerate(self.states[version])
        )

    def base(self, version, here=None):
        return Base(
            state_digest=self.state_digest(version),
            chunks=self.refs(version),
            here=frozenset(range(self.count)) if here is None else frozenset(here),
        )

    def manifest(self, version, patches=None):
        return Manifest(
            run_id="run-1",
            version=version,
            chunks=self.refs(version),
            patches=self.patches if patches is None else patches,
            tensors=(
                TensorSpan(
                    name="w",
                    dtype="U8",
                    shape=(self.count * self.chunk_bytes,),
                    offset_bytes=0,
                    size_bytes=self.count * self.chunk_bytes,
                ),
            ),
            files=(
                FileRef(
                    name="config.json",
                    chunks=(ChunkRef(kind=ChunkKind.FILE, digest=digest("file"), size_bytes=20),),
                ),
            ),
            state_digest=self.state_digest(version),
            tokenizer_digest=bytes(32),
            template_digest=bytes(32),
            task=TaskSpec(task_id="sort", args_json="{}", digest=bytes(32)),
            probe=Probe(token_ids=bytes(8), logprobs=bytes(4)),
        )

    def _patch(self, base, version, spans):
        old, new = self.states[base], self.states[version]
        changed = [i for i in range(self.count) if old[i] != new[i]]
        chunks = []
        while changed:
            first = changed[0]
            inside = [i for i in changed if i < first + spans]
            changed = changed[len(inside) :]
            chunks.append(
                PatchChunk(
                    ref=ChunkRef(
                        kind=ChunkKind.PATCH,
                        digest=digest("patch", base, version, first),
                        size_bytes=self.patch_bytes * len(inside),
                    ),
                    first=first,
                    count=inside[-1] - first + 1,
                )
            )
        return Patch(
            base=base,
            base_digest=self.state_digest(base),
            version=version,
            state_digest=self.state_digest(version),
            chunks=tuple(chunks),
        )
