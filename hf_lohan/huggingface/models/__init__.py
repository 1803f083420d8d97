"""Moves models between checkpoints and the store: loading, saving, adapters, export."""
