"""The key file is its owner's alone, is never overwritten, and names the node."""

import os
import stat

import pytest

from echo2_mesh.errors import LocalError, PeerError, UsageError
from echo2_mesh.identity import Identity, node_id_of, public_key_of, verify
from tests.limited import files_at_most


def test_the_node_id_of_a_known_seed_is_libp2ps_peer_id():
    """The expected id was made with libp2p 0.8.1: ID.from_pubkey(create_new_key_pair(seed))."""
    expected = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
    assert Identity(bytes(range(32))).node == expected


def test_a_signature_is_verified_with_the_node_id_alone():
    identity = Identity.generate()
    signature = identity.sign(b"message")
    assert verify(identity.node, b"message", signature)
    assert not verify(identity.node, b"another", signature)
    assert not verify(Identity.generate().node, b"message", signature)
    assert not verify(identity.node, b"message", signature[:-1])


@pytest.mark.parametrize(
    "spoil", [str.lower, lambda n: n + "\n", lambda n: n[:-1], lambda n: "1" + n]
)
def test_a_node_id_has_one_spelling(spoil):
    node = Identity(bytes(32)).node
    assert node_id_of(public_key_of(node)) == node
    with pytest.raises(PeerError, match="node id"):
        public_key_of(spoil(node))


def test_a_very_long_node_id_is_refused_before_it_is_decoded():
    with pytest.raises(PeerError, match="100000 characters"):
        public_key_of("1" * 100_000)


def test_a_new_key_file_can_be_read_by_its_owner_alone(tmp_path):
    identity = Identity.generate()
    identity.save(tmp_path / "deep" / "key")
    assert stat.S_IMODE((tmp_path / "deep" / "key").stat().st_mode) == 0o600
    assert Identity.load(tmp_path / "deep" / "key").node == identity.node


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o666])
def test_a_key_file_that_others_can_use_is_refused(tmp_path, mode):
    Identity.generate().save(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(LocalError, match="chmod 600"):
        Identity.load(tmp_path / "key")


def test_a_key_file_is_never_overwritten(tmp_path):
    first = Identity.generate()
    first.save(tmp_path / "key")
    with pytest.raises(UsageError, match="already a key file"):
        Identity.generate().save(tmp_path / "key")
    assert Identity.load(tmp_path / "key").node == first.node


def test_load_or_create_creates_once(tmp_path):
    first = Identity.load_or_create(tmp_path / "key")
    assert Identity.load_or_create(tmp_path / "key").node == first.node


@pytest.mark.parametrize("content", [b"", b"zz" * 32, b"00" * 31, b"00" * 33, b"\xff" * 64])
def test_a_damaged_key_file_is_told_apart(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        Identity.load(tmp_path / "key")


def test_a_missing_key_file_says_how_to_make_one(tmp_path):
    with pytest.raises(UsageError, match="keys new"):
        Identity.load(tmp_path / "key")


def test_a_folder_in_place_of_the_key_file_is_a_local_error(tmp_path):
    with pytest.raises(LocalError, match="cannot be read"):
        Identity.load(tmp_path)


def test_a_file_in_place_of_the_folder_is_a_local_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match="folder"):
        Identity.generate().save(tmp_path / "file" / "key")


def test_a_full_disk_leaves_no_half_key_behind(tmp_path):
    """EFBIG, as a full disk's ENOSPC."""
    with files_at_most(10), pytest.raises(LocalError, match="cannot be written"):
        Identity.generate().save(tmp_path / "key")
    assert not os.listdir(tmp_path)


def test_the_seed_is_in_no_representation():
    identity = Identity(bytes([7] * 32))
    assert identity.seed.hex() not in repr(identity) + str(identity)
