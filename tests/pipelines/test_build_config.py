import pytest

from pipelines.config import BuildConfig, FilterConfig, HeldOutConfig, RunConfig, SourceConfig
from shards.errors import ConfigError
from shards.settings import load_settings, validate


def test_a_source_may_be_a_path_alone():
    config = BuildConfig.model_validate({"source": "data/coco", "out": "o"})
    assert str(config.source.root) == "data/coco"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["source.root=null"], r"give root .* missing here: root and annotations and images"),
        (["build.procesess=2"], r"build.procesess is not a setting; did you mean build.processes\?"),
        (["build.processes=0"], r"processes is 0, expected auto or at least 1"),
        (["filters.norm_std=[1, 0, 1]"], r"norm_std: is \[1.0, 0.0, 1.0\], expected no zero"),
        (["filters.norm_mean=[.inf, 0, 1]"], r"norm_mean: is \[inf, 0.0, 1.0\], expected finite numbers"),
        (["filters.norm_std=[.nan, 1, 1]"], r"norm_std: is \[nan, 1.0, 1.0\], expected finite numbers"),
        (["source.split=val", "held_out.root=x"], r"held_out.split is 'val', as source.split is"),
        (["source.split=../x"], r"source.split is '../x'"),
        (["filters.max_pixels=100000000000"], r"filters.max_pixels is 100000000000"),
    ],
)
def test_wrong_settings_are_named_with_their_value(tmp_path, overrides, message):
    path = tmp_path / "build.yaml"
    path.write_text("source:\n  root: data\nout: shards\n")
    with pytest.raises(ConfigError, match=message):
        load_settings(BuildConfig, path, overrides)


def test_every_field_says_what_it_is_for():
    sections = (BuildConfig, SourceConfig, HeldOutConfig, RunConfig, FilterConfig)
    fields = [(m.__name__, name, f.description) for m in sections for name, f in m.model_fields.items()]
    assert [field for field in fields if not field[2]] == []


def test_the_shipped_config_is_valid(request):
    path = request.config.rootpath / "configs" / "build.yaml"
    assert load_settings(BuildConfig, path).build.records_per_shard == 256


def test_paths_and_processes_do_not_count_as_written_settings():
    def written(**build):
        return validate(BuildConfig, {"source": "a", "out": "b", "build": build}, "test").written_settings

    assert written(processes=3, overwrite=True, max_reject_share=1, gallery=0) == written()
    assert written(seed=1) != written()
