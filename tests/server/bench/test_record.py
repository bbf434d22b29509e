"""The record written by `--json`."""

import datetime
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from records import read_record
from refusals import refuses

from outrider.profiles.fingerprint import cpu_name, folder_digest
from outrider.server.bench import record


@dataclass
class Times:
    milliseconds: list[float]


def test_a_record_names_its_conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["/x/bin/outrider", "bench", "micro", "plan", "--only", "two words"])
    record.write(None, "micro plan", {})
    record.write(tmp_path / "a.json", "micro plan", {"case": Times([1.5])}, weights={"drafter": drafter}, requests=3)
    written = read_record(tmp_path / "a.json")
    assert written["results"] == {"case": {"milliseconds": [1.5]}}
    assert written["command"] == "outrider bench micro plan --only 'two words'"
    assert written["machine"]["device"] == cpu_name()
    assert written["weights"] == {"drafter": folder_digest(drafter)}
    assert written["requests"] == 3
    assert set(written["versions"]) == {"outrider", "sglang", "torch", "python"}
    assert datetime.date.fromisoformat(written["date"]) <= datetime.datetime.now(datetime.UTC).date()


@pytest.mark.parametrize(
    ("text", "reason"), [("", "Expecting value"), ("[]", "no attribute"), ('{"question": 1}', "it lacks command, date")]
)
def test_other_files_are_no_records(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    refuses(reason, read_record, tmp_path / "a.json")


def test_acceptance_is_found_at_any_depth() -> None:
    counts = [{"tried": [n], "kept": [0], "tau": 1.0} for n in range(3)]
    value = {
        "1": {"off": [{"counts": counts[0]}, {"counts": None}], "planned": [{"counts": counts[1]}]},
        "a": counts[2],
    }
    assert list(record.acceptance_counts(json.loads(json.dumps(value)))) == counts
