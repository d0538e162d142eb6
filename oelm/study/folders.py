"""What a run's folder says about it, beside what the trainer itself reads. No torch."""

import contextlib
import json
import os
import uuid
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """A JSON file's content, or None if there is none that is whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    """What the trainer, or the queue, said last about a run."""
    state = read_json(folder / "state.json")
    return state if isinstance(state, dict) else {}


def attempts(folder: Path) -> list[dict[str, Any]]:
    """The failed attempts since the run was last given a new chance."""
    entries: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        for line in (folder / "attempts.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                entries = [] if entry.get("reset") else [*entries, entry]
    return entries


def note_attempt(folder: Path, entry: dict[str, Any]) -> None:
    """Append to the list of failed attempts."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "attempts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def final_failure(folder: Path) -> bool:
    """Whether the run failed for good, so that only `--retry-failed` starts it again."""
    tried = attempts(folder)
    return bool(tried and tried[-1]["final"])


def ask_to_stop(folder: Path) -> None:
    """Leave the mark that runners and jobs obey if it is newer than they are."""
    write_text(folder / "stop", uuid.uuid4().hex)


def stop_token(folder: Path) -> str | None:
    """The mark that `oelm stop` left, if it left one."""
    try:
        return (folder / "stop").read_text(encoding="utf-8")
    except OSError:
        return None


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
