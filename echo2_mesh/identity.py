"""One Ed25519 seed is the libp2p peer id and the signing key.

The key file holds the 32-byte seed in hex and is readable by its owner alone (mode 0600); a file
that others can read is refused. The node id is libp2p's peer id of that key: the base58 form of
an identity multihash that contains the public key, so a signature is checked with the node id
alone and no key server exists (libp2p spec `peer-ids`, Ed25519 rule).
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from echo2_mesh import limits
from echo2_mesh.errors import LocalError, PeerError, UsageError
from echo2_mesh.wire.types import NodeId

_PEER_ID_PREFIX = bytes.fromhex("002408011220")
"""identity multihash (0x00), 36 bytes, protobuf PublicKey{type: Ed25519, data: 32 bytes}."""

_KEY_FILE_BYTES_MAX = 1024
_NODE_ID_CHARACTERS_MAX = 64
"""Decoding base58 takes time quadratic in the length."""


def node_id_of(public_key: bytes) -> NodeId:
    """The node id of a raw 32-byte Ed25519 public key."""
    return NodeId(base58.b58encode(_PEER_ID_PREFIX + public_key).decode("ascii"))


def public_key_of(node: NodeId) -> bytes:
    """The raw 32-byte public key inside a node id.

    Raises:
        PeerError: the string is not the peer id of an Ed25519 key.
    """
    if len(node) > _NODE_ID_CHARACTERS_MAX:
        raise PeerError(f"'{node[:64]}' is not a node id: {len(node)} characters.")
    try:
        raw: bytes = base58.b58decode(node)
    except ValueError as error:
        raise PeerError(f"'{node[:64]}' is not a node id: not base58.") from error
    key = raw[len(_PEER_ID_PREFIX) :]
    # Base58 decoders forgive white space: a second spelling would be a second node with one key.
    if len(key) != 32 or node_id_of(key) != node:
        raise PeerError(f"'{node[:64]}' is not the node id of an Ed25519 key.")
    return key


def verify(node: NodeId, message: bytes, signature: bytes) -> bool:
    """True if `signature` is `node`'s Ed25519 signature of `message`."""
    try:
        _key_of(node).verify(signature, message)
    except (InvalidSignature, PeerError, ValueError):
        return False
    return True


@functools.lru_cache(maxsize=limits.MEMBERS_MAX)
def _key_of(node: NodeId) -> Ed25519PublicKey:
    """Parsing a node id costs several signature checks; the same few nodes speak all the time."""
    return Ed25519PublicKey.from_public_bytes(public_key_of(node))


class Identity:
    """A node's key pair. Never printed, never sent."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != 32:
            raise UsageError(f"An identity seed has 32 bytes, this one has {len(seed)}.")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self.node = node_id_of(self._key.public_key().public_bytes_raw())

    @property
    def seed(self) -> bytes:
        """The secret seed, for the libp2p host alone."""
        return self._seed

    def sign(self, message: bytes) -> bytes:
        """64-byte Ed25519 signature of `message`."""
        return self._key.sign(message)

    @classmethod
    def generate(cls) -> Identity:
        """A fresh identity from the operating system's randomness."""
        return cls(os.urandom(32))

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a key file.

        Raises:
            UsageError: the file is missing or is not a key.
            LocalError: the file can be read by others than its owner.
        """
        try:
            with path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                text = file.read(_KEY_FILE_BYTES_MAX).decode("ascii").strip()
        except FileNotFoundError as error:
            raise UsageError(
                f"There is no key file at {path}.", "Create one with `echo2-node keys new`."
            ) from error
        except UnicodeDecodeError:
            text = ""  # not a key, said below, after the mode
        except OSError as error:
            raise LocalError(
                f"The key file {path} cannot be read: {error}.",
                "Run as its owner, or choose another with --key.",
            ) from error
        if mode & 0o077:
            raise LocalError(
                f"The key file {path} has mode {mode:04o}: others on this host can read it.",
                f"Make it yours alone with `chmod 600 {path}`; if someone may have copied it, "
                "move it away and create a new one with `echo2-node keys new`.",
            )
        try:
            seed = bytes.fromhex(text)
            if len(seed) != 32:
                raise ValueError(len(seed))
        except ValueError as error:
            raise UsageError(
                f"{path} is not an Echo-2 key file: it must hold 64 hexadecimal digits.",
                "Restore it from a backup or create a new one with `echo2-node keys new`.",
            ) from error
        return cls(seed)

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key file, creating it (0600) where none exists."""
        if not path.exists():
            identity = cls.generate()
            # Another process may have been faster: then its key is the key.
            with contextlib.suppress(UsageError):
                identity.save(path)
                return identity
        return cls.load(path)

    def save(self, path: Path) -> None:
        """Write the key file with mode 0600.

        Raises:
            UsageError: a file is already there; a key is never overwritten.
            LocalError: the folder cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalError(
                f"The folder {path.parent} for the key cannot be made: {error}.",
                "Choose another path with --key.",
            ) from error
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise UsageError(
                f"There is already a key file at {path}.", "Choose another path with --key."
            ) from error
        except OSError as error:
            raise LocalError(
                f"The key file {path} cannot be written: {error}.",
                "Choose another path with --key.",
            ) from error
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(self._seed.hex() + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            path.unlink(missing_ok=True)  # half a key would stand in the way of a whole one
            raise LocalError(
                f"The key file {path} cannot be written: {error}.",
                "Free space there or choose another path with --key.",
            ) from error
