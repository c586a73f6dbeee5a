import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rl_memory_plugins.config import RLMemoryConfig
from rl_memory_plugins.errors import InvalidRequestError

GiB = 1 << 30


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("RL_MEMORY", *(f"RL_MEMORY_{key.upper()}" for key in RLMemoryConfig.model_fields)):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("value", [None, True, "", "  ", "true", "1", "on", "{}", {}])
def test_nothing_named_gives_the_defaults(value):
    config = RLMemoryConfig.parse(value)
    assert config == RLMemoryConfig()
    assert config.to_dict() == {}
    assert config.allocator == "auto"
    assert config.device_memory_margin_bytes == 64 << 20


@pytest.mark.parametrize(
    "value",
    [
        '{"allocator": "host", "poison": true, "host_arena_max_bytes": "1GiB", "update_timeout_s": 5}',
        "allocator=host,poison=true,host_arena_max_bytes=1GiB,update_timeout_s=5",
        " allocator = host , poison = 1 , host_arena_max_bytes = 1 GiB, update_timeout_s=5.0 ",
        {"allocator": "host", "poison": True, "host_arena_max_bytes": GiB, "update_timeout_s": 5.0},
    ],
)
def test_every_form_fills_the_same_model(value):
    config = RLMemoryConfig.parse(value)
    expected = {"allocator": "host", "host_arena_max_bytes": GiB, "poison": True, "update_timeout_s": 5.0}
    assert config.to_dict() == expected
    assert list(config.to_dict()) == sorted(expected)
    assert RLMemoryConfig.parse(config) is config


@pytest.mark.parametrize(
    "text, size",
    [("0", 0), ("5", 5), (7, 7), ("1KiB", 1024), ("1 gib", GiB), ("1.5GiB", 3 * GiB // 2), ("2GB", 2 * 10**9)],
)
def test_byte_sizes(text, size):
    assert RLMemoryConfig.parse({"host_memory_margin_bytes": text}).host_memory_margin_bytes == size


def test_an_explicit_value_wins_over_the_environment_and_that_over_the_default(monkeypatch):
    monkeypatch.setenv("RL_MEMORY_DRAIN_TIMEOUT_S", "30")
    monkeypatch.setenv("RL_MEMORY_POISON", "1")
    monkeypatch.setenv("RL_MEMORY_HOST_ARENA_MAX_BYTES", "2GiB")
    config = RLMemoryConfig.parse("drain_timeout_s=5,poison=false")
    assert config.drain_timeout_s == 5
    assert config.poison is False
    assert config.host_arena_max_bytes == 2 * GiB
    assert config.update_timeout_s == 60


def test_an_empty_variable_is_an_unset_one(monkeypatch):
    monkeypatch.setenv("RL_MEMORY_POISON", "")
    assert RLMemoryConfig.parse().poison is False


def test_a_misspelt_variable_is_told(monkeypatch, caplog):
    monkeypatch.setenv("RL_MEMORY_URL", "http://127.0.0.1:8000")
    monkeypatch.setenv("RL_MEMORY_ENGINE_KEY", "secret")
    RLMemoryConfig.parse()
    assert not caplog.records
    monkeypatch.setenv("RL_MEMORY_DRAIN_TIMEOUT", "30")
    assert RLMemoryConfig.parse().drain_timeout_s == 600
    assert "RL_MEMORY_DRAIN_TIMEOUT" in caplog.text and "URL" not in caplog.text and "ENGINE_KEY" not in caplog.text


def test_what_was_decided_once_does_not_ask_the_environment_again(monkeypatch):
    monkeypatch.setenv("RL_MEMORY_POISON", "1")
    config = RLMemoryConfig.parse("poison=false,strict_dtypes=true,allow_cast=true")
    assert RLMemoryConfig.from_dict(config.to_dict()) == config


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "allocator": st.sampled_from(["auto", "vmm", "tms", "host"]),
            "poison": st.booleans(),
            "eager_backup": st.booleans(),
            "host_arena_max_bytes": st.integers(0, 1 << 60),
            "update_timeout_s": st.floats(0.001, 1e5),
            "fault_dir": st.none() | st.text(),
        },
    )
)
def test_to_dict_is_small_json_that_comes_back(options):
    config = RLMemoryConfig.parse(options)
    record = config.to_dict()
    assert record.keys() <= options.keys()
    assert RLMemoryConfig.from_dict(json.loads(json.dumps(record))) == config
    assert RLMemoryConfig.parse(json.dumps(options)) == config
    assert json.dumps(record) == json.dumps(RLMemoryConfig.parse(dict(reversed(options.items()))).to_dict())


@pytest.mark.parametrize(
    "value, key",
    [
        ("allocator=magic", "allocator"),
        ("poison=maybe", "poison"),
        ("host_arena_max_bytes=lots", "host_arena_max_bytes"),
        ("host_arena_max_bytes=-1GiB", "host_arena_max_bytes"),
        ({"host_arena_max_bytes": -1}, "host_arena_max_bytes"),
        ({"host_arena_max_bytes": True}, "host_arena_max_bytes"),
        ({"host_arena_max_bytes": 1.5}, "host_arena_max_bytes"),
        ({"host_arena_max_bytes": None}, "host_arena_max_bytes"),
        ("update_timeout_s=0", "update_timeout_s"),
        ("drain_timeout_s=inf", "drain_timeout_s"),
        ("update_timeout_s=1e300", "update_timeout_s"),
        ("drain_timeout_s=nan", "drain_timeout_s"),
        ("take_turns_s=5", "take_turns_s"),
        ("take_turns_s=5,wake_on_request_s=60,start_stale=true", "take_turns_s"),
        ("poisson=true", "poisson"),
        ({"allocator": ["vmm"]}, "allocator"),
        ({"": 1}, ""),
    ],
)
def test_a_bad_value_names_its_key_and_all_options(value, key):
    with pytest.raises(InvalidRequestError) as caught:
        RLMemoryConfig.parse(value)
    assert list(caught.value.details["problems"]) == [key]
    assert caught.value.details["allowed"] == sorted(RLMemoryConfig.model_fields)
    assert f"{key}: {caught.value.details['problems'][key]}" in caught.value.message
    assert "update_timeout_s" in caught.value.message


def test_all_problems_are_told_at_once():
    with pytest.raises(InvalidRequestError) as caught:
        RLMemoryConfig.parse("poison=maybe,allocator=magic,x=1")
    assert caught.value.details["problems"].keys() == {"poison", "allocator", "x"}


def test_a_bad_variable_is_named_as_it_was_written(monkeypatch):
    monkeypatch.setenv("RL_MEMORY_ALLOCATOR", "magic")
    with pytest.raises(InvalidRequestError, match="RL_MEMORY_ALLOCATOR: "):
        RLMemoryConfig.parse("poison=true")


@pytest.mark.parametrize(
    "value",
    [
        False,
        1,
        1.0,
        ["poison"],
        object(),
        "poison",
        "poison=1,",
        "=1",
        "poison=1,poison=0",
        "{",
        '{"poison"}',
        "false",
    ],
)
def test_other_forms_are_refused(value):
    with pytest.raises(InvalidRequestError) as caught:
        RLMemoryConfig.parse(value)
    assert caught.value.details["allowed"] == sorted(RLMemoryConfig.model_fields)


@pytest.mark.parametrize("value", [None, "", " ", "0", "false", "False", "no", "off"])
def test_the_flags_variable_can_be_off(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("RL_MEMORY", value)
    monkeypatch.setenv("RL_MEMORY_POISON", "1")  # an option does not enable
    assert RLMemoryConfig.from_environment() is None


@pytest.mark.parametrize(
    "value, expected",
    [
        ("1", {}),
        ("true", {}),
        ("on", {}),
        ("poison=1", {"poison": True}),
        ('{"poison": true}', {"poison": True}),
    ],
)
def test_the_flags_variable_is_read_as_the_flag(monkeypatch, value, expected):
    monkeypatch.setenv("RL_MEMORY", value)
    config = RLMemoryConfig.from_environment()
    assert config is not None
    assert config.to_dict() == expected


def test_a_bad_flags_variable_is_no_silent_off(monkeypatch):
    monkeypatch.setenv("RL_MEMORY", "yes please")
    with pytest.raises(InvalidRequestError):
        RLMemoryConfig.from_environment()


def test_frozen_hashable_picklable():
    config = RLMemoryConfig.parse("poison=1")
    with pytest.raises(ValidationError):
        config.poison = False
    assert hash(config) == hash(RLMemoryConfig.parse({"poison": True}))
    assert pickle.loads(pickle.dumps(config)) == config


def test_every_option_is_described():
    assert [key for key, field in RLMemoryConfig.model_fields.items() if not field.description] == []
