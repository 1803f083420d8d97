"""Training state on disk, piece by piece and without Hugging Face: whole folders, optimizer states, resume points."""

__all__: list[str] = []
