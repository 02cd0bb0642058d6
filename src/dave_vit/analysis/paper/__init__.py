"""The paper's suite: what is reproduced, the published numbers, and the page of both."""
