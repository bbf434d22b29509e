"""Writes dashboards/*.json, or into another folder: python deploy/grafana/generate.py [FOLDER]

overview.py, speculation.py and service_levels.py describe them, a line per panel and query; Grafana's foundation SDK,
which knows their schema, writes them. tests/deploy compares the files with what this writes, and runs every query.
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
from overview import OVERVIEW
from panels import Panel
from service_levels import SLA
from speculation import SPECULATION

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 8, 8
"""Size of a panel; a row has 24 columns."""

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
