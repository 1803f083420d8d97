"""The settings of runs with several ranks: accepted and refused values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hf_lohan.config import Collectives, ConfigError, OffloadConfig


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("exact", Collectives()),
        ("quantized", Collectives(forward="int8", backward="node", gradients="int4", within="int4")),
        ({"within": "int8"}, Collectives(within="int8")),
        ({"within": "exact"}, Collectives()),
        ({}, Collectives()),
        ({"forward": "delta"}, Collectives(forward="delta")),
        ({"forward": "exact", "backward": "world"}, Collectives(forward="exact", backward="world")),
        ({"forward": "auto", "backward": "ssd"}, Collectives(backward="ssd")),
        ({"backward": "node", "gradients": "int8"}, Collectives(backward="node", gradients="int8")),
        (Collectives(forward="int8"), Collectives(forward="int8")),
    ],
)
def test_every_spelling_survives_a_round_trip(setting: Any, expected: Collectives) -> None:
    config = OffloadConfig.load(ranks={"collectives": setting})
    assert config.ranks.collectives == expected
    assert OffloadConfig.load(json.loads(json.dumps(config.to_dict()))) == config


def test_the_default_rounds_nothing() -> None:
    assert OffloadConfig().ranks.collectives.is_exact
    assert OffloadConfig().to_dict()["ranks"]["collectives"] == "exact"


@pytest.mark.parametrize(
    ("setting", "is_exact"),
    [
        ({"forward": "delta", "backward": "node"}, True),
        ({"forward": "int8"}, False),
        ({"gradients": "int8"}, False),
        ({"within": "int8"}, False),
        ("quantized", False),
    ],
)
def test_rounding_settings_are_not_exact(setting: Any, is_exact: bool) -> None:
    assert OffloadConfig.load(**{"ranks.collectives": setting}).ranks.collectives.is_exact is is_exact


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fast", "ranks.collectives: 'fast' is not allowed; give 'exact', 'quantized', or a table"),
        (None, "ranks.collectives: None is not allowed"),
        (
            {"forward": "int4"},
            "ranks.collectives: forward: 'int4' is not allowed; choose 'auto' or 'exact' or 'int8' or 'delta'",
        ),
        ({"backward": True}, "choose 'auto' or 'world' or 'node' or 'ram' or 'ssd'"),
        ({"within": "int2"}, "ranks.collectives: within: 'int2' is not allowed; choose 'exact' or 'int8' or 'int4'"),
        ({"within": True}, "ranks.collectives: within: True is not allowed"),
        ({"gradient": "int4"}, "did you mean 'gradients'"),
    ],
)
def test_a_refused_value_is_quoted(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.load(**{"ranks.collectives": value})
    assert message in str(caught.value)


@pytest.mark.parametrize(("slowest_step_s", "timeout_s"), [(0.0, 120.0), (5.0, 120.0), (60.0, 600.0)])
def test_the_automatic_timeout_follows_the_slowest_step(slowest_step_s: float, timeout_s: float) -> None:
    assert OffloadConfig().ranks.timeout_s(slowest_step_s) == timeout_s
    assert OffloadConfig.load(ranks={"timeout": 7}).ranks.timeout_s(slowest_step_s) == 7.0


@pytest.mark.parametrize("value", [0, -1, True, "10s", float("inf"), float("nan"), None])
def test_a_timeout_is_a_number_of_seconds(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"ranks.timeout: .* give a number of seconds above 0, or 'auto'"):
        OffloadConfig.load(ranks={"timeout": value})
