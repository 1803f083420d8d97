"""What a run needs to know before it begins, and what becomes of the plan."""


__all__ = [
]
