"""What a run says while it trains: a live bar on a terminal, plain lines elsewhere, and training.log."""

import logging
import sys
import time
from types import TracebackType

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from oelm.train.config import TrainConfig

LINE_SECONDS = 2.0  # between plain lines, so that fast small runs do not flood a log


class Console:
    """Sends the `oelm` loggers to the run's log and to the screen; rank 0 only."""

    def __init__(self, config: TrainConfig, *, first: bool) -> None:
        self.config, self.first = config, first
        self.terminal = Terminal(stderr=True)
        self.bar: Progress | None = None
        self._handlers: list[logging.Handler] = []
        self._said = 0.0

    def __enter__(self) -> "Console":
        if self.first and self.terminal.is_terminal:
            self.bar = Progress(
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=self.terminal,
            )
            self._task = self.bar.add_task("", total=self.config.max_steps, text="", start=False)
            self.bar.start()
        if self.first:
            self._handlers = [
                _LogFile(self.config.out_dir / "training.log"),
                _Screen(self.terminal),
            ]
        else:
            self._handlers = [logging.StreamHandler(sys.stderr)]
        logger = logging.getLogger("oelm")
        logger.setLevel(logging.INFO if self.first else logging.ERROR)
        for handler in self._handlers:
            logger.addHandler(handler)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar:
            self.bar.stop()
        for handler in self._handlers:
            logging.getLogger("oelm").removeHandler(handler)
            handler.close()

    def step(
        self, step: int, loss: float, ppl: float, tokens_per_second: float, left: float
    ) -> None:
        """Show where the run is; `left` in seconds."""
        shown = f"  ppl {ppl:.2f}" if self.config.task == "language" else ""
        text = f"loss {loss:.4f}{shown}  {tokens_per_second:,.0f} tokens/s"
        if self.bar:
            self.bar.start_task(self._task)
            self.bar.update(self._task, completed=step, text=text)
        elif time.monotonic() - self._said > LINE_SECONDS or step == self.config.max_steps:
            self._said = time.monotonic()
            minutes, seconds = divmod(round(left), 60)
            eta = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
            logging.getLogger(__name__).info(
                "step %d/%d  %s  %s left", step, self.config.max_steps, text, eta
            )


class _LogFile(logging.FileHandler):
    """`training.log`; a full disk costs lines, never the run."""

    def __init__(self, path: object) -> None:
        super().__init__(str(path), encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Nothing: the screen has the line too."""


class _Screen(logging.Handler):
    """Lines on stderr, above the bar if there is one."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        mark = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        text = mark + record.getMessage()
        if self.terminal.is_terminal:
            self.terminal.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)
