"""Reports: sections of words, tables and figures, and the templates that make pages of them.

Templates are in ``templates``: ``run`` is the page of an evaluation, ``suite`` that of a reproduction; both share
``page.html`` and one style. Every page is one HTML file that needs no other, and the same in Markdown.
"""

from dave_vit.report.pages import estimate_words, render
from dave_vit.report.section import Number, Picture, Section, Table, csv_bytes

__all__ = ["Number", "Picture", "Section", "Table", "csv_bytes", "estimate_words", "render"]
