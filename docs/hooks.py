"""Notebooks as pages: mkdocs calls this while it builds."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


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
