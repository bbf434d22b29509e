"""The store of answers and their features: appended, read while it grows, cut after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_drafters import make_sequence

from outrider.drafters.training.store import FeatureStore


def test_store_keeps_what_it_was_given_and_drops_half_written_rows(tmp_path: Path) -> None:
    def opened(*layers: int) -> FeatureStore:
        return FeatureStore(tmp_path / "f", width=4, top=3, meta={"layers": list(layers) or [1]})

    store, reader = opened(), opened()
    written = [make_sequence(9, 4), make_sequence(6, 2)]
    with store.writing():
        for s in written:
            store.append(s, temperature=0.0, source="x")
        with pytest.raises(ValueError, match="another run is writing"), opened().writing():
            pass
        assert reader.grow()
        assert not reader.grow()
    for name in ("features.bin", "index.jsonl"):
        with (tmp_path / "f" / name).open("ab") as file:
            file.write(b"killed here")
    assert not reader.grow()
    again = opened()
    with again.writing():
        again.append(make_sequence(5, 2), temperature=0.0, source="x")
    assert reader.grow()
    for found in (again, reader):
        assert len(found) == 3
        for i, s in enumerate(written):
            for name in ("tokens", "features", "top_ids", "top_probs"):
                assert torch.equal(getattr(found[i], name), getattr(s, name))
    with pytest.raises(ValueError, match=r"layers \[1\] instead of \[2\]"):
        opened(2)
