"""Attributes that are replaced for a while are afterwards as they were."""

from __future__ import annotations

import types

import pytest

from hf_lohan.compat.patches import replaced


class Stock:
    def method(self) -> str:
        return "stock"

    @classmethod
    def made(cls) -> str:
        return cls.__name__


class Derived(Stock):
    pass


def test_a_class_and_its_objects_have_their_methods_again() -> None:
    one, before = Derived(), dict(vars(Derived))
    with (
        pytest.raises(ValueError),
        replaced(Stock, method=lambda self: "class", made=classmethod(lambda cls: "new")),
        replaced(Derived, made=lambda: "derived"),
        replaced(one, method=lambda: "object", added=1),
    ):
        assert (one.method(), Derived().method(), Derived.made(), Stock.made()) == ("object", "class", "derived", "new")
        raise ValueError
    assert (one.method(), Derived.made(), Stock.made()) == ("stock", "Derived", "Stock")
    assert not vars(one) and dict(vars(Derived)) == before


def test_an_attribute_of_a_module_has_its_value_of_before() -> None:
    module = types.ModuleType("stock")
    module.value = None  # type: ignore[attr-defined]
    with replaced(module, value=1), replaced(module, value=2):
        assert module.value == 2  # type: ignore[attr-defined]
    assert vars(module)["value"] is None
