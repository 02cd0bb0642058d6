"""Explain pictures and clips, from a file to maps, records and figures.

One image's way: `pipeline` reads a source and picks its kind; `classes`, `scores`, `words`, `sentences` and `clips`
make one `ImageExplanation` each; `output_files` writes its files; `gallery` shows several together; `comparison` draws
several methods side by side; `demo` holds the steps of `dave demo`.
"""
