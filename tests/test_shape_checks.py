"""The checks of shapes that all tests run with refuse what jaxtyping refuses; see `support/shape_checks.py`."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float
from shape_checks import jaxtyped
from torch import Tensor

from dino_sparo.data.crops import resize_fast


@jaxtyped(typechecker=beartype)
def gram(rows: Float[Tensor, "B D"], others: Float[Tensor, "B D"] | None = None) -> Float[Tensor, "B B"]:
    return rows.T if others is None else rows @ others.T


@jaxtyped(typechecker=beartype)
def name_of(number: int) -> str:
    return number if number < 0 else str(number)  # type: ignore[return-value]


@jaxtyped(typechecker=beartype)
def rows_of(table: Float[Tensor, "B D"]) -> Iterator[Float[Tensor, " D"]]:
    yield from table


def test_a_letter_has_one_size_in_all_arguments_and_in_the_result() -> None:
    assert gram(torch.ones(3, 5), torch.ones(3, 5)).shape == (3, 3)
    assert gram(torch.ones(5, 7), torch.ones(5, 7)).shape == (5, 5)  # another call, another size
    for arguments in ((torch.ones(3, 5), torch.ones(3, 7)), (torch.ones(3),), (torch.ones(3, 5),)):
        with pytest.raises(BeartypeCallHintViolation):
            gram(*arguments)


def test_types_of_arguments_and_results_are_checked() -> None:
    assert name_of(3) == "3"
    for number in ("3", -3):
        with pytest.raises(BeartypeCallHintViolation):
            name_of(number)  # type: ignore[arg-type]


def test_generators_are_left_to_jaxtyping() -> None:
    assert len(list(rows_of(torch.ones(3, 5)))) == 3
    with pytest.raises(jaxtyping.TypeCheckError):
        list(rows_of(torch.ones(3)))


def test_functions_of_the_package_are_checked() -> None:
    with pytest.raises(BeartypeCallHintViolation):
        resize_fast(torch.ones(3, 5), [7, 11])
