"""Panels of the dashboard "service levels"."""

from __future__ import annotations

from panels import Panel, rate, ratio, share

SLA: dict[str, list[Panel]] = {
    "Service levels that requests asked for": [
        share(
            "Attained",
            "Share of the finished requests with a level that got it.",
            {
                "attained": ratio(
                    "outrider_service_level_requests_total",
                    "outrider_service_level_requests_total",
                    only={"met": "true"},
                )
            },
        ),
        Panel(
            "Requests with a level",
            "By whether they got it.",
            {"met: {{met}}": rate("outrider_service_level_requests_total", "met")},
            "reqps",
        ),
        Panel(
            "Goodput and throughput",
            "Goodput: tokens of the finished requests that got their level, or asked for none.",
            {
                "goodput": rate("outrider_goodput_tokens_total"),
                "throughput": rate("sglang:realtime_tokens_total", mode="decode"),
            },
        ),
    ],
    "Objectives of your own": [
        share(
            "First token in time",
            "Share of the streams whose first token came within the chosen seconds.",
            {
                "within ${first_token} s": ratio(
                    "sglang:time_to_first_token_seconds_bucket",
                    "sglang:time_to_first_token_seconds_count",
                    only={"le": "$first_token"},
                    is_streaming="true",
                )
            },
        ),
        share(
            "Tokens in time",
            "Share of the answers whose time per output token is within the chosen seconds.",
            {
                "within ${per_token} s": ratio(
                    "outrider_time_per_output_token_seconds_bucket",
                    "outrider_time_per_output_token_seconds_count",
                    only={"le": "$per_token"},
                )
            },
        ),
        share(
            "Requests served",
            "Completed, of those that were not refused as wrong or left by their client.",
            {
                "served": f"{rate('outrider_request_seconds_count', outcome='completed')} / "
                f"{rate('outrider_request_seconds_count', outcome='completed|failed|overloaded')}"
            },
        ),
        Panel(
            "Time per output token",
            "Of every whole answer.",
            {"{{le}}": rate("outrider_time_per_output_token_seconds_bucket", "le")},
            "s",
            kind="heatmap",
        ),
    ],
}
