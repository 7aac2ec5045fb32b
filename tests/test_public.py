"""Public names: objects of the package, each documented."""

import inspect

import pytest

import dcpmla


def test_public_names() -> None:
    assert set(dcpmla.__all__) <= set(dir(dcpmla))
    with pytest.raises(AttributeError, match="module 'dcpmla' has no attribute 'LMM'"):
        dcpmla.LMM  # noqa: B018


@pytest.mark.parametrize("name", dcpmla.__all__)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(dcpmla, name)
    assert (thing.__doc__ or "").strip(), f"{name} has no docstring"
    assert not thing.__doc__.startswith(f"{name}("), f"{name} has only the signature that dataclass wrote"
    public = (
        [member for key, member in vars(thing).items() if not key.startswith("_")] if inspect.isclass(thing) else []
    )
    for member in public:
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function):
            assert function.__doc__, f"{function.__qualname__} has no docstring"
