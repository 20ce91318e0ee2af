"""`echo2-node weights` on a state folder: what is known, what is whole, and a folder to load."""

import copy
import errno
import json
import shutil
import sys

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.identity import Identity
from echo2_mesh.versionlog import VERSIONS_FILE, append_version, known_version
from echo2_mesh.wire.codec import seal
from echo2_mesh.wire.messages import FileRef, Patch, PatchChunk
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion
from echo2_node import cli, shelf
from echo2_node.engines.weights import read_manifest
from tests.tiny_model import make_module, publish, write_model_folder

VERSIONS = (0, 3, 4)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process: (exit code, standard output, standard error)."""

    def call(*arguments):
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["echo2-node", "weights", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        written = capsys.readouterr()
        return code, written.out, written.err

    return call


class Node:
    """A state folder with three versions of a tiny model in it."""

    def __init__(self, folder):
        self.folder = folder / "state"
        self.store = ChunkStore(self.folder / "chunks")
        self.model = write_model_folder(folder / "model")
        self.module = make_module(self.model, seed=1)
        self.manifests = {}
        for version in VERSIONS:
            with torch.no_grad():
                self.module.model.norm.weight += 0.25
            self.manifests[version] = self._note(publish(self.module, self.store, version))

    def copy(self, folder):
        """The same node in another folder, for a test that breaks things."""
        twin = copy.copy(self)
        shutil.copytree(self.folder, folder)
        twin.folder, twin.store = folder, ChunkStore(folder / "chunks")
        return twin

    def _note(self, digest):
        """Published like a learner's: with its files, and a patch from the version before."""
        bare = read_manifest(self.store.folder, digest)
        files = tuple(
            FileRef(name=path.name, chunks=(self.store.add(ChunkKind.FILE, path.read_bytes()),))
            for path in sorted(self.model.iterdir())
        )
        patches = ()
        if bare.version:
            blob = self.store.add(ChunkKind.PATCH, b"patch to %d" % bare.version)
            step = Patch(
                base=PolicyVersion(bare.version - 1),
                base_digest=Digest(bytes(32)),
                version=bare.version,
                state_digest=bare.state_digest,
                chunks=(PatchChunk(ref=blob, first=0, count=1),),
            )
            patches = (step,)
        fields = {name: getattr(bare, name) for name in bare.__struct_fields__}
        manifest = type(bare)(**fields | {"files": files, "patches": patches})
        identity = Identity(bytes(32))
        raw = seal(manifest, run_id="run-test", sender=identity.node, sign=identity.sign)
        ref = self.store.add(ChunkKind.MANIFEST, raw)
        append_version(self.folder / VERSIONS_FILE, known_version(ref, manifest, fetched_bytes=0))
        return manifest, ref

    def path(self, digest):
        return self.store.path(digest)

    def changed(self, version):
        """The data chunk that only this version has."""
        others = {
            chunk.digest
            for number, (manifest, _) in self.manifests.items()
            for chunk in manifest.chunks
            if number != version
        }
        (own,) = [c for c in self.manifests[version][0].chunks if c.digest not in others]
        return own.digest


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    torch.set_num_threads(1)
    return Node(tmp_path_factory.mktemp("published"))


@pytest.fixture
def node(published, tmp_path):
    return published.copy(tmp_path / "state")


def test_the_log_names_every_version_with_its_sizes(run, node):
    node.path(node.changed(0)).unlink()
    code, out, _ = run("log", "--state-dir", node.folder)
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.strip()]
    assert [row[0] for row in rows[2:]] == ["0", "3", "4"]
    assert [row[-1] == "complete" for row in rows[2:]] == [False, True, True]
    assert node.manifests[4][1].digest.hex()[:8] in out
    document = json.loads(run("log", "--state-dir", node.folder, "--json")[1])
    first, _, last = document["versions"]
    assert (first["version"], first["complete"], first["patches"]) == (0, False, [])
    assert (last["version"], last["complete"]) == (4, True)
    assert last["patches"] == [{"base": 3, "size_bytes": len(b"patch to 4")}]
    assert last["size_bytes"] == sum(c.size_bytes for c in node.manifests[4][0].chunks)


def test_a_clock_that_says_no_date_spoils_no_table(run, node):
    path = node.folder / VERSIONS_FILE
    path.write_text(path.read_text() + path.read_text().splitlines()[-1].replace(
        '"created_unix_ms":0', f'"created_unix_ms":{2**53}'
    ) + "\n")  # fmt: skip
    assert str(2**53) in path.read_text()
    code, out, err = run("log", "--state-dir", node.folder)
    assert (code, err) == (0, "")
    assert "complete" in out


def test_verify_reports_a_blob_that_is_no_manifest_and_goes_on(run, node):
    path = node.folder / VERSIONS_FILE
    other = node.store.add(ChunkKind.FULL, b"no manifest at all")
    known = known_version(*reversed(node.manifests[3]), fetched_bytes=0)
    append_version(path, msgspec.structs.replace(known, manifest=other.digest.hex()))
    code, out, _ = run("verify", "--state-dir", node.folder)
    assert code == 1
    assert "version 3: damaged" in out
    assert "version 4: complete" in out


def test_verify_finds_nothing_wrong_and_touches_nothing(run, node):
    before = {path.name: path.stat().st_mtime_ns for path in node.store.folder.iterdir()}
    code, out, _ = run("verify", "--state-dir", node.folder)
    assert code == 0
    assert [line.split(",")[0] for line in out.splitlines()] == [
        "version 0: complete", "version 3: complete", "version 4: complete",
    ]  # fmt: skip
    after = {path.name: path.stat().st_mtime_ns for path in node.store.folder.iterdir()}
    assert after == before


def test_verify_tells_damage_in_any_version_and_a_gap_in_the_newest(run, node):
    victim = node.path(node.changed(3))
    data = victim.read_bytes()
    victim.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    node.path(node.changed(4)).unlink()
    node.path(node.changed(0)).unlink()
    code, out, _ = run("verify", "--state-dir", node.folder)
    assert code == 1
    first, second, third = out.splitlines()
    assert first.startswith("version 0: let go")
    assert second.startswith("version 3: damaged")
    assert node.changed(3).hex()[:8] in second
    assert third.startswith("version 4: missing")
    document = json.loads(run("verify", "--state-dir", node.folder, "--json")[1])
    assert not document["ok"]
    assert document["versions"][2]["missing"] == [node.changed(4).hex()]
    code, out, _ = run("verify", 0, "--state-dir", node.folder)
    assert code == 1, "asked for by number it ought to be whole"
    assert "missing" in out


def test_patches_need_not_be_here_but_are_hashed_where_they_are(run, node):
    patch = node.manifests[4][0].patches[0].chunks[0].ref
    node.path(patch.digest).write_bytes(b"patch to 5")
    code, out, _ = run("verify", "latest", "--state-dir", node.folder)
    assert code == 1
    assert patch.digest.hex()[:8] in out
    node.path(patch.digest).unlink()
    assert run("verify", "latest", "--state-dir", node.folder)[0] == 0


def test_a_version_whose_manifest_is_gone_is_not_spoken_of_unless_asked_for(run, node):
    node.path(node.manifests[0][1].digest).unlink()
    code, out, _ = run("verify", "--state-dir", node.folder)
    assert code == 0
    assert "version 0" not in out
    assert run("verify", 0, "--state-dir", node.folder)[0] == 1
    code, _, err = run("export", 0, node.folder / "out", "--state-dir", node.folder)
    assert code == 3
    assert "not kept here any more" in err


@pytest.mark.parametrize(("word", "version"), [("3", 3), ("latest", 4)])
def test_an_exported_folder_loads_with_its_own_weights(run, node, tmp_path, word, version):
    target = tmp_path / "exported"
    code, out, err = run("export", word, target, "--state-dir", node.folder)
    assert code == 0, err
    assert f"Version {version} is in {target}" in out
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    moved = 0.25 * (1 + VERSIONS.index(version))
    assert torch.equal(
        loaded.model.norm.weight, torch.full_like(loaded.model.norm.weight, 1 + moved)
    )
    embedding = node.module.model.embed_tokens.weight
    assert torch.equal(loaded.model.embed_tokens.weight, embedding)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert AutoTokenizer.from_pretrained(target)("12")["input_ids"]
    assert not list(target.glob("*.part"))


def test_export_refuses_a_folder_with_something_in_it_unless_forced(run, node, tmp_path):
    target = tmp_path / "exported"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    code, _, err = run("export", "latest", target, "--state-dir", node.folder)
    assert code == 2
    assert "not empty" in err
    assert "--force" in err
    assert [path.name for path in target.iterdir()] == ["notes.txt"]
    assert run("export", "latest", target, "--force", "--state-dir", node.folder)[0] == 0
    assert (target / "notes.txt").read_text() == "mine"
    assert (target / "model.safetensors").is_file()
    code, _, err = run("export", 4, target / "notes.txt", "--state-dir", node.folder)
    assert code == 2
    assert "is a file" in err


def test_an_unknown_version_is_answered_with_those_there_are(run, node, tmp_path):
    for words in (("export", "7", tmp_path / "out"), ("verify", "seven")):
        code, _, err = run(*words, "--state-dir", node.folder)
        assert code == 2
        assert "Known here: 0, 3, 4, or latest" in err


def test_a_damaged_blob_or_a_full_disk_leaves_no_half_folder(run, node, tmp_path, monkeypatch):
    target = tmp_path / "exported"
    victim = node.path(node.changed(4))
    good = victim.read_bytes()
    victim.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    code, _, err = run("export", 4, target, "--state-dir", node.folder)
    assert code == 3
    assert "not whole here" in err
    assert not target.exists()
    victim.write_bytes(good)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shelf, "_copy", full)
    target.mkdir()
    code, _, err = run("export", 4, target, "--state-dir", node.folder)
    assert code == 3
    assert "has no room for version 4" in err
    assert list(target.iterdir()) == []


def test_a_folder_without_versions_says_where_they_come_from(run, tmp_path):
    code, _, err = run("log", "--state-dir", tmp_path)
    assert code == 2
    assert VERSIONS_FILE in err
    assert "Traceback" not in err


def test_a_torn_line_and_a_line_of_a_later_program_do_no_harm(run, node):
    with (node.folder / VERSIONS_FILE).open("a") as file:
        file.write('{"version": 5, "mood": "good"}\n{"version": 6, "mani')
    document = json.loads(run("log", "--state-dir", node.folder, "--json")[1])
    assert [row["version"] for row in document["versions"]] == list(VERSIONS)
