"""What a person or a disk gets wrong: one paragraph, the documented exit code, no traceback.

Each case is a real `echo2-node`. Where torch is not needed to know better, importing it fails:
a folder on PYTHONPATH holds a `torch` that refuses. Exit codes: 2 the person's, 3 this host's.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from echo2_mesh.identity import Identity
from echo2_mesh.wire.ticket import RunTicket, write_ticket
from tests.e2e.world import open_world, run_cli, write_run, write_small_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PERSON, HOST = 2, 3
PARAGRAPH_LINES_MAX = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """An environment in which nobody gets far who imports torch or transformers."""
    folder = tmp_path_factory.mktemp("light")
    for name in ("torch", "transformers"):
        (folder / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')\n")
    return {"PYTHONPATH": str(folder)}


@pytest.fixture
def run_file(tmp_path, model):
    return write_run(tmp_path / "run.toml", model)


def told(done, code, *words):
    """Asserts that `done` ended with `code` and one paragraph that has every one of `words`."""
    said = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    text = "\n".join(said)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert said[0].startswith("error: "), text
    assert len(said) <= PARAGRAPH_LINES_MAX, text
    assert len(said) >= 2, f"it does not say what to do: {text}"
    for word in words:
        assert str(word) in text, text


def learn(run_file, *arguments, environment=None):
    state_dir = run_file.parent / "state"
    return run_cli("learn", run_file, *arguments, "--state-dir", state_dir, environment=environment)


def ticket_for(**fields):
    values = {
        "run_id": "sort-0a1b2c3d",
        "learner": Identity.generate().node,
        "addresses": ("/ip4/127.0.0.1/tcp/9",),
    }
    return write_ticket(RunTicket(**{**values, **fields}))


def join(tmp_path, *arguments, environment=None):
    return run_cli(
        "join", *arguments, "--state-dir", tmp_path / "actor", "--no-mdns", environment=environment
    )


# --- the run file ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.id=sort_digit", ("sort_digit", "sort_digits")),
        ("learner.loss=gropo", ("gropo", "grpo")),
        ("learner.loss_args.clip_hihg=0.2", ("clip_hihg",)),
        ("task.args.digitss=3", ("digitss",)),
        ("rollout.group_size=1", ("rollout.group_size", "2")),
        ("staleness.publish_every_steps=9", ("publish_every_steps", "limit_steps")),
        ("learner.lr=fast", ("learner.lr", "float")),
        ("learner.lerning_rate=1", ("learner.lerning_rate",)),
        ("rollout.group_sise=4", ("rollout.group_sise", "group_size")),
        ("mesh.listen=['/ip4/127.0.0.1/udp/4']", ("/ip4/127.0.0.1/udp/4",)),
        ("mesh.bootstrap=['/ip4/127.0.0.1/tcp/4']", ("/ip4/127.0.0.1/tcp/4",)),
        ("run.name=Sort It", ("run.name",)),
        ("lr", ("'lr'", "learner.lr=1e-5")),
    ],
    ids=lambda value: value.partition("=")[0] if isinstance(value, str) else "",
)
def test_a_wrong_setting_is_named_with_what_is_right(run_file, light, override, words):
    told(learn(run_file, override, environment=light), PERSON, *words)
    assert not (run_file.parent / "state" / "ledger.sqlite").exists(), "it stands in nobody's way"


def test_a_file_that_is_not_toml_is_told_with_its_line(tmp_path, light):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[task\n')
    told(learn(path, environment=light), PERSON, path, "line 3")
    told(learn(tmp_path / "nowhere.toml", environment=light), PERSON, "nowhere.toml")


# --- the model ---------------------------------------------------------------------------------


def test_a_missing_model_folder_is_named(run_file, light):
    told(learn(run_file, "model.path=/nowhere/qwen", environment=light), PERSON, "/nowhere/qwen")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_file_that_is_missing_is_named(tmp_path, model, light, name):
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / name).unlink()
    run_file = write_run(tmp_path / "run.toml", broken)
    told(learn(run_file, environment=light), PERSON, broken, name)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_file_that_was_cut_off_is_named(tmp_path, model, light, name):
    broken = shutil.copytree(model, tmp_path / "broken")
    whole = (broken / name).read_bytes()
    (broken / name).write_bytes(whole[: len(whole) // 2])
    run_file = write_run(tmp_path / "run.toml", broken)
    told(learn(run_file, environment=light), PERSON, broken / name)


def test_a_tokenizer_that_lacks_the_tasks_letters_is_told_before_anything_starts(tmp_path, light):
    letters = write_small_model(tmp_path / "letters", alphabet="abc")
    run_file = write_run(tmp_path / "run.toml", letters)
    told(learn(run_file, environment=light), PERSON, "tokenizer")


# --- the state folder --------------------------------------------------------------------------


def test_a_key_that_others_can_read_is_refused(tmp_path, run_file, light):
    for name in ("state", "actor"):
        Identity.generate().save(tmp_path / name / "key")
        (tmp_path / name / "key").chmod(0o644)
    told(learn(run_file, environment=light), HOST, "chmod 600", tmp_path / "state" / "key")
    told(join(tmp_path, ticket_for(), environment=light), HOST, "chmod 600")


def test_resuming_where_nothing_ran_is_refused(run_file, light):
    told(learn(run_file, "--resume", environment=light), PERSON, "no run to resume")


def test_a_second_run_does_not_overwrite_the_first(run_file, light):
    from echo2_node.learner.ledger import Ledger

    Ledger.open(run_file.parent / "state" / "ledger.sqlite").close()
    told(learn(run_file, environment=light), PERSON, "already a run", "--resume")


def test_a_ledger_that_is_damaged_is_told(run_file, light):
    path = run_file.parent / "state" / "ledger.sqlite"
    path.parent.mkdir()
    path.write_bytes(b"not a database, by no means" * 100)
    told(learn(run_file, "--resume", environment=light), HOST, "ledger.sqlite")
    told(run_cli("ledger", "verify", path.parent, environment=light), HOST, "ledger.sqlite")


def test_a_state_folder_that_cannot_be_one_is_told(tmp_path, run_file, light):
    (tmp_path / "state").write_text("a file")
    told(learn(run_file, environment=light), HOST, "--state-dir")


# --- the network -------------------------------------------------------------------------------


def test_a_port_in_use_is_named(tmp_path, run_file, light):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{port}"
        told(learn(run_file, f"mesh.listen=['{address}']", environment=light), HOST, port)
        told(join(tmp_path, ticket_for(), "--listen", address, environment=light), HOST, port)
    # Nothing happened yet, so the same command is enough once the port is free.
    told(learn(run_file, "--resume", environment=light), PERSON, "no run to resume")


def damaged():
    word = ticket_for()
    return word[:30] + ("a" if word[30] != "a" else "b") + word[31:]


@pytest.mark.parametrize(
    ("word", "words"),
    [
        (damaged, ("damaged",)),
        (lambda: ticket_for()[:-9], ("damaged",)),
        (lambda: ticket_for(expires_unix_s=int(time.time()) - 7200), ("expired", "2.0 hours")),
        (lambda: ticket_for().replace("echo2v1x", "echo2v7x"), ("network version 7",)),
        (lambda: "hello", ("not an Echo-2 ticket",)),
        (lambda: "/nowhere/ticket.txt", ("/nowhere/ticket.txt",)),
    ],
    ids=["damaged", "cut", "expired", "version", "prose", "file"],
)
def test_a_ticket_that_cannot_be_used_is_told(tmp_path, light, word, words):
    told(join(tmp_path, word(), environment=light), PERSON, *words)
    assert not (tmp_path / "actor").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--engine", "vlm"), ("vlm", "vllm")),
        (("--device", "gpu"), ("device", "cuda")),
        (("--dtype", "fp8"), ("dtype",)),
        (("--sequences-max", "0"), ("sequences_max",)),
        (("--listen", "localhost:80"), ("localhost:80",)),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_an_option_of_join_that_does_not_exist_is_told_before_it_joins(
    tmp_path, light, options, words
):
    told(join(tmp_path, ticket_for(), *options, environment=light), PERSON, *words)


# --- full disks --------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int):
    """A tmpfs of `size_bytes` at `folder`."""
    folder.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "echo2-e2e", folder],
        check=True,
        capture_output=True,
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True)


@pytest.fixture
def disks():
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root and mount(8) for a small tmpfs")
    with contextlib.ExitStack() as stack:
        yield lambda folder, size_bytes: stack.enter_context(small_disk(folder, size_bytes))


def fill(folder):
    """Use up every byte of the disk; returns the file to delete afterwards."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.mark.root
def test_a_disk_too_small_for_the_first_version_is_told(tmp_path, run_file, disks):
    disks(tmp_path / "state", 128 * 1024)
    told(learn(run_file), HOST, tmp_path / "state")


@pytest.mark.root
@pytest.mark.parametrize(("part", "size_bytes"), [("chunks", 96 * 1024), ("checkpoints", 16384)])
def test_a_disk_that_fills_up_ends_the_run_which_can_be_resumed(tmp_path, disks, part, size_bytes):
    with open_world(tmp_path / "world") as world, contextlib.ExitStack() as stack:
        stack.enter_context(small_disk(world.folder / "learner" / part, size_bytes))
        learner = world.learn(
            run={"steps": 8},
            learner={"checkpoint_every_steps": 2},
            weights={"full_disk_wait_s": 2.0},
        )
        world.join(learner, "actor")
        assert learner.wait_exit(90) == HOST
        text = learner.text()
        assert "Traceback" not in text
        assert "error: " in text
        assert "Free" in text
        stack.close()
        learner = world.learn(resume=True)
        assert learner.wait_exit(90) == 0, learner.last_words()
        assert world.verify(learner)["steps"] == 8


@pytest.mark.root
def test_a_ledger_without_room_pauses_the_run_and_loses_nothing(tmp_path, disks):
    with open_world(tmp_path / "world") as world:
        state = disks(world.folder / "learner", 64 * 1024 * 1024)
        for name in ("chunks", "checkpoints"):
            (world.folder / f"learner-{name}").mkdir()
            (state / name).symlink_to(world.folder / f"learner-{name}")
        learner = world.learn("run.steps=40")
        actor = world.join(learner, "actor")
        world.until(lambda: learner.step() >= 2, "two steps", alive=(learner, actor))
        ballast = fill(state)
        world.until(
            lambda: "ledger cannot be written" in learner.text(), "a warning", alive=(learner,)
        )
        time.sleep(1.0)
        assert learner.process.poll() is None
        ballast.unlink()
        assert learner.wait_exit(90) == 0, learner.last_words()
        assert world.verify(learner)["steps"] == 40


@pytest.mark.root
def test_an_actor_without_room_says_so_waits_and_goes_on(tmp_path, disks):
    with open_world(tmp_path / "world") as world:
        state = disks(world.folder / "actor", 64 * 1024 * 1024)
        learner = world.learn(run={"steps": 100_000})
        other = world.join(learner, "other")
        Identity.generate().save(state / "key")
        ballast = fill(state)
        actor = world.join(learner, "actor")
        world.until(
            lambda: any("full" in row["last_error"] for row in learner.status()["members"]),
            "the learner to hear of a full disk",
            alive=(learner, actor, other),
        )
        ballast.unlink()
        world.until(
            lambda: any(
                row["name"] == "actor" and row["accepted"] > 0
                for row in learner.status().get("members", ())
            ),
            "rollouts of the actor",
            alive=(learner, actor, other),
        )
        fill(state)
        before = learner.step()
        world.until(lambda: learner.step() > before + 3, "more steps", alive=(learner, actor))
        assert "Traceback" not in actor.text()
