"""Numbers of the host on their way to a device, which a CPU stands for here."""

import numpy as np
import pytest
import torch

from outrider.kernels import upload as module
from outrider.kernels.upload import ALIGNED, LastUpload, upload_together


@pytest.fixture
def sent(monkeypatch):
    """Arrays that were copied, in order."""
    found = []

    def upload(numbers, device):
        assert device == "cuda"
        found.append(numbers.copy())
        return torch.from_numpy(found[-1])

    monkeypatch.setattr(module, "upload", upload)
    return found


def test_several_arrays_go_in_one_copy_and_come_as_they_were(sent):
    arrays = [
        np.array([7]),
        np.array([[0.25], [0.5], [1e-9]], dtype=np.float32),
        np.array([True, False, True]),
        np.arange(5)[::2],
    ]
    found = upload_together(arrays, "cuda")
    assert len(sent) == 1
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.storage_offset() * tensor.element_size() % ALIGNED == 0


def test_on_a_cpu_nothing_is_copied():
    array = np.arange(3)
    (found,) = upload_together([array], "cpu")
    array[0] = 5
    assert found.tolist() == [5, 1, 2]


def test_what_has_not_changed_is_not_sent_again(sent):
    last = LastUpload()
    for numbers in ([1, 2], [1, 2], [1, 3], [1, 3, 4], [1, 3, 4]):
        assert last.of(np.array(numbers), "cuda").tolist() == numbers
    assert [array.tolist() for array in sent] == [[1, 2], [1, 3], [1, 3, 4]]
