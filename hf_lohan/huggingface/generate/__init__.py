"""Generation with weights that are streamed from the store."""
