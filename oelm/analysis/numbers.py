"""How numbers are written: as many digits as mean something, units always."""

import math

from oelm.analysis.metrics import Metric, Unit

MINUS = "−"


def number(value: float | None, digits: int = 4) -> str:
    """`digits` significant digits, thousands separated, no exponent where one can be avoided."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -5 or size > 14:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    return f"{value:,.{max(0, digits - 1 - size)}f}".replace("-", MINUS)


def count(value: float | None) -> str:
    """A whole number."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.0f}"


def short(value: float) -> str:
    """A large number in a word: 131,072 → `131k`, 1,234,567 → `1.23M`."""
    rounded = float(f"{value:.3g}")  # first, so that 999,700 is 1M and not 1000k
    power = min(4, int(math.log10(rounded)) // 3) if rounded >= 1 else 0
    return f"{rounded / 1000**power:.3g}{('', 'k', 'M', 'G', 'T')[power]}"


def percent(share: float | None, *, signed: bool = True, digits: int = 1) -> str:
    """0.098 → `+9.8 %`, 0.0003 → `+0.03 %`: what is there never shows as nothing."""
    if share is None or not math.isfinite(share):
        return "–"
    while digits < 3 and share and round(abs(share) * 100, digits) == 0:
        digits += 1
    shown = f"{share * 100:+.{digits}f}" if signed else f"{share * 100:.{digits}f}"
    if not float(shown):
        shown = shown.lstrip("+-")
    return shown.replace("-", MINUS) + "\u202f%"


def points(share: float | None, *, signed: bool = True, unit: str = "pt") -> str:
    """0.0108 → `+1.08 pt`."""
    if share is None or not math.isfinite(share):
        return "–"
    shown = f"{share * 100:+.2f}" if signed else f"{share * 100:.2f}"
    return f"{shown}\u202f{unit}".replace("-", MINUS)


def duration(seconds: float | None) -> str:
    """`0.0837 s`, `4 min 31 s`, `9 h 10 min`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 0.1:
        return f"{number(seconds * 1000, 3)}\u202fms"
    if seconds < 60:
        return f"{number(seconds, 3)}\u202fs"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}\u202fmin {rest}\u202fs"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours}\u202fh {rest}\u202fmin"


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None or not math.isfinite(value):
        return "–"
    power = min(4, int(math.log2(abs(value)) // 10)) if abs(value) >= 1 else 0
    return f"{number(value / 1024**power, 3)}\u202f{('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def axis_unit(unit: Unit, most: float) -> tuple[float, str]:
    """What to divide values by on an axis that reaches `most`, and what they are then counted in."""
    if unit == "s":
        steps = ((0.1, 1e-3, "ms"), (600, 1.0, "s"), (7200, 60.0, "min"))
        return next(((by, name) for below, by, name in steps if most < below), (3600.0, "h"))
    if unit == "bytes":
        return (2.0**20, "MiB") if most < 10 * 2**30 else (2.0**30, "GiB")
    return 1.0, ""


def p_value(p: float) -> str:
    """To two digits, and never zero."""
    if math.isnan(p):
        return "–"
    return "< 0.0001" if p < 1e-4 else f"{p:.2g}"


def shown(metric: Metric, value: float | None) -> str:
    """A value of a metric with its unit."""
    if metric.unit == "%":
        return percent(value, signed=False, digits=2)
    if metric.unit == "parameters":
        return count(value)
    if metric.unit == "s":
        return duration(value)
    if metric.unit == "bytes":
        return size(value)
    text = number(value)
    return f"{text}\u202f{metric.unit}" if metric.unit and text != "–" else text


def difference(metric: Metric, value: float | None, *, log: bool) -> str:
    """A difference between two arms: of a ratio in per cent, of a share in points, else in the unit."""
    if value is None or not math.isfinite(value):
        return "–"
    if log:
        return percent(math.expm1(value))
    if metric.share:
        return points(value)
    sign = MINUS if value < 0 else "+"
    return sign + shown(metric, abs(value))
