"""Fingerprints tell machines and checkpoints apart."""

from pathlib import Path

import pytest

from outrider.profiles import fingerprint


def folder(path: Path, config: bytes = b"{}", weights: bytes = b"w" * 100, name: str = "model.safetensors") -> Path:
    path.mkdir()
    (path / "config.json").write_bytes(config)
    (path / name).write_bytes(weights)
    return path


def test_a_copy_of_a_folder_has_the_same_digest_and_any_change_another(tmp_path: Path) -> None:
    digest = fingerprint.folder_digest(folder(tmp_path / "a"))
    assert fingerprint.folder_digest(folder(tmp_path / "b")) == digest
    others = [
        folder(tmp_path / "c", config=b'{"gamma": 3}'),
        folder(tmp_path / "d", weights=b"w" * 99 + b"x"),
        folder(tmp_path / "e", weights=b"w" * 101),
        folder(tmp_path / "f", name="other.safetensors"),
    ]
    assert len({digest, *map(fingerprint.folder_digest, others)}) == 5
    (tmp_path / "b" / "README.md").write_text("not part of the model")
    assert fingerprint.folder_digest(tmp_path / "b") == digest


def test_the_end_of_a_large_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 10)
    digest = fingerprint.folder_digest(folder(tmp_path / "a", weights=b"w" * 99 + b"x"))
    assert digest != fingerprint.folder_digest(folder(tmp_path / "b"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither"):
        fingerprint.folder_digest(tmp_path)
