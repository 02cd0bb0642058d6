"""One picture, clip or sentence from its pixels to maps and files."""
