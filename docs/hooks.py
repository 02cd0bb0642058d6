"""Notebooks as pages: mkdocs calls this while it builds."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each notebook; the notebook itself stays beside it, to be downloaded."""
    from nbconvert import MarkdownExporter

    for source in [file for file in files if file.src_uri.endswith(".ipynb")]:
        text, _ = MarkdownExporter().from_filename(str(source.abs_src_path))
        name = source.src_uri.rpartition("/")[2]
        note = f"\n\nThis page is a notebook without its outputs: [download it]({name}) and run it offline.\n\n"
        title, _, rest = text.strip().partition("\n")
        page = source.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, page, content=f"{title}{note}{rest}"))
    return files


def on_page_markdown(markdown: str, page: Page, **others: Any) -> str:
    """Links to notebooks lead to their pages; where the source is read as it is, they lead to the notebooks."""
    if page.file.src_uri.startswith("notebooks/"):
        return markdown
    return re.sub(r"(\]\([\w/.-]+)\.ipynb\)", r"\1.md)", markdown)
