"""One run that loses everything in turn: an engine, an actor, its learner three times; it ends.

The story runs once for the module; each test looks at one chapter of what it left behind. Engines
are fakes but for one: the loop, its processes and its books are the subject.
"""

import contextlib
import os
from types import SimpleNamespace

import psutil
import pytest

from tests.e2e.world import open_world

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LIMIT_STEPS = 2
STEPS_AT_THE_END = 40
TRAINER, ENGINE = "echo2_node.learner.trainer", "echo2_node.engines.worker"
SLOW = {"step_s": 0.3}


def accepted_of(learner, actor):
    """What the learner recorded of an actor: rollouts admitted."""
    return learner.query(
        "SELECT count(*) FROM submissions WHERE actor = ? AND verdict = 'admitted'", actor.node
    )[0][0]


def published_of(learner):
    return [row[0] for row in learner.query("SELECT version FROM published ORDER BY rowid")]


def await_work(world, learner, actor):
    """The learner admits something new of `actor`."""
    world.until(actor.status, f"a status of {actor.name}", alive=(actor,))
    before = accepted_of(learner, actor) if learner.query("SELECT 1 FROM submissions") else 0
    world.until(
        lambda: learner.query("SELECT 1 FROM submissions") and accepted_of(learner, actor) > before,
        f"rollouts of {actor.name}",
        alive=(learner, actor),
    )


def kill_an_engine(world, learner, actor):
    """SIGKILL the engine child of `actor`; its daemon starts another."""
    engine = world.until(lambda: actor.child(ENGINE), "an engine")
    engine.kill()
    other = world.until(
        lambda: (now := actor.child(ENGINE)) and now.pid != engine.pid and now,
        "another engine",
        alive=(actor,),
    )
    await_work(world, learner, actor)
    return engine.pid, other.pid


def kill_an_actor(world, learner, actor):
    """SIGKILL an actor while it holds leases none of whose rollouts came; the learner ends them."""
    held = world.until(
        lambda: learner.query(
            "SELECT lease_id FROM leases WHERE actor = ? AND lease_id NOT IN "
            "(SELECT lease_id FROM lease_ends UNION SELECT lease_id FROM submissions)",
            actor.node,
        ),
        f"leases of {actor.name}",
        alive=(learner, actor),
    )
    actor.kill()
    return [lease for (lease,) in held]


def kill_in_a_step(world, learner):
    """SIGKILL the learner in the middle of an optimizer step: its trainer stands still."""
    trainer = world.until(lambda: learner.child(TRAINER), "a trainer")
    trainer.suspend()
    world.until(lambda: learner.status().get("state") in ("training", "publishing"), "a step")
    learner.kill()
    world.until(lambda: is_gone(trainer.pid), "the end of a dead learner's trainer")


def kill_after_a_publication(world, learner):
    """SIGKILL the learner at the moment a new version is in its books."""
    before = len(published_of(learner))
    world.until(
        lambda: len(published_of(learner)) > before, "a version", poll_s=0.001, alive=(learner,)
    )
    learner.kill()


def kill_in_a_checkpoint(world, learner):
    """SIGKILL the learner while a checkpoint is being written (or has just been)."""
    folder = learner.state_dir / "checkpoints"
    before = set(os.listdir(folder))
    world.until(
        lambda: set(os.listdir(folder)) - before, "a checkpoint", poll_s=0.001, alive=(learner,)
    )
    learner.kill()


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    with open_world(tmp_path_factory.mktemp("loop")) as world:
        learner = world.learn(run={"steps": 100_000}, staleness={"limit_steps": LIMIT_STEPS})
        # The learner goes on without anybody's help: these two must find it again each time.
        real = world.join(learner, "real", engine="torch", options=["--drain-s", "5"])
        dialler = world.join(learner, "dialler", listen="")
        tale = SimpleNamespace(world=world, real=real, dialler=dialler)
        for actor in (real, dialler):
            await_work(world, learner, actor)
        tale.killed_engine, tale.new_engine = kill_an_engine(world, learner, dialler)

        late = world.join(learner, "late", fake=SLOW)
        await_work(world, learner, late)
        tale.late, tale.late_id = late, late.node
        tale.orphaned = kill_an_actor(world, learner, late)
        marks = ", ".join("?" * len(tale.orphaned))
        world.until(
            lambda: (
                len(
                    learner.query(
                        f"SELECT 1 FROM lease_ends WHERE lease_id IN ({marks})", *tale.orphaned
                    )
                )
                == len(tale.orphaned)
            ),
            "the end of a dead actor's leases",
            alive=(learner,),
        )

        tale.kills, tale.ports, overrides = [], [port_of(learner)], ()
        for kill in (kill_after_a_publication, kill_in_a_checkpoint, kill_in_a_step):
            kill(world, learner)
            steps, versions = learner.step(), published_of(learner)
            if kill is kill_in_a_step:
                tale.last_step = steps + STEPS_AT_THE_END
                overrides = (f"run.steps={tale.last_step}",)
            learner = tale.learner = world.learn(*overrides, resume=True)
            tale.kills.append(SimpleNamespace(name=kill.__name__, steps=steps, versions=versions))
            tale.ports.append(port_of(learner))
            await_work(world, learner, dialler)

        await_work(world, learner, real)
        real.terminate()
        tale.real_exit = real.wait_exit()
        tale.real_standing = world.until(
            lambda: standing_of(learner, real.node) != "up" and standing_of(learner, real.node),
            "a goodbye",
            timeout_s=5,
        )
        tale.learner_exit = learner.wait_exit(150)
        tale.dialler_exit = dialler.wait_exit()
        tale.books = world.verify(learner)
        yield tale


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def port_of(learner):
    """The port the learner listens on now, by the system's table."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.Process(learner.pid).net_connections(kind="tcp4"):
            if connection.status == psutil.CONN_LISTEN:
                return connection.laddr.port
    return None


def standing_of(learner, node):
    rows = [row for row in learner.status().get("members", ()) if row["node"] == node]
    return rows[0]["standing"] if rows else "gone"


def test_the_run_ends_well_and_its_books_add_up(story):
    assert story.learner_exit == 0, story.learner.last_words()
    assert story.books["ok"]
    assert story.books["steps"] == story.last_step
    assert story.learner.status()["state"] == "ended"


def test_nothing_was_trained_beyond_the_staleness_limit(story):
    assert story.books["consumed"] > 0
    assert story.books["staleness_steps_max"] <= LIMIT_STEPS
    oldest = [max(map(int, line["staleness_steps"])) for line in story.learner.metrics()]
    assert max(oldest) <= LIMIT_STEPS


def test_every_actor_contributed_and_the_late_one_too(story):
    accepted = {row["actor"]: row["consumed"] for row in story.books["actors"]}
    assert accepted[story.real.node] > 0
    assert accepted[story.dialler.node] > 0
    assert story.late_id in accepted


def test_a_killed_learner_resumes_on_another_port_and_its_actors_find_it(story):
    assert len({port for port in story.ports if port is not None}) > 1
    assert len(story.kills) == 3
    # That its trainer did not outlive it was waited for by the story itself.
    # So was work of the dialler after every resume, and of the other after the last.
    for actor in (story.real, story.dialler):
        assert "Traceback" not in actor.text()


def test_a_resumed_learner_never_reuses_a_version_number(story):
    published = published_of(story.learner)
    assert len(published) == len(set(published))
    assert published == sorted(published)
    for kill in story.kills:
        assert published[: len(kill.versions)] == kill.versions, "history is kept"
    spans = story.learner.query(
        "SELECT version_before, count(*) FROM steps WHERE undone = 0 GROUP BY 1 HAVING count(*) > 1"
    )
    assert spans == [], "two surviving steps started from one version"


def test_steps_after_the_last_checkpoint_were_undone_and_done_again(story):
    assert story.books["resumes"] == len(story.kills)
    assert story.books["steps_undone"] > 0
    twice = story.learner.query(
        "SELECT group_id, count(*) FROM consumption WHERE undone = 0 GROUP BY 1 HAVING count(*) > 1"
    )
    assert twice == []


def test_leases_of_a_killed_actor_are_ended_and_its_groups_offered_again(story):
    assert story.orphaned
    marks = ", ".join("?" * len(story.orphaned))
    ends = dict(
        story.learner.query(
            f"SELECT lease_id, how FROM lease_ends WHERE lease_id IN ({marks})", *story.orphaned
        )
    )
    assert set(ends) == set(story.orphaned)
    lost = [lease for lease, how in ends.items() if how in ("actor_gone", "expired")]
    assert lost
    again = story.learner.query(
        "SELECT count(*) FROM leases AS later JOIN leases AS first USING (group_id) "
        f"WHERE first.lease_id IN ({', '.join('?' * len(lost))}) "
        "AND later.actor != first.actor",
        *lost,
    )
    assert again[0][0] > 0


def test_a_killed_engine_is_replaced_and_the_daemon_lives(story):
    assert story.new_engine != story.killed_engine
    assert "engine died" in story.dialler.text()


def test_an_actor_told_to_leave_hands_back_says_goodbye_and_exits_0(story):
    assert story.real_exit == 0, story.real.last_words()
    assert story.real_standing == "gone"
    open_leases = story.learner.query(
        "SELECT count(*) FROM leases WHERE actor = ? AND lease_id NOT IN "
        "(SELECT lease_id FROM lease_ends)",
        story.real.node,
    )
    assert open_leases == [(0,)]
    # A killed learner may have granted what nobody ever heard; after its last return, no more.
    ways = dict(
        story.learner.query(
            "SELECT how, count(*) FROM lease_ends JOIN leases USING (lease_id) WHERE actor = ? "
            "AND granted_unix_ms > (SELECT resumed_unix_ms FROM resumes WHERE resume = 3) "
            "GROUP BY 1",
            story.real.node,
        )
    )
    assert set(ways) <= {"completed", "returned", "group_dropped"}, f"orphaned leases: {ways}"


def test_an_actor_leaves_by_itself_when_the_run_has_ended(story):
    assert story.dialler_exit == 0, story.dialler.last_words()
    assert "run ended" in story.dialler.text()


def test_nothing_of_the_run_is_left_running(story):
    names = str(story.world.folder)
    left = []
    for process in psutil.process_iter(["cmdline", "status"]):
        zombie = process.info["status"] == psutil.STATUS_ZOMBIE
        if not zombie and any(names in word for word in process.info["cmdline"] or ()):
            left.append(process.info["cmdline"])
    assert left == []
