from __future__ import annotations

import pickle

import msgspec
import pytest

import rl_memory_plugins
from rl_memory_plugins import errors
from rl_memory_plugins.errors import (
    DeviceMemoryError,
    EngineFaultError,
    InvalidRequestError,
    ManifestError,
    RLMemoryError,
    as_rl_memory_error,
    from_record,
)

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RLMemoryError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_type_and_fields_survive_every_hop(cls):
    error = cls("why", needed_bytes=5, ranks=[1, 2])
    through_msgpack = from_record(msgspec.msgpack.decode(msgspec.msgpack.encode(error.to_record())))
    for copy in (through_msgpack, pickle.loads(pickle.dumps(error))):
        assert type(copy) is cls
        assert (copy.message, copy.details, str(copy)) == ("why", error.details, "why")


def test_every_class_is_public_and_has_a_status():
    assert {cls.__name__ for cls in CLASSES} <= set(rl_memory_plugins.__all__)
    expected = {
        "RLMemoryError": 500,
        "InvalidRequestError": 422,
        "ManifestError": 422,
        "StateConflictError": 409,
        "EngineAsleepError": 503,
        "OutOfMemoryError": 507,
        "DeviceMemoryError": 507,
        "HostMemoryError": 507,
        "WeightUpdateError": 502,
        "DrainTimeoutError": 504,
        "AuthenticationError": 401,
        "PermissionDeniedError": 403,
        "UnsupportedError": 422,
        "NoAnswerError": 504,
        "EngineLostError": 503,
        "EngineFaultError": 500,
    }
    assert {cls.__name__: cls.status for cls in CLASSES} == expected
    assert issubclass(ManifestError, InvalidRequestError)


@pytest.mark.parametrize(
    "record",
    [{}, {"error": "SystemExit", "message": "x"}, {"error": None, "message": None, "details": None}],
)
def test_an_unknown_record_is_an_engine_fault(record):
    assert type(from_record(record)) is EngineFaultError


def test_details_of_a_peer_may_use_any_key():
    error = from_record({"error": "DeviceMemoryError", "message": "x", "details": {"message": "y", "self": 1}})
    assert type(error) is DeviceMemoryError
    assert error.details == {"message": "y", "self": 1}


def test_foreign_errors_are_wrapped_and_own_ones_kept():
    own = DeviceMemoryError("x")
    assert as_rl_memory_error(own) is own
    wrapped = as_rl_memory_error(KeyError("k"))
    assert type(wrapped) is EngineFaultError
    assert wrapped.details == {"type": "KeyError"}
