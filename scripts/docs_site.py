"""Hooks of mkdocs, which builds the site from the pages of the repository.

README.md becomes the first page. Pages at the top and in docs/ link to each other by their places
in the repository, which differ from their places on the site.

The site also has llms.txt, a list of its pages and of the skills for language models, and each of
them as Markdown.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files  # type: ignore

TOP = {"README.md": "index.md"} | {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md")}


_FIRST_SENTENCE = re.compile(r"^[A-Z`][^|#<]*?[.:](?=\s|$)", re.MULTILINE)


def on_files(files: "Files", config: Any, **_: Any) -> "Files":
    """Add the pages that lie next to docs/."""
    from mkdocs.structure.files import File  # type: ignore

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


def on_post_page(output: str, page: Any, config: Any, **_: Any) -> str:
    """Write the page as Markdown, too."""
    target = Path(config["site_dir"]) / Path(page.file.dest_uri).with_suffix(".md")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page.markdown)
    return output


def on_post_build(config: Any, **_: Any) -> None:
    """Write llms.txt."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", "", "## Docs", ""]
    for page in config["nav_pages"]:
        name = Path(page.file.dest_uri).with_suffix(".md")
        lines.append(f"- [{page.title}]({name}): {summary_of(page.markdown)}")
    lines += ["", "## Skills", "", *write_skills(Path(config["site_dir"]))]
    (Path(config["site_dir"]) / "llms.txt").write_text("\n".join(lines) + "\n")


def write_skills(site: Path) -> Iterator[str]:
    """Copy each skill into the site, and yield its line of llms.txt."""
    for source in sorted(Path("skills").glob("*/SKILL.md")):
        text = source.read_text().replace("](../../docs/", "](../../")
        target = site / source
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        name, description = re.findall(r"^(?:name|description): (.*)$", text, re.MULTILINE)[:2]
        yield f"- [{name}]({source}): {description}"


def on_nav(nav: Any, config: Any, **_: Any) -> Any:
    """Keep the pages in their order for llms.txt."""
    config["nav_pages"] = list(nav.pages)
    return nav


def summary_of(markdown: str) -> str:
    """Return the first sentence of a page that is no heading, table or picture."""
    found = _FIRST_SENTENCE.search(markdown)
    sentence = " ".join(found[0].split()).rstrip(":.") if found else "What changed in each version"
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence) + "."
