"""Blackout: all processes of a real job are killed, again and again, and it goes on each time."""
