"""Render notebooks as pages; mkdocs calls these functions during a build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page with the outputs and pictures of each notebook; the notebook stays available as a download."""
    from nbconvert import MarkdownExporter

    for source in [file for file in files if file.src_uri.endswith(".ipynb")]:
        folder, _, name = source.src_uri.rpartition("/")
        stem = Path(name).stem
        text, resources = MarkdownExporter().from_filename(
            str(source.abs_src_path), resources={"unique_key": stem, "output_files_dir": f"{stem}_files"}
        )
        for path, data in resources["outputs"].items():
            files.append(File.generated(config, f"{folder}/{path}", content=data))
        title, _, rest = text.strip().partition("\n")
        note = f"\n\nThis page is a notebook: [download it]({name}).\n\n"
        files.append(File.generated(config, f"{folder}/{stem}.md", content=f"{title}{note}{rest}"))
    return files


def on_page_markdown(markdown: str, page: Page, **others: Any) -> str:
    """Point links to notebooks at their pages. In the Markdown source they point at the notebooks."""
    if page.file.src_uri.startswith("notebooks/"):
        return markdown
    return re.sub(r"(\]\([\w/.-]+)\.ipynb\)", r"\1.md)", markdown)
