"""Tables of cases whose tests cost less than pytest's own work for a test."""

import inspect
import traceback
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import pytest

Test = Callable[..., None]


def in_one_test(names: str | tuple[str, ...], cases: Collection[Any]) -> Callable[[Test], Test]:
    """Run all cases in one test, which reports every case that fails: as pytest.mark.parametrize,
    but with the same fixtures for all of them."""
    assert cases
    own = (names,) if isinstance(names, str) else names

    def decorate(test: Test) -> Test:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            failed = []
            for case in cases:
                values = (case,) if isinstance(names, str) else case
                try:
                    test(**fixtures, **dict(zip(own, values, strict=True)))
                except (Exception, pytest.fail.Exception):
                    failed.append(f"{case!r:.300}\n{traceback.format_exc(limit=-2)}")
            assert not failed, f"{len(failed)} of {len(cases)}:\n" + "\n".join(failed)

        signature = inspect.signature(test)
        left = [each for each in signature.parameters.values() if each.name not in own]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate
