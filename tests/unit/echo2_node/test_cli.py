import inspect
import json
import os
import stat
import subprocess
import sys
import time

import pytest

from echo2_mesh.errors import PeerError
from echo2_mesh.identity import Identity
from echo2_mesh.wire.ticket import RunTicket, write_ticket
from echo2_node import cli, foreground
from echo2_node.config import ActorConfig
from echo2_node.status import Snapshot, write_snapshot


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHO2_STATE_BASE", str(tmp_path / "state"))
    monkeypatch.delenv("ECHO2_STATE_DIR", raising=False)
    monkeypatch.delenv("ECHO2_TICKET", raising=False)
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process: (exit code, standard output, standard error)."""

    def call(*arguments):
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["echo2-node", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        written = capsys.readouterr()
        return code, written.out, written.err

    return call


def make_ticket(**fields):
    learner = Identity.generate().node
    values = {"run_id": "sort-0a1b2c3d", "learner": learner, "addresses": ()}
    return RunTicket(**{**values, **fields})


def put_status(folder, **fields):
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time_ns() // 1_000_000
    values = {
        "role": "learner",
        "node": "12D3KooWabcdefgh",
        "run_id": f"{folder.name}-0a1b2c3d",
        "state": "training",
        "pid": os.getpid(),
        "updated_unix_ms": now,
        "started_unix_ms": now,
    }
    write_snapshot(folder / "status.json", Snapshot(**{**values, **fields}))


def test_version_names_program_and_network(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("echo2-node ")
    assert "network version 1" in out


def test_a_mistyped_command_is_answered_with_the_nearest_one(run):
    code, _, err = run("statsu")
    assert code == 2
    assert "status" in err


def test_every_option_of_an_actor_can_be_given_to_join():
    options = set(inspect.signature(cli.join).parameters)
    assert set(ActorConfig.__struct_fields__) <= options
    defaults = ActorConfig()
    for name, parameter in inspect.signature(cli.join).parameters.items():
        if name in ActorConfig.__struct_fields__ and parameter.default is not None:
            assert parameter.default == getattr(defaults, name), name


def test_join_hands_the_options_and_the_ticket_to_the_actor(run, base, monkeypatch):
    seen = []

    def join(config, ticket, *, state_dir, verbose):
        seen.append((config, ticket, state_dir))
        return "stopped"

    monkeypatch.setattr(foreground, "join_in_foreground", join)
    ticket = make_ticket()
    code, _, err = run(
        "join",
        write_ticket(ticket),
        "--name",
        "den",
        "--threads",
        2,
        "--no-mdns",
        "--listen",
        "",
        "--announce",
        "/ip4/10.0.0.1/tcp/1",
    )
    assert code == 0, err
    ((config, invitation, folder),) = seen
    assert invitation == ticket
    assert (config.name, config.threads, config.mdns) == ("den", 2, False)
    assert config.listen == ()
    assert config.announce == ("/ip4/10.0.0.1/tcp/1",)
    assert folder == base / "actor-sort-0a1b2c3d-den"
    assert "stopped" in err


def test_join_reads_a_ticket_from_a_file(run, base, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(
        foreground, "join_in_foreground", lambda config, ticket, **_: seen.append(ticket) or "ok"
    )
    path = tmp_path / "ticket.txt"
    path.write_text(write_ticket(make_ticket()) + "\n")
    assert run("join", path)[0] == 0
    assert seen[0].run_id == "sort-0a1b2c3d"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", "not an Echo-2 ticket"),
        ("echo2v9xabcdef", "network version 9"),
        ("damaged", "damaged"),
        ("expired", "expired"),
        ("/nowhere/ticket.txt", "cannot be read"),
    ],
)
def test_a_bad_ticket_is_one_paragraph_and_exit_code_2(run, base, text, words):
    if text == "damaged":
        text = write_ticket(make_ticket())
        text = text[:-1] + ("a" if text[-1] != "a" else "b")
    if text == "expired":
        text = write_ticket(make_ticket(expires_unix_s=1_000_000))
    code, out, err = run("join", text)
    assert code == 2
    assert words in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 3
    assert out == ""


def test_an_option_out_of_bounds_is_told_by_its_name(run, base):
    code, _, err = run("join", write_ticket(make_ticket()), "--groups-in-flight-max", 0)
    assert code == 2
    assert "groups_in_flight_max" in err


def test_an_error_of_a_peer_has_its_own_exit_code(run, base, monkeypatch):
    def join(*_, **__):
        raise PeerError("The learner refused this node.", "Ask for [new] ticket.")

    monkeypatch.setattr(foreground, "join_in_foreground", join)
    code, _, err = run("join", write_ticket(make_ticket()))
    assert code == 4
    assert "Ask for [new] ticket." in err


def test_learn_tells_a_typo_with_its_path(run, base, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[task]\nid = "sort_digits"\n[learner]\nlerning = 1\n')
    code, _, err = run("learn", path)
    assert code == 2
    assert "learner.lerning" in err


def test_learn_refuses_an_unknown_task_and_a_missing_model_before_it_starts(run, base, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "nowhere"\n[task]\nid = "sort_digits"\n')
    code, _, err = run("learn", path)
    assert code == 2
    assert "no model folder" in err
    code, _, err = run("learn", path, "task.id=sort_digit")
    assert code == 2
    assert "sort_digits" in err


def test_learn_hands_file_and_overrides_to_the_learner(run, base, tmp_path, monkeypatch):
    seen = []

    def learn(config, *, state_dir, resume, verbose):
        seen.append((config, state_dir, resume))
        return "all steps done"

    monkeypatch.setattr(foreground, "learn_in_foreground", learn)
    monkeypatch.setattr(cli, "_check_names", lambda config, *, dry_run: None)
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "sorting"\n[model]\npath = "m"\n[task]\nid = "sort_digits"\n')
    code, _, err = run("learn", path, "run.steps=7", "learner.lr=1e-5", "--resume")
    assert code == 0, err
    ((config, folder, resume),) = seen
    assert (config.run.steps, config.learner.lr) == (7, 1e-5)
    assert folder == base / "sorting"
    assert resume
    assert "all steps done" in err


def test_a_stopped_learner_says_how_to_go_on(run, base, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "_check_names", lambda *_, **__: None)
    monkeypatch.setattr(foreground, "learn_in_foreground", lambda *_, **__: "stopped")
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[task]\nid = "sort_digits"\n')
    code, _, err = run("learn", path)
    assert code == 0
    assert "--resume" in err


def test_a_dry_run_prints_every_setting_and_starts_nothing(run, base, tmp_path, monkeypatch):
    monkeypatch.setattr(foreground, "learn_in_foreground", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(cli, "_check_names", lambda config, *, dry_run: None)
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[task]\nid = "sort_digits"\n')
    code, out, _ = run("learn", path, "staleness.limit_steps=5", "--dry-run")
    assert code == 0
    import tomllib

    assert tomllib.loads(out)["staleness"]["limit_steps"] == 5
    assert list(base.iterdir()) == []


def test_keys_new_writes_a_private_file_once_and_never_prints_it(run, base):
    code, out, _ = run("keys", "new")
    assert code == 0
    path = base / "key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load(path).node in out
    assert path.read_text().strip() not in out
    code, _, err = run("keys", "new")
    assert code == 2
    assert "already a key" in err


def test_keys_show_lists_every_node_of_this_user(run, base):
    Identity.generate().save(base / "sorting" / "key")
    code, out, _ = run("keys", "show")
    assert code == 0
    assert Identity.load(base / "sorting" / "key").node in out
    code, out, _ = run("keys", "show", "--state-dir", base / "sorting")
    assert code == 0
    assert Identity.load(base / "sorting" / "key").node in out


def test_a_key_that_others_can_read_is_refused_with_the_remedy(run, base):
    path = base / "sorting" / "key"
    Identity.generate().save(path)
    path.chmod(0o644)
    code, _, err = run("keys", "show")
    assert code == 3
    assert "chmod 600" in err


def test_ticket_prints_the_word_alone(run, base):
    put_status(base / "sorting")
    (base / "sorting" / "ticket.txt").write_text("echo2v1xabc\n")
    assert run("ticket")[:2] == (0, "echo2v1xabc\n")
    assert run("ticket", "sorting")[:2] == (0, "echo2v1xabc\n")
    (base / "sorting" / "ticket.txt").unlink()
    code, _, err = run("ticket")
    assert code == 2
    assert "no ticket" in err


def test_status_without_any_node_says_how_to_start_one(run, base):
    code, out, _ = run("status")
    assert code == 0
    assert "echo2-node learn" in out


def test_status_json_is_one_document_with_what_became_of_each_process(run, base):
    put_status(base / "sorting", step=3)
    code, out, _ = run("status", "--json")
    assert code == 0
    (node,) = json.loads(out)["nodes"]
    assert (node["process"], node["step"]) == ("running", 3)
    assert json.loads(run("status", "other", "--json")[1])["nodes"] == []


def test_status_shows_the_named_run_alone(run, base):
    put_status(base / "sorting")
    put_status(base / "counting")
    out = run("status", "sorting")[1]
    assert "sorting-0a1b2c3d" in out
    assert "counting" not in out


def test_watch_ends_on_ctrl_c_without_a_traceback(base):
    import signal

    put_status(base / "sorting")
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "echo2_node.cli", "status", "--watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "sorting" in line + out


def test_the_demo_refuses_an_unknown_loss_before_it_makes_anything(run, base):
    code, _, said = run("demo", "--loss", "ppo")
    assert code == 2
    assert said.startswith("error: There is no loss 'ppo'.")
    assert "Known: dppo" in said
