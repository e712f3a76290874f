"""`report.html`: one page about an artifact for someone who has never seen the project.

The page is templates/report.html.j2, rendered from `ReportInputs`: no network, no script that it
could not do without, no date and no path, so the same inputs give the same bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jinja2

from mkc.compiler.explain import Explainer
from mkc.compiler.render import header_text
from mkc.compiler.report_charts import (
    SPENT_CSS,
    Window,
    measured_chart,
    spent_chart,
    stream_chart,
    work_chart,
)
from mkc.compiler.report_data import (
    OP_TITLES,
    LayerKind,
    ReportInputs,
    bytes_text,
    chain_seconds,
    facts,
    graph_nodes,
    hops_of_layer,
    layer_kinds,
    op_shares,
)
from mkc.compiler.simulate_causes import Hop
from mkc.compiler.simulate_waits import Spent, time_spent

TEMPLATE = "report.html.j2"
MARGIN = 0.12
"""Of a layer's time, what its chart shows before and after it."""
NEGLIGIBLE_SECONDS = 1e-6


def render_report(inputs: ReportInputs) -> str:
    """The page's HTML."""
    step = inputs.step
    explainer = Explainer(step)
    kinds = layer_kinds(step)
    spent = time_spent(step)
    nodes, arrows = graph_nodes(step, kinds[0].layer)
    return _environment().get_template(TEMPLATE).render(
        plan=inputs.plan,
        spec=inputs.plan.spec,
        target=inputs.plan.target,
        step=step,
        facts=facts(inputs),
        points=inputs.points,
        kernels=inputs.kernels,
        proof=inputs.proof,
        shared={f"decode_step_{s.rows}": s for s in inputs.plan.layout.shared},
        ops=op_shares(step),
        titles=OP_TITLES,
        nodes=nodes,
        arrows=arrows,
        kinds=[_layer(inputs, explainer, kind) for kind in kinds],
        spent=_spent_rows(spent, step.seconds),
        spent_chart=spent_chart(spent),
        chain=chain_seconds(explainer.path),
        hops=[_hop(explainer, hop) for hop in explainer.path],
    )  # fmt: skip


def _layer(inputs: ReportInputs, explainer: Explainer, kind: LayerKind) -> dict[str, Any]:
    """One layer's charts and its part of the critical path."""
    step = inputs.step
    begin = step.layer_begin(kind.layer)
    margin = MARGIN * kind.seconds
    window = Window(max(0.0, begin - margin), begin + kind.seconds + margin)
    hops = [_hop(explainer, hop) for hop in hops_of_layer(step, explainer.path, kind.layer)]
    measured = measured_chart(inputs.measured, kind.layer, inputs.plan.target.sms)
    marks = [("input here", begin), ("next layer's input here", begin + kind.seconds)]
    for number, signal in enumerate(step.tasks.signals):
        if (signal.set, signal.layer) == ("router_logits", kind.layer):
            marks.insert(1, ("experts known", step.seen[number]))
    span = window.end - window.begin
    return {
        "kind": kind,
        "window": window,
        "marks": [(text, (time - window.begin) / span) for text, time in marks],
        "stream": stream_chart(step, window),
        "work": work_chart(step, window),
        "measured": None if measured is None else measured[0],
        "measured_seconds": None if measured is None else measured[1].end,
        "hops": hops,
        "begin": begin,
    }


def _hop(explainer: Explainer, hop: Hop) -> dict[str, Any]:
    return {
        "kind": hop.kind.value,
        "css": hop.kind.value.replace("-", ""),
        "begin": hop.begin,
        "seconds": hop.seconds,
        "text": explainer.hop_text(hop),
        "slack": hop.slack_seconds,
    }


def _spent_rows(spent: list[dict[Spent, float]], seconds: float) -> list[dict[str, Any]]:
    """Mean over the SMs by cause."""
    rows = []
    for cause, css in SPENT_CSS.items():
        mean = sum(one[cause] for one in spent) / len(spent)
        most = max(one[cause] for one in spent)
        if most < NEGLIGIBLE_SECONDS:
            continue
        rows.append(
            {"name": cause.value, "css": css, "mean": mean, "most": most, "share": mean / seconds}
        )
    return rows


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(header_text),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["us"] = _microseconds
    environment.filters["ms"] = _milliseconds
    environment.filters["percent"] = _percent
    environment.filters["bytes"] = bytes_text
    environment.filters["count"] = _count
    return environment


def _microseconds(seconds: float, digits: int = 1) -> str:
    return _grouped(f"{seconds * 1e6:,.{digits}f}")


def _milliseconds(seconds: float, digits: int = 3) -> str:
    return f"{seconds * 1e3:.{digits}f}"


def _percent(share: float, digits: int = 1) -> str:
    return f"{share * 100:.{digits}f}\u202f%"


def _count(number: int) -> str:
    return _grouped(f"{number:,}")


def _grouped(number: str) -> str:
    """Thousands apart by a narrow space at which no line breaks."""
    return number.replace(",", "\u202f")
