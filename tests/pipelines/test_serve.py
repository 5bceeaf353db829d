"""What ties the parts of ``serve`` to it, without any Prefect."""

import logging
import os
import subprocess
import sys

from pipelines import prefect_api
from shards.errors import ConfigError


def test_a_flow_run_ends_with_the_process_of_serve_that_is_killed():
    code = "from pipelines import prefect_api as p; import time; p.end_with_server(); print('up', flush=True); time.sleep(99)"
    with subprocess.Popen(["sleep", "99"]) as server:
        environment = {**os.environ, prefect_api.SERVE_PID: str(server.pid)}
        run = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        with run:
            assert run.stdout.readline() == "up\n"
            server.kill()
            assert run.wait(timeout=30) == 1


def test_wrong_input_is_logged_once_and_without_traceback(monkeypatch, caplog):
    names = ["prefect.task_runs", "prefect.flow_runs", "prefect.flow_runs", "prefect.engine"]
    for name in {*names, "prefect"}:
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "filters", [])
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "handlers", [])  # Prefect, set up by another test, would send to its API
    prefect_api.say_in_one_paragraph()
    try:
        raise ConfigError("/nowhere: does not exist; give source.root")
    except ConfigError:
        for name in names:
            logging.getLogger(name).exception("Encountered an exception: %s", name)
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("/nowhere: does not exist; give source.root", None)
