"""What a run writes about itself."""


__all__ = [
]
