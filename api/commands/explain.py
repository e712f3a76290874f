"""`mkc explain`: why tasks sit where they do, and where a step's time goes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mkc.api.commands.common import (
    ArtifactArgument,
    JsonOption,
    print_json,
    print_lines,
    print_table,
)

if TYPE_CHECKING:
    from mkc.compiler.explain import Explainer, Explanation
    from mkc.compiler.plan import Plan
    from mkc.compiler.trace import MeasuredEvent


class What(StrEnum):
    """What can be explained; all but the step take a name."""

    STEP = "step"
    TASK = "task"
    PACKET = "packet"
    LAYER = "layer"


def explain_artifact(
    artifact: ArtifactArgument,
    what: Annotated[
        What,
        typer.Argument(
            metavar="WHAT",
            help="step, where its time goes; task NAME, such as layer3.qkv:17; packet NAME, such "
            "as merged[3,5,0]; layer N.",
        ),
    ] = What.STEP,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which one.", show_default=False)
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(help="Tokens that each row of the step sees, with commas between rows."),
    ] = "8192",
    seed: Annotated[int, typer.Option(help="Of the experts that the rows choose.")] = 0,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured events, to set beside the predicted ones."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the step's report, in HTML.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the step's trace for Perfetto."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain a task, a packet, a layer or the whole step, from a simulated step."""
    from mkc.compiler.artifact import load_artifact
    from mkc.compiler.explain import Explainer, UnknownName
    from mkc.compiler.simulate import simulate_step

    if (name is None) != (what is What.STEP):
        takes = "takes no name" if what is What.STEP else "takes a name"
        raise typer.BadParameter(f"{what} {takes}", param_hint="NAME")
    loaded = load_artifact(artifact)
    step = simulate_step(loaded.plan, _lengths(lengths, loaded.plan), seed)
    explainer = Explainer(step)
    try:
        explanation = _explain(explainer, what, name or "")
    except UnknownName as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from error
    _show(explanation, as_json)
    events: list[MeasuredEvent] = []
    if measured is not None:
        from mkc.compiler.trace import read_measured

        events = read_measured(measured)
    if report is not None:
        from mkc.compiler.report import render_report
        from mkc.compiler.report_data import ReportInputs

        report.write_text(render_report(ReportInputs.of_artifact(loaded, step, events)), "utf-8")
    if trace is not None:
        from mkc.compiler.trace import dump_trace

        trace.write_bytes(dump_trace(step, events, loaded.plan.spec.name))


def _lengths(text: str, plan: Plan) -> list[int]:
    """Row lengths; one that is longer than the model's longest sequence is cut to that."""
    rows, parts = plan.tiling.max_rows, text.split(",")
    if len(parts) > rows or not all(part.strip().isdecimal() and int(part) for part in parts):
        wanted = f"{text!r} is no list of 1 to {rows} lengths, such as 8192 or 500,90"
        raise typer.BadParameter(wanted, param_hint="--lengths")
    return [min(int(part), plan.spec.max_positions) for part in parts]


def _explain(explainer: Explainer, what: What, name: str) -> Explanation:
    match what:
        case What.TASK:
            return explainer.task(name)
        case What.PACKET:
            return explainer.packet(name)
        case What.LAYER:
            if not name.isdecimal():
                raise typer.BadParameter("layer takes a number", param_hint="NAME")
            return explainer.layer(int(name))
    return explainer.whole_step()


def _show(explanation: Explanation, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "title": explanation.title,
                "facts": [{"name": name, "text": text} for name, text in explanation.facts],
                "tables": [
                    {
                        "title": table.title,
                        "rows": [dict(zip(table.headers, row, strict=True)) for row in table.rows],
                    }
                    for table in explanation.tables
                ],
            }
        )
        return
    width = max(len(name) for name, _ in explanation.facts)
    print_lines(explanation.title, "")
    print_lines(*(f"{name:{width}}  {text}" for name, text in explanation.facts))
    for table in explanation.tables:
        print_lines("", table.title)
        print_table(table.headers, table.rows, left=table.left)
