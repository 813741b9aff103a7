import dataclasses

import pytest

import kvpool
from kvpool import config, errors
from kvpool.config import Settings


def loaded(tmp_path=None, toml=None, environment=None, **arguments):
    environ = dict(environment or {})
    if toml is not None:
        file = tmp_path / "settings.toml"
        file.write_text(toml)
        environ["KVPOOL_CONFIG"] = str(file)
    return config.load_with_sources(environment=environ, **arguments)


def test_the_defaults_hold_without_settings():
    result = loaded()
    assert result.settings == Settings()
    assert set(result.sources.values()) == {"default"}
    assert result.file is None


def test_an_argument_beats_the_environment_which_beats_the_file(tmp_path):
    toml = 'policy = "fifo"\ncopy_threads = 3\nnuma_node = 1\n'
    environment = {"KVPOOL_POLICY": "lfu", "KVPOOL_COPY_THREADS": "4"}
    result = loaded(tmp_path, toml, environment, policy="lru")
    assert (result.settings.policy, result.settings.copy_threads, result.settings.numa_node) == ("lru", 4, 1)
    assert result.sources["policy"] == "argument"
    assert result.sources["copy_threads"] == "environment KVPOOL_COPY_THREADS"
    assert result.sources["numa_node"] == f"file {tmp_path / 'settings.toml'}"
    assert result.sources["audit"] == "default"


def test_none_as_an_argument_counts_as_not_given():
    assert loaded(environment={"KVPOOL_POLICY": "lfu"}, policy=None).settings.policy == "lfu"


def test_an_empty_variable_counts_as_unset():
    assert loaded(environment={"KVPOOL_POLICY": "", "KVPOOL_CONFIG": ""}).settings == Settings()


def test_the_usual_file_is_read_where_it_exists(tmp_path):
    folder = tmp_path / "kvpool"
    folder.mkdir()
    assert config.load(environment={"XDG_CONFIG_HOME": str(tmp_path)}) == Settings()
    (folder / "config.toml").write_text("audit = true")
    assert config.load(environment={"XDG_CONFIG_HOME": str(tmp_path)}).audit is True


def test_without_a_home_there_is_no_usual_file():
    assert config.load_with_sources(environment={}).file is None


@pytest.mark.parametrize(("text", "value"), [("1", True), ("True", True), ("on", True), ("no", False), ("OFF", False)])
def test_switches_in_the_environment_are_words(text, value):
    assert loaded(environment={"KVPOOL_AUDIT": text}).settings.audit is value


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"KVPOOL_POLICY": "mru"}, "environment KVPOOL_POLICY.*'mru'.*lru, lfu, fifo"),
        ({"KVPOOL_COPY_THREADS": "two"}, "environment KVPOOL_COPY_THREADS is 'two'"),
        ({"KVPOOL_COPY_THREADS": "257"}, "environment KVPOOL_COPY_THREADS.*257.*from 1 to 256"),
        ({"KVPOOL_AUDIT": "maybe"}, "environment KVPOOL_AUDIT is 'maybe'"),
        ({"KVPOOL_COPY_THREAD": "2"}, "did you mean KVPOOL_COPY_THREADS"),
        ({"KVPOOL_CONFG": "x"}, "did you mean KVPOOL_CONFIG"),
        ({"KVPOOL_LEASE_S": "soon"}, "environment KVPOOL_LEASE_S is 'soon'; it must be a number"),
        ({"KVPOOL_LEASE_S": "nan"}, "lease_s is nan; it must be from 0.05 to 3600"),
        ({"KVPOOL_ROUTES": "shm,road"}, "routes has 'road'; each must be one of loopback, shm"),
        ({"KVPOOL_NAME": "n" * 256}, "name must be printable text of at most 255 bytes, and has 256"),
        ({"KVPOOL_SECRET": "hidden\n"}, "secret must be printable text"),
    ],
)
def test_a_bad_variable_is_named(environment, message):
    with pytest.raises(errors.ArgumentError, match=message):
        loaded(environment=environment)


def test_text_numbers_and_lists_come_from_any_source(tmp_path):
    toml = 'name = "a"\nroutes = ["shm", "sock", "shm"]\nlease_s = 1\n'
    settings = loaded(tmp_path, toml).settings
    assert (settings.name, settings.routes, settings.lease_s) == ("a", ("shm", "sock"), 1.0)
    environment = {"KVPOOL_ROUTES": "cma, sock", "KVPOOL_LEASE_S": "0.5", "KVPOOL_UCX": "system"}
    settings = loaded(environment=environment).settings
    assert (settings.routes, settings.lease_s, settings.ucx) == (("cma", "sock"), 0.5, "system")


def test_a_secret_is_never_shown(capsys):
    result = loaded(environment={"KVPOOL_SECRET": "hidden"})
    assert result.settings.secret == "hidden"
    assert "hidden" not in repr(result)
    assert {"name": "secret", "value": "set", "source": "environment KVPOOL_SECRET"} in config.describe(result)
    assert config.describe(loaded())[list(config.FIELDS).index("secret")]["value"] == "not set"
    for wrong in (b"hidden", "hidden" * 1000, "hidden\n"):
        with pytest.raises(errors.Error) as caught:
            Settings(secret=wrong)
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"lease_s": "1"}, {"lease_s": True}, {"routes": "shm"}, {"routes": (1,)}, {"name": 1}, {"name": b"a"}]
)
def test_text_numbers_and_lists_have_their_types(wrong):
    with pytest.raises(errors.ArgumentTypeError, match=next(iter(wrong))):
        Settings(**wrong)


def test_variables_of_other_programs_are_left_alone():
    foreign = {"KVPOOL_PORT": "tcp://10.0.0.1:80", "KVPOOL_SERVICE_HOST": "10.0.0.1", "KVPOOL_CI": "1"}
    assert loaded(environment=foreign).settings == Settings()


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('polcy = "lru"', "'polcy' is unknown; did you mean policy"),
        ("[pool]", "'pool' is unknown"),
        ('policy = "mru"', "policy is 'mru'"),
        ("numa_node = -2", "numa_node is -2; it must be from -1"),
        ("policy = ", "is not TOML"),
    ],
)
def test_a_bad_file_is_named(tmp_path, toml, message):
    with pytest.raises(errors.ArgumentError, match=message) as caught:
        loaded(tmp_path, toml)
    assert str(tmp_path / "settings.toml") in str(caught.value)
    assert caught.value.source == f"file {tmp_path / 'settings.toml'}"


@pytest.mark.parametrize("toml", ["copy_threads = 2.0", "copy_threads = true", "audit = 1", "policy = 1"])
def test_a_value_of_the_wrong_type_in_a_file_is_named(tmp_path, toml):
    with pytest.raises(errors.ArgumentTypeError, match=r"settings\.toml"):
        loaded(tmp_path, toml)


def test_a_file_that_is_asked_for_must_exist(tmp_path):
    with pytest.raises(errors.ArgumentError, match=r"cannot read file .*missing"):
        config.load(environment={"KVPOOL_CONFIG": str(tmp_path / "missing")})


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(errors.ArgumentError, match="is not TOML"):
        config.load(environment={"KVPOOL_CONFIG": str(tmp_path / "binary")})


def test_an_unknown_argument_is_named():
    with pytest.raises(errors.ArgumentError, match="argument: 'polici' is unknown; did you mean policy"):
        config.load(environment={}, polici="lru")


@pytest.mark.parametrize(
    ("misspelt", "message"),
    [
        ({"hbm_block": 8}, "'hbm_block' is unknown; did you mean hbm_blocks?"),
        ({"dram_block": 8}, "'dram_block' is unknown; did you mean dram_blocks?"),
        ({"devise": "cpu"}, "'devise' is unknown; did you mean device?"),
        ({"copy_thread": 2}, "'copy_thread' is unknown; did you mean copy_threads?"),
        ({"x": 1}, "'x' is unknown; the arguments are layout, hbm_blocks, .*, parallel; the settings are policy, "),
    ],
)
def test_a_misspelt_argument_of_a_pool_is_not_taken_for_a_setting(misspelt, message):
    with pytest.raises(errors.ArgumentError, match=message) as caught:
        kvpool.Pool(kvpool.RawLayout(64), **misspelt)
    assert "self" not in str(caught.value)


@pytest.mark.parametrize("value", ["2", 2.0, True, None])
def test_settings_check_their_types_when_made_directly(value):
    with pytest.raises(errors.ArgumentTypeError, match="copy_threads"):
        Settings(copy_threads=value)


def test_settings_check_their_values_when_made_directly():
    with pytest.raises(errors.ArgumentError, match="huge_pages is 'always'"):
        Settings(huge_pages="always")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("nccl_pass_bytes", (1 << 20) - 1), ("nccl_pass_bytes", (256 << 20) + 1), ("nccl_init_s", 0.0),
     ("nccl_thread_blocks", -1), ("nccl_thread_blocks", 65)],
)  # fmt: skip
def test_the_settings_of_nccl_have_limits(name, wrong):
    with pytest.raises(errors.ArgumentError, match=name):
        Settings(**{name: wrong})


def test_settings_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().policy = "lfu"


def test_every_setting_is_described():
    for field in dataclasses.fields(Settings):
        assert f"{field.name}: " in (Settings.__doc__ or "")
    described = config.describe(loaded(environment={"KVPOOL_AUDIT": "1"}))
    assert [one["name"] for one in described] == [field.name for field in dataclasses.fields(Settings)]
    assert {"name": "audit", "value": True, "source": "environment KVPOOL_AUDIT"} in described
