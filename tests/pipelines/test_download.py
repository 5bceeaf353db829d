"""Downloads from a server that drops, stalls and lies: after retries the right file, or a message and no file."""

import hashlib
import io
import json
import os
import random
import resource
import signal
import subprocess
import threading
import time
import zipfile

import pytest
import webserver

from pipelines import transfer
from pipelines.__main__ import main
from pipelines.download import Downloaded, problem_of, run_download
from pipelines.download_config import OFFICIAL, DownloadConfig
from pipelines.errors import BuildError, DownloadError
from pipelines.transfer import Version, Wanted, backoff_s
from shards import cli
from shards.errors import ConfigError

DATA = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def web():
    with webserver.running() as server:
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.01)


def serve(web, *tricks, data=DATA, name="a.bin", **options):
    web.files[f"/{name}"] = found = webserver.Resource(data, tricks, **options)
    return found


def config(web, out, *files, **settings):
    files = files or ({"url": f"{web.url}/a.bin"},)
    return DownloadConfig.model_validate({"out": out, "dataset": "none", "files": files, "timeout_s": 5, **settings})


def only(out):
    """The one file in the folder, and nothing of it left elsewhere."""
    [name] = [p.name for p in out.iterdir() if p.name != ".download"]
    assert not list((out / ".download").glob("*.part"))
    return (out / name).read_bytes()


def offsets(found):
    return [request.get("Range", "") for request in found.requests]


def fails(web, out, message, **settings):
    """The download ends with the message, and nothing stands under the final name."""
    with pytest.raises(DownloadError, match=message):
        run_download(config(web, out, **settings))
    assert [p.name for p in out.iterdir()] == [".download"]


def test_dropped_connections_go_on_from_the_bytes_that_came(web, tmp_path):
    found = serve(web, "drop:100000", "drop:50000")
    assert run_download(config(web, tmp_path)).fetched == ["a.bin"]
    assert only(tmp_path) == DATA
    assert offsets(found) == ["", "bytes=100000-", "bytes=150000-"]
    assert found.requests[1]["If-Range"] == found.tag


def test_a_stall_is_given_up_after_the_timeout_and_tried_again(web, tmp_path):
    found = serve(web, "stall:70000")
    run_download(config(web, tmp_path, timeout_s=1))
    assert only(tmp_path) == DATA
    assert offsets(found) == ["", "bytes=70000-"]


def test_a_length_that_is_too_large_is_no_whole_file(web, tmp_path):
    serve(web, *["longer"] * 9)
    fails(web, tmp_path, "a.bin.*tries in a row failed", tries=3)


def test_a_length_that_is_too_small_is_found_by_the_digest(web, tmp_path):
    serve(web, "shorter", "shorter")
    fails(web, tmp_path, f"its sha256 is .*, expected {SHA256}", files=({"url": f"{web.url}/a.bin", "sha256": SHA256},))


def test_a_known_size_is_held_against_what_the_server_says(web, tmp_path):
    serve(web)
    files = ({"url": f"{web.url}/a.bin", "num_bytes": 300_001},)
    fails(web, tmp_path, "the server's file has 300000 bytes, expected 300001", files=files)


def test_a_server_without_ranges_starts_over(web, tmp_path):
    found = serve(web, "drop:100000", "ignore-range")
    run_download(config(web, tmp_path))
    assert only(tmp_path) == DATA
    assert len(found.requests) == 2


def test_a_server_that_always_breaks_off_at_the_same_byte_is_given_up(web, tmp_path):
    """Though each try brings bytes: those are old ones, so the tries end."""
    found = serve(web, *["drop:2000000"] * 50, data=DATA * 10, etag=False)
    fails(web, tmp_path, r"4 tries in a row failed", tries=4)
    assert len(found.requests) == 4


def test_416_starts_over(web, tmp_path):
    serve(web, "drop:100000", "status:416")
    run_download(config(web, tmp_path))
    assert only(tmp_path) == DATA


def test_bytes_that_are_all_there_are_not_asked_for_again(web, tmp_path):
    """A kill between the last byte and the final name, of a file whose length the server had not told."""
    found = serve(web)
    kept = tmp_path / ".download"
    kept.mkdir()
    (kept / "a.bin.part").write_bytes(DATA)
    (kept / "a.bin.json").write_text(json.dumps({"etag": found.tag, "last_modified": None, "num_bytes": None}))
    run_download(config(web, tmp_path))
    assert only(tmp_path) == DATA
    assert offsets(found) == ["bytes=300000-"]


@pytest.mark.parametrize("trick", ["", "blind-range"])
def test_a_file_that_changes_between_two_tries_is_not_glued_together(web, tmp_path, trick):
    found = serve(web, "drop:100000", trick)
    seen = threading.Event()

    def change():
        while not found.requests or found.at_once:
            time.sleep(0.001)
        found.data = OTHER
        seen.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "backoff_s", lambda failures: 0.3)
        thread = threading.Thread(target=change)
        thread.start()
        run_download(config(web, tmp_path))
        thread.join()
    assert seen.is_set()
    assert only(tmp_path) == OTHER


def test_bytes_that_nothing_identifies_are_fetched_anew(web, tmp_path):
    found = serve(web, "drop:100000", etag=False)
    run_download(config(web, tmp_path))
    assert only(tmp_path) == DATA
    assert offsets(found) == ["", ""]


def test_a_wrong_join_is_found_by_the_digest_and_fetched_once_more(web, tmp_path):
    """The bytes that are there are not of this file, and neither server nor client could tell."""
    serve(web, etag=False)
    kept = tmp_path / ".download"
    kept.mkdir()
    (kept / "a.bin.part").write_bytes(OTHER[:100_000])
    run_download(config(web, tmp_path, {"url": f"{web.url}/a.bin", "sha256": SHA256}))
    assert only(tmp_path) == DATA


def test_503_waits_as_long_as_the_server_asks(web, tmp_path):
    serve(web, "status:503", headers={"Retry-After": "1"})
    began = time.monotonic()
    run_download(config(web, tmp_path))
    assert time.monotonic() - began >= 1
    assert only(tmp_path) == DATA


def test_a_server_that_asks_for_an_hour_is_not_waited_for(web, tmp_path):
    serve(web, "status:429", headers={"Retry-After": "3600"})
    fails(web, tmp_path, "HTTP 429 .*asks to come back in 3600 s")


def test_a_missing_file_is_said_at_once_and_the_others_come(web, tmp_path):
    serve(web)
    files = ({"url": f"{web.url}/gone.bin?signature=secret"}, {"url": f"{web.url}/a.bin"})
    with pytest.raises(DownloadError, match=r"gone.bin: http://127.0.0.1:\d+/gone.bin: HTTP 404 Not Found") as caught:
        run_download(config(web, tmp_path, *files))
    assert "secret" not in str(caught.value)
    assert only(tmp_path) == DATA


def test_redirects_are_followed(web, tmp_path):
    serve(web, f"redirect:{web.url}/b.bin")
    serve(web, name="b.bin")
    run_download(config(web, tmp_path))
    assert only(tmp_path) == DATA


def test_redirects_in_a_circle_are_an_error(web, tmp_path):
    serve(web, *[f"redirect:{web.url}/a.bin"] * 9)
    fails(web, tmp_path, "Exceeded maximum allowed redirects; check the URL")


def test_a_page_in_place_of_the_file_is_refused_and_costs_no_bytes(web, tmp_path):
    serve(web, "drop:100000", "page")
    fails(web, tmp_path, r"the server sends a web page \(text/html\), expected the file; open the URL in a browser")
    assert (tmp_path / ".download" / "a.bin.part").read_bytes() == DATA[:100_000]
    run_download(config(web, tmp_path))
    assert only(tmp_path) == DATA


def test_a_text_that_says_it_is_a_zip_is_none(web, tmp_path):
    serve(web, data=b"<html>Sign in</html>", name="a.zip", type="application/zip")
    fails(web, tmp_path, "it is no whole zip .*begins with '<html>Sign in</html>'", files=(f"{web.url}/a.zip",))


def a_zip(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "/").replace("_json", ".json"), data)
    return out.getvalue()


def test_a_zip_without_a_digest_is_checked_by_its_own(web, tmp_path):
    data = a_zip(a=DATA)
    broken = data.replace(DATA[1000:1100], DATA[2000:2100])
    serve(web, data=broken, name="a.zip")
    fails(web, tmp_path, "its member 'a' is damaged", files=(f"{web.url}/a.zip",))
    serve(web, data=data, name="a.zip")
    run_download(config(web, tmp_path, f"{web.url}/a.zip"))
    assert only(tmp_path) == data


def test_an_end_that_nothing_tells_from_a_drop_is_refused(web, tmp_path):
    serve(web, "until-close", "until-close")
    fails(web, tmp_path, "does not say how long the file is.*give its num_bytes or sha256")
    run_download(config(web, tmp_path, {"url": f"{web.url}/a.bin", "sha256": SHA256}))
    assert only(tmp_path) == DATA


def test_a_server_that_is_not_there_is_named_with_what_is_kept(web, tmp_path):
    config_ = config(web, tmp_path, "http://127.0.0.1:9/a.bin", tries=2)
    with pytest.raises(
        DownloadError, match=r"a.bin: .*:9/a.bin: .*refused \(2 tries in a row failed\); 0 bytes are kept"
    ):
        run_download(config_)


def test_a_rerun_asks_nobody_for_what_is_there(web, tmp_path):
    found = serve(web)
    run_download(config(web, tmp_path))
    again = run_download(config(web, tmp_path))
    assert (again.fetched, again.present) == ([], ["a.bin"])
    assert len(found.requests) == 1
    assert str(again) == f"{tmp_path}: 1 file, 0.3 MB; 0 fetched, 1 were there"


def test_a_file_of_that_name_that_is_another_is_not_overwritten(web, tmp_path):
    (tmp_path / "a.bin").write_bytes(OTHER)
    with pytest.raises(ConfigError, match="is there already, but its sha256 is"):
        run_download(config(web, tmp_path, {"url": f"{web.url}/a.bin", "sha256": SHA256}))
    with pytest.raises(ConfigError, match="nothing tells whether it is whole: give its sha256"):
        run_download(config(web, tmp_path))
    assert (tmp_path / "a.bin").read_bytes() == OTHER


def test_a_file_that_was_fetched_by_other_means_is_taken(web, tmp_path):
    (tmp_path / "a.bin").write_bytes(DATA)
    assert run_download(config(web, tmp_path, {"url": f"{web.url}/a.bin", "sha256": SHA256})).present == ["a.bin"]


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched(web, tmp_path):
    found = serve(web)
    files = ({"url": f"{web.url}/a.bin", "num_bytes": 10**15},)
    fails(web, tmp_path, r"1 file need 1000000.0 GB more and \d+\.\d GB are free there; free", files=files)
    assert not found.requests


def test_connections_to_one_host_are_few(web, tmp_path):
    names = [f"{i}.bin" for i in range(8)]
    found = [serve(web, name=name, data=DATA[:200_000], delay_s=0.02) for name in names]
    peak = 0
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, sum(f.at_once for f in found))
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    run_download(config(web, tmp_path, *(f"{web.url}/{name}" for name in names)))
    done.set()
    thread.join()
    assert peak == 2
    assert sorted(p.name for p in tmp_path.glob("*.bin")) == names


def test_two_downloads_into_one_folder_are_refused(web, tmp_path):
    from pipelines.download import Download

    with Download(config(web, tmp_path)), pytest.raises(BuildError, match="another download is at work in this folder"):
        run_download(config(web, tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"files": ["ftp://host/a"]}, "expected http:// or https://"),
        ({"files": ["http://host/"]}, "give name"),
        ({"files": [{"url": "http://host/a", "name": "../a"}]}, "name is '../a', expected that of a file"),
        ({"files": [{"url": "http://host/a", "name": ".a"}]}, "name is '.a'"),
        ({"files": ["http://host/a", "http://other/a"]}, "two are named 'a'"),
        ({"files": []}, "there is nothing to fetch"),
        ({"files": [{"url": "http://host/a", "sha256": "abc"}]}, "sha256 has 3 digits, expected 64"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        DownloadConfig.model_validate({"out": tmp_path, "dataset": "none", **settings})


def test_the_official_files_are_named_with_their_size_and_md5(tmp_path):
    wanted = DownloadConfig(out=tmp_path).wanted
    assert [w.name for w in wanted] == ["train2017.zip", "val2017.zip", "annotations_trainval2017.zip"]
    assert wanted[1].url == "http://images.cocodataset.org/zips/val2017.zip"
    assert sum(w.num_bytes for w in wanted) == 20_405_354_669
    assert all(len(md5) == 32 for files in OFFICIAL.values() for _, _, md5 in files.values())


@pytest.fixture
def coco_mirror(web, photos, zipped, tmp_path, monkeypatch):
    """A host with the paths of the official one, and the sample pictures in place of COCO's."""
    files = {}
    for part in ("train", "val"):
        path = zipped(photos / f"{part}2017", tmp_path / f"{part}2017.zip", f"{part}2017/")
        files[part] = (f"zips/{part}2017.zip", path.read_bytes())
    captions = {f"annotations__captions_{s}2017_json": (photos / f"annotations/captions_{s}2017.json").read_bytes()
                for s in ("train", "val")}  # fmt: skip
    data = a_zip(**captions, annotations__instances_train2017_json=b"{}")
    files["annotations"] = ("annotations/annotations_trainval2017.zip", data)
    for path, data in files.values():
        serve(web, "drop:5000", data=data, name=path)
    known = {part: (path, len(data), hashlib.md5(data).hexdigest()) for part, (path, data) in files.items()}
    monkeypatch.setitem(OFFICIAL, "coco2017", known)
    return web.url


def test_downloaded_coco_is_built_from_its_zips(coco_mirror, photos, make_config, data_files, tmp_path):
    from pipelines.run import run_plain

    out = tmp_path / "coco"
    done = run_download(DownloadConfig(out=out, mirror=coco_mirror))
    assert done.next_step == f"python -m pipelines build configs/build.yaml source.root={out} out=data/shards"
    assert sorted(p.name for p in (out / "annotations").iterdir()) == [
        "captions_train2017.json",
        "captions_val2017.json",
    ]
    run_plain(make_config(out, tmp_path / "a"))
    run_plain(make_config(photos, tmp_path / "b"))
    assert data_files(tmp_path / "a") == data_files(tmp_path / "b")
    (out / "annotations" / "captions_val2017.json").write_text("{}")
    run_download(DownloadConfig(out=out, mirror=coco_mirror))
    assert (out / "annotations" / "captions_val2017.json").stat().st_size > 2


@pytest.mark.parametrize("part", ["train", "val"])
def test_one_split_alone_is_built_as_the_download_says(coco_mirror, part, tmp_path, capsys):
    out = tmp_path / "coco"
    assert cli.run(main, ["download", "--out", str(out), "--split", part, f"mirror={coco_mirror}"]) == 0
    command = capsys.readouterr().out.partition("next: python -m pipelines ")[2].split()
    settings = [text.replace("out=data/shards", f"out={tmp_path / 'shards'}") for text in command]
    assert cli.run(main, [*settings, "build.processes=1", "--plain"]) == 0
    assert f"({part} {24 if part == 'train' else 5})" in capsys.readouterr().out


def test_the_command_says_what_came(web, tmp_path, capsys):
    serve(web)
    path = tmp_path / "download.yaml"
    path.write_text(json.dumps({"out": str(tmp_path / "out"), "dataset": "none", "files": [f"{web.url}/a.bin"]}))
    assert cli.run(main, ["download", str(path)]) == 0
    assert "out: 1 file, 0.3 MB; 1 fetched, 0 were there" in capsys.readouterr().out
    assert cli.run(main, ["download", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["present"] == ["a.bin"]
    assert cli.run(main, ["download", "--out", str(tmp_path / "x"), "conections=3"]) == 2
    assert "did you mean connections?" in capsys.readouterr().err
    assert cli.run(main, ["download"]) == 2
    assert "out is missing" in capsys.readouterr().err


@pytest.fixture
def slow(web, tmp_path):
    """A download of some seconds through the command line, its config, and where its bytes come in."""
    found = serve(web, data=DATA * 10, delay_s=0.05)
    path = tmp_path / "download.yaml"
    path.write_text(json.dumps({"out": str(tmp_path / "out"), "dataset": "none", "files": [f"{web.url}/a.bin"]}))
    return found, path, tmp_path / "out" / ".download" / "a.bin.part"


def until_it_has_bytes(part, process, least=200_000):
    while not part.exists() or part.stat().st_size < least:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_a_download_killed_again_and_again_goes_on_and_ends_with_the_same_bytes(slow, command):
    found, path, part = slow
    for i in range(3):
        process = command("download", path)
        until_it_has_bytes(part, process, 200_000 + 600_000 * i)
        process.kill()
        process.communicate()
        assert not (part.parents[1] / "a.bin").exists()
    found.delay_s = 0
    process = command("download", path)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert hashlib.sha256(only(part.parents[1])).hexdigest() == hashlib.sha256(DATA * 10).hexdigest()
    starts = [int(r.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-")) for r in found.requests]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert starts[1] >= 200_000
    assert starts[3] >= 1_400_000


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_download_at_once_even_while_the_server_stalls(slow, command, signum):
    found, path, part = slow
    found.tricks = ["stall:500000"]
    process = command("download", path)
    until_it_has_bytes(part, process)
    began = time.monotonic()
    process.send_signal(signum)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 75
    assert time.monotonic() - began < 20  # the timeout for the next byte is 30 s
    assert "the download was stopped; the same command goes on from the bytes that are there" in errors
    assert "Traceback" not in errors
    found.delay_s = 0
    process = command("download", path)
    process.communicate(timeout=200)
    assert only(part.parents[1]) == DATA * 10


def test_a_full_disk_is_said_and_the_rest_comes_when_there_is_room(slow, command):
    found, path, part = slow
    found.delay_s = 0
    limit = 1_000_000
    process = command("download", path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "a.bin.part: File too large; free some space, or raise the limit on the size of files" in errors
    assert "1000000 bytes of it are kept" in errors
    assert "Traceback" not in errors
    process = command("download", path)
    process.communicate(timeout=200)
    assert only(part.parents[1]) == DATA * 10
    assert found.requests[1]["Range"] == "bytes=1000000-"


def test_waits_double_to_a_bound_and_differ(monkeypatch):
    monkeypatch.setattr(transfer, "FIRST_WAIT_S", 0.5)
    waits = [backoff_s(failures) for failures in range(1, 60)]
    assert 0.25 <= waits[0] <= 0.5
    assert max(waits) <= 30
    assert len(set(waits[10:])) > 40


def test_versions_contradict_only_where_both_speak():
    assert not Version(etag='"a"').contradicts(Version(last_modified="x", num_bytes=3))
    assert Version(etag='"a"', num_bytes=3).contradicts(Version(etag='"a"', num_bytes=4))
    assert Version(etag='W/"a"', last_modified="x").validator == "x"
    assert Version(etag='W/"a"').validator is None


def test_what_is_known_of_a_file_is_held_against_it(tmp_path):
    (tmp_path / "a").write_bytes(DATA)
    md5 = hashlib.md5(DATA).hexdigest()
    assert problem_of(tmp_path / "a", Wanted("a", "http://x/a", 300_000, SHA256, md5)) is None
    assert "expected 5" in problem_of(tmp_path / "a", Wanted("a", "http://x/a", 5))
    assert "its md5 is" in problem_of(tmp_path / "a", Wanted("a", "http://x/a", md5="0" * 32))


def test_the_result_survives_json(tmp_path):
    done = Downloaded(tmp_path, ["a"], [], 5, "go on")
    assert json.loads(json.dumps(done.to_json()))["fetched"] == ["a"]
    assert str(done).endswith("next: go on")


def test_help_of_download_imports_nothing_heavy():
    code = (
        "import sys\nfrom pipelines.__main__ import main\n"
        "try: main(['download', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'httpx', 'pydantic', 'prefect'} & set(sys.modules)"
    )
    subprocess.run([os.sys.executable, "-c", code], check=True, capture_output=True)
