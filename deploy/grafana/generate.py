"""Writes dashboards/*.json, or into another folder: python deploy/grafana/generate.py [FOLDER]

The dashboards are described here, in a line per panel and query, and written by Grafana's foundation SDK, which knows
their schema. tests/deploy compares the files with what this writes, and runs every query.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from panels import Panel, mean, quantiles, rate, ratio, share

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 8, 8
"""Size of a panel; a row has 24 columns."""

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

SPECULATION: dict[str, list[Panel]] = {
    "What it brings": [
        Panel(
            "Accepted length (τ)",
            "Tokens per request and step, the target's own included: 1 is no speculation at all.",
            {"τ": mean("outrider_accepted_length")},
        ),
        share(
            "Acceptance by source",
            "Share of the drafts seen by the target that it accepted.",
            {"{{source}}": ratio("outrider_accepted_position_total", "outrider_verified_position_total", "source")},
        ),
        share(
            "Acceptance by sampling",
            "A seed keeps fewer drafts of a sampled answer than chance does.",
            {"{{sampling}}": ratio("outrider_accepted_position_total", "outrider_verified_position_total", "sampling")},
        ),
        share(
            "Acceptance by position",
            "Of drafts whose predecessors were accepted.",
            {"{{position}}": ratio("outrider_accepted_position_total", "outrider_verified_position_total", "position")},
        ),
        Panel(
            "Drafter collapsed",
            "1 while almost nothing that is drafted is accepted.",
            {"{{instance}}": "outrider_acceptance_collapsed{S}"},
            kind="stat",
        ),
    ],
    "What it costs": [
        Panel(
            "Draft tokens per second",
            "Wasted ones were verified and not accepted; the budget is what the planner allowed.",
            {
                "drafted": rate("outrider_drafted_tokens_total"),
                "budget": rate("outrider_budget_tokens_total"),
                "verified": rate("outrider_verified_tokens_total"),
                "accepted": rate("outrider_accepted_tokens_total"),
                "wasted": rate("outrider_wasted_tokens_total"),
            },
        ),
        share(
            "Steps without the model's drafts",
            "The planner found that they would not pay.",
            {"share": ratio("outrider_undrafted_steps_total", "outrider_decode_steps_total")},
        ),
        Panel(
            "Requests per decode step",
            "The batch that is verified together.",
            {"requests": ratio("outrider_request_steps_total", "outrider_decode_steps_total")},
        ),
        Panel(
            "Share of a step's time",
            "By the host's clock.",
            {
                "drafting": ratio("outrider_draft_seconds_total", "outrider_step_seconds_sum"),
                "planning": ratio("outrider_planner_seconds_sum", "outrider_step_seconds_sum"),
            },
            "percentunit",
        ),
    ],
    "Whether its predictions hold": [
        Panel(
            "Step time, predicted and taken",
            "Mean of the steps whose time was predicted, over the taken time of the same steps.",
            {
                "predicted / taken": ratio(
                    "outrider_predicted_step_seconds_total", "outrider_predictable_step_seconds_total"
                )
            },
        ),
        Panel(
            "Error of the predicted step time",
            "Σ |predicted − taken| / Σ taken.",
            {"error": ratio("outrider_step_prediction_error_seconds_total", "outrider_predictable_step_seconds_total")},
            "percentunit",
        ),
        Panel(
            "Calibration error (ECE)",
            "Σ |expected − accepted| / Σ observed, over bins of confidence.",
            {
                "{{source}}": "sum by (source) (abs("
                f"{rate('outrider_calibration_expected_total', 'source, confidence')}"
                f" - {rate('outrider_calibration_accepted_total', 'source, confidence')}))"
                f" / {rate('outrider_calibration_observed_total', 'source')}"
            },
            "percentunit",
        ),
        share(
            "Accepted, by confidence",
            "Calibrated, each line lies at the middle of its bin.",
            {
                "{{confidence}}": ratio(
                    "outrider_calibration_accepted_total", "outrider_calibration_observed_total", "confidence"
                )
            },
        ),
    ],
    "Learning": [
        Panel(
            "Tokens a step, held out and live",
            "Held out: answers that no drafter was trained on. Live: of all requests (τ).",
            {
                "{{instance}}, in use": "outrider_learn_in_use_tau{S} > 0",
                "{{instance}}, candidate": "outrider_learn_candidate_tau{S} > 0",
                "live": mean("outrider_accepted_length"),
            },
        ),
        Panel(
            "Promotions and rollbacks",
            "Learned drafters put to use and taken back since the start.",
            {
                "promotions": "sum (outrider_learn_promotions_total{S})",
                "rollbacks": "sum (outrider_learn_rollbacks_total{S})",
            },
        ),
        Panel(
            "Drafter in use",
            "Number of the learned drafter; 0: that of the start.",
            {"{{instance}}": "outrider_learn_in_use{S}"},
            kind="stat",
        ),
        Panel(
            "Answers kept",
            "Held out: to judge drafters, never trained on.",
            {
                "trained on": "sum (outrider_learn_answers{S})",
                "held out": "sum (outrider_learn_held_out_answers{S})",
            },
        ),
        Panel("Tokens kept", "Of prompts and answers.", {"tokens": "sum (outrider_learn_tokens{S})"}),
        Panel(
            "Anchors per second",
            "Drafts trained on; none while requests run.",
            {"anchors": rate("outrider_learn_anchors")},
        ),
    ],
    "Block-diffusion models": [
        Panel(
            "Forwards per token",
            "Of an open block: with a token revealed per forward 1 without speculation, and less with it.",
            {"forwards": ratio("outrider_diffusion_request_forwards_total", "outrider_diffusion_tokens_total")},
        ),
        Panel(
            "Draft states per second",
            "Coming states of open blocks that were in a forward, and those among them that blocks came to.",
            {"drafted": rate("outrider_drafted_states_total"), "accepted": rate("outrider_accepted_states_total")},
        ),
        Panel(
            "States accepted per forward and block",
            "By steps ahead: the sum over all is what a forward brings beside its own step.",
            {
                "{{depth}}": f"{rate('outrider_accepted_states_total', 'depth')} / ignoring(depth) group_left "
                + rate("outrider_diffusion_request_forwards_total")
            },
        ),
        Panel(
            "States drafted of a block (D)",
            "As the planner decides, forward by forward; 0 where drafts would not pay.",
            {"{{le}}": rate("outrider_planned_states_bucket", "le")},
            kind="heatmap",
        ),
        share(
            "Blocks joined",
            "Share of the forwards of open blocks that finished one and took the first step of the next.",
            {"share": ratio("outrider_joined_commits_total", "outrider_diffusion_request_forwards_total")},
        ),
    ],
}

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

CHOICES = {"first_token": ("First token within (s)", "0.5,0.1,0.2,1.0,2.0,5.0,10.0")}
CHOICES |= {"per_token": ("Time per token within (s)", "0.05,0.01,0.02,0.1,0.2,0.5,1.0")}
DASHBOARDS = {
    "overview": ("Outrider: overview", OVERVIEW),
    "speculation": ("Outrider: speculation", SPECULATION),
    "sla": ("Outrider: service levels", SLA),
}


def expression(query: str) -> str:
    chosen = 'job=~"$job",instance=~"$instance"'
    return query.replace("{S", "{" + chosen).replace("[R]", "[$__rate_interval]")


def drawn(panel: Panel) -> timeseries.Panel | stat.Panel | heatmap.Panel:
    made = {"timeseries": timeseries.Panel, "stat": stat.Panel, "heatmap": heatmap.Panel}[panel.kind]()
    made.title(panel.title).description(panel.description).datasource(SOURCE).span(WIDTH).height(HEIGHT)
    if isinstance(made, heatmap.Panel):
        made.calculate(False).color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges"))
        made.y_axis(heatmap.YAxisConfig().unit(panel.unit))
    else:
        made.unit(panel.unit).min(0)
        if panel.most is not None:
            made.max(panel.most)
    if isinstance(made, timeseries.Panel):
        legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        made.legend(legend.show_legend(True)).fill_opacity(8).tooltip(
            common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)
        )
    for number, (legend_format, query) in enumerate(panel.queries.items()):
        asked = prometheus.Dataquery().expr(expression(query)).legend_format(legend_format).ref_id(chr(65 + number))
        if panel.kind == "heatmap":
            asked.format(PromQueryFormat.HEATMAP)
        made.with_target(asked)
    return made


def build(uid: str, title: str, rows: dict[str, Sequence[Panel]]) -> str:
    """A dashboard as JSON."""
    made = dashboard.Dashboard(title).uid(f"outrider-{uid}").tags(["outrider"]).refresh("10s").time("now-1h", "now")
    made.tooltip(DashboardCursorSync.CROSSHAIR).editable()
    made.link(dashboard.DashboardLink("Outrider").type("dashboards").tags(["outrider"]).keep_time(True))
    made.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for name, query in (
        ("job", "label_values(outrider_decode_steps_total, job)"),
        ("instance", 'label_values(outrider_decode_steps_total{job=~"$job"}, instance)'),
    ):
        variable = dashboard.QueryVariable(name).label(name.capitalize()).datasource(SOURCE).query(query)
        made.with_variable(
            variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).multi(True).include_all(True).all_value(".*")
        )
    text = str([panel.queries for panels in rows.values() for panel in panels])
    for name, (label, values) in CHOICES.items():
        if f"${name}" in text:
            made.with_variable(dashboard.CustomVariable(name).label(label).values(values))
    for row, panels in rows.items():
        made.with_row(dashboard.Row(row))
        for panel in panels:
            made.with_panel(drawn(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def main(folder: Path) -> None:
    for name, (title, rows) in DASHBOARDS.items():
        (folder / f"{name}.json").write_text(build(name, title, rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
