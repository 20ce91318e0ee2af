from random import Random

import pytest

from echo2_node.tasks.registry import make_task

TASK = make_task("sort_digits", {})


def test_items_are_the_same_on_every_host():
    """Golden: a change here is a change of the task and raises its version."""
    assert [TASK.item(0, index).prompt for index in range(3)] == ["626337=", "635106=", "324725="]
    assert TASK.item(1, 0).prompt != TASK.item(0, 0).prompt


@pytest.mark.parametrize(
    ("completion", "finished", "reward"),
    [
        ("012359", True, 1.0),
        ("012395", True, 4 / 6),
        ("910235", True, 1 / 6),
        ("012359", False, 0.0),
        ("0123599", True, 0.0),
        ("01235", True, 0.0),
        ("", True, 0.0),
        (" 012359", True, 0.0),
        ("٠١٢٣٥٩", True, 0.0),
    ],
)
def test_the_reward_is_the_share_of_right_positions(completion, finished, reward):
    item = TASK.item(0, 0)
    item = type(item)(index=0, prompt="925013=", answer="012359")
    score = TASK.score(item, completion, finished=finished)
    assert score.reward == pytest.approx(reward)
    assert score.metrics["exact"] == float(reward == 1.0)


def test_demonstrations_are_right_as_often_as_skill_says():
    rng = Random(0)
    items = [TASK.item(0, index) for index in range(1000)]
    rewards = [
        TASK.score(i, TASK.demonstration(i, rng, skill=0.3), finished=True).reward for i in items
    ]
    assert 0.25 < sum(reward == 1.0 for reward in rewards) / 1000 < 0.35


def test_a_wrong_demonstration_has_the_same_digits():
    rng = Random(0)
    for index in range(50):
        item = TASK.item(0, index)
        wrong = TASK.demonstration(item, rng, skill=0.0)
        assert sorted(wrong) == list(item.answer)
        assert wrong != item.answer


def test_where_all_digits_are_equal_the_answer_is_the_only_demonstration():
    task = make_task("sort_digits", {"digits": 1})
    item = task.item(0, 0)
    assert task.demonstration(item, Random(0), skill=0.0) == item.answer
