"""Panels of the dashboard "speculation": what it brings, what drafts know of themselves, steps, learning."""

from __future__ import annotations

from panels import Panel, mean, rate, ratio, share

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
