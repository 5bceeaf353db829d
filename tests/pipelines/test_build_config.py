import os

import pytest
import yaml

from pipelines.config import BuildConfig, FilterConfig, HeldOutConfig, RunConfig, SourceConfig, SplitConfig
from pipelines.download_config import DownloadConfig
from pipelines.sources.coco import open_all
from shards.errors import ConfigError, counted
from shards.settings import apply_override, load_settings, validate


def test_a_source_may_be_a_path_alone():
    config = BuildConfig.model_validate({"source": "data/coco", "out": "o"})
    assert str(config.source.root) == "data/coco"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["source.root=null"], r"give root .* missing here: root and annotations and images"),
        (["build.procesess=2"], r"build.procesess is not a setting; did you mean build.processes\?"),
        (["build.processes=0"], r"processes is 0, expected auto or at least 1"),
        (["build.processes=99999"], r"build.processes is 99999, expected at most \d+: this process may use \d+ CPU"),
        (["build.retries=1000000"], r"build.retries is 1000000, expected less than or equal to 100$"),
        (["build.records_per_shard=1000000000"], r"build.records_per_shard is 1000000000, expected less than or equal"),
        (["filters.max_aspect_ratio=.inf"], r"filters.max_aspect_ratio is inf, expected a finite number$"),
        (["filters.norm_std=[1, 0, 1]"], r"norm_std: is \[1.0, 0.0, 1.0\], expected no zero"),
        (["filters.norm_mean=[.inf, 0, 1]"], r"norm_mean: is \[inf, 0.0, 1.0\], expected finite numbers"),
        (["filters.norm_std=[.nan, 1, 1]"], r"norm_std: is \[nan, 1.0, 1.0\], expected finite numbers"),
        (["source.split=val", "held_out.root=x"], r"held_out.split is 'val', as source.split is"),
        (["source.split=../x"], r"source.split is '../x', expected a text of a-z 0-9 _ only"),
        (["build.processes=x"], r"build.processes is 'x', expected a whole number or 'auto'$"),
        (["build.processes=1.5"], r"build.processes is 1.5, expected a whole number or 'auto'$"),
        (["held_out.roots=x"], r"held_out.roots is not a setting; did you mean held_out.root\?"),
        (["build.overwrite=maybe"], r"build.overwrite is 'maybe', expected true or false$"),
        (["out="], r"out is None, expected a text or a path$"),
        (["filters.color_modes=[XYZ]"], r"build.yaml: filters.color_modes.0 is 'XYZ', expected '1', 'L', .* or 'F'$"),
        (
            ["filters.caption_scripts=[LATN]"],
            r"build.yaml: filters.caption_scripts.0: is 'LATN', .*did you mean LATIN\?$",
        ),
        (["filters.color_modes=[]"], r"filters.color_modes is \[\], expected at least 1 value, or null$"),
        (["filters.norm_mean=[1, 2]"], r"filters.norm_mean has 2 values, expected more$"),
        (["held_out.split=X y"], r"build.yaml: held_out.split is 'X y', expected a text of a-z 0-9 _ only$"),
        (["split.fractions={TRAIN: 0.5, val: 0.5}"], r"split.fractions.TRAIN is 'TRAIN', expected a text of a-z"),
        (
            ["source.kind=csv", "source.path=x", "source.root=null", "source.delimiter=ab"],
            r"delimiter is 'ab', expected at most 1 char",
        ),
        (
            ["source.kind=jsonl", "source.root=null", "source.path=[]"],
            r"source.path is \[\], expected a text or at least 1 value, or null$",
        ),
        (["filters.max_pixels=100000000000"], r"filters.max_pixels is 100000000000"),
    ],
)
def test_wrong_settings_are_named_with_their_value(tmp_path, overrides, message):
    path = tmp_path / "build.yaml"
    path.write_text("source:\n  root: data\nout: shards\n")
    with pytest.raises(ConfigError, match=message):
        load_settings(BuildConfig, path, overrides)


@pytest.mark.parametrize("model", [RunConfig, DownloadConfig])
def test_every_number_of_how_to_run_has_an_upper_limit_or_is_a_seed(model):
    values = {f"build.{n}" if model is RunConfig else n: v for n, v in model.model_json_schema()["properties"].items()}
    numbers = {name: v for name, v in values.items() if v.get("type") in ("integer", "number")}
    assert numbers
    assert [name for name, value in numbers.items() if "maximum" not in value] == (
        ["build.seed"] * (model is RunConfig)
    )


@pytest.mark.parametrize("number", [1, 2, 8])
def test_more_processes_than_cpus_are_noted(number):
    allowed = len(os.sched_getaffinity(0))
    note = RunConfig(processes=number * allowed).note
    assert note == (
        f"build.processes is {number * allowed}, and this process may use {counted(allowed, 'CPU')}: more processes than "
        "that only take turns, and take more memory; auto is one for each"
        if number > 1
        else ""
    )
    assert RunConfig().note == ""


AS_THEY_STAND = ["/x/run #3", "a: b", "2024-01-01", "123", "no", "~", "1e5", "[a]", "'a'", "a # b", "{a}", "x "]


@pytest.mark.parametrize("text", AS_THEY_STAND)
def test_a_path_or_text_on_the_command_line_is_taken_as_it_stands(text):
    overrides = [f"source.root={text}", f"source.split={text}", f"out={text}"]
    values: dict = {}
    for override in overrides:
        apply_override(values, override, BuildConfig)
    assert values == {"source": {"root": text, "split": text}, "out": text}


@pytest.mark.parametrize("text", ["/x/run #3", "2024-01-01", "123", "no", "1e5"])
def test_a_source_given_as_a_path_alone_is_taken_as_it_stands(text):
    config = load_settings(BuildConfig, None, [f"source={text}", f"held_out={text}", "out=o"])
    assert str(config.source.root) == str(config.held_out.root) == text


def test_the_other_values_are_yaml_and_optional_ones_may_be_none():
    overrides = ["source.root=a", "source.images=null", "source.annotations=", "out=o", "build.processes=auto"]
    overrides += ["filters.norm_std=[1, 2, 3]", "build.max_reject_share=1e-1", "build.overwrite=yes", "held_out=none"]
    config = load_settings(BuildConfig, None, overrides)
    assert (config.source.images, config.source.annotations, config.held_out) == (None, None, "none")
    assert (config.filters.norm_std, config.build.max_reject_share, config.build.overwrite) == ((1, 2, 3), 0.1, True)


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path):
    path = tmp_path / "build.yaml"
    path.write_text("source: data\nout: a\nbuild:\n  seed: 1\n  processes: 2\n  seed: 2\n")
    with pytest.raises(ConfigError, match=r"build.seed is set twice, in lines 4 and 6; keep one of them"):
        load_settings(BuildConfig, path)


def test_the_config_of_another_command_is_recognised(request):
    with pytest.raises(
        ConfigError, match=r"demo.yaml: its sections are run, .*it looks like the config of another"
    ) as e:
        load_settings(BuildConfig, request.config.rootpath / "configs" / "demo.yaml", ["source=a", "out=b"])
    assert "is not a setting" not in str(e.value)


def test_a_held_out_word_that_is_none_says_which_there_are():
    config = load_settings(BuildConfig, None, ["source=a", "held_out=always", "out=b"])
    with pytest.raises(
        ConfigError, match=r"always: does not exist.* give held_out.root, .*, or auto or none as held_out"
    ):
        open_all(config.held_out, False)


def test_every_field_says_what_it_is_for():
    sections = (BuildConfig, SourceConfig, HeldOutConfig, SplitConfig, RunConfig, FilterConfig)
    fields = [(m.__name__, name, f.description) for m in sections for name, f in m.model_fields.items()]
    assert [field for field in fields if not field[2]] == []


def test_the_shipped_config_is_valid(request):
    path = request.config.rootpath / "configs" / "build.yaml"
    assert load_settings(BuildConfig, path).build.records_per_shard == 256


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "karpathy", "tars"])
def test_the_shipped_configs_of_other_kinds_are_valid(request, kind):
    config = load_settings(BuildConfig, request.config.rootpath / "configs" / f"build-{kind}.yaml")
    assert config.source.kind == {"tars": "webdataset"}.get(kind, kind)


def test_a_list_of_files_on_the_command_line_is_one():
    overrides = ["source.kind=csv", "source.path=[a.csv, b.csv]", "source.images=2024-01-01", "out=o"]
    config = load_settings(BuildConfig, None, overrides)
    assert (config.source.path, config.source.images) == (("a.csv", "b.csv"), "2024-01-01")


def test_the_deployment_builds_what_the_shipped_config_does(request):
    root = request.config.rootpath
    deployments = yaml.safe_load((root / "prefect.yaml").read_text())["deployments"]
    (deployment,) = (d for d in deployments if d["entrypoint"].endswith(":build_shards"))
    assert validate(BuildConfig, deployment["parameters"], "prefect.yaml") == load_settings(
        BuildConfig, root / "configs" / "build.yaml"
    )


def test_paths_and_processes_do_not_count_as_written_settings():
    def written(**build):
        return validate(BuildConfig, {"source": "a", "out": "b", "build": build}, "test").written_settings

    assert written(processes=3, overwrite=True, max_reject_share=1, gallery=0) == written()
    assert written(seed=1) != written()
