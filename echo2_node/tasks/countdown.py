"""Reach a target with the given numbers: `3 5 7 -> 22:` asks for an expression such as `3*5+7`.

Every item can be solved, because its target is the value of an expression drawn first. Answers
are judged by an exact evaluator of its own (rational numbers, bounded length and depth), never
by Python's. Pure; made by `registry.make_task`, called by actors and by the learner.
"""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from echo2_node.tasks.protocol import Item, Score

EXPRESSION_CHARACTERS_MAX = 256
EXPRESSION_DEPTH_MAX = 16
"""Nested brackets; with the length it bounds the evaluator's stack and the size of its numbers."""
FORMAT_REWARD = 0.1
_DRAWS_MAX = 200
_DEMONSTRATION_DRAWS_MAX = 20
_DIGITS = frozenset("0123456789")


class IllegalExpression(ValueError):
    """Not an expression of the grammar, or its value does not exist."""


class Puzzle(msgspec.Struct, frozen=True, kw_only=True):
    """An item's answer: what was given, what is wanted, and one way to reach it."""

    numbers: tuple[int, ...]
    target: int
    solution: str


class Countdown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task; its fields are its arguments."""

    task_id: ClassVar[str] = "countdown"
    version: ClassVar[int] = 1

    numbers: Annotated[int, Meta(ge=2, le=6)] = 3
    """How many numbers a prompt gives."""
    number_max: Annotated[int, Meta(ge=2, le=999)] = 9
    target_max: Annotated[int, Meta(ge=10, le=9999)] = 99
    operators: Annotated[str, Meta(pattern=r"^[+*/-]{1,4}$")] = "+-*"
    """Of the hidden solution; an answer may use all four."""
    shaping: Annotated[float, Meta(ge=0.0, le=0.8)] = 0.0
    """Extra reward, at most, for a legal expression whose value is near the target."""

    def item(self, seed: int, index: int) -> Item:
        """Item `index` of `seed`: only `random()` is drawn, which Python keeps reproducible."""
        rng = Random(f"{seed}:{index}:{self.task_id}")
        for _ in range(_DRAWS_MAX):
            numbers = tuple(1 + int(rng.random() * self.number_max) for _ in range(self.numbers))
            solution, value = _draw_expression(numbers, self.operators, rng)
            if value.denominator == 1 and self._fits(int(value), numbers):
                return _item(index, Puzzle(numbers=numbers, target=int(value), solution=solution))
        # Bounds so tight that drawing fails still have an answer: the first number itself.
        return _item(index, Puzzle(numbers=numbers, target=numbers[0], solution=str(numbers[0])))

    def _fits(self, target: int, numbers: tuple[int, ...]) -> bool:
        return 1 <= target <= self.target_max and target not in numbers

    def score(self, item: Item, completion: str, *, finished: bool) -> Score:
        """1 for the target; 0.1 for a legal expression (plus shaping); 0 for everything else.

        Legal means: the grammar is obeyed, and each given number is used at most as often as it
        was given. `shaping` adds up to that much as the value nears the target.
        """
        puzzle = item.answer
        assert isinstance(puzzle, Puzzle)
        try:
            value, used = evaluate(completion)
        except IllegalExpression:
            return _score(0.0, parsed=False, valid=False, exact=False)
        left = list(puzzle.numbers)
        for number in used:
            if number not in left:
                return _score(0.0, parsed=True, valid=False, exact=False)
            left.remove(number)
        if not finished:
            return _score(0.0, parsed=True, valid=True, exact=False)
        if value == puzzle.target:
            return _score(1.0, parsed=True, valid=True, exact=True)
        nearness = max(0.0, 1.0 - float(abs(value - puzzle.target) / puzzle.target))
        reward = FORMAT_REWARD + self.shaping * nearness
        return _score(reward, parsed=True, valid=True, exact=False)

    def demonstration(self, item: Item, rng: Random, *, skill: float) -> str:
        """The solution with probability `skill`, else a legal expression with another value."""
        puzzle = item.answer
        assert isinstance(puzzle, Puzzle)
        if rng.random() < skill:
            return puzzle.solution
        for _ in range(_DEMONSTRATION_DRAWS_MAX):
            text, value = _draw_expression(puzzle.numbers, self.operators, rng)
            if value != puzzle.target:
                return text
        return next((str(n) for n in puzzle.numbers if n != puzzle.target), puzzle.solution)

    def alphabet(self) -> str:
        return "0123456789 ->:+*/()"


def evaluate(text: str) -> tuple[Fraction, tuple[int, ...]]:
    """The exact value of an arithmetic expression and the numbers in it, left to right.

        sum     = product { ("+" | "-") product }
        product = atom { ("*" | "/") atom }
        atom    = digits | "(" sum ")"

    Spaces may stand between the parts.

    Raises:
        IllegalExpression: too long, too deep, not of this grammar, or a division by zero.
    """
    if len(text) > EXPRESSION_CHARACTERS_MAX:
        raise IllegalExpression("too long")
    return _Parser(text).parse()


class _Parser:
    """Recursive descent, one character of look-ahead, evaluating as it goes."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._numbers: list[int] = []

    def parse(self) -> tuple[Fraction, tuple[int, ...]]:
        value = self._sum(0)
        if self._peek():
            raise IllegalExpression(f"unexpected '{self._peek()}' at {self._at}")
        return value, tuple(self._numbers)

    def _peek(self) -> str:
        """The next character that is not a space; empty at the end."""
        while self._text[self._at : self._at + 1] == " ":
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _sum(self, depth: int) -> Fraction:
        if depth > EXPRESSION_DEPTH_MAX:
            raise IllegalExpression("too deep")
        value = self._product(depth)
        while (operator := self._peek()) in ("+", "-"):
            self._at += 1
            term = self._product(depth)
            value = value + term if operator == "+" else value - term
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._atom(depth)
        while (operator := self._peek()) in ("*", "/"):
            self._at += 1
            factor = self._atom(depth)
            if operator == "/" and factor == 0:
                raise IllegalExpression("division by zero")
            value = value * factor if operator == "*" else value / factor
        return value

    def _atom(self, depth: int) -> Fraction:
        if self._peek() == "(":
            self._at += 1
            value = self._sum(depth + 1)
            if self._peek() != ")":
                raise IllegalExpression(f"no ')' at {self._at}")
            self._at += 1
            return value
        start = self._at
        while self._text[self._at : self._at + 1] in _DIGITS:
            self._at += 1
        if start == self._at:
            raise IllegalExpression(f"no number at {start}")
        number = int(self._text[start : self._at])
        self._numbers.append(number)
        return Fraction(number)


def _draw_expression(numbers: tuple[int, ...], operators: str, rng: Random) -> tuple[str, Fraction]:
    """An expression over all the numbers, joined two at a time in a drawn order."""
    parts = [(str(number), Fraction(number), "") for number in numbers]
    while len(parts) > 1:
        left = parts.pop(int(rng.random() * len(parts)))
        right = parts.pop(int(rng.random() * len(parts)))
        operator = operators[int(rng.random() * len(operators))]
        if operator == "/" and right[1] == 0:
            operator = "*"
        parts.append(_join(left, operator, right))
    return parts[0][0], parts[0][1]


def _join(
    left: tuple[str, Fraction, str], operator: str, right: tuple[str, Fraction, str]
) -> tuple[str, Fraction, str]:
    """`left operator right` with only the brackets it needs; parts are (text, value, operator)."""
    binds = operator in "*/"
    left_text = f"({left[0]})" if binds and left[2] in ("+", "-") else left[0]
    loose = (binds and right[2] != "") or (operator == "-" and right[2] in ("+", "-"))
    right_text = f"({right[0]})" if loose else right[0]
    match operator:
        case "+":
            value = left[1] + right[1]
        case "-":
            value = left[1] - right[1]
        case "*":
            value = left[1] * right[1]
        case _:
            value = left[1] / right[1]
    return f"{left_text}{operator}{right_text}", value, operator


def _item(index: int, puzzle: Puzzle) -> Item:
    given = " ".join(map(str, puzzle.numbers))
    return Item(index=index, prompt=f"{given} -> {puzzle.target}:", answer=puzzle)


def _score(reward: float, *, parsed: bool, valid: bool, exact: bool) -> Score:
    return Score(
        reward=reward,
        metrics={"parsed": float(parsed), "valid": float(valid), "exact": float(exact)},
    )
