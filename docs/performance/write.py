"""Fill the tables of docs/performance.md and docs/scaling.md, and draw the chart of the former, from the
JSON files beside this script.

python docs/performance/write.py. Which commands make the files is said in docs/performance.md.
"""

import json
from pathlib import Path

import altair as alt

HERE = Path(__file__).parent
PAGES = (HERE.parent / "performance.md", HERE.parent / "scaling.md")
OURS, PEER = "#0072b2", "#999999"


def training(result):
    """Of steps or, in evaluation, of passes forward."""
    step = "pass" if result.get("evaluation") else "step"
    torchs = f" (torch's {result['torch_gflops']:.0f})" if "torch_gflops" in result else ""
    lines = [
        f"{result['batch_size']} × {result['seq_len']} tokens a {step}, {result['threads']} threads, "
        f"median of {result['rounds']} interleaved rounds, matmul peak {result['peak_gflops']:.0f} GFLOP/s"
        f"{torchs}.",
        "",
        f"| trainer | {step}, s | tokens/s | useful share of peak | peak memory, MiB | time of ours (95 %) |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        median, low, high = row["time_of_ours"]
        lines.append(
            f"| {name} | {row['seconds']:.3f} | {row['tokens_per_second']:,.0f} | {row['of_peak']:.2f} | "
            f"{row['memory'] / 2**20:,.0f} | {median:.2f} ({low:.2f} to {high:.2f}) |"
        )
    return lines


def methods(result):
    how = "steps of one layer, times the layers" if result["by_layer"] else "whole steps"
    lines = [
        f"{result['batch_size']} × {result['seq_len']} tokens a step, {result['rounds']} rounds of {how}, "
        f"matmul peak {result['peak_gflops']:.0f} GFLOP/s.",
        "",
        "| method | step, ms | saved (95 %) | arithmetic it does without | saved, ms | "
        "that arithmetic at the peak, ms | of that, saved |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        interval = f"{row['saved']:.1%} ({row['saved_low']:.1%} to {row['saved_high']:.1%})"
        saved, predicted = row["saved_seconds"] * 1e3, row["predicted_seconds"] * 1e3
        share = f"{saved / predicted:.0%}" if predicted else ""
        lines.append(
            f"| {row['method']} | {row['seconds'] * 1e3:,.1f} | {interval} | {row['possible']:.1%} | "
            f"{saved:,.1f} | {predicted:,.1f} | {share} |"
        )
    return lines


def explained(result):
    lines = [
        f"`{result['method']}`, {result['batch_size']} × {result['seq_len']} tokens a step, median of "
        f"{result['rounds']} rounds, matmul peak {result['peak_gflops']:.0f} GFLOP/s, memory read at "
        f"{result['reading_gigabytes']:.0f} GB/s.",
        "",
        "| part | GFLOP | MB moved | predicted, ms | measured, ms |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['part']} | {row['gflops']:,.2f} | {row['megabytes']:,.0f} | "
            f"{row['predicted'] * 1e3:,.1f} | {row['measured'] * 1e3:,.1f} |"
        )
    return lines


def generation(results):
    lines = [
        "| model | batch | ours, ms/token | Hugging Face, ms/token | their time of ours (95 %) | "
        "of the bandwidth bound |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        median, low, high = r["hugging_face_time_of_ours"]
        ms = r["ms_per_token"]
        lines.append(
            f"| {r['workload']} | {r['batch_size']} | {ms['oelm']:.2f} | {ms['Hugging Face']:.2f} | "
            f"{median:.2f} ({low:.2f} to {high:.2f}) | {r['of_bandwidth_bound']:.2f} |"
        )
    return lines


def growth(result):
    lines = [
        f"![Seconds a step against what changes](performance/growth.png)\n\nMatmul peak "
        f"{result['peak_gflops']:.0f} GFLOP/s, medians of {result['rounds']} rounds:",
        "",
        "| what changes | to | step, s | its arithmetic at the peak, s | share |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['factor']} | {row['value']:,} | {row['measured']:.3f} | {row['at_peak']:.3f} | "
            f"{row['at_peak'] / row['measured']:.2f} |"
        )
    return lines


def chart(results):
    """Tokens per second of every trainer, as a share of ours."""
    rows = [
        {"workload": r["workload"], "trainer": name, "speed": 1 / row["time_of_ours"][0]}
        for r in results
        for name, row in r["rows"].items()
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X(
            "speed:Q", title="training speed, times ours (baseline)", scale=alt.Scale(zero=True)
        ),
        y=alt.Y("trainer:N", title=None, sort=None),
    )
    bars = base.mark_bar().encode(
        color=alt.condition("indexof(datum.trainer, 'oelm') == 0", alt.value(OURS), alt.value(PEER))
    )
    text = base.mark_text(align="left", dx=3).encode(text=alt.Text("speed:Q", format=".2f"))
    whole = alt.layer(bars, text).properties(width=420).facet(row=alt.Row("workload:N", title=None))
    whole.resolve_scale(y="independent").save(HERE / "training.png", scale_factor=2)


def read(folder):
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def tables_of(found):
    tables = {}
    for name, result in found.items():
        if name.startswith(("train-", "evaluate-")):
            tables[name] = training(result)
        elif name.startswith("methods-"):
            tables[name] = methods(result)
        elif name.startswith("explain-"):
            tables[name] = explained(result)
    generated = [r for name, r in found.items() if name.startswith("generate-")]
    if generated:
        tables["generate"] = generation(generated)
    if "growth" in found:
        tables["growth"] = growth(found["growth"])
    return tables


def main():
    found = read(HERE)
    tables = tables_of(found)
    for folder in sorted(path for path in HERE.iterdir() if path.is_dir()):  # another processor's
        tables |= {
            f"{folder.name}/{name}": table for name, table in tables_of(read(folder)).items()
        }
    for page in PAGES:
        text = page.read_text()
        for name, lines in tables.items():
            opening, closing = f"<!-- {name} -->\n", "<!-- end -->"
            if opening in text:
                before, rest = text.split(opening)
                after = rest.split(closing, 1)[1]
                text = before + opening + "\n".join(lines) + "\n" + closing + after
        page.write_text(text)
    chart([r for name, r in found.items() if name.startswith("train-")])


if __name__ == "__main__":
    main()
