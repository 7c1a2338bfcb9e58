"""Numbers and names as a reader sees them: digits that the error allows, powers of ten, text without control codes."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass

Cell = str | int | float

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_EXACT_DIGITS = 5


@dataclass(frozen=True)
class Numbers:
    """The numbers that a chart draws or a section states, as a table: column names and rows of plain cells."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    digits: int = _EXACT_DIGITS

    def texts(self) -> list[list[str]]:
        """Every row with its numbers formatted."""
        return [[cell_text(cell, self.digits) for cell in row] for row in self.rows]


def cell_text(cell: Cell, digits: int = _EXACT_DIGITS) -> str:
    """A cell of a table of numbers: text without control codes, integers whole, other numbers to so many digits.

    >>> cell_text(1797), cell_text(0.125), cell_text("0.weight")
    ('1,797', '0.12500', '0.weight')
    """
    if isinstance(cell, str):
        return plain_text(cell)
    return f"{cell:,}" if isinstance(cell, int) else significant(cell, digits)


def significant(value: float, digits: int = _EXACT_DIGITS) -> str:
    """`value` to that many significant digits, as a power of ten where a plain decimal would be long.

    >>> significant(3.14159), significant(1234567.0, 4), significant(2e-7, 1), significant(float("inf"))
    ('3.1416', '1.235×10⁶', '2×10⁻⁷', '∞')
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    mantissa, exponent = _scientific(value, digits)
    if -3 <= exponent < 5:
        text = f"{float(f'{mantissa}e{exponent}'):.{max(0, digits - 1 - exponent)}f}"
    else:
        text = f"{mantissa}×{power_of_ten(exponent)}"
    return text.replace("-", "−")


def value_and_error(value: float, error: float, digits: int = _EXACT_DIGITS) -> tuple[str, str]:
    """`value` to the digits that `error` leaves meaningful, at most `digits`, and the error rounded up; "" for none.

    The error keeps one digit, and two where the first is a 1, so that rounding up never adds much.

    >>> value_and_error(12.34567, 0.0213), value_and_error(2.5, 0.0), value_and_error(1.234567e6, 1250.0)
    (('12.35', '0.03'), ('2.5000', ''), ('1.2346×10⁶', '1300'))
    """
    if error == 0 or not math.isfinite(value):
        return significant(value, digits), ""
    if not math.isfinite(error):
        return significant(value, 2), "unknown"
    bound, kept = _rounded_up(abs(error))
    if value == 0:
        return "0", significant(bound, kept)
    places = _scientific(value, 12)[1] - _scientific(bound, kept)[1] + kept
    return significant(value, min(max(places, 1), digits)), significant(bound, kept)


def with_error(value: float, error: float) -> str:
    """`value_and_error` on one line.

    >>> with_error(12.34567, 0.0213)
    '12.35 ± 0.03'
    """
    number, bound = value_and_error(value, error)
    return f"{number} ± {bound}" if bound else number


def power_of_ten(exponent: int) -> str:
    """Ten to a whole power.

    >>> power_of_ten(-12)
    '10⁻¹²'
    """
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


def times(ratio: float) -> str:
    """A factor above one in words.

    >>> times(1000312.0), times(3.217), times(2.5e6)
    ('10⁶ times', '3.2 times', '2.5×10⁶ times')
    """
    return f"{factor_text(ratio)} times"


def factor_text(ratio: float) -> str:
    """A factor above one to two digits, a power of ten where it is one to 5 % and from ten thousand on.

    >>> factor_text(3.217), factor_text(1023.0), factor_text(13000.0), factor_text(1000312.0)
    ('3.2', '1000', '1.3×10⁴', '10⁶')
    >>> factor_text(1.0312), factor_text(1.000047)  # what is left of one, in one digit
    ('1.03', '1.00005')
    """
    if 1 < ratio < 1.1:
        return f"{1 + float(f'{ratio - 1:.0e}'):.9g}"
    if ratio < 9_950 or not math.isfinite(ratio):
        return significant(ratio, 2)
    nearest = round(math.log10(ratio))
    if abs(ratio / 10.0**nearest - 1) < 0.05:
        return power_of_ten(nearest)
    mantissa, exponent = _scientific(ratio, 2)
    return f"{mantissa}×{power_of_ten(exponent)}"


def p_value(p: float) -> str:
    """A p-value as papers print one: two digits, and nothing below a thousandth.

    >>> p_value(0.0312), p_value(0.0004), p_value(1.0), p_value(float("nan"))
    ('0.031', '≤ 0.001', '1', '–')
    """
    return "–" if math.isnan(p) else "≤ 0.001" if p <= 0.001 else f"{p:.2g}"


def plain_text(text: object) -> str:
    """`text` on one line, with every control or formatting code point shown instead of obeyed.

    >>> plain_text("a\\x1b[31mb\\n")
    'a\\\\x1b[31mb\\\\n'
    """
    return "".join(_visible(character) for character in str(text))


def shortened(text: str, length: int) -> str:
    """`text` with its middle left out where it is longer than `length`.

    >>> shortened("features.denseblock4.conv", 13)
    'featur…4.conv'
    """
    if len(text) <= length:
        return text
    head = length // 2
    return f"{text[:head]}…{text[len(text) - (length - head - 1) :]}"


def bytes_text(count: int) -> str:
    """A number of bytes in the unit that fits.

    >>> bytes_text(3_400_000_000), bytes_text(512)
    ('3.4 GB', '512 B')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2g} {unit}" if count < 100 * size else f"{count / size:.0f} {unit}"
    return f"{count} B"


def seconds_text(seconds: float) -> str:
    """A duration in the unit that fits.

    >>> seconds_text(0.0312), seconds_text(12.34), seconds_text(615.0)
    ('31 ms', '12.3 s', '10 min 15 s')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _scientific(value: float, digits: int) -> tuple[str, int]:
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return mantissa, int(exponent)


def _rounded_up(error: float) -> tuple[float, int]:
    """`error` to one significant digit, two where the first is a 1, never smaller than it is; and how many digits."""
    exponent = math.floor(math.log10(error))
    kept = 2 if error / 10.0**exponent < 2 else 1
    unit = 10.0 ** (exponent - kept + 1)
    return (math.ceil(error / unit - 1e-9) * unit, kept) if unit > 0 else (error, kept)


def _visible(character: str) -> str:
    if unicodedata.category(character) in {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}:
        return character.encode("unicode_escape").decode("ascii")
    return character
