"""Environment variables: each value is checked where it is read, and errors name variable, value and range."""

import logging
import math

import pytest

from epcomm import InvalidArgumentError, _create, _registry, config


def test_unset_and_empty_mean_the_default():
    for variable in config.VARIABLES + config.LAUNCHER_VARIABLES:
        assert config.get(variable.name, {}) == variable.default
        assert config.get(variable.name, {variable.name: "  "}) == variable.default


@pytest.mark.parametrize("text", ["0", "-1", "abc", "nan", "inf", "1e12", "864001"])
def test_timeouts_out_of_range_are_refused(text):
    with pytest.raises(InvalidArgumentError) as caught:
        config.get("EPCOMM_TIMEOUT_S", {"EPCOMM_TIMEOUT_S": text})
    message = str(caught.value)
    assert "EPCOMM_TIMEOUT_S" in message and repr(text) in message and "864000" in message


@pytest.mark.parametrize("value", [0, -1, "abc", "", None, True, False, [], {}, 1j, math.nan, math.inf, 1e12, 10**400])
def test_timeouts_given_as_arguments_are_checked_alike(value):
    with pytest.raises(InvalidArgumentError, match="timeout_s"):
        config.seconds("timeout_s", value)


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), (" 7 ", 7.0), ("864000", 864000.0)])
def test_timeouts_in_range(text, value):
    assert config.get("EPCOMM_TIMEOUT_S", {"EPCOMM_TIMEOUT_S": text}) == value


@pytest.mark.parametrize("text", ["0", "65536", "-1", "1.5", "0x10", "http"])
def test_ports_out_of_range_are_refused(text):
    with pytest.raises(InvalidArgumentError) as caught:
        config.get("EPCOMM_PORT", {"EPCOMM_PORT": text})
    assert repr(text) in str(caught.value) and "from 1 to 65535" in str(caught.value)


@pytest.mark.parametrize(("name", "text"), [("EPCOMM_HOST_ISA", "sse"), ("EPCOMM_LOG", "loud")])
def test_unknown_choices_are_refused_with_the_list(name, text):
    with pytest.raises(InvalidArgumentError) as caught:
        config.get(name, {name: text})
    assert name in str(caught.value) and repr(text) in str(caught.value) and "expected one of" in str(caught.value)


def test_choices_may_be_written_in_capitals():
    assert config.get("EPCOMM_LOG", {"EPCOMM_LOG": "INFO"}) == "info"
    assert config.get("EPCOMM_IB_PROVIDER", {"EPCOMM_IB_PROVIDER": "Soft"}) == "soft"


def test_the_help_of_a_choice_lists_what_is_allowed():
    for variable in config.VARIABLES:
        try:
            variable.parse("it", "?")
        except InvalidArgumentError as error:
            _, listed, words = str(error).partition("expected one of ")
            if listed and not words[0].isdigit():
                missing = [word for word in words.split(", ") if word not in f"{variable.help} {variable.default}"]
                assert not missing, f"{variable.name}: {missing}"


def test_a_partition_key_in_place_of_its_index_is_refused_with_the_difference():
    with pytest.raises(InvalidArgumentError, match=r"EPCOMM_IB_PKEY='0xffff'.* index of .* \(not the key\)"):
        config.get("EPCOMM_IB_PKEY", {"EPCOMM_IB_PKEY": "0xffff"})


def test_in_effect_has_every_row_in_order_and_no_secret():
    values = config.in_effect({"EPCOMM_AUTHKEY": "hush", "EPCOMM_PORT": "29500"})
    assert list(values) == [variable.name for variable in config.VARIABLES]
    assert values["EPCOMM_PORT"] == 29500
    assert values["EPCOMM_AUTHKEY"] == "(set)" and "hush" not in repr(values)
    assert config.in_effect({})["EPCOMM_AUTHKEY"] is None


def test_in_effect_raises_for_a_bad_value():
    with pytest.raises(InvalidArgumentError, match="EPCOMM_NUM_THREADS='0'"):
        config.in_effect({"EPCOMM_NUM_THREADS": "0"})


def test_names_are_unique_and_each_row_has_help():
    rows = config.VARIABLES + config.LAUNCHER_VARIABLES
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.help for row in rows)
    assert all(row.name.startswith("EPCOMM_") for row in config.VARIABLES)


@pytest.mark.parametrize(("misspelt", "meant"), [
    ("EPCOMM_BAKCEND", "EPCOMM_BACKEND"), ("EPCOMM_IB_PRVIDER", "EPCOMM_IB_PROVIDER"), ("EPCOMM_HCA", "EPCOMM_IB_HCA"),
    ("EPCOMM_TIMEOUT", "EPCOMM_TIMEOUT_S"), ("EPCOMM_TC", "EPCOMM_IB_TC"), ("EPCOMM_LOG_LEVEL", "EPCOMM_LOG"),
    ("EPCOMM_IB_GID", "EPCOMM_IB_GID_INDEX"), ("epcomm_backend", "EPCOMM_BACKEND"), ("EPCOMM_THREADS",
    "EPCOMM_NUM_THREADS"), ("EPCOMM_IB_FAIL_OVER", "EPCOMM_IB_FAILOVER"), ("EPCOMM_SOFT_HCA_PORTS",
    "EPCOMM_SOFTHCA_PORTS"), ("EPCOMM_QUITE_ANOTHER_THING", None), ("EPCOMM_", None)])  # fmt: skip
def test_a_misspelt_variable_is_told_with_the_nearest_name(misspelt, meant):
    assert config.nearest(misspelt) == meant
    text = config.unknown({misspelt: "x", "EPCOMM_PORT": "1", "HOME": "/"})[misspelt]
    assert misspelt in text and (meant or "python -m epcomm info") in text


def test_variables_of_others_of_the_build_and_of_the_tests_are_not_told():
    others = ("NCCL_IB_HCA", "EPCOMM_BUILD_FLAGS", "EPCOMM_TEST_REQUIRE", "RANK")
    assert config.unknown(dict.fromkeys(others, "x")) == {}


def test_the_names_of_all_variables_are_known():
    assert config.unknown({variable.name: "x" for variable in config.VARIABLES}) == {}


def test_a_misspelt_variable_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setenv("EPCOMM_IB_DETPH", "64")
    with caplog.at_level(logging.WARNING, logger="epcomm"):
        config.warn_of_unknown()
        config.warn_of_unknown()
    told = [record.getMessage() for record in caplog.records if "EPCOMM_IB_DETPH" in record.getMessage()]
    assert len(told) == 1 and "did you mean EPCOMM_IB_DEPTH?" in told[0]


@pytest.mark.parametrize(("backend", "num_ports", "words"), [
    ("ibrc", 2, ("backend ibrc", "shm_ibgda, ibgda can replay")), ("ibgda", 1, ("a rank with one port",)),
    ("ibgda", 2, ())])  # fmt: skip
def test_replay_is_warned_of_where_there_is_none(monkeypatch, caplog, backend, num_ports, words):
    config.warn_once.cache_clear()
    monkeypatch.setenv("EPCOMM_IB_FAILOVER", "replay")
    (row,) = [row for row in _registry.BACKENDS if row.name == backend]
    with caplog.at_level(logging.WARNING, logger="epcomm"):
        _create._note_failover(row, num_ports)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(words)
    assert all(word in told[0] for word in words)
