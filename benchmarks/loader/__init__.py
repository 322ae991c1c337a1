"""How fast samples come through the session's loader, and what it costs to deal them."""
