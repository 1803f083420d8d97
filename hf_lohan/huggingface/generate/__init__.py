"""Generation with weights that are streamed from the store."""

__all__: list[str] = []
