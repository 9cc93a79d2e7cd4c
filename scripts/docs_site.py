"""Hooks of mkdocs, which builds the site from the pages of the repository.

README.md becomes the first page. Pages at the top and in docs/ link to each other by their places
in the repository, which are not those of the site.
"""

import re
from typing import Any

from mkdocs.structure.files import File, Files  # type: ignore

TOP = {"README.md": "index.md"} | {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md")}


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages that lie next to docs/."""
    for source, page in TOP.items():
        files.append(File.generated(config, page, abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links for the site. Remove everything but the language from the first line of a
    fence, and the remarks for the test that runs the commands."""
    markdown = re.sub(r" +# writes .*$", "", markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^```(\w+) [\w ]+$", r"```\1", markdown, flags=re.MULTILINE)
    here = page.file.src_uri
    prefix = "docs/" if here in TOP.values() else "../"
    markdown = markdown.replace(f"]({prefix}", "](").replace(f'="{prefix}', '="')
    return re.sub(r"\]\(([A-Z]+\.md)\)", lambda link: f"]({TOP.get(link[1], link[1])})", markdown)
