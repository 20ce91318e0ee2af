import blake3
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import DiskFull, LocalError
from echo2_mesh.wire.messages import Manifest, TaskSpec
from echo2_mesh.wire.types import Digest
from echo2_node.learner import export, frames
from echo2_node.learner.export import probe_tokens, write_chunks, write_files
from echo2_node.learner.stepper import Stepper
from echo2_node.learner.tensorfile import Entry
from echo2_node.shelf import write_folder
from echo2_node.tokens import template_digest, tokenizer_digest
from tests.samples import behaviour, run_config, sampled_batch, write_trainable_folder


@pytest.fixture
def store(tmp_path):
    return ChunkStore(tmp_path / "chunks", quota_bytes=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return write_trainable_folder(tmp_path_factory.mktemp("model") / "tiny")


def entry(name, size_bytes, fill):
    data = memoryview(bytes([fill]) * size_bytes)
    return Entry(name=name, dtype="U8", shape=(size_bytes,), read=lambda: data)


def manifest_of(exported):
    return Manifest(
        run_id="run-test",
        version=exported.version,
        chunks=exported.chunks,
        tensors=exported.tensors,
        tied=exported.tied,
        files=exported.files,
        state_digest=exported.state_digest,
        tokenizer_digest=exported.tokenizer_digest,
        template_digest=exported.template_digest,
        task=TaskSpec(task_id="sort_digits", args_json="{}", digest=Digest(bytes(32))),
        probe=exported.probe,
    )


def test_chunks_are_cut_at_tensor_borders_and_a_large_tensor_is_sliced(store):
    entries = [entry("a", 60, 1), entry("b", 50, 2), entry("c", 250, 3), entry("d", 10, 4)]
    section = write_chunks(entries, store, 100)
    assert [chunk.size_bytes for chunk in section.chunks] == [60, 50, 100, 100, 50, 10]
    assert [(span.name, span.offset_bytes) for span in section.tensors] == [
        ("a", 0),
        ("b", 60),
        ("c", 110),
        ("d", 360),
    ]
    whole = b"".join(store.read(chunk.digest) for chunk in section.chunks)
    assert whole == b"".join(bytes(e.read()) for e in entries)
    assert section.state_digest == blake3.blake3(whole).digest()


def test_a_tensor_that_did_not_change_gives_the_same_chunk_again(store):
    first = write_chunks([entry("a", 90, 1), entry("b", 90, 2), entry("c", 90, 3)], store, 100)
    second = write_chunks([entry("a", 90, 1), entry("b", 90, 9), entry("c", 90, 3)], store, 100)
    same = [a.digest == b.digest for a, b in zip(first.chunks, second.chunks, strict=True)]
    assert same == [True, False, True]
    assert first.state_digest != second.state_digest


def test_files_larger_than_a_chunk_are_cut(store):
    (reference,) = write_files({"tokenizer.json": b"x" * 250}, store, 100)
    assert [chunk.size_bytes for chunk in reference.chunks] == [100, 100, 50]


def test_probe_tokens_are_fixed_legal_and_fit_the_context():
    assert probe_tokens(1000, 4096) == probe_tokens(1000, 4096)
    assert len(probe_tokens(1000, 4096)) == 32
    assert len(probe_tokens(1000, 8)) == 8
    assert all(0 <= token < 7 for token in probe_tokens(7, 4096))


@pytest.mark.parametrize("chunk_size_bytes", [4096, 1 << 20])
def test_an_exported_version_loads_as_a_folder_with_the_trainers_own_weights(
    folder, store, tmp_path, chunk_size_bytes
):
    stepper = Stepper(run_config(folder, lr=1e-2), store, None)
    stepper._chunk_size_bytes = chunk_size_bytes
    stepper.step(sampled_batch(stepper.policy.model))
    exported = stepper.export(3)
    assert max(chunk.size_bytes for chunk in exported.chunks) <= chunk_size_bytes
    write_folder(manifest_of(exported), store.folder, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for name, parameter in stepper.policy.model.named_parameters():
        assert torch.equal(loaded.get_parameter(name).float(), parameter)
    assert tokenizer_digest(tmp_path / "out") == exported.tokenizer_digest
    assert template_digest(tmp_path / "out") == exported.template_digest


def test_tied_tensors_are_stored_once_and_named(folder, store):
    exported = Stepper(run_config(folder), store, None).export(0)
    names = {span.name for span in exported.tensors}
    assert exported.tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert "lm_head.weight" not in names
    assert {span.dtype for span in exported.tensors} == {"BF16"}


def test_untied_tensors_are_both_stored(store, tmp_path):
    untied = write_trainable_folder(tmp_path / "untied", tie_word_embeddings=False)
    exported = Stepper(run_config(untied), store, None).export(0)
    assert exported.tied == ()
    assert "lm_head.weight" in {span.name for span in exported.tensors}


def test_the_probe_is_what_the_published_weights_say(folder, store):
    stepper = Stepper(run_config(folder), store, None)
    probe = stepper.export(0).probe
    ids = np.frombuffer(probe.token_ids, dtype="<i4").tolist()
    wanted = behaviour(stepper.policy.model, ids[:1], ids[1:], 1.0)
    assert np.frombuffer(probe.logprobs, dtype="<f4").tolist() == pytest.approx(wanted, abs=1e-5)


def test_every_training_step_changes_the_probe_and_the_state_digest(folder, store):
    stepper = Stepper(run_config(folder, lr=1e-2), store, None)
    before = stepper.export(0)
    assert stepper.export(1).state_digest == before.state_digest
    stepper.step(sampled_batch(stepper.policy.model))
    after = stepper.export(2)
    assert after.state_digest != before.state_digest
    assert after.probe.logprobs != before.probe.logprobs
    assert after.probe.token_ids == before.probe.token_ids
    assert after.files == before.files


def test_a_version_with_a_missing_chunk_is_not_written_as_a_folder(folder, store, tmp_path):
    exported = Stepper(run_config(folder), store, None).export(0)
    store.remove(exported.chunks[0].digest)
    with pytest.raises(LocalError, match="not whole here"):
        write_folder(manifest_of(exported), store.folder, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_trainer_s_versions_are_linked_by_patches_that_survive_the_pipe(folder, store):
    stepper = Stepper(run_config(folder, lr=1e-4), store, None)
    assert stepper.export(0).patches == ()
    for version in (1, 2):
        stepper.step(sampled_batch(stepper.policy.model, seed=version))
        exported = stepper.export(version)
        raw = frames.encode(frames.ExportDone(exported=exported))
        assert frames.decode_reply(raw).exported == exported
    assert (exported.patches[0].base, exported.patches[0].version) == (1, 2)
    assert exported.patches[0].state_digest == exported.state_digest
    blobs = [chunk.ref for patch in exported.patches for chunk in patch.chunks]
    assert blobs
    assert all(store.has(ref.digest) for ref in blobs)


def test_an_export_that_failed_late_and_was_made_again_counts_once(folder, store, monkeypatch):
    stepper = Stepper(run_config(folder, lr=1e-4), store, None)
    stepper.export(0)
    stepper.step(sampled_batch(stepper.policy.model, seed=1))

    def full(*_):
        raise DiskFull("The disk is full.")

    with monkeypatch.context() as patched:
        patched.setattr(export, "write_files", full)
        with pytest.raises(DiskFull):
            stepper.export(1)
    assert [(p.base, p.version) for p in stepper.export(1).patches] == [(0, 1)]
    stepper.step(sampled_batch(stepper.policy.model, seed=2))
    patches = stepper.export(2).patches
    assert {(p.base, p.version) for p in patches} == {(1, 2), (0, 2), (0, 1)}
    assert len({p.base_digest for p in patches}) == 2
