import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from echo2_mesh.errors import LocalError
from echo2_node.learner.models import entry_of
from echo2_node.learner.tensorfile import read_header, read_tensor, write_tensors

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
}


def test_what_is_written_is_read_by_the_safetensors_library(tmp_path):
    path = tmp_path / "out.safetensors"
    with path.open("wb") as file:
        write_tensors(file, [entry_of(name, tensor) for name, tensor in TENSORS.items()])
    loaded = load_file(path)
    assert set(loaded) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_what_the_safetensors_library_writes_is_read(tmp_path):
    path = tmp_path / "in.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.places["a"].shape == (2, 3)
    with path.open("rb") as file:
        data = read_tensor(file, header, "a")
    assert torch.equal(torch.frombuffer(data, dtype=torch.float32).reshape(2, 3), TENSORS["a"])


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_arbitrary_bytes_are_refused_with_the_files_name(tmp_path_factory, noise, cut):
    path = tmp_path_factory.mktemp("noise") / "noise.safetensors"
    with path.open("wb") as file:
        write_tensors(file, [entry_of("a", TENSORS["a"])])
    good = path.read_bytes()
    for bad in (noise, good[:cut], good + noise):
        if bad == good:
            continue
        path.write_bytes(bad)
        with pytest.raises(LocalError, match=r"noise\.safetensors"):
            read_header(path)
