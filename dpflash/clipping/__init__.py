"""Clipping: gates, planner, clipping factors, and the speed of the device."""
