"""The search for the fastest plan, and plans for other hardware."""
