"""The sections on one study, and the charts in them."""

import math
import re
from collections.abc import Sequence
from functools import partial

from oelm.analysis import classes, figures, intervals, tables
from oelm.analysis.blocks import Block, Document, bullets, code, paragraph, section, subtitle
from oelm.analysis.conclusions import conclusion, limitations
from oelm.analysis.metrics import metric
from oelm.analysis.numbers import number
from oelm.analysis.sentences import metric_name
from oelm.analysis.study import Study, chain
from oelm.analysis.verdicts import Verdict, confirmations
from oelm.analysis.words import Words

MOST_PROBES = 12


def study_sections(
    doc: Document, study: Study, verdicts: list[Verdict], prefix: str, places: Sequence[str]
) -> list[Block | None]:
    """Every section on one study; `prefix` keeps identifiers apart where there are several."""
    words = doc.words
    problems = [words(problem) for problem in study.all_problems()]

    def part(name: str, *blocks: Block | None) -> Block | None:
        return section(prefix + name, words(f"sec_{name}"), blocks)

    intro = paragraph(words("claims_note" if verdicts else "no_claims"), style="note")
    return [
        part("problems", bullets(problems)),
        part(
            "claims",
            tables.claims(words, [("", v) for v in verdicts]),
            intro,
            _forest(doc, study, prefix),
        ),
        part(
            "results",
            tables.quality(words, study),
            paragraph(words("results_note", reference=study.reference.name), style="note"),
        ),
        part("confirmation", *_confirmation(doc, study, prefix)),
        part("curves", *_curves(doc, study, prefix)),
        part("parts", _parts(doc, study, prefix)),
        part("tuning", *_tuning(doc, study, prefix)),
        part("cost", *_cost(doc, study, prefix)),
        part("probes", *_probes(doc, study, prefix)),
        part("classes", *_classes(doc, study, prefix)),
        part("samples", *_samples(words, study)),
        part("conclusion", *conclusion(words, study)),
        part("confounds", *_confounds(words, study)),
        part("limitations", bullets(limitations(words, study))),
        part("notes", bullets(study.notes)),
        part(
            "audit",
            tables.audits(words, study),
            bullets(tables.audit_problems(study)),
            paragraph(words("audit_note" if _audited(study) else "audit_none"), style="note"),
        ),
        part("appendix", *_appendix(words, study, places)),
    ]


def _audited(study: Study) -> bool:
    return any(run.audit.get("verdict") for run in study.runs)


def _noted(block: Block | None, note: str) -> list[Block | None]:
    return [block, paragraph(note, style="note")] if block else []


def _by_seeds(study: Study, figure: str) -> str:
    """The note of a figure that has intervals, unless there is one seed."""
    return f"{figure}_note" if len(study.seeds) > 1 else f"{figure}_one"


def _forest(doc: Document, study: Study, prefix: str) -> Block | None:
    note = doc.words(_by_seeds(study, "fig_forest")) + _margins(doc.words, study)
    title = doc.words("fig_forest", reference=study.reference.name)
    return doc.figure(prefix + "forest", title, note, partial(intervals.forest, study=study))


def _margins(words: Words, study: Study) -> str:
    return words("fig_margins") if figures.margins_of(study) else ""


def _curves(doc: Document, study: Study, prefix: str) -> list[Block | None]:
    words, log = doc.words, metric(study.primary).ratio
    name = metric_name(words, study.primary)
    title = words("fig_val", metric=name[:1].upper() + name[1:])
    note = words("fig_val_note", log=words("fig_val_log") if log else "")
    draw = partial(figures.curves, study=study)
    val = partial(draw, kind="val", column=study.primary, log=log)
    gap_title = words("fig_gap", reference=study.reference.name)
    gap_note = words(_by_seeds(study, "fig_gap")) + _margins(words, study)
    gap = partial(figures.gap_curves, study=study)
    train = partial(draw, kind="train", column="loss", log=False, half=True)
    rate = partial(draw, kind="train", column="lr", log=False, half=True)
    return [
        doc.figure(prefix + "val", title, note, val),
        doc.figure(prefix + "gap", gap_title, gap_note, gap),
        doc.figure(prefix + "train", words("fig_train"), words("fig_train_note"), train, half=True),
        doc.figure(prefix + "lr", words("fig_lr"), words("fig_lr_note"), rate, half=True),
    ]


def _parts(doc: Document, study: Study, prefix: str) -> Block | None:
    steps = chain(study)
    if not steps:
        return None
    title = doc.words("fig_parts", first=steps[0].name, last=steps[-1].name)
    build = partial(intervals.decomposition, study=study, chain=steps)
    return doc.figure(prefix + "parts", title, doc.words(_by_seeds(study, "fig_parts")), build)


def _tuning(doc: Document, study: Study, prefix: str) -> list[Block | None]:
    words = doc.words
    name = metric_name(words, study.primary)
    title = words("fig_tuning", metric=name[:1].upper() + name[1:])
    build = partial(figures.tuning, study=study)
    return [
        doc.figure(prefix + "tuning", title, words("fig_tuning_note"), build),
        tables.grid(words, study),
    ]


def _cost(doc: Document, study: Study, prefix: str) -> list[Block | None]:
    words = doc.words
    table = tables.cost(words, study)
    if table is None or len(table["columns"]) < 2:
        return []
    name = metric_name(words, study.primary)
    title = words("fig_scatter", metric=name[:1].upper() + name[1:])
    dots, note = partial(intervals.dots, study=study), words("fig_dots_note")
    step = partial(dots, name="step_time", title="axis_step_time")
    memory = partial(dots, name="peak_memory", title="axis_memory")
    tokens = partial(dots, name="tokens_per_second", title="axis_tokens")
    blocks = [
        table,
        paragraph(words("cost_note"), style="note"),
        doc.figure(prefix + "step", words("fig_step"), note, step, half=True),
        doc.figure(prefix + "tokens", words("fig_tokens"), note, tokens, half=True),
    ]
    target = _target(study)
    if target:
        reach = partial(dots, name=f"time_to_ppl:{target}", title="axis_target")
        said = words("fig_target", target=number(target, 3))
        blocks.append(
            doc.figure(prefix + "target", said, words("fig_target_note"), reach, half=True)
        )
    scatter, layers = partial(figures.scatter, study=study), partial(figures.layers, study=study)
    return [
        *blocks,
        doc.figure(prefix + "memory", words("fig_memory"), note, memory, half=True),
        doc.figure(prefix + "scatter", title, words("fig_scatter_note"), scatter),
        doc.figure(prefix + "layers", words("fig_layers"), words("fig_layers_note"), layers),
    ]


def _target(study: Study) -> float | None:
    """The lowest perplexity that every finished run reached, rounded up to three digits."""
    runs = [r for a in study.arms.values() for r in a.runs if r.finished and r.seed in study.seeds]
    best = [float(min(r.val["ppl"])) for r in runs if len(r.val.get("ppl", ())) and len(r.train)]
    if not best or not math.isfinite(max(best)):
        return None
    step = 10.0 ** (math.floor(math.log10(max(best))) - 2)
    return float(f"{math.ceil(max(best) / step) * step:.6g}")


def _probes(doc: Document, study: Study, prefix: str) -> list[Block | None]:
    """What is one number against the step; what every layer has, by layer after the last step."""
    words = doc.words
    names = list(dict.fromkeys(name for run in study.runs for name in run.probes))
    layers: dict[str, list[int]] = {}
    for name in names:
        if found := re.fullmatch(r"(.+)_(\d+)", name):
            layers.setdefault(found[1], []).append(int(found[2]))
    single = [n for n in names if not re.fullmatch(r".+_\d+", n)]
    blocks: list[Block | None] = []
    about = [kind for kind in ("induction", "attention") if any(n.startswith(kind) for n in names)]
    notes = [paragraph(words(f"probes_{kind}"), style="note") for kind in about]
    for i, name in enumerate(single[:MOST_PROBES]):
        title, note = _probe_words(words, name), words("fig_probe_note")
        build = partial(figures.probe, study=study, name=name)
        blocks.append(doc.figure(f"{prefix}probe{i}", title, note, build, half=True))
    for i, (name, numbers) in enumerate(list(layers.items())[:MOST_PROBES]):
        title, note = _probe_words(words, name), words("fig_layer_note")
        build = partial(figures.by_layer, study=study, name=name, layers=sorted(numbers))
        blocks.append(doc.figure(f"{prefix}layer{i}", title, note, build, half=True))
    if (more := len(single) + len(layers) - len(blocks)) > 0:
        blocks.append(paragraph(words("more_runs", n=more), style="note"))
    return [*notes, *blocks]


def _probe_words(words: Words, name: str) -> str:
    return words.either(f"fig_{name}", words("fig_probe", name=name))


def _confirmation(doc: Document, study: Study, prefix: str) -> list[Block | None]:
    twice = confirmations(study)
    if not twice:
        return []
    words = doc.words
    build = partial(intervals.confirmation, study=study, twice=twice)
    note = words(_by_seeds(study, "fig_confirmation"))
    return [
        paragraph(words("confirmation_note")),
        tables.confirmation(words, study, twice),
        doc.figure(prefix + "confirmation", words("fig_confirmation"), note, build),
    ]


def _classes(doc: Document, study: Study, prefix: str) -> list[Block | None]:
    words = doc.words
    scores = classes.scores(words, study)
    build = partial(classes.confusion, study=study)
    matrix = doc.figure(
        prefix + "confusion", words("fig_confusion"), words("fig_confusion_note"), build
    )
    return [*_noted(scores, words("classes_note")), matrix]


def _samples(words: Words, study: Study) -> list[Block | None]:
    by_prompt: dict[str, list[dict[str, str]]] = {}
    for arm in study.arms.values():
        run = next((r for r in arm.runs if r.samples), None)
        for sample in run.samples if run else ():
            item = {"arm": arm.name, "text": sample["text"].removeprefix(sample["prompt"]).strip()}
            by_prompt.setdefault(sample["prompt"], []).append(item)
    blocks: list[Block | None] = [
        {"kind": "samples", "label": words("prompt"), "prompt": prompt, "items": items}
        for prompt, items in by_prompt.items()
    ]
    return [paragraph(words("samples_note"), style="note"), *blocks] if blocks else []


def _confounds(words: Words, study: Study) -> list[Block | None]:
    lines = []
    for confound in study.confounds:
        kind = str(confound.get("kind", ""))
        about = words.either(f"confound_{kind}", kind)
        if confound.get("claim"):
            about += f" ({words('confound_claim', name=confound['claim'])})"
        lines.append(f"{about}{words('colon')}{confound['line']}")
    note = "confounds_note" if lines else "confounds_none"
    return [paragraph(words(note), style="note"), bullets(lines)]


def _appendix(words: Words, study: Study, places: Sequence[str]) -> list[Block | None]:
    differ, shared = tables.differences(words, study)
    environment = tables.environment(words, study)
    commands = []
    if study.path is not None:
        commands.append(f"oelm run {study.path / 'study.yaml'}")
        one = next(
            (r.folder for r in study.runs if r.folder and (r.folder / "config.yaml").is_file()),
            None,
        )
        commands += (
            [f"oelm train --config {one / 'config.yaml'} --out_dir runs/again"] if one else []
        )
    commands.append(f"oelm report {' '.join(places)}" if places else "oelm report")
    blocks: list[Block | None] = [
        subtitle(words("sub_commands")),
        paragraph(words("commands_note"), style="note"),
        code("\n".join(commands)),
    ]
    for key, block in (("differences", differ), ("shared", shared), ("environment", environment)):
        blocks += [subtitle(words(f"sub_{key}")), block] if block else []
    return [*blocks, subtitle(words("sub_runs")), tables.runs(words, study)]
