"""A browser for all pages of this folder, since starting one takes longer than drawing a page."""

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, start_browser


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Return the browser, in which no page may have an error."""
    chromium.errors.clear()
    yield chromium
    assert chromium.errors == []
