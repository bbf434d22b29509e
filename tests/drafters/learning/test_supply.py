"""Feature stores of a learner's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.drafters.learning.supply import open_store
from outrider.drafters.training.store import StoreInUse


def test_a_store_that_another_process_writes_to_is_left_alone(tmp_path: Path) -> None:
    folder, meta = tmp_path / "features", {"layers": [1]}
    with open_store(folder, 8, meta).writing():
        with pytest.raises(StoreInUse, match="another run is writing"):
            open_store(folder, 8, meta)
        assert (folder / "meta.json").exists()


def test_a_store_of_other_layers_is_emptied(tmp_path: Path) -> None:
    folder = tmp_path / "features"
    open_store(folder, 8, {"layers": [1]})
    (folder / "left").touch()
    open_store(folder, 8, {"layers": [2]})
    assert not (folder / "left").exists()
