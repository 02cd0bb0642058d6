"""Reports: sections of words, tables and figures, and the templates that make pages of them.

Templates are in ``templates``: ``run`` is the page of an evaluation, ``suite`` that of a reproduction, ``gallery`` that
of explained pictures; all share ``page.html`` and one style. Every page is one HTML file that needs no other; those of
evaluations and reproductions come in Markdown too.
"""

from dave_vit.report.gallery import Gallery
from dave_vit.report.pages import estimate_words, render
from dave_vit.report.section import Number, Picture, Section, Table, csv_bytes

__all__ = ["Gallery", "Number", "Picture", "Section", "Table", "csv_bytes", "estimate_words", "render"]
