"""Pauses of streams while a long prompt is read, and first tokens."""

import asyncio
from pathlib import Path
from typing import Any

import long_prompts
import pytest
import script
from aiohttp import web
from records import read_record
from small_openai import SmallServer, answer

LONG = 200
READ_SECONDS = 0.8


def test_pauses_and_pace() -> None:
    even = [at / 10 for at in range(1, 101)]
    stands = [at for at in even if not 4.05 < at < 6.05] + [11.0, 13.0]
    pause, pace = long_prompts.pauses([even, stands], 4.0, 8.0)
    assert pause == pytest.approx(2.1)
    assert pace == pytest.approx((40 + 20) / 80, rel=0.05)
    ends = [at for at in even if at <= 6.05]  # the end of a stream is no pause
    assert long_prompts.pauses([ends], 4.0, 8.0) == pytest.approx((0.1, 1.0), rel=0.05)


@pytest.mark.slow
def test_pauses_of_streams_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server stops streams while it reads a long prompt; the other continues them."""
    monkeypatch.setattr(long_prompts, "BEFORE_SECONDS", 0.4)
    monkeypatch.setattr(long_prompts, "SHORT_SECONDS", 0.2)

    def reading(*, stops: bool) -> Any:
        free = asyncio.Event()
        free.set()

        async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if len(body["messages"][0]["content"].split()) >= LONG and body["stream"]:
                if stops:
                    free.clear()
                await asyncio.sleep(READ_SECONDS * (1 if stops else 1.5))
                free.set()
            if body["max_tokens"] == 1:
                await free.wait()
                return await answer(request, body)
            # First tokens come later than BEFORE_SECONDS after the request.
            return await answer(request, body, text="a " * body["max_tokens"], ttft=0.5, tpot=0.004, free=free)

        return handler

    written = tmp_path / "long.json"
    with SmallServer(reading(stops=True)) as stops, SmallServer(reading(stops=False)) as goes_on:
        urls = (f"stops={stops.url}", f"goes on={goes_on.url}")
        flags = ("--streams", "2", "--rounds", "1", "--json", str(written))
        assert script.main(long_prompts, ["500", "--url", *urls, *flags]) == 0
    arms = read_record(written)["results"]["500"]
    [before], [after] = arms["stops"], arms["goes on"]
    assert READ_SECONDS * 0.9 < before["pause"] < READ_SECONDS * 1.5
    assert after["pause"] < READ_SECONDS / 2
    assert before["pace"] < 0.3 < 0.8 < after["pace"]
    assert after["short"] < 0.2 < 0.4 < before["short"]
    assert before["alone"] == pytest.approx(before["beside"], abs=0.2)
    shown = capsys.readouterr().out
    assert "× stops" in shown
    long_texts = [b["messages"][0]["content"] for b in stops.asked if len(b["messages"][0]["content"].split()) >= LONG]
    assert len(long_texts) == len(set(long_texts))
