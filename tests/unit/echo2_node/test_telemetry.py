import errno
import json
import logging
import os

import pytest
import structlog

from echo2_mesh.errors import LocalError
from echo2_node import telemetry
from echo2_node.telemetry import MetricsFile, read_metrics, short_id

NODE = "12D3KooWAbCdEfGhJkLmNoPqRsTuVwXyZ1234567891234567891"


@pytest.fixture
def logs_restored():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    structlog.reset_defaults()


def test_short_ids_leave_out_the_prefix_that_all_nodes_share():
    assert short_id(NODE) == "AbCdEfGh"
    assert short_id(NODE) != short_id(NODE.replace("AbCd", "AbCx"))


def test_metrics_come_back_in_order(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write({"step": 1, "reward_mean": 0.25})
        file.write({"step": 2, "staleness_steps": {"0": 3}})
    assert read_metrics(path) == [
        {"step": 1, "reward_mean": 0.25},
        {"step": 2, "staleness_steps": {"0": 3}},
    ]


def test_a_line_torn_by_a_crash_costs_only_itself(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    with MetricsFile(path) as file:
        file.write({"step": 3})
    assert read_metrics(path) == [{"step": 1}, {"step": 3}]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_loses_metric_lines_and_nothing_else(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    file = MetricsFile(path)
    file.write({"step": 1})
    file.write({"step": 2})
    assert file.lost_lines == 2
    path.unlink()
    file.write({"step": 3})
    assert read_metrics(path) == [{"step": 3}]
    file.close()


def test_an_unwritable_metrics_file_is_an_error_of_this_host(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(LocalError, match=r"metrics\.jsonl"):
        MetricsFile(tmp_path / "metrics.jsonl").write({"step": 1})


def test_absent_metrics_are_no_metrics(tmp_path):
    assert read_metrics(tmp_path / "nowhere.jsonl") == []


def test_logs_are_json_lines_in_a_file_with_whole_ids(tmp_path, logs_restored):
    path = tmp_path / "logs" / "daemon.log"
    telemetry.configure(log_path=path, console=False)
    structlog.get_logger().info("version installed", peer=NODE, version=3)
    structlog.get_logger().debug("chunk asked")
    logging.getLogger("somebody.else").warning("a warning of a library")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["version installed", "a warning of a library"]
    assert lines[0]["peer"] == NODE
    assert lines[0]["version"] == 3
    assert lines[0]["level"] == "info"


def test_verbose_adds_developers_events(tmp_path, logs_restored):
    path = tmp_path / "daemon.log"
    telemetry.configure(log_path=path, verbose=True, console=False)
    structlog.get_logger().debug("chunk asked", chunk=b"\x01\x02")
    assert "chunk asked" in path.read_text()


def test_off_a_terminal_standard_error_gets_json(capsys, logs_restored):
    telemetry.configure()
    structlog.get_logger().warning("disk full", reason="ENOSPC")
    written = capsys.readouterr()
    assert written.out == ""
    assert json.loads(written.err)["reason"] == "ENOSPC"


def test_a_full_disk_under_the_log_ends_nothing(tmp_path, logs_restored, monkeypatch, capsys):
    telemetry.configure(log_path=tmp_path / "daemon.log", console=False)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logging.FileHandler, "_open", full)
    structlog.get_logger().info("step", step=1)
    assert capsys.readouterr().err == ""
