"""Training state in Hugging Face's checkpoint folders, piece by piece."""


__all__ = [
]
