"""What int8_mode says in each of the places that have it."""

from __future__ import annotations

from typing import Any

import pytest

from ft_format.weight_format import FORMATS, INT8, NONE, find_format


@pytest.mark.parametrize("mode", ["", "0", 0, False, None])
def test_matrices_are_as_data_type_says(mode: Any) -> None:
    assert find_format(mode) is NONE


@pytest.mark.parametrize("mode", ["1", 1, True])
def test_matrices_are_int8(mode: Any) -> None:
    assert find_format(mode) is INT8


@pytest.mark.parametrize("mode", ["2", 2, "smooth"])
def test_what_another_server_says_is_neither_and_called_as_it_is_written(mode: Any) -> None:
    found = find_format(mode)
    assert found and found not in FORMATS and found.name == f"int8_mode {mode}"
