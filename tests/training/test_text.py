"""Test the printing of tables and of texts with control characters."""

import pytest

from frugalvit.training.text import format_table, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Bär, 猫, قط, 👩‍👧, a b", "Bär, 猫, قط, 👩‍👧, a b"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\u2028b\u2029c", r"a\u2028b\u2029c"),
        ("\udcff.png", r"\udcff.png"),
    ],
)
def test_control_characters_do_not_reach_the_terminal(text, shown):
    assert printable(text) == shown
    assert shown in format_table([{"label": text}])


def test_columns_are_as_wide_as_their_texts():
    rows = [{"name": "a", "images/s": 12.34567, "tokens": 1000}, {"name": "long", "images/s": None, "share": 0.5}]
    assert format_table(rows).splitlines() == [
        "name  images/s  tokens  share",
        "----  --------  ------  -----",
        "a        12.35   1,000      -",
        "long         -       -    0.5",
    ]
