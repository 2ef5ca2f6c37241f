"""Reading a recording: NumPy arrays, torch tensors, metadata, refused files."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import MINI_FILES, GoldenFile
from v4tool.errors import RecordingError
from v4tool.record.reader import Recording

LEN6 = MINI_FILES[1].path


@pytest.mark.parametrize("golden", MINI_FILES, ids=lambda g: g.name)
def test_every_tensor_comes_as_numpy_and_as_torch(golden: GoldenFile) -> None:
    """The same bits as safetensors itself gives, and the same dtype and shape."""
    expected = load_file(golden.path)
    with Recording.open(golden.path) as recording:
        assert set(recording) == set(recording.keys()) == expected.keys()
        assert len(recording) == len(expected)
        for key, value in expected.items():
            array, tensor = recording[key], recording.torch(key)
            assert (tensor.dtype, tensor.shape) == (value.dtype, value.shape), key
            assert tensor.numpy().tobytes() == value.numpy().tobytes(), key
            assert (array.dtype, array.shape) == (value.numpy().dtype, value.numpy().shape), key
            assert array.tobytes() == value.numpy().tobytes(), key


def test_an_array_may_be_changed_without_changing_the_recording() -> None:
    with Recording.open(LEN6) as recording:
        before = recording["embed.out"].copy()
        recording["embed.out"][:] = 0
        recording.torch("embed.out").zero_()
        assert np.array_equal(recording["embed.out"], before)
        assert before.any()


def test_metadata_and_keys() -> None:
    with Recording.open(LEN6) as recording:
        assert recording.metadata["decode_ids"] == "[38, 7, 96]"
        assert recording.input_ids == [251, 247, 122, 75, 79, 300]
        assert recording.spec("layers.3.attn.out") == ("F32", (1, 6, 128))
        assert "layers.3.attn.out" in recording
        assert "layers.3.attn" not in recording
        for read in (recording.__getitem__, recording.torch):
            with pytest.raises(KeyError, match=r"layers\.3\.attn"):
                read("layers.3.attn")


def test_a_closed_recording_says_so() -> None:
    with Recording.open(LEN6) as recording:
        pass
    with pytest.raises(RecordingError, match=r"embed\.out: cannot be read: File is closed"):
        recording["embed.out"]


def test_a_dtype_that_no_recording_has_is_refused(tmp_path: Path) -> None:
    """Keys and shapes can still be seen: a port's own file may hold BF16."""
    path = tmp_path / "a.safetensors"
    save_file({"embed.out": torch.ones(2, 3, dtype=torch.bfloat16)}, path)
    with Recording.open(path) as recording:
        assert recording.spec("embed.out") == ("BF16", (2, 3))
        for read in (recording.__getitem__, recording.torch):
            with pytest.raises(RecordingError) as caught:
                read("embed.out")
            expected = f"{path}: embed.out: expected one of F32, I32, I64, found BF16"
            assert str(caught.value) == expected


def test_what_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="no such recording"):
        Recording.open(tmp_path / "none.safetensors")
    (tmp_path / "a.safetensors").write_bytes(b"nothing")
    with pytest.raises(RecordingError, match="not a readable safetensors file"):
        Recording.open(tmp_path / "a.safetensors")


def test_numpy_alone_does_not_import_torch() -> None:
    code = (
        "import sys; from v4tool.record.reader import Recording; "
        f"print(Recording.open({str(LEN6)!r})['embed.out'].shape, 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "(1, 6, 128) False\n"
