"""The search for the fastest plan, and what other hardware would make of it."""
