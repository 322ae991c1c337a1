"""Draws runs on one page, from their events.

Knows the events' contract (`elastane.telemetry`) and nothing of how training makes them;
matplotlib is imported only when something is drawn.
"""

from elastane.plots.page import plot_runs

__all__ = ["plot_runs"]
