"""Numbers for people."""

from math import inf, nan

import pytest

from bascule.quantities import (
    Scale,
    amount,
    count,
    flops,
    money,
    num_bytes,
    number,
    percent,
    seconds,
    times,
    with_spread,
)

WRITTEN = (
    (number, 0, "0"),
    (number, 0.0, "0"),
    (number, 7, "7"),
    (number, 99_690, "99,690"),
    (number, 99_690.4, "99,690"),
    (number, 123.4, "123"),
    (number, 99.96, "100"),
    (number, 9.996, "10.0"),
    (number, 12.345, "12.3"),
    (number, -1.2345, "-1.23"),
    (number, 0.0030612, "0.00306"),
    (number, 1.23e-16, "1.2 x 10⁻¹⁶"),
    (number, 1e30, "1.0 x 10³⁰"),
    (number, inf, "infinite"),
    (number, nan, "not known"),
    (number, None, "not known"),
    (seconds, 0.0, "0 s"),
    (seconds, 3.2e-7, "320 ns"),
    (seconds, 796e-6, "796 µs"),
    (seconds, 0.00306, "3.06 ms"),
    (seconds, 0.99996, "1.00 s"),
    (seconds, 90.0, "90.0 s"),
    (seconds, 150.0, "2.50 min"),
    (seconds, 1.22e6, "14.1 days"),
    (seconds, 1e9, "11,574 days"),
    (num_bytes, 512, "512 B"),
    (num_bytes, 177.4e9, "177 GB"),
    (num_bytes, 2.5e12, "2.50 TB"),
    (flops, 6584.56e12, "6.58 PFLOP"),
    (flops, 1.337e16, "13.4 PFLOP"),
    (flops, 5e21, "5,000 EFLOP"),
    (percent, 0.0, "0 %"),
    (percent, 0.382, "38.2 %"),
    (percent, 0.0371, "3.71 %"),
    (percent, 1.0, "100 %"),
    (percent, -0.097, "-9.70 %"),
    (percent, 4e-7, "under 0.01 %"),
    (percent, None, "not known"),
    (times, 1.8249, "1.82x"),
    (times, 12.34, "12.3x"),
    (times, 0.9982, "0.998x"),
    (money, 199_600.4, "$199,600"),
    (money, -12.3, "-$12.30"),
    (money, -0.001, "$0.00"),
    (number, 2e-5, "2.0 x 10⁻⁵"),
    (Scale(1.0, "sequences"), 8, "8"),
)


@pytest.mark.parametrize(("write", "value", "text"), WRITTEN)
def test_numbers_are_written_as_people_read_them(write, value, text):
    assert write(value) == text


def test_units_of_a_column_are_one():
    scale = Scale.of([4.033e14, 1.337e16, None, inf], "FLOP")
    assert scale.unit == "PFLOP" and [scale(4.033e14), scale(1.337e16)] == ["0.403", "13.4"]
    assert amount(12_345, "tokens") == "12,345 tokens"
    assert Scale.of([], "s").unit == "s"


def test_what_is_counted_is_singular_or_plural():
    assert [count(n, "step") for n in (0, 1, 12_345)] == ["0 steps", "1 step", "12,345 steps"]


def test_a_spread_has_the_digits_of_its_value():
    assert with_spread(796e-6, 530e-6, "s") == "796 ± 530 µs"
    assert with_spread(1.2345, 0.01, "s") == "1.23 ± 0.01 s"
    assert with_spread(1.2345, None, "s") == "1.23 s, spread not known"
    assert with_spread(3e-6, 1.2e-3, "s") == "0.00 ± 1.20 ms"
    assert with_spread(3.21e-13, 4e-15, "s") == "321 ± 4 fs"
    assert money(12.3, "CHF") == "12.30 CHF" and money(1234.5, "EUR") == "€1,234"
