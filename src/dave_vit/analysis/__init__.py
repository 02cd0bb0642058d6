"""What the paper's tables and figures show, computed again: one file for each analysis, one command for all."""
