"""Panels of the dashboard "overview": traffic, latency, keys, cache and errors."""

from __future__ import annotations

from panels import Panel, quantiles, rate, share

OVERVIEW: dict[str, list[Panel]] = {
    "Traffic": [
        Panel(
            "Requests by outcome",
            "Cancelled: the client left; refused: a bad request; overloaded: told to come back; failed: our fault.",
            {"{{outcome}}": rate("outrider_request_seconds_count", "outcome")},
            "reqps",
        ),
        Panel(
            "Requests under way",
            "In flight: from the first byte to the last. Running and waiting are the scheduler's, a few steps old.",
            {
                "in flight": "sum (outrider_requests_in_flight{S})",
                "running": "sum (sglang:num_running_reqs{S})",
                "waiting": "sum (sglang:num_queue_reqs{S})",
            },
        ),
        Panel(
            "Tokens per second",
            "Generated, read from prompts, and prompt tokens that the cache saved.",
            {
                "generated": rate("sglang:realtime_tokens_total", mode="decode"),
                "read": rate("sglang:realtime_tokens_total", mode="prefill_compute"),
                "cached": rate("sglang:realtime_tokens_total", mode="prefill_cache"),
            },
        ),
    ],
    "Latency": [
        Panel(
            "Time to first token",
            "Of streams: of other answers SGLang counts the first piece, which is not the first token.",
            quantiles("sglang:time_to_first_token_seconds", is_streaming="true"),
            "s",
        ),
        Panel(
            "Time per output token",
            "Mean of each whole answer, streamed or not.",
            quantiles("outrider_time_per_output_token_seconds"),
            "s",
        ),
        Panel(
            "Inter-token latency",
            "Time between two pieces over the tokens that the second brought: a step may bring several.",
            quantiles("sglang:inter_token_latency_seconds"),
            "s",
        ),
        Panel(
            "End to end",
            "From a request to the end of its whole answer.",
            quantiles("outrider_request_seconds", outcome="completed"),
            "s",
        ),
        Panel("Time in queue", "Until the scheduler takes a request up.", quantiles("sglang:queue_time_seconds"), "s"),
        Panel(
            "Decode step",
            "From one decode step to the next.",
            quantiles("outrider_step_seconds"),
            "s",
        ),
    ],
    "Keys": [
        Panel("Requests by key", "Refused ones too.", {"{{key}}": rate("outrider_key_requests_total", "key")}, "reqps"),
        Panel(
            "Tokens per second by key",
            "Of prompts and answers, counted when a request has ended.",
            {"{{key}}": rate("outrider_key_tokens_total", "key", kind="prompt|completion")},
        ),
        share(
            "Prompt tokens from the cache by key",
            "Share that the prefix cache had.",
            {
                "{{key}}": f"{rate('outrider_key_tokens_total', 'key', kind='cached')} / "
                f"{rate('outrider_key_tokens_total', 'key', kind='prompt')}"
            },
        ),
    ],
    "Cache and errors": [
        Panel(
            "Servers",
            "1 for each that answers, with what it serves.",
            {"{{instance}}: {{model}}, {{drafter}}, {{version}}": "outrider_info{S}"},
            kind="stat",
        ),
        share(
            "KV cache in use",
            "Near 1, requests wait for room, or are taken back and read again.",
            {"{{instance}} {{dp_rank}}": "sglang:token_usage{S}"},
        ),
        share(
            "Prompt tokens from the cache",
            "Share that the radix cache knew.",
            {
                "cached": f"{rate('sglang:realtime_tokens_total', mode='prefill_cache')} / "
                f"{rate('sglang:realtime_tokens_total', mode='prefill_.*')}"
            },
        ),
        Panel(
            "HTTP answers by status",
            "All routes.",
            {"{{status}}": rate("outrider_http_requests_total", "status", path="/v1/.*|other")},
            "reqps",
        ),
    ],
}
