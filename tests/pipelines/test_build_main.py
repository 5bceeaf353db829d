import json
import socket
import subprocess
import sys
import threading

import pytest

from pipelines.__main__ import main
from pipelines.config import usable_cpus
from pipelines.errors import BuildError
from pipelines.prefect_api import require_answer
from pipelines.run import run_plain
from pipelines.summary import Summary
from shards import cli


@pytest.fixture
def config_file(photos, tmp_path):
    path = tmp_path / "build.yaml"
    build = {"records_per_shard": 8, "processes": 1}
    path.write_text(json.dumps({"source": str(photos), "out": str(tmp_path / "out"), "build": build}))
    return path


def test_build_says_what_it_kept_and_rejected(config_file, capsys):
    assert cli.run(main, ["build", str(config_file), "--plain"]) == 0
    output = capsys.readouterr().out
    assert "out: 29 kept (train 24, val 5), 0 rejected" in output
    assert cli.run(main, ["build", str(config_file), "--plain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unchanged"] is True


def test_the_summary_survives_json(coco, make_config, pictures, tmp_path):
    files = {f"{i}.jpg": pictures.encode(pictures.photo(i)) if i < 5 else b"" for i in range(8)}
    summary = run_plain(make_config(coco(tmp_path / "source", files), tmp_path / "out"))
    values = json.loads(json.dumps(summary.to_json()))
    assert values["rejected"] == {"empty_file": 3}
    assert str(Summary.from_json(values)) == str(summary)
    assert "5 kept (train 5), 3 rejected (empty_file 3)" in str(summary)


def test_more_processes_than_cpus_are_said_once(config_file, capsys):
    number = 1 + usable_cpus()
    assert cli.run(main, ["build", str(config_file), "--plain", f"build.processes={number}"]) == 0
    assert capsys.readouterr().err.count(f"note: build.processes is {number}, and this process may use ") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["source.root=nowhere"], "error: nowhere: does not exist"),
        (["filters.max_pixel=3"], "filters.max_pixel is not a setting; did you mean filters.max_pixels?"),
        (["source.root"], "expected section.field=value"),
    ],
)
def test_wrong_input_is_one_paragraph_and_code_2(config_file, capsys, arguments, message):
    config_file.write_text(json.dumps({"source": {"root": "x"}, "out": str(config_file.parent / "out")}))
    assert cli.run(main, ["build", str(config_file), *arguments, "--plain"]) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
    assert not (config_file.parent / "out").exists()


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        (["build", "CONFIG", "out=/proc/xctrain"], "out"),
        (["build", "CONFIG", "out=/proc/xctrain", "--plain"], "out"),
        (["add", "/proc/xctrain", "CONFIG", "--plain"], "out"),
        (["preview", "CONFIG", "--page", "/proc/xctrain"], "--page"),
        (["download", "--out", "/proc/xctrain"], "out"),
        (["sample", "--out", "/proc/xctrain"], "--out"),
    ],
)
def test_a_place_where_nothing_can_be_written_is_code_2_and_names_the_setting(config_file, capsys, command, setting):
    assert cli.run(main, [str(config_file) if part == "CONFIG" else part for part in command]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {setting} is /proc/xctrain, where nothing can be written (No such"
    )


def test_wrong_usage_is_code_2(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.run(main, ["build"])
    assert caught.value.code == 2


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom pipelines.__main__ import main\n"
        "try: main(['build', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'prefect', 'pydantic', 'numpy', 'PIL'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "section.field=value" in done.stdout
    assert "75 stopped by a signal" in done.stdout


def test_sample_says_how_many_pictures_it_drew(tmp_path, capsys):
    assert cli.run(main, ["sample", "--out", str(tmp_path / "s"), "--images", "15"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 's'}: 15 train, 2 val pictures\n"


@pytest.mark.parametrize("number", ["0", "-4"])
def test_no_pictures_are_wrong_usage(tmp_path, capsys, number):
    assert cli.run(main, ["sample", "--out", str(tmp_path / "s"), "--images", number]) == 2
    assert f"--images is {number}, expected 1 or more" in capsys.readouterr().err


def test_a_port_that_is_none_is_wrong_usage(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    assert cli.run(main, ["serve", "--port", "99999"]) == 2
    assert "port 99999: expected 1 to 65535; choose another with --port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\n<p>", "it sends text/html, expected application/json"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "HTTP 404 Not Found"),
        (b"220 mail.example ESMTP\r\n", "220 mail.example ESMTP"),
        (b"", "without response"),
    ],
)
def test_an_address_of_something_else_is_as_a_dead_one(reply, found):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/api"
        with pytest.raises(BuildError, match=f"PREFECT_API_URL is {url}, but no Prefect API answers there .*{found}"):
            require_answer(url)
        thread.join()


def test_a_place_where_prefect_cannot_work_is_wrong_usage(config_file, command, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "file" / "home"))
    _, errors = (process := command("build", config_file)).communicate(timeout=200)
    assert process.returncode == 2
    assert "Prefect cannot keep its database there (Not a directory); set PREFECT_HOME" in errors
    assert errors.count("\n") == 1


def test_a_missing_package_says_how_to_get_it(capsys):
    def main_without_yaml(arguments):
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml.nodes")

    assert cli.run(main_without_yaml, []) == 2
    errors = capsys.readouterr().err
    assert f"{sys.executable}: the Python package yaml is not installed there; run `make install`" in errors


def test_a_broken_import_of_our_own_is_no_missing_package():
    with pytest.raises(ModuleNotFoundError):
        cli.run(lambda _: __import__("shards.nothing"), [])


def test_a_dead_prefect_address_names_both_ways_out(config_file, command, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    process = command("build", config_file)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "PREFECT_API_URL is http://127.0.0.1:9/api, but no Prefect API answers there" in errors
    assert "unset PREFECT_API_URL" in errors
    assert "add --plain" in errors
