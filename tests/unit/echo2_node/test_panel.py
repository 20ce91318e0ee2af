from rich.console import Console

from echo2_node.panel import render
from echo2_node.sightings import Sighting
from echo2_node.status import FlowRow, InstallRow, MemberRow, Snapshot, Spread


def drawn(*members, process="running", width=160, **fields):
    values = {
        "role": "learner",
        "node": "12D3KooWabcdefghij",
        "name": "sorting",
        "run_id": "sort-0a1b2c3d",
        "state": "training",
        "pid": 1,
        "updated_unix_ms": 1,
        "started_unix_ms": 1,
        "members": members,
    }
    snapshot = Snapshot(**{**values, **fields})
    console = Console(width=width, record=True, force_terminal=True, file=open_null())
    console.print(render(Sighting(folder="f", process=process, snapshot=snapshot)))
    return console.export_text()


def open_null():
    import io

    return io.StringIO()


def test_the_table_has_what_an_operator_asks_for():
    text = drawn(
        MemberRow(
            node="12D3KooWzyxwvuts9999",
            role="actor",
            state="generating",
            version=41,
            lag=2,
            tokens_per_s=1234.5,
            accepted=96,
            refused=5,
            commonest_refusal="stale",
            fetched_bytes=500_000,
            fetch_bytes=2_000_000,
            seen_s_ago=0.7,
        ),
        step=43,
        steps=100,
        version=43,
        reward_last=0.5,
        groups_alive=3,
        groups_alive_max=12,
    )
    for words in ("zyxwvuts", "generating", "41", "1,234", "96", "stale", "25% of 2 MB", "1 s"):
        assert words in text
    assert "step 43/100" in text
    assert "reward 0.500" in text
    assert "groups 3/12" in text


def test_refusals_and_ages_stand_below_the_table():
    text = drawn(
        refusals={"late": 1, "stale": 7},
        staleness_histogram={"0": 9, "10": 1, "2": 3},
        staleness_limit_steps=10,
    )
    assert "stale 7, late 1" in text
    assert "0: 9, 2: 3, 10: 1 (limit 10)" in text


def test_what_the_last_version_cost_stands_below_the_table():
    text = drawn(
        MemberRow(node="n", role="actor", state="generating", reach="relayed"),
        traffic={"full": FlowRow(in_bytes=270_000_000), "patch": FlowRow(in_bytes=1_500_000)},
        traffic_by_peer={"a": FlowRow(), "b": FlowRow()},
        installs=(
            InstallRow(
                version=9, fetched_full_bytes=0, fetched_patch_bytes=1_500_000, fetch_s=0.2,
                since_announced_s=0.75, install_s=0.5, pause_s=0.012, changed=7,
            ),
        ),
        dissemination=(
            Spread(version=8, actors=3, first_s=0.4, all_s=1.3, full_bytes=9, patch_bytes=1),
        ),
        reach="punched: nobody could dial it",
    )  # fmt: skip
    assert "weights: full 270 MB in, 0 B out; patch 1.5 MB in, 0 B out; 2 peers" in text
    assert "version 9: 1.5 MB fetched, installed 0.75 s after its announcement, pause 12 ms" in text
    assert "version 8: 0.40 s to the first, 1.30 s to the last of 3 actors" in text
    assert "reach: punched: nobody could dial it" in text
    assert "relayed" in text


def test_a_suspect_is_called_so_and_a_dead_daemon_stopped():
    text = drawn(MemberRow(node="n", role="actor", state="generating", standing="suspect"))
    assert "suspect" in text
    assert "stopped" in drawn(process="stopped")


def test_a_hostile_name_reaches_the_terminal_without_control_characters_or_markup():
    name = "[bold red]\x1b[2J\x07own\u202eed[/]"
    row = MemberRow(node="n", role="actor", state="generating", name=name, last_error="")
    text = drawn(row, last_error="\x1b]0;title\x07")
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "[bold red]?[2J?own?ed[/]" in text


def test_eighty_columns_hold_every_row_on_one_line():
    learner = MemberRow(
        node="me", name="countdown", role="learner", state="waiting for rollouts", version=11,
        accepted=31688, refused=104,
    )  # fmt: skip
    busy = MemberRow(
        node="a", name="attic", role="actor", state="restarting engine", version=8, lag=3,
        tokens_per_s=1234.0, accepted=22408, refused=40,
    )  # fmt: skip
    slow = MemberRow(
        node="b", role="actor", state="fetching", name="phone", fetched_bytes=41, fetch_bytes=100
    )
    lines = drawn(learner, busy, slow, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    by_name = {line.split()[0]: line for line in lines if line.strip()}
    assert all(word in by_name["countdown"] for word in ("waiting", "11", "31688", "104"))
    assert all(word in by_name["attic"] for word in ("restarting engine", "1,234", "22408", "40"))
    assert "fetching 41%" in by_name["phone"]
    assert "\u2026" not in "".join(lines)


def test_a_stopped_node_shows_since_when_its_numbers_stand():
    own = MemberRow(node="12D3KooWabcdefghij", role="learner", state="training", name="sorting")
    text = drawn(own, process="stopped", updated_unix_ms=1_700_000_000_000)
    assert "as of 2023-11-" in text
    assert "training" not in text
    assert "as of" not in drawn(own)
