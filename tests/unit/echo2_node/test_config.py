"""A run file: typos name the nearest key, wrong values their path, and relations are checked."""

import msgspec
import pytest

from echo2_mesh.errors import UsageError
from echo2_node.config import ActorConfig, RunConfig, convert, dump, load_run

LEAST = '[model]\npath = "/models/tiny"\n[task]\nid = "sort_digits"\n'


@pytest.fixture
def load(tmp_path):
    def load_text(text=LEAST, *overrides):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return load_run(path, overrides)

    return load_text


def test_the_least_file_takes_every_default(load):
    config = load()
    assert config.model.path == "/models/tiny"
    assert (config.rollout.group_size, config.staleness.limit_steps) == (8, 3)


@pytest.mark.parametrize(
    ("text", "wrong", "near"),
    [
        ("[lerner]\nlr = 1.0\n", "'lerner'", "'learner'"),
        (
            "[learner]\nlr_warmup_step = 1\n",
            "'learner.lr_warmup_step'",
            "'learner.lr_warmup_steps'",
        ),
        ("[staleness]\nlimit = 1\n", "'staleness.limit'", "'staleness.limit_steps'"),
        ("[mesh]\nbootstraps = []\n", "'mesh.bootstraps'", "'mesh.bootstrap'"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_known_one(load, text, wrong, near):
    with pytest.raises(UsageError) as caught:
        load(LEAST + text)
    assert wrong in caught.value.what
    assert near in caught.value.hint


def test_a_key_like_no_other_lists_the_known_ones(load):
    with pytest.raises(UsageError, match="Known here: name, seed, steps"):
        load(LEAST + "[run]\nqqqqqq = 1\n")


def test_arguments_of_the_task_are_free(load):
    assert load(LEAST + "[task.args]\ndigits = 4\n").task.args == {"digits": 4}


@pytest.mark.parametrize(
    ("override", "at"),
    [
        ("rollout.group_size=1", "rollout.group_size: expected `int` >= 2"),
        ("rollout.temperature=0.0", "rollout.temperature"),
        ("learner.lr=nan", "learner.lr"),
        ("learner.lr=inf", "learner.lr"),
        ("learner.lr=fast", "learner.lr: expected `float`, got `str`"),
        ("learner.loss_args.cap=nan", "learner.loss_args"),
        ("learner.device=tpu", "learner.device"),
        ("staleness.publish_every_steps=0", "staleness.publish_every_steps"),
        ("run.steps=1.5", "run.steps"),
        ("run.name=Big Run", "run.name"),
        ("model=5", "model: expected `object`, got `int`"),
        ("mesh.listen=/ip4/0.0.0.0/tcp/0", "mesh.listen"),
        ("run.seed=9007199254740993", "run.seed"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(load, override, at):
    with pytest.raises(UsageError) as caught:
        load(LEAST, override)
    assert at in caught.value.what


def test_a_missing_section_is_named(load):
    with pytest.raises(UsageError, match="missing required field `task`"):
        load('[model]\npath = "x"\n')


@pytest.mark.parametrize("text", ["[model", "a = = 1", "\x00", "[model]\n[model]\n"])
def test_what_is_not_toml_is_said_so(load, text):
    with pytest.raises(UsageError, match="is not TOML"):
        load(text)


def test_bytes_that_are_not_text_are_not_toml(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not TOML"):
        load_run(tmp_path / "run.toml")


def test_a_missing_file_points_to_the_examples(tmp_path):
    with pytest.raises(UsageError, match="runs/"):
        load_run(tmp_path / "none.toml")


def test_overrides_win_over_the_file_and_speak_toml(load):
    config = load(
        LEAST + "[learner]\nlr = 1e-3\n",
        "learner.lr=1e-5",
        "run.name=night",
        'mesh.listen=["/ip4/0.0.0.0/tcp/0"]',
        "task.args.digits=3",
        "mesh.mdns=false",
    )
    assert (config.learner.lr, config.run.name, config.mesh.mdns) == (1e-5, "night", False)
    assert config.mesh.listen == ("/ip4/0.0.0.0/tcp/0",)
    assert config.task.args == {"digits": 3}


@pytest.mark.parametrize("override", ["", "lr", "=1", "learner.=1", ".lr=1", "model.path.x=1"])
def test_what_is_no_override_is_refused(load, override):
    with pytest.raises(UsageError, match=r"override|is a value, not a table"):
        load(LEAST, override)


def test_a_misspelt_override_names_the_nearest_key(load):
    with pytest.raises(UsageError, match=r"Did you mean 'rollout\.group_size'"):
        load(LEAST, "rollout.groupsize=4")


@pytest.mark.parametrize(
    ("limit", "kappa", "legal"), [(0, 1, True), (0, 2, False), (3, 4, True), (3, 5, False)]
)
def test_a_version_must_be_published_before_all_rollouts_are_stale(load, limit, kappa, legal):
    overrides = (f"staleness.limit_steps={limit}", f"staleness.publish_every_steps={kappa}")
    if legal:
        assert load(LEAST, *overrides).staleness.kappa_steps == kappa
    else:
        with pytest.raises(UsageError, match="publish_every_steps"):
            load(LEAST, *overrides)


@pytest.mark.parametrize(("limit", "kappa"), [(0, 1), (1, 1), (2, 1), (3, 2), (11, 10)])
def test_the_papers_publication_period(load, limit, kappa):
    overrides = (f"staleness.limit_steps={limit}", "staleness.publish_every_steps=paper")
    assert load(LEAST, *overrides).staleness.kappa_steps == kappa


def test_a_store_too_small_for_a_chunk_is_refused(load):
    with pytest.raises(UsageError, match="store_quota_bytes"):
        load(LEAST, "mesh.store_quota_bytes=1000")


def test_a_models_path_is_taken_from_the_run_file_where_it_lies_beside_it(load, tmp_path):
    (tmp_path / "tiny-model-here").mkdir()
    text = LEAST.replace("/models/tiny", "tiny-model-here")
    assert load(text).model.path == str(tmp_path / "tiny-model-here")


def test_what_is_dumped_can_be_loaded(load):
    config = load(LEAST, "learner.lr=3e-4", "staleness.publish_every_steps=paper")
    assert load(dump(config)) == config


def test_a_configuration_cannot_be_changed():
    config = msgspec.convert({"model": {"path": "x"}, "task": {"id": "y"}}, RunConfig)
    with pytest.raises(AttributeError):
        config.run.seed = 5


def test_an_actors_settings_are_checked_the_same_way():
    assert convert({"drain_s": 1.5}, ActorConfig, where="join").drain_s == 1.5
    with pytest.raises(UsageError, match=r"join: there is no setting 'drains'"):
        convert({"drains": 1.5}, ActorConfig, where="join")
