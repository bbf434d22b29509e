"""The store of answers and their features."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_drafters import make_sequence

from outrider.drafters.training import store as stores
from outrider.drafters.training.store import FeatureStore


def test_store_keeps_appended_rows_and_drops_half_written_ones(tmp_path: Path) -> None:
    def opened(*layers: int) -> FeatureStore:
        return FeatureStore(tmp_path / "f", width=4, top=3, meta={"layers": list(layers) or [1]})

    store, reader = opened(), opened()
    written = [make_sequence(9, 4), make_sequence(6, 2)]
    with store.writing():
        for s in written:
            store.append(s, temperature=0.0, source="x")
        with pytest.raises(ValueError, match="another run is writing"), opened().writing():
            pass
        assert not reader.grow()
        store.flush()
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


def recorded(monkeypatch: pytest.MonkeyPatch, note: Callable[[str], None]) -> None:
    """Call `note` with a file's name before each fsync."""
    fsync = os.fsync

    def noting(handle: int) -> None:
        note(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noting)


def test_rows_are_on_the_disk_before_the_lines_that_name_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For several sequences at once, and at the end of the run."""
    monkeypatch.setattr(stores, "FLUSH_TOKENS", 30)
    synced: list[tuple[str, int]] = []
    store = FeatureStore(tmp_path, width=4, top=3, meta={})

    def indexed() -> int:
        return len((tmp_path / "index.jsonl").read_text().splitlines())

    columns = ["tokens.bin", "features.bin", "top_ids.bin", "top_probs.bin"]

    def fill() -> None:
        with store.writing():
            recorded(monkeypatch, lambda name: synced.append((name, indexed())))
            for length in range(10, 17):
                store.append(make_sequence(length, 4), temperature=0.0, source="x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill()
    batches = [(0, 3), (3, 6), (6, 7)]  # 10 + 11 + 12 tokens, 13 + 14 + 15, and 16 at the end
    assert synced == [
        one for before, after in batches for one in (*((c, before) for c in columns), ("index.jsonl", after))
    ]
    assert len(FeatureStore(tmp_path, width=4, top=3, meta={})) == 7


def test_a_store_without_its_last_lines_goes_on(tmp_path: Path) -> None:
    """A power failure can keep the columns of a flush and lose its lines."""
    store = FeatureStore(tmp_path, width=4, top=3, meta={})
    with store.writing():
        store.append(make_sequence(9, 4), temperature=0.0, source="x")
        store.flush()
        store.append(make_sequence(8, 4), temperature=0.0, source="x")
        whole = (tmp_path / "index.jsonl").read_text()
    (tmp_path / "index.jsonl").write_text(whole)
    again = FeatureStore(tmp_path, width=4, top=3, meta={})
    other = make_sequence(7, 3)
    with again.writing():
        again.append(other, temperature=0.0, source="x")
    assert torch.equal(FeatureStore(tmp_path, width=4, top=3, meta={})[1].tokens, other.tokens)
