"""`oelm bench`: how fast the methods train on this machine, and what its arithmetic would allow."""

import json as json_format
from typing import Annotated, Any

import tyro

from oelm.cli.options import parse
from oelm.errors import UserError
from oelm.methods import method as resolve_method
from oelm.model.config import ModelConfig

USUAL = (
    "baseline", "oelm_v2", "oelm_q_only", "identity_q", "identity_qk", "identity_lowrank",
    "oelm_hadamard", "identity_kernel",
)  # fmt: skip


def bench(argv: list[str]) -> int:
    """Entry point of `oelm bench`."""
    return parse(_bench, argv, prog="oelm bench")


def _bench(
    methods: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[METHOD ...]")
    ] = (),
    /,
    *,
    model: str = "nano",
    batch_size: int = 16,
    rounds: int = 30,
    device: str = "auto",
    by_layer: bool = False,
    explain: str | None = None,
    json: bool = False,
) -> int:
    """Time training steps of some methods side by side on this machine.

    The methods take turns, a whole step each (forward, backward, clipping, AdamW) on random tokens, so
    that a busy moment is shared by all. The table shows what each saves against the first, with its
    95 % interval, beside the share of arithmetic that it does without; both also in milliseconds, where
    "possible" is the time of that arithmetic at the machine's matrix-product peak, measured in the same
    rounds; and how much of that peak a step reaches. Let nothing else run meanwhile; all the models are
    in memory at once.

    Args:
        methods: Names or specs; baseline and the usual frozen ones if none is given.
        model: A preset, or a spec such as `nano,positions=rope`.
        batch_size: Sequences in a step.
        rounds: How often each takes its turn; more make the intervals narrower.
        device: `cpu`, `cuda`, …; the fastest there is if `auto`.
        by_layer: Let models of one layer take the turns, and multiply: narrower intervals in less time.
        explain: Instead, time this method's parts, each alone, where it may take longer than within a step,
            beside what the peak and the memory's rate of reading predict; "reached" is predicted by measured.
        json: Print JSON instead of a table.
    """
    if rounds < 6:
        raise UserError(f"rounds must be at least 6, or there is no 95 % interval; not {rounds}")
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, not {batch_size}")
    if explain and (methods or by_layer):
        what = f"method {methods[0]}" if methods else "--by_layer"
        raise UserError(f"--explain takes one method apart, {explain}; drop {what}, or --explain")
    shape = ModelConfig.from_spec(model)
    chosen = [resolve_method(name) for name in methods or USUAL]
    taken_apart = resolve_method(explain) if explain else None
    from rich.console import Console
    from rich.progress import Progress

    from oelm import bench as measure

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        what = f"the parts of {explain}" if explain else f"{len(chosen)} methods"
        task = bar.add_task(what, total=rounds)

        def progress(done: int) -> None:
            bar.update(task, completed=done)

        common = (shape, batch_size, rounds, device, progress)
        if taken_apart:
            result = measure.explain(taken_apart, *common)
        else:
            result = measure.compare(chosen, *common, by_layer=by_layer)
    result |= {"model": model, "batch_size": batch_size, "seq_len": shape.seq_len}
    if json:
        print(json_format.dumps(result, indent=1))
    else:
        _print(result)
    return 0


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    apart = "method" in result
    limits = f"peak {result['peak_gflops']:.0f} GFLOP/s"
    if apart:
        limits += f", memory {result['reading_gigabytes']:.0f} GB/s"
    title = (
        f"{result.get('method', '')} {result['model']}, {result['batch_size']} × {result['seq_len']} tokens, "
        f"{result['device']}, {result['precision']}, {result['threads']} threads, "
        f"{limits}, median of {result['rounds']} rounds"
    )
    table = Table(
        title=title.strip(), title_justify="left", box=None, pad_edge=False, collapse_padding=True
    )
    columns = (
        ("part", "GFLOP", "MB moved", "predicted, ms", "measured, ms", "reached")
        if apart
        else (
            "method",
            "step, ms",
            "of peak",
            "saved",
            "95 % interval",
            "possible",
            "saved, ms",
            "possible, ms",
        )
    )
    for column in columns:
        names = column in ("part", "method")
        table.add_column(column, justify="left" if names else "right", no_wrap=names)
    for row in result["rows"]:
        if apart:
            shown = row["predicted"] > 0 and row["measured"] > 0
            table.add_row(
                row["part"],
                f"{row['gflops']:.2f}" if row["gflops"] else "",
                f"{row['megabytes']:,.0f}" if row["megabytes"] else "",
                f"{row['predicted'] * 1e3:.1f}" if row["predicted"] else "",
                f"{row['measured'] * 1e3:.1f}",
                f"{row['predicted'] / row['measured']:.2f}" if shown else "",
            )
        else:
            table.add_row(
                row["method"],
                f"{row['seconds'] * 1e3:.1f}",
                f"{row['of_peak']:.2f}",
                f"{row['saved']:.1%}",
                f"{row['saved_low']:.1%} to {row['saved_high']:.1%}",
                f"{row['possible']:.1%}",
                f"{row['saved_seconds'] * 1e3:.1f}",
                f"{row['predicted_seconds'] * 1e3:.1f}",
            )
    Console().print(table)
