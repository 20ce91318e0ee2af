"""What every task promises, whatever its arguments and whatever a model writes."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2_node.tasks.countdown import evaluate
from echo2_node.tasks.registry import TASKS, make_task

ARGS = {
    "sort_digits": st.fixed_dictionaries({}, optional={"digits": st.integers(1, 32)}),
    "countdown": st.fixed_dictionaries(
        {},
        optional={
            "numbers": st.integers(2, 6),
            "number_max": st.integers(2, 999),
            "target_max": st.integers(10, 9999),
            "operators": st.text("+-*/", min_size=1, max_size=4),
            "shaping": st.floats(0.0, 0.8),
        },
    ),
}
ITEMS = st.tuples(st.integers(0, 2**53), st.integers(0, 2**53))
COMPLETIONS = st.text() | st.text("0123456789 +-*/()", max_size=40)
every_task = pytest.mark.parametrize("task_id", sorted(TASKS))


@every_task
def test_each_task_has_its_arguments_here(task_id):
    assert task_id in ARGS


@every_task
@given(data=st.data(), at=ITEMS)
def test_the_right_answer_scores_one(task_id, data, at):
    task = make_task(task_id, data.draw(ARGS[task_id]))
    item = task.item(*at)
    answer = task.demonstration(item, Random(0), skill=1.0)
    assert task.score(item, answer, finished=True).reward == 1.0


@every_task
@given(data=st.data(), at=ITEMS, completion=COMPLETIONS, finished=st.booleans())
def test_any_text_scores_between_zero_and_one(task_id, data, at, completion, finished):
    task = make_task(task_id, data.draw(ARGS[task_id]))
    score = task.score(task.item(*at), completion, finished=finished)
    assert 0.0 <= score.reward <= 1.0
    assert all(math.isfinite(value) for value in score.metrics.values())


@every_task
@given(data=st.data(), at=ITEMS)
def test_an_item_depends_on_seed_index_and_arguments_alone(task_id, data, at):
    args = data.draw(ARGS[task_id])
    assert make_task(task_id, args).item(*at) == make_task(task_id, args).item(*at)


@every_task
@given(data=st.data(), at=ITEMS, seed=st.integers(), skill=st.floats(0.0, 1.0))
def test_prompts_and_demonstrations_stay_in_the_alphabet(task_id, data, at, seed, skill):
    task = make_task(task_id, data.draw(ARGS[task_id]))
    item = task.item(*at)
    said = item.prompt + task.demonstration(item, Random(seed), skill=skill)
    assert set(said) <= set(task.alphabet())


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({''.join(t)})"),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_the_evaluator_agrees_with_pythons_on_rational_numbers(text):
    import re
    from fractions import Fraction

    exact = re.sub(r"\d+", lambda number: f"Fraction({number[0]})", text)
    try:
        expected = eval(exact, {"Fraction": Fraction})  # our own text, made above
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="division by zero"):
            evaluate(text)
    else:
        assert evaluate(text)[0] == expected
