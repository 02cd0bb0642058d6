"""Explain pictures and clips, from a file to maps, records and figures.

One image's way: `pipeline` reads a source and picks its kind; `classes`, `scores`, `words` and `recordings` make one
`ImageExplanation` each; `output_files` writes its files and a gallery of several; `comparison` draws several methods
side by side, also for `dave demo`.
"""
