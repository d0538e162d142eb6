"""`oelm audit` (alias `oelm diagnose`): the proof that freezing is what it says."""

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import tyro

from oelm.cli.options import parse
from oelm.errors import UserError
from oelm.methods import freeze_qk as switch
from oelm.methods import method as resolve_method
from oelm.model.config import ModelConfig


def audit(argv: list[str]) -> int:
    """Entry point of `oelm audit`."""
    return parse(_audit, argv, prog="oelm audit")


def _audit(
    run: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[RUN]")] = None,
    /,
    *,
    method: str = "oelm_v2",
    model: str = "medium-512",
    steps: int = 3,
    seed: int = 0,
    freeze_qk: bool | None = None,
    json: bool = False,
) -> int:
    """Prove that what should be frozen stays as it is, and that the rest trains.

    Without RUN: builds the model, takes a few real optimizer steps on random tokens, and compares
    every tensor with what the configuration says. With RUN (a run folder or one of its .pt files):
    rebuilds the model from the run's configuration and compares it with what the checkpoint holds.
    Exit code 1 when the audit fails.

    Args:
        run: A run folder, or a checkpoint inside one.
        method: A method's name or spec; `oelm methods` lists them.
        model: A preset, or a spec such as `nano,positions=rope`.
        steps: How many optimizer steps to take; what thaws late does so within them.
        seed: Sets the weights and the random tokens.
        freeze_qk: Freeze or train Q and K whatever the method says.
        json: Print JSON instead of a table.
    """
    if run is not None:
        result = audit_run(run)
    else:
        if freeze_qk is not None:
            method = switch(method, freeze_qk)
        result = audit_steps(method, model, steps, seed)
    if json:
        print(json_format.dumps(result, indent=1))
    else:
        _print(result)
    return 0 if result["verdict"] == "pass" else 1


def audit_steps(method: str, model: str, steps: int, seed: int) -> dict[str, Any]:
    """Audit a fresh model across a few real optimizer steps with weight decay."""
    import torch

    from oelm.freezing import Gates, Plan, hashes
    from oelm.freezing import audit as compare
    from oelm.model.gpt import GPT
    from oelm.train.config import TrainConfig
    from oelm.train.optimizer import build_optimizer

    if steps < 1:
        raise UserError(f"steps must be at least 1, not {steps}")
    config, chosen = ModelConfig.from_spec(model), resolve_method(method)
    plan = Plan.of(GPT(config, chosen, seed), chosen)
    net = GPT(config, chosen, seed)
    gates = Gates(net, steps)
    optimizer = build_optimizer(net, chosen, gates, TrainConfig(max_lr=1e-3, max_steps=steps))
    before = hashes(net)
    tokens = torch.Generator().manual_seed(seed)
    length = min(64, config.seq_len)
    for step in range(steps):
        gates.apply(step)
        x = torch.randint(config.vocab_size, (2, length + 1), generator=tokens)
        net(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = compare(net, plan, optimizer=optimizer, before=before, thawed=gates.thawed_by(steps))
    return {"method": chosen.name, "model": model, "steps": steps, **result}


def audit_run(path: Path) -> dict[str, Any]:
    """Audit a checkpoint against the configuration of the run that it belongs to."""
    from oelm.train.saved import audit_checkpoint

    return audit_checkpoint(path)


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column, right in [
        ("tensor", 0),
        ("kind", 0),
        ("shape", 1),
        ("role", 0),
        ("in optimizer", 0),
    ]:
        table.add_column(column, justify="right" if right else "left", no_wrap=column == "tensor")
    for column in ("before", "after", "moved", "off orthogonal"):
        table.add_column(column)
    word = {True: "yes", False: "no", None: "–"}
    for row in result["tensors"]:
        errors = row["orthogonality_error"]
        table.add_row(
            row["name"],
            row["kind"],
            "×".join(map(str, row["shape"])),
            row["role"] or "unknown",
            word[row["in_optimizer"]],
            (row["sha256_before"] or "–")[:8],
            row["sha256_after"][:8],
            word[row["moved"]],
            f"{max(errors):.0e}" if errors else "",
        )
    # Wide enough for whole names even where the terminal is not, or the output goes to a file.
    console = Console(width=max(120, Console().width), soft_wrap=True)
    console.print(table)
    console.print()
    for layer, c in result["by_layer"].items():
        console.print(f"{layer:<20} {c['trainable']:>12,} trainable {c['frozen']:>12,} frozen")
    console.print(
        f"{'total':<20} {result['trainable']:>12,} trainable {result['frozen']:>12,} frozen"
        f" = {result['total']:,} ({result['frozen_bytes']:,} bytes frozen)"
    )
    for note in result["notes"]:
        console.print(f"note: {escape(note)}")
    for problem in result["problems"]:
        console.print(f"[red]problem:[/red] {escape(problem)}")
    colour = "green" if result["verdict"] == "pass" else "red"
    console.print(f"verdict: [bold {colour}]{result['verdict']}[/]")
