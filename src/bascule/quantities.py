"""Write numbers for people: three digits, thousands separators, scaled units, no e-notation.

Whatever a person reads goes through these functions: consoles, pages, logs and errors. Programs
read JSON, which has all digits.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

_PREFIXES = tuple((10.0 ** (3 * power), prefix) for power, prefix in enumerate(" KMGTPE"))
_TIMES = (
    *((1e-15, "fs"), (1e-12, "ps"), (1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s")),
    *((60.0, "min"), (3600.0, "h"), (86400.0, "days")),
)
_FEWEST = {60.0: 2.0, 3600.0: 2.0, 86400.0: 2.0}  # 90 seconds are not 1.5 minutes
_SMALLEST, _LARGEST = 1e-4, 1e15  # other numbers are written with a power of ten
_EXPONENTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_NO_NUMBER = "not known"
_SYMBOLS = {"USD": "$", "EUR": "€", "GBP": "£"}


@dataclass(frozen=True, slots=True)
class Scale:
    """A unit in which values are written, such as PFLOP, so that those of a column compare."""

    factor: float
    unit: str

    @classmethod
    def of(cls, values: Iterable[float | None], unit: str) -> "Scale":
        """Choose the unit in which the largest of the values has one to three digits.

        Args:
            values: In the base unit; None and numbers that are not finite do not count.
            unit: "s" becomes fs to days; "B", "FLOP", and either a second ("B/s") get prefixes up
                to E (10^18); any other unit stays as it is.
        """
        if unit not in ("s", "B", "FLOP", "B/s", "FLOP/s"):
            return cls(1.0, unit)
        steps = _TIMES
        if unit != "s":
            steps = tuple((factor, (prefix + unit).strip()) for factor, prefix in _PREFIXES)
        sizes = [abs(value) for value in values if value is not None and math.isfinite(value)]
        most = max(sizes, default=0.0) or 1.0  # 0 s, not 0 fs
        rounded = most * (1 + 5e-4)  # 999.6 becomes 1.00 of the next unit
        fitting = [step for step in steps if step[0] * _FEWEST.get(step[0], 1.0) <= rounded]
        return cls(*(fitting[-1] if fitting else steps[0]))

    def __call__(self, value: float | None) -> str:
        """Write a value in this unit, without the unit's name."""
        return number(value if value is None or self.factor == 1.0 else value / self.factor)


def number(value: float | None) -> str:
    """Write a number with three digits, from 100 on as a whole number: 0.0123, 12.3, 12,345."""
    if value is None or math.isnan(value):
        return _NO_NUMBER
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if 0 < abs(value) < _SMALLEST or abs(value) >= _LARGEST:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits} x 10{str(int(exponent)).translate(_EXPONENTS)}"
    is_whole = value == 0 or isinstance(value, Integral)
    return f"{value:,.{0 if is_whole else _decimals(value)}f}"


def count(how_many: int, noun: str, ending: str = "s") -> str:
    """Write how many there are of something: 1 step, 12,345 steps."""
    return f"{number(how_many)} {noun}{'' if how_many == 1 else ending}"


def _decimals(value: float) -> int:
    """Return the decimals with which a value has three digits."""
    exponent = math.floor(math.log10(abs(value)))
    exponent += abs(round(value, 2 - exponent)) >= 10 ** (exponent + 1)  # 9.996 is 10.0
    return max(2 - exponent, 0)


def amount(value: float | None, unit: str) -> str:
    """Write a value with the unit that suits it, as `Scale.of` chooses: 6.58 PFLOP, 12.3 ms."""
    if value is None or not math.isfinite(value):
        return number(value)
    scale = Scale.of([value], unit)
    return f"{scale(value)} {scale.unit}".strip()


def seconds(value: float | None) -> str:
    """Write seconds as fs to days."""
    return amount(value, "s")


def num_bytes(value: float | None) -> str:
    """Write bytes as B, KB, MB, .. of powers of 1,000."""
    return amount(value, "B")


def flops(value: float | None) -> str:
    """Write floating point operations as FLOP to EFLOP."""
    return amount(value, "FLOP")


def percent(share: float | None) -> str:
    """Write a share as per cent, with at most two decimals; 0 % is only exactly 0."""
    if share is None or not math.isfinite(share):
        return number(share)
    value = share * 100
    if 0 < abs(value) < 0.01:
        return "under 0.01 %" if value > 0 else "above -0.01 %"
    return "0 %" if value == 0 else f"{value:,.{min(_decimals(value), 2)}f} %"


def times(ratio: float | None) -> str:
    """Write a ratio of speeds or times, such as 1.82x."""
    text = number(ratio)
    return text if text == _NO_NUMBER else f"{text}x"


def money(value: float | None, currency: str = "USD") -> str:
    """Write an amount of money, whole from 100 on: $199,600, €12.30, 12.30 CHF."""
    if value is None or not math.isfinite(value):
        return number(value)
    text = f"{abs(value):,.{0 if abs(value) >= 100 else 2}f}"
    sign, symbol = "-" if value < 0 and text != "0.00" else "", _SYMBOLS.get(currency)
    return f"{sign}{text} {currency}" if symbol is None else f"{sign}{symbol}{text}"


def with_spread(value: float, spread: float | None, unit: str) -> str:
    """Write a value and its spread in one unit and with as many decimals: 796 ± 530 µs."""
    if spread is None or not math.isfinite(spread):
        return f"{amount(value, unit)}, spread {_NO_NUMBER}"
    scale, largest = Scale.of([value, spread], unit), max(abs(value), spread)
    decimals = _decimals(largest / scale.factor) if largest else 0
    texts = (f"{part / scale.factor:,.{decimals}f}" for part in (value, spread))
    return f"{' ± '.join(texts)} {scale.unit}"
