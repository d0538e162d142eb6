"""`oelm methods`: what there is to choose from."""

import json
from typing import Any

from oelm.cli.options import parse


def methods(argv: list[str]) -> int:
    """Entry point of `oelm methods`."""
    return parse(_methods, argv, prog="oelm methods")


def _methods(*, model: str = "medium-512", json: bool = False) -> int:
    """List the methods, with what each trains and freezes in a model of the given size.

    A method can be changed in place, wherever one is named: `oelm_v2,qk.rank=4` or
    `baseline,q.init=headwise,lr_by_layer=[1,1,1,0.5]`.

    Args:
        model: A preset, or a spec such as `nano,positions=rope`.
        json: Print JSON instead of a table.
    """
    rows = _rows(model)
    if json:
        _print_json(rows)
    else:
        _print_table(rows, model)
    return 0


def _rows(model: str) -> list[dict[str, Any]]:
    import torch

    from oelm.config import to_mapping
    from oelm.freezing import count
    from oelm.methods import METHODS
    from oelm.model.config import ModelConfig
    from oelm.model.gpt import GPT

    config = ModelConfig.from_spec(model)
    rows = []
    with torch.device("meta"):  # shapes without values: counting needs no more
        for method in METHODS.values():
            counts = count(GPT(config, method, seed=None))
            numbers = {key: counts[key] for key in ("total", "trainable", "frozen")}
            rows.append({**to_mapping(method), **numbers})
    return rows


def _print_json(rows: list[dict[str, Any]]) -> None:
    print(json.dumps(rows, indent=1))


def _print_table(rows: list[dict[str, Any]], model: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=None, pad_edge=False, title=f"methods, counted at {model}", title_justify="left"
    )
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("trainable", justify="right", no_wrap=True)
    table.add_column("frozen", justify="right", no_wrap=True)
    table.add_column("what it does")
    for row in rows:
        table.add_row(row["name"], f"{row['trainable']:,}", f"{row['frozen']:,}", row["about"])
    Console().print(table)
