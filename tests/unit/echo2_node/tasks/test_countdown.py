from fractions import Fraction
from random import Random

import pytest

from echo2_node.tasks.countdown import IllegalExpression, Puzzle, evaluate
from echo2_node.tasks.protocol import Item
from echo2_node.tasks.registry import make_task

TASK = make_task("countdown", {})
ITEM = Item(
    index=0, prompt="3 5 7 -> 22:", answer=Puzzle(numbers=(3, 5, 7), target=22, solution="3*5+7")
)


def test_items_are_the_same_on_every_host():
    """Golden: a change here is a change of the task and raises its version."""
    assert [TASK.item(0, index).prompt for index in range(3)] == [
        "1 1 5 -> 10:",
        "9 5 2 -> 63:",
        "7 1 5 -> 12:",
    ]


@pytest.mark.parametrize(
    ("completion", "reward", "valid"),
    [
        ("3*5+7", 1.0, 1.0),
        (" ( 7 + 5*3 ) ", 1.0, 1.0),
        ("7*3+1", 0.0, 0.0),
        ("3*5+7*1", 0.0, 0.0),
        ("3+5+7", 0.1, 1.0),
        ("7", 0.1, 1.0),
        ("3*5+7+3-3", 0.0, 0.0),
        ("22", 0.0, 0.0),
        ("3*5+7=22", 0.0, 0.0),
        ("-3", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("3**5", 0.0, 0.0),
        ("٣*5+7", 0.0, 0.0),
        ("__import__('os')", 0.0, 0.0),
    ],
)
def test_the_reward_grades_format_and_value(completion, reward, valid):
    score = TASK.score(ITEM, completion, finished=True)
    assert (score.reward, score.metrics["valid"]) == (reward, valid)


def test_an_answer_that_was_cut_off_earns_nothing():
    assert TASK.score(ITEM, "3*5+7", finished=False).reward == 0.0


def test_shaping_pays_for_nearness_and_never_more_than_the_target():
    task = make_task("countdown", {"shaping": 0.8})
    near, far, wild = (
        task.score(ITEM, text, finished=True).reward for text in ("3*7", "3", "7*5*3")
    )
    assert 0.1 == wild < far < near < 1.0
    assert near == pytest.approx(0.1 + 0.8 * 21 / 22)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("1-2-3", -4),
        ("8/4/2", 1),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("1/3+1/6", Fraction(1, 2)),
        ("((((7))))", 7),
        ("8/(3-8/3)", 24),
        ("007", 7),
    ],
)
def test_expressions_have_their_exact_value(text, value):
    assert evaluate(text)[0] == value


@pytest.mark.parametrize(
    "text",
    [
        "1/0",
        "1/(2-2)",
        "(1",
        "1)",
        "()",
        "1 2",
        "+1",
        "1+",
        "1.5",
        "1e3",
        "²",
        "(" * 300,
        "(" * 17 + "1" + ")" * 17,
        "1+" * 200 + "1",
        "1\n+2",
    ],
)
def test_what_is_not_an_expression_is_refused(text):
    with pytest.raises(IllegalExpression):
        evaluate(text)


def test_wrong_demonstrations_are_legal_expressions():
    rng = Random(0)
    for index in range(100):
        item = TASK.item(0, index)
        score = TASK.score(item, TASK.demonstration(item, rng, skill=0.0), finished=True)
        assert score.metrics == {"parsed": 1.0, "valid": 1.0, "exact": 0.0}


def test_everything_said_is_in_the_alphabet():
    task = make_task("countdown", {"operators": "+-*/"})
    alphabet = set(task.alphabet())
    rng = Random(0)
    for index in range(100):
        item = task.item(3, index)
        assert set(item.prompt + task.demonstration(item, rng, skill=0.5)) <= alphabet
